"""Is this machine fit for this configuration? One line a question, with the remedy where the answer is no.

Each check returns a `Line`; nothing here prints, and nothing is changed but for files of its own under results/, which
are gone afterwards.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from eagle3lib import gpus, overview, targets
from eagle3lib.config import TargetConfig
from eagle3lib.disk import Disk, size
from eagle3lib.errors import UserError
from eagle3lib.leases import Leases
from eagle3lib.plan import RESULTS, STORE, Plan

LOCK_FILE = Path(__file__).parents[1] / "envs" / "trainer.txt"
CHUNK = bytes(2**23)
MEASURED_BYTES, MEASURED_SECONDS = 2**28, 5.0  # whichever comes first
SLOW_MB_S = 100  # Kimi's 4.6 TiB would take half a day at this rate
OPEN_FILES = 4096
SHARED_MEMORY = 2**30  # NCCL and workers of a loader; Docker gives 64 MiB


@dataclass(frozen=True)
class Line:
    """The answer to one question."""

    status: Literal["ok", "warn", "fail"]
    name: str
    text: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.status:<4}  {self.name:<14}  {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def examine(plan: Plan) -> Iterator[Line]:
    """The answers, each as soon as it is there."""
    RESULTS.mkdir(exist_ok=True)
    cfg = plan.runs[0].cfg
    training = max(run.cfg.training.gpus for run in plan.runs)
    engine = max(run.cfg.engine.gpus for run in plan.runs)
    need = gpus.Need(training, "training.gpus") if training >= engine else gpus.Need(engine, "engine.gpus")
    yield from devices(need, gpus.look(need, cfg.gpus, Leases(STORE)))
    yield torch_cuda(training)
    yield packages(LOCK_FILE)
    for target in {run.cfg.target.name: run.cfg.target for run in plan.runs}.values():
        yield weights(target)
    checks: list[Callable[[Path], Line]] = [hard_links, locks, throughput]
    for check in checks:
        with tempfile.TemporaryDirectory(prefix=".doctor-", dir=RESULTS) as folder:
            yield answered(check, Path(folder))
    yield answered(free_space, Disk(RESULTS, cfg.storage))
    yield answered(states_to_come, plan)
    yield open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield shared_memory(Path("/dev/shm"))


def answered(check: Callable[..., Line], *arguments: Any) -> Line:
    """The check's line; what it raises for the user is a failure, too."""
    try:
        return check(*arguments)
    except UserError as error:
        return Line("fail", check.__name__.replace("_", " "), str(error))
    except OSError as error:
        remedy = "results/ must be writable: look at the volume"
        return Line("fail", check.__name__.replace("_", " "), str(error), remedy)


# --- GPUs --------------------------------------------------------------------------------------------------------


def devices(need: gpus.Need, seen: dict[str, Any]) -> Iterator[Line]:
    """The driver, then a line a GPU. seen: `gpus.look`."""
    if seen["nvml"] != "ok":
        if need.gpus:
            yield Line("fail", "driver", gpus.no_driver(need, seen["nvml"]))
        else:
            yield Line("ok", "driver", f"{seen['nvml']}; this configuration needs no GPU")
        return
    usable = [d for d in seen["devices"] if d["state"] not in ("masked", "lost", "split")]
    mask = "" if seen["mask"] is None else f", {gpus.MASK}={seen['mask']}"
    text = f"{seen['driver']}, {len(usable)} of {len(seen['devices'])} GPUs usable, {need.gpus} needed{mask}"
    if len(usable) < need.gpus:
        yield Line("fail", "driver", text, f"mend those named below, or lower {need.setting}")
    else:
        yield Line("ok", "driver", text)
    for device in seen["devices"]:
        yield _device(device, seen["leases"])


def _device(device: dict[str, Any], leases: list[dict[str, Any]]) -> Line:
    name = f"GPU {device['index']}"
    if device["state"] in ("free", "masked"):
        return Line("ok", name, f"{device['state']}, {device.get('name', device.get('error'))}")
    enabled = [unit for unit in units(device) if starts_at_boot(unit)]
    remedies = gpus.remedies(device) + [f"`sudo systemctl disable {u}`, or a reboot brings it back" for u in enabled]
    status: Literal["ok", "warn"] = "ok" if device["state"] == "ours" else "warn"
    return Line(status, name, f"{device['state']}: {gpus.holder(device, leases)}", "; ".join(remedies))


def units(device: dict[str, Any]) -> list[str]:
    """systemd services of others that hold the device."""
    return list(dict.fromkeys(p["unit"] for p in gpus.strangers(device) if p["unit"]))


def starts_at_boot(unit: str) -> bool:
    if not shutil.which("systemctl"):
        return False
    done = subprocess.run(["systemctl", "is-enabled", unit], capture_output=True, text=True, check=False)
    return done.stdout.strip() == "enabled"


def torch_cuda(training_gpus: int) -> Line:
    """Can the torch of this environment use the GPUs that training wants?"""
    import torch

    text = f"torch {torch.__version__}, built for {'CUDA ' + torch.version.cuda if torch.version.cuda else 'CPUs'}"
    if not training_gpus:
        return Line("ok", "torch", text)
    if not torch.backends.cuda.is_built():
        return Line("fail", "torch", text, "install torch's CUDA build into this environment, or set training.gpus: 0")
    if not torch.cuda.is_available():
        remedy = "`python -c 'import torch; torch.zeros(1).cuda()'` tells why: a driver that is too old for it, mostly"
        return Line("fail", "torch", f"{text}, sees no GPU", remedy)
    return Line("ok", "torch", f"{text}, sees {torch.cuda.device_count()} GPUs")


# --- software and target -----------------------------------------------------------------------------------------


def packages(lock_file: Path) -> Line:
    """Installed versions against the pins of `lock_file` (`name==version` a line)."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)", lock_file.read_text(), re.MULTILINE))
    wrong = []
    for name, wanted in pins.items():
        try:
            found = version(name).split("+")[0]  # +cpu, +cu130: the same version
        except PackageNotFoundError:
            found = "absent"
        if found != wanted:
            wrong.append(f"{name} {found}, not {wanted}")
    if not wrong:
        return Line("ok", "packages", f"all {len(pins)} as in {lock_file.parent.name}/{lock_file.name}")
    named = ", ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if wrong[4:] else "")
    return Line("warn", "packages", named, "`make venv` installs what was tested")


def weights(target: TargetConfig) -> Line:
    """Is every file of the target here, and as long as it says itself? Works offline."""
    name = "target"
    try:
        kind, where = targets.source(target)
    except UserError as error:
        return Line("fail", name, str(error))
    if kind == "package":
        return Line("ok", name, f"{target.model}: made out of the wheel {where} by the run")
    folder = Path(where) if kind == "folder" else targets.hub_snapshot(target)
    if folder is None:
        remedy = f"`hf download {target.model}` fetches it, or the run does"
        return Line("warn", name, f"{target.model}: not (wholly) in the hub's cache", remedy)
    faults = weight_faults(folder)
    if faults:
        named = "; ".join(faults[:3]) + (f" and {len(faults) - 3} more" if faults[3:] else "")
        return Line("fail", name, f"{folder}: {named}", "fetch these files again")
    files = sorted(folder.glob("*.safetensors"))
    return Line("ok", name, f"{folder}: {len(files)} files whole, {size(sum(f.stat().st_size for f in files))}")


def weight_faults(folder: Path) -> list[str]:
    """What is missing of a model folder: files of its index, tensors of these files, ends of files."""
    if not (folder / "config.json").exists():
        return ["config.json is missing"]
    expected: dict[str, set[str]] = {path.name: set() for path in folder.glob("*.safetensors")}
    for index in folder.glob("*.safetensors.index.json"):
        try:
            for tensor, name in json.loads(index.read_text())["weight_map"].items():
                expected.setdefault(name, set()).add(tensor)
        except (ValueError, KeyError, TypeError, AttributeError):
            return [f"{index.name} is no index"]
    if not expected and not list(folder.glob("pytorch_model*.bin")):
        return ["no weights (*.safetensors)"]
    faults = [(name, _file_fault(folder / name, tensors)) for name, tensors in sorted(expected.items())]
    return [f"{name} {fault}" for name, fault in faults if fault]


def _file_fault(path: Path, tensors: set[str]) -> str | None:
    """safetensors: 8 bytes of length, a JSON header with the offsets of each tensor, the data."""
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            actual = os.fstat(file.fileno()).st_size
            if length > actual:
                return f"is no safetensors file ({actual} bytes)"
            header = json.loads(file.read(length))
        wanted = 8 + length + max((t["data_offsets"][1] for n, t in header.items() if n != "__metadata__"), default=0)
    except FileNotFoundError:
        return "is missing"
    except (ValueError, KeyError, TypeError):
        return "has no readable header"
    if actual != wanted:
        return f"has {actual:,} of {wanted:,} bytes"
    absent = tensors - header.keys()
    return f"lacks {len(absent)} tensors of the index ({min(absent)})" if absent else None


# --- disk --------------------------------------------------------------------------------------------------------


def hard_links(folder: Path) -> Line:
    """Samples are links into the store."""
    (folder / "a").touch()
    try:
        os.link(folder / "a", folder / "b")
    except OSError as error:
        remedy = "put results/ on a filesystem that has them (ext4, xfs, NFS, Lustre, CephFS)"
        return Line("fail", "hard links", f"results/: {error.strerror}", remedy)
    return Line("ok", "hard links", "results/ has them")


def locks(folder: Path) -> Line:
    """flock must keep a second one out: jobs that write the same samples wait for each other by it."""
    remedy = "mount it with locks (NFS: without `nolock`; Lustre: `-o flock`)"
    with open(folder / "lock", "w") as first, open(folder / "lock", "w") as second:
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return Line("fail", "locks", f"results/: {error.strerror}", remedy)
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return Line("ok", "locks", "flock works in results/")
    return Line("fail", "locks", "results/: two holders of one lock", remedy)


def throughput(folder: Path) -> Line:
    """Sequential write with fsync, and read past the page cache, in MB/s (10**6 bytes)."""
    path, written = folder / "measured", 0
    begin = time.monotonic()
    with open(path, "wb", buffering=0) as file:
        while written < MEASURED_BYTES and time.monotonic() - begin < MEASURED_SECONDS:
            written += file.write(CHUNK)
        os.fsync(file.fileno())
        write = written / (time.monotonic() - begin) / 1e6
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    begin = time.monotonic()
    with open(path, "rb", buffering=0) as file:
        while file.read(len(CHUNK)):
            pass
    read = written / (time.monotonic() - begin) / 1e6
    text = f"write {write:,.0f} MB/s with fsync, read {read:,.0f} MB/s, {written // 2**20} MiB in results/"
    if write < SLOW_MB_S:
        return Line("warn", "throughput", text, "extraction will wait for the disk: a faster volume, or fp8 storage")
    return Line("ok", "throughput", text)


def free_space(disk: Disk) -> Line:
    """What is free, and who says so."""
    free, storage = disk.free(), disk.storage
    source = f"storage.free_command ({storage.free_command})" if storage.free_command else f"statvfs of {disk.folder}/"
    text = f"{size(free)} by {source}, storage.reserve_bytes {size(storage.reserve_bytes)}"
    if free <= storage.reserve_bytes:
        return Line("fail", "free space", text, "free some: nothing is written into the reserve")
    return Line("ok", "free space", text)


def states_to_come(plan: Plan) -> Line:
    """As every run asks before its first byte."""
    overview.check_room(plan)
    return Line("ok", "states to come", "they fit, as far as the samples are known yet")


# --- limits ------------------------------------------------------------------------------------------------------


def open_files(limit: int) -> Line:
    if 0 <= limit < OPEN_FILES:
        return Line("warn", "open files", f"ulimit -n is {limit}", f"`ulimit -n {OPEN_FILES}` before the run")
    return Line("ok", "open files", f"ulimit -n is {limit}")


def shared_memory(folder: Path) -> Line:
    total = shutil.disk_usage(folder).total if folder.exists() else 0
    if total < SHARED_MEMORY:
        return Line("warn", "shared memory", f"{folder}: {size(total)}", "in Docker: --shm-size=8g or --ipc=host")
    return Line("ok", "shared memory", f"{folder}: {size(total)}")
