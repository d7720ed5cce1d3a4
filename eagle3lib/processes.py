"""Who a process is, beyond its number: a pid may be somebody else's after a reboot, or by now."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

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


def session(leader: dict[str, Any]) -> list[psutil.Process]:
    """Living processes of the session that this process has begun (`start_new_session`), itself left out: what it
    started and all that came of it, also when it has ended."""
    if leader["boot_id"] != boot_id() or started(leader["pid"]) not in (None, leader["started"]):
        return []
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # ended meanwhile
            mine = process.pid != leader["pid"] and os.getsid(process.pid) == leader["pid"]
            if mine and int(started(process.pid) or 0) >= int(leader["started"]):
                found.append(process)
    return found


def send(number: int, processes: Iterable[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.Error):
            process.send_signal(number)


def wait_until(true: Callable[[], bool], seconds: float, every: float = 0.1) -> bool:
    """Has it become true within `seconds`?"""
    end = time.monotonic() + seconds
    while not true():
        if time.monotonic() >= end:
            return False
        time.sleep(every)
    return True


def end_with_parent() -> None:
    """To be called in a child before it starts (Linux): SIGTERM to it when its parent dies, however that ends."""
    set_parent_death_signal = 1
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)
