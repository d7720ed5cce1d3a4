"""Who a process is, beyond its number: a pid may be somebody else's after a reboot, or by now."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from eagle3lib.job import started


def identity(pid: int) -> dict[str, Any]:
    """{"pid", "started" (clock ticks since boot), "boot_id"} of a process that lives. Raises ProcessLookupError."""
    ticks = started(pid)
    if ticks is None:
        raise ProcessLookupError(pid)
    return {"pid": pid, "started": ticks, "boot_id": boot_id()}


def alive(who: dict[str, Any]) -> bool:
    """Does the very process still live that `identity` was taken of?"""
    ticks = started(int(who["pid"]))
    return ticks is not None and who.get("started") == ticks and who.get("boot_id") == boot_id()


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def stop_group(who: dict[str, Any], pgid: int, grace_seconds: float) -> str:
    """End the process group `pgid` of a leader of ours: SIGTERM, up to `grace_seconds`, SIGKILL.

    Returns what was needed: "gone" (nothing: the leader lives no more, or its number is somebody else's),
    "SIGTERM" or "SIGKILL". Members that outlive the leader are ended, too; nobody else can have got their group's
    number meanwhile, since a number that a group bears is given to no new process.
    """
    if not alive(who) or _group_of(who["pid"]) != pgid:
        return "gone"
    os.killpg(pgid, signal.SIGTERM)
    if _ended(pgid, grace_seconds):
        return "SIGTERM"
    with suppress(ProcessLookupError):  # the last one ended just now
        os.killpg(pgid, signal.SIGKILL)
    _ended(pgid, grace_seconds)
    return "SIGKILL"


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None


def _ended(pgid: int, seconds: float) -> bool:
    """Has every process of the group ended within `seconds`?"""
    end = time.monotonic() + seconds
    while any(_group_of(pid) == pgid and started(pid) for pid in _pids()):
        if time.monotonic() >= end:
            return False
        time.sleep(0.05)
    return True


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]
