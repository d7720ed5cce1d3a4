"""Is what the store holds still what was written?

Everything when asked for (`python -m eagle3lib verify`); after an unclean end of a run what was written since the
last sync mark, and one sample in a hundred of the rest. What fails is quarantined and made again by the next run.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3lib.job import Progress, started, write_json
from eagle3lib.shards import is_drawn
from eagle3lib.store import Store, open_stores

SAMPLE_OF_THE_REST = 0.01
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass
class Report:
    """What a verification read and found."""

    files: int = 0
    of_files: int = 0
    bytes: int = 0
    seconds: float = 0.0
    bad: list[tuple[Path, str]] = field(default_factory=list)

    def __str__(self) -> str:
        rate = self.bytes / max(self.seconds, 1e-9) / 1e9
        lines = [f"quarantined {path}: {reason}" for path, reason in self.bad]
        how_far = "" if self.files == self.of_files else f" of {self.of_files:,}; interrupted, the rest was not read"
        lines.append(
            f"{self.files:,} files{how_far}, {self.bytes:,} bytes read in {self.seconds:.0f} s ({rate:.2f} GB/s): "
            f"{len(self.bad)} bad" + (", quarantined; the next run makes them again" if self.bad else "")
        )
        return "\n".join(lines)


def verify(todo: Sequence[tuple[Store, dict[str, Any]]]) -> Report:
    """Check every byte of these samples; quarantine the bad ones. Ctrl-C ends it with the report so far.

    As many threads as cores: hashing and reading both let go of the interpreter.
    """
    report, start = Report(of_files=len(todo)), time.monotonic()
    progress = Progress(sum(record["bytes"] for _, record in todo), "bytes", "verify")

    def check(item: tuple[Store, dict[str, Any]]) -> str | None:
        store, record = item
        try:
            return store.fault(record["sample_id"], full=True)
        except FileNotFoundError:  # somebody removed it: nothing to find fault with
            return None

    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    try:
        for (store, record), reason in zip(todo, pool.map(check, todo), strict=True):
            if reason is not None:
                path = store.path(record["sample_id"])
                store.quarantine(path, reason)
                report.bad.append((path, reason))
            report.files += 1
            report.bytes += record["bytes"]
            progress.update(record["bytes"], files=report.files, bad=len(report.bad))
    except KeyboardInterrupt:
        pass
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    report.seconds = time.monotonic() - start
    return report


def everything(root: Path, keys: Sequence[str] | None = None) -> list[tuple[Store, dict[str, Any]]]:
    """All samples with a line in their manifest, of all keys or those asked for."""
    return [(store, record) for store in open_stores(root, keys) for record in store.records()]


# --- after an unclean end -----------------------------------------------------------------------------


def begin(root: Path) -> None:
    """Remember, until `end`, that a run writes into the store."""
    write_json(_session(root), _this_process())


def end(root: Path) -> None:
    """The run has ended in order: what it wrote is made durable and marked so."""
    if _session(root).exists():
        for store in open_stores(root):
            store.mark_synced()
        _session(root).unlink()


def ended_uncleanly(root: Path) -> bool:
    """Has a run begun that neither ended nor still runs?"""
    try:
        session = json.loads(_session(root).read_text())
    except (OSError, ValueError):
        return _session(root).exists()
    here = _this_process()
    if any(session.get(name) != here[name] for name in ("host", "boot")):
        return True
    return started(session.get("pid", 0)) != session.get("started")


def suspects(root: Path) -> list[tuple[Store, dict[str, Any]]]:
    """Samples written since the last sync mark, and a seeded share of the rest."""
    found = []
    for store in open_stores(root):
        since = store.synced()  # the seed, too: in time every sample comes up
        for record in store.records():
            if record.get("written", 0) >= since or is_drawn(record["sample_id"], since, SAMPLE_OF_THE_REST):
                found.append((store, record))
    return found


def after_unclean_end(root: Path) -> Report | None:
    """Verify what an unclean end may have damaged, say what was read, and take note that it was done."""
    if not ended_uncleanly(root):
        return None
    todo = suspects(root)
    print(f"The last run ended uncleanly: {len(todo):,} samples are hashed before this one starts", file=sys.stderr)
    report = verify(todo)
    print(report, file=sys.stderr)
    if report.files < report.of_files:
        raise KeyboardInterrupt
    end(root)
    return report


def _session(root: Path) -> Path:
    return root / "session.json"


def _this_process() -> dict[str, Any]:
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else None
    return {"host": socket.gethostname(), "boot": boot, "pid": os.getpid(), "started": started(os.getpid())}
