"""GPUs through NVML: who holds them, the proof that they are free before training, and the lease of those it uses."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from eagle3lib.config import GpusConfig
from eagle3lib.errors import UserError
from eagle3lib.leases import Leases

MIB = 2**20
POLL_SECONDS = 1.0
GRACE_SECONDS = 5.0  # a process that is just ending is no stranger yet
MASK = "CUDA_VISIBLE_DEVICES"

Device = dict[str, Any]


@dataclass(frozen=True)
class Need:
    """What a job needs: `gpus` devices, as `setting` says, with room for `bytes_each` on each."""

    gpus: int
    setting: str
    bytes_each: int = 0


# --- what NVML says ----------------------------------------------------------------------------------------------


def survey() -> dict[str, Any]:
    """{"nvml": "ok", "driver", "devices"}; {"nvml": reason, "driver": None, "devices": []} where there is no driver.

    A device: index, uuid, name, capability ([9, 0]), used_mib, total_mib, mig (is it split?) and its compute
    processes, each with pid, user, command, unit (of systemd), stop (the command that ends that unit) and used_mib; of
    a process that has ended or cannot be seen from here only pid and used_mib are not None. Or index and error, where
    the device does not answer.
    """
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"nvml": f"not available: {error}", "driver": None, "devices": []}
    try:
        count = pynvml.nvmlDeviceGetCount()
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        return {"nvml": "ok", "driver": driver, "devices": [_device(pynvml, i) for i in range(count)]}
    finally:
        pynvml.nvmlShutdown()


def _device(pynvml: Any, index: int) -> Device:
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        return {
            "index": index,
            "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
            "name": _text(pynvml.nvmlDeviceGetName(handle)),
            "capability": list(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
            "used_mib": memory.used // MIB,
            "total_mib": memory.total // MIB,
            "mig": _is_split(pynvml, handle),
            "processes": [
                _process(p.pid, p.usedGpuMemory) for p in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ],
        }
    except pynvml.NVMLError as error:
        return {"index": index, "error": str(error)}


def _is_split(pynvml: Any, handle: Any) -> bool:
    try:
        return pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except (pynvml.NVMLError_NotSupported, pynvml.NVMLError_FunctionNotFound):
        return False


def _process(pid: int, used: int | None) -> dict[str, Any]:
    about: dict[str, Any] = {"pid": pid, "user": None, "command": None, "unit": None, "stop": None}
    try:
        process = psutil.Process(pid)
        about |= {"user": process.username(), "command": " ".join(process.cmdline()) or process.name()}
        about |= unit_of(Path(f"/proc/{pid}/cgroup").read_text())
    except (psutil.Error, OSError):  # it has ended (a zombie has, too)
        pass
    return about | {"used_mib": None if used is None else used // MIB}


def unit_of(cgroups: str) -> dict[str, str]:
    """{"unit", "stop"} out of the text of /proc/PID/cgroup: the systemd service, and the command that ends it.

    Empty for a process that is in none: one of a login or of a container.
    """
    for line in cgroups.splitlines():
        services = [name for name in line.split("/") if name.endswith(".service")]
        if services and not services[-1].startswith("user@"):
            manager = "systemctl --user" if services[0].startswith("user@") else "sudo systemctl"
            return {"unit": services[-1], "stop": f"{manager} stop {services[-1]}"}
    return {}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


# --- what it means -----------------------------------------------------------------------------------------------


def visible(devices: Sequence[Device], mask: str | None) -> list[Device]:
    """The devices that a CUDA_VISIBLE_DEVICES (indices in NVML's order, or beginnings of UUIDs) leaves, in its order.

    As CUDA does it: nothing after "-1" counts, null leaves all. Raises UserError for what names no device here.
    """
    if mask is None:
        return list(devices)
    found = []
    for entry in filter(None, (one.strip() for one in mask.split(","))):
        if entry in ("-1", "NoDevFiles"):
            break
        if entry.startswith("MIG-"):
            raise UserError(f"{MASK}: {entry} is a part of a GPU (MIG); training takes whole ones: ask for those")
        named = [d for d in devices if entry == str(d["index"]) or str(d.get("uuid")).startswith(entry)]
        if len(named) != 1:
            raise UserError(f"{MASK}: {entry!r} names {len(named)} GPUs of this machine, not one; unset or mend it")
        found += named
    return found


def state(device: Device, leased: Sequence[str], cfg: GpusConfig, bytes_each: int) -> str:
    """What a device is to a job that needs `bytes_each` on it.

    "free"; "ours": a job of ours uses it; "foreign": a process that is not ours; "lingering": memory or a process
    that nobody is seen to hold; "split" (MIG); "lost". `leased`: UUIDs of our leases. With gpus.foreign: ignore a
    device that others use is free as long as they leave `bytes_each`.
    """
    if "error" in device:
        return "lost"
    if device["mig"]:
        return "split"
    if device["uuid"] in leased or any(p.get("ours") for p in device["processes"]):
        return "ours"
    if strangers(device):
        room = (device["total_mib"] - device["used_mib"]) * MIB
        return "free" if cfg.foreign == "ignore" and room >= bytes_each else "foreign"
    return "lingering" if device["processes"] or device["used_mib"] >= cfg.free_below_mib else "free"


def strangers(device: Device) -> list[dict[str, Any]]:
    """Living processes on it that are not ours."""
    return [p for p in device.get("processes", []) if p["command"] is not None and not p.get("ours")]


# --- waiting, taking ---------------------------------------------------------------------------------------------


def release(need: Need, cfg: GpusConfig, leases: Leases) -> dict[str, Any]:
    """Prove that the GPUs can be had, waiting up to `gpus.wait_seconds`; return the record of what was seen.

    A device that another job of ours uses counts: Snakemake starts no more jobs than there are GPUs. Without need
    only the record is made. Raises UserError that names the holders when too few devices become free: nothing that
    is not ours is ever ended.
    """
    begin = time.monotonic()
    seen = _wait(need, cfg, leases, lambda seen: len(_in(seen, "free", "ours")) >= need.gpus)
    waited = round(time.monotonic() - begin, 1)
    return {**vars(need), "free": [d["uuid"] for d in _in(seen, "free")], "waited_seconds": waited, **seen}


@contextmanager
def lease(need: Need, cfg: GpusConfig, leases: Leases, purpose: str) -> Iterator[list[str]]:
    """Have free GPUs to oneself: their UUIDs, also as CUDA_VISIBLE_DEVICES of this process and its children.

    CUDA must not have started in this process. Without need nothing happens. Raises UserError as `release`, also
    when other jobs of ours keep the devices for longer than `gpus.wait_seconds`.
    """
    if not need.gpus:
        yield []
        return
    taken: list[str] = []

    def take(seen: dict[str, Any]) -> bool:
        free = [d["uuid"] for d in _in(seen, "free")]
        if len(free) < need.gpus:
            return False
        taken.extend(free[: need.gpus])
        leases.add(taken, purpose)
        return True

    _wait(need, cfg, leases, take)
    print(f"GPUs leased for {purpose}: {', '.join(taken)}")
    try:
        with leases.environment(taken):
            yield taken
    finally:
        leases.remove(taken)


def _wait(need: Need, cfg: GpusConfig, leases: Leases, done: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Look until `done` (called under the lock) is true of what is seen; raise UserError when that takes too long."""
    if not need.gpus:
        return look(need, cfg, leases)
    begin = time.monotonic()
    while True:
        with leases.lock():
            leases.sweep()
            seen = look(need, cfg, leases)
            if seen["nvml"] != "ok":
                raise UserError(no_driver(need, seen["nvml"]))
            if done(seen):
                return seen
        # Where waiting cannot help, what is just ending is waited for, and no longer.
        hope = ("free", "ours", "lingering") + (("foreign",) if cfg.foreign == "wait" else ())
        limit = cfg.wait_seconds if len(_in(seen, *hope)) >= need.gpus else min(GRACE_SECONDS, cfg.wait_seconds)
        waited = time.monotonic() - begin
        if waited >= limit:
            raise UserError(busy(seen, need, waited))
        time.sleep(min(POLL_SECONDS, limit - waited))


def look(need: Need, cfg: GpusConfig, leases: Leases) -> dict[str, Any]:
    """`survey`, with the state of each device and, of each process, whether it is ours.

    Also "mask", our CUDA_VISIBLE_DEVICES (devices outside of it have the state "masked"), and "leases", the handles.
    """
    seen, handles, mask = survey(), leases.living(), os.environ.get(MASK)
    holders = {handle["pid"] for handle in handles}
    for device in seen["devices"]:
        device["state"] = "masked"
        for process in device.get("processes", []):
            process["ours"] = process["pid"] in holders or leases.started(process["pid"])
    leased = [uuid for handle in handles for uuid in handle["uuids"]]
    for device in visible(seen["devices"], mask) if need.gpus else seen["devices"]:
        device["state"] = state(device, leased, cfg, need.bytes_each)
    return {**seen, "mask": mask, "leases": handles}


def _in(seen: dict[str, Any], *states: str) -> list[Device]:
    """The devices in one of these states; those that nobody else uses come first."""
    return sorted((d for d in seen["devices"] if d["state"] in states), key=lambda d: len(d.get("processes", [])))


# --- messages ----------------------------------------------------------------------------------------------------


def no_driver(need: Need, reason: str) -> str:
    return (
        f"{need.setting}: {need.gpus} GPUs needed, but NVML is {reason}; `nvidia-smi` must work where this runs: load "
        f"the driver (after an update of it reboot), in a container hand the GPUs in, or set {need.setting}: 0"
    )


def busy(seen: dict[str, Any], need: Need, waited: float) -> str:
    """Who holds what, and what to do about each; one line."""
    considered = [d for d in seen["devices"] if d["state"] != "masked"]
    free = f"{len(_in(seen, 'free'))} of {len(considered)} GPUs"
    if seen["mask"] is not None:
        free += f" that {MASK}={seen['mask']} leaves"
    holders = [f"; GPU {d['index']}: {holder(d, seen['leases'])}" for d in considered if d["state"] != "free"]
    advice = list(dict.fromkeys(one for d in considered for one in remedies(d))) or [f"lower {need.setting}"]
    return (
        f"{need.setting}: {free} are free, {need.gpus} needed, after {waited:.0f} s{''.join(holders)}. "
        f"{'; '.join(advice)}; then run the same command again"
    )


def holder(device: Device, leases: Sequence[dict[str, Any]]) -> str:
    """Who uses a device that is not free, or why nobody can. leases: handles of ours."""
    if device["state"] == "lost":
        return device["error"]
    if device["state"] == "split":
        return "split into parts (MIG is on)"
    names = [_named(p) for p in device["processes"]]
    names += [f"leased by pid {h['pid']} ({h['purpose']})" for h in leases if device["uuid"] in h["uuids"]]
    return f"{', '.join(names) or 'no process'}, {device['used_mib']} MiB used in all"


def _named(process: dict[str, Any]) -> str:
    held = "" if process["used_mib"] is None else f", {process['used_mib']} MiB"
    if process["command"] is None:
        return f"pid {process['pid']} (it has ended, or is of another container or user{held})"
    unit = f", unit {process['unit']}" if process["unit"] else ""
    whose = "ours" if process.get("ours") else f"user {process['user']}"
    return f"pid {process['pid']} ({process['command'][:100]}; {whose}{unit}{held})"


def remedies(device: Device) -> list[str]:
    """What makes a device free; empty where it is, or is outside of the mask."""
    number = device["index"]
    if device["state"] == "lost":
        return [
            f"`dmesg | grep Xid` tells what happened to GPU {number}; `sudo nvidia-smi -r -i {number}` or a reboot "
            "may bring it back"
        ]
    if device["state"] == "split":
        return [f"`sudo nvidia-smi -i {number} -mig 0` makes GPU {number} whole again"]
    if device["state"] == "foreign":
        return [remedy(p) for p in strangers(device)]
    if device["state"] == "ours":
        return ["wait until that job of this project has ended"]
    if device["state"] == "lingering":
        return [f"`sudo fuser -v /dev/nvidia{number}` tells who holds GPU {number}; or raise gpus.wait_seconds"]
    return []


def remedy(process: dict[str, Any]) -> str:
    """How its owner ends a process that is not ours. Killed, a service would come back."""
    if process["stop"]:
        return f"`{process['stop']}` ends what uses it"
    return f"have {process['user']} end pid {process['pid']}"


# --- what Snakemake was given ------------------------------------------------------------------------------------


def check_granted(granted: int, wanted: int, setting: str) -> None:
    """Snakemake runs a job with what `--resources gpu=N` leaves, silently; we do not."""
    if granted < wanted:
        raise UserError(
            f"{setting}: {wanted} GPUs wanted, {granted} granted; run snakemake with "
            f"--resources gpu={wanted} (or more), "
            f"or lower {setting}"
        )


def summary() -> str:
    """One line for the end of a run: what holds the GPUs now."""
    seen = survey()
    if not seen["devices"]:
        return seen["nvml"] if seen["nvml"] != "ok" else "none"
    return ", ".join(
        f"{d['index']}: " + (d.get("error") or f"{d['used_mib']} MiB, {len(d['processes'])} processes")
        for d in seen["devices"]
    )
