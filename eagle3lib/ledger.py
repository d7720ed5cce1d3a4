"""What dear work was done: a line a job in `store/ledger.jsonl`. From it come measured rates, and the question
before finished work is made again.

A line: {"kind": "replies" | "states" | "draft", "name", "shaping", "start", "end", "samples", "tokens"}; `shaping`
holds plain values of all that decides the result, times are seconds of the epoch.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lib.job import append_line, read_lines
from eagle3lib.lineage import digest

PUT_DOWN_SECONDS = 300


@dataclass(frozen=True)
class Entry:
    """One job's work."""

    kind: str
    name: str
    shaping: dict[str, Any]
    start: float
    end: float
    samples: int
    tokens: int


class Work:
    """Work in progress: `count` what is finished. Put down every few minutes, so that a kill costs no more."""

    def __init__(self, store: Path, kind: str, name: str, shaping: dict[str, Any]):
        self.store, self.about = store, (kind, name, shaping)
        self.start, self.samples, self.tokens = time.time(), 0, 0

    def count(self, samples: int, tokens: int) -> None:
        self.samples += samples
        self.tokens += tokens
        if time.time() - self.start > PUT_DOWN_SECONDS:
            self.put_down()

    def put_down(self) -> None:
        now = time.time()
        if self.samples:
            add(self.store, Entry(*self.about, self.start, now, self.samples, self.tokens))
        self.start, self.samples, self.tokens = now, 0, 0

    def __enter__(self) -> Work:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        with contextlib.suppress(*[OSError] if failed else []):  # the first error is the one to tell
            self.put_down()


def add(store: Path, entry: Entry) -> None:
    """Append one line. The store is there: a vanished volume is not replaced."""
    append_line(store / "ledger.jsonl", asdict(entry))


def read(store: Path) -> list[Entry]:
    """All lines; one that a crash tore is passed over."""
    entries = []
    for line in read_lines(store / "ledger.jsonl"):
        with contextlib.suppress(TypeError):
            entries.append(Entry(**line))
    return entries


def seconds(entries: Iterable[Entry]) -> float:
    """Time in which at least one of these jobs was at work: jobs side by side count once."""
    total, end = 0.0, float("-inf")
    for entry in sorted(entries, key=lambda e: e.start):
        total += max(0.0, entry.end - max(entry.start, end))
        end = max(end, entry.end)
    return total


def rate(entries: Iterable[Entry]) -> float | None:
    """Tokens per second of all jobs together, or None when nothing was measured."""
    entries = list(entries)
    spent = seconds(entries)
    return sum(e.tokens for e in entries) / spent if spent else None


@dataclass(frozen=True)
class Redo:
    """Finished work that a plan would make again."""

    kind: str
    name: str
    finished: dict[str, Any]  # what shaped it
    causes: list[str]
    samples: int
    hours: float
    token: str

    def __str__(self) -> str:
        what = {"replies": "replies", "states": "samples' hidden states", "draft": "samples' training of the draft"}
        return (
            f"{self.name}: {'; '.join(self.causes)}: {self.samples:,} {what[self.kind]} that are finished would be "
            f"made again, about {self.hours:.1f} h (storage.confirm_above_hours). Undo the change, or: "
            f"python -m eagle3lib confirm {self.token}"
        )


def redo(entries: Iterable[Entry], kind: str, name: str, shaping: dict[str, Any]) -> Redo | None:
    """The latest finished work of this kind and name, if shaped otherwise; None when the same was done before."""
    done = [e for e in entries if (e.kind, e.name) == (kind, name)]
    if not done or any(e.shaping == shaping for e in done):
        return None
    latest = done[-1].shaping
    lost = [e for e in done if e.shaping == latest]
    samples = sum(e.samples for e in lost)
    hours, token = seconds(lost) / 3600, digest([kind, name, shaping])
    return Redo(kind, name, latest, differences(latest, shaping), samples, hours, token)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """`path: old -> new` for each value that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = list(dict.fromkeys([*old, *new]))
        return [d for k in keys for d in differences(old.get(k), new.get(k), f"{path}.{k}" if path else str(k))]
    return [] if old == new else [f"{path}: {json.dumps(old)} -> {json.dumps(new)}"]


def confirm(store: Path, token: str) -> None:
    (store / "confirmed").mkdir(parents=True, exist_ok=True)
    (store / "confirmed" / token).touch()


def confirmed(store: Path, token: str) -> bool:
    return (store / "confirmed" / token).exists()
