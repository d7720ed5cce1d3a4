"""GPUs through NVML: who holds them, and the proof that they are free before training."""

from __future__ import annotations

import time
from typing import Any

from eagle3lib.config import GpusConfig
from eagle3lib.errors import UserError

MIB = 2**20


def survey() -> dict[str, Any]:
    """Devices with their memory and compute processes; {"nvml": reason} and no devices where there is no driver."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return {"nvml": f"not available: {error}", "devices": []}
    try:
        count = pynvml.nvmlDeviceGetCount()
        return {"nvml": "ok", "devices": [_device(pynvml, i) for i in range(count)]}
    finally:
        pynvml.nvmlShutdown()


def _device(pynvml: Any, index: int) -> dict[str, Any]:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    return {
        "index": index,
        "uuid": _text(pynvml.nvmlDeviceGetUUID(handle)),
        "used_mib": memory.used // MIB,
        "total_mib": memory.total // MIB,
        "processes": [_process(p.pid, p.usedGpuMemory) for p in processes],
    }


def _process(pid: int, used: int | None) -> dict[str, Any]:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as file:
            command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        command = "(ended, or not ours to see)"
    return {"pid": pid, "command": command, "used_mib": None if used is None else used // MIB}


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def free(device: dict[str, Any], cfg: GpusConfig) -> bool:
    return device["used_mib"] < cfg.free_below_mib and not device["processes"]


def release(needed: int, cfg: GpusConfig) -> dict[str, Any]:
    """Prove that `needed` GPUs are free, waiting up to `gpus.wait_seconds`; return the record of what was seen.

    The transformers engine lives inside its job and ends with it, so there is nothing of ours to stop.
    Without NVML (or with `needed` 0) that is recorded and the run goes on. Raises UserError that
    names the holders when too few devices become free: nothing that is not ours is ever ended.
    """
    start = time.monotonic()
    while True:
        seen = survey()
        available = [d for d in seen["devices"] if free(d, cfg)]
        waited = time.monotonic() - start
        # No driver at all cannot mend itself; training reports it when it really wants a GPU.
        if len(available) >= needed or seen["nvml"] != "ok":
            return {
                "needed": needed,
                "free": [d["uuid"] for d in available],
                "waited_seconds": round(waited, 1),
                **seen,
            }
        if waited >= cfg.wait_seconds:
            raise UserError(_busy(seen["devices"], len(available), needed, cfg))
        time.sleep(min(2.0, cfg.wait_seconds - waited))


def _busy(devices: list[dict[str, Any]], available: int, needed: int, cfg: GpusConfig) -> str:
    holders = [
        f"GPU {d['index']}: "
        + (", ".join(f"pid {p['pid']} ({p['command'][:80]})" for p in d["processes"]) or "no process")
        + f", {d['used_mib']} MiB used"
        for d in devices
        if not free(d, cfg)
    ]
    return (
        f"{available} of {len(devices)} GPUs are free, {needed} needed, after {cfg.wait_seconds:.0f} s; "
        f"{'; '.join(holders)}. "
        "Stop these processes (they are not ours) or raise gpus.wait_seconds, then run the same command again"
    )


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
    return ", ".join(f"{d['index']}: {d['used_mib']} MiB, {len(d['processes'])} processes" for d in seen["devices"])
