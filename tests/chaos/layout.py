"""Where a trial's files lie: `results/` as the product lays it out, and beside it what the trial wants to know."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagle3lib.hidden_states import StateKey
from eagle3lib.store import Store

KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")
SAMPLES = 24
DIGEST = "0123456789abcdef"


def store_of(folder: Path) -> Store:
    return Store(folder / "results/store", KEY)


def states_folder(folder: Path) -> Path:
    return folder / f"results/tiny/talk/{KEY.short}/hidden_states/00000"


def draft_folder(folder: Path) -> Path:
    return folder / "results/store/drafts" / DIGEST


def skip_probe(world: Path, folder: Path) -> None:
    """As for all shards but the first: the store has seen this engine before."""
    store = store_of(folder)
    store.prepare()
    for record in store_of(world / "whole").folder.glob("probe-*.json"):
        shutil.copy(record, store.folder)
