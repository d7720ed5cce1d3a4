"""Names in the datasets that are no longer links into the store: a copy without -H makes a file of each name, and
doubles the bytes. `relink` makes links of them again; nothing is lost on the way, whichever of the two is whole.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.hidden_states import slot_path
from eagle3lib.job import Progress
from eagle3lib.lineage import file_sha256
from eagle3lib.store import Store, link, open_stores

DRAFT_FILES = ("model.safetensors", "training.json", "metrics.jsonl")


@dataclass(frozen=True)
class Name:
    """A dataset's name for a sample, a file of its own; `record` is what the shard's manifest says of it."""

    path: Path
    store: Store
    record: dict[str, Any]
    bytes: int

    @property
    def stored(self) -> Path:
        return self.store.path(self.record["sample_id"])


def doubled_bytes(results: Path, key: str) -> int:
    """Bytes of states of one key that no link shares with the store. A stat a name: no file is read."""
    total = 0
    for folder in results.glob(f"*/*/{key}/hidden_states/*"):
        for entry in os.scandir(folder):
            if entry.name.endswith(".pt") and not entry.is_symlink():
                about = entry.stat()
                total += about.st_size if about.st_nlink == 1 else 0
    return total


def broken(results: Path) -> Iterator[Name]:
    """The names that are files of their own, in all datasets."""
    for store in open_stores(results / "store"):
        for manifest in sorted(results.glob(f"*/*/{store.key.short}/hidden_states/*/manifest.json")):
            with suppress(ValueError, KeyError, TypeError):
                for record in json.loads(manifest.read_text())["samples"]:
                    path = manifest.parent.parent / slot_path(manifest.parent.name, record["slot"])
                    stored = store.path(record["sample_id"])
                    if path.is_file() and not path.is_symlink() and not (stored.exists() and path.samefile(stored)):
                        yield Name(path, store, record, path.stat().st_size)


def relink(results: Path, say: Callable[[str], None]) -> int:
    """Make links of the broken names; how many could not be: neither the name nor the store has the right bytes."""
    names = list(broken(results))
    progress, freed, bad = Progress(len(names), "names", "relink"), 0, 0
    for name in names:
        if _mend(name):
            freed += name.bytes
        else:
            bad += 1
            say(f"{name.path}: neither it nor the store has the manifest's bytes; delete it, the next run makes it")
        progress.update()
    drafts = sum(_mend_draft(folder) for folder in results.glob("*/*/*/*/training"))
    say(f"{len(names) - bad:,} states and {drafts:,} files of drafts linked again, {freed:,} bytes doubled no longer")
    return bad


def _mend(name: Name) -> bool:
    """The store's file where it is whole, else the name's."""
    sample, stored = name.record["sample_id"], name.stored
    if stored.exists() and name.store.fault(sample, full=True) is None:
        link(stored, name.path)
        return True
    if file_sha256(name.path) != name.record["sha256"]:
        return False
    if stored.exists():
        name.store.quarantine(stored, "found bad by relink; a copy under a dataset's name was whole")
    name.store.take(sample, name.path)
    return True


def _mend_draft(folder: Path) -> int:
    """A training's files, linked to those of the same draft in the store where they are equal."""
    mended = 0
    with suppress(OSError, ValueError, KeyError):
        digest = json.loads((folder / "training.json").read_text())["digest"]
        stored = folder.parents[4] / "store" / "drafts" / digest
        for file in DRAFT_FILES:
            own, other = folder / file, stored / file
            if own.exists() and other.exists() and not own.samefile(other) and file_sha256(own) == file_sha256(other):
                link(other, own)
                mended += 1
    return mended
