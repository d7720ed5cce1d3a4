"""States made by other code, or another version of the engine: are they what we would make today?

Neither is part of a state's identity: days of GPU time hang on it. Instead, when either has changed, a few
samples of the store are extracted again and compared. Equal within the tolerance: the store is kept, and its
record says so. `store/hidden_states/{key}/made_by.json` lists all that made or were found to make these states.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from typing import Any

from eagle3lib.errors import UserError
from eagle3lib.hidden_states import IN_PLACE, distance, load_sample, pack_sample, unpack
from eagle3lib.job import file_lock, write_json
from eagle3lib.store import Store

SAMPLES = 16
# Relative L2 distance of a layer of a sample. What is stored is rounded to bf16 (2**-9); a bf16 pass differs from
# itself in another batch by a few of these steps, a wrong layer or norm by about 1.
TOLERANCE = {"float32": 0.01, "bfloat16": 0.05}


def adopt(store: Store, maker: dict[str, str], open_engine: Callable[[], Any]) -> list[dict[str, Any]]:
    """Take `maker` ({"code", "engine_version"}) as one that makes the states of this store; all its makers so far.

    An empty store takes anyone. Otherwise SAMPLES seeded samples are extracted again, unless `maker` is known.
    Raises UserError with the layer and the distance when they differ; nothing is deleted.
    """
    store.prepare()
    path = store.folder / "made_by.json"
    with file_lock(store.folder / "locks" / "made_by.lock"):
        makers = json.loads(path.read_text()) if path.exists() else []
        if any({name: one[name] for name in maker} == maker for one in makers):
            return makers
        # Imported states are made by nobody here: their files are held against their sha256.
        drawn = [] if store.key.storage_format == IN_PLACE else _draw(store)
        entry: dict[str, Any] = {**maker, "time": time.time(), "samples": drawn}
        if drawn:
            print(f"adopt: {len(drawn)} samples of {store.folder} are extracted again with {maker}")
            entry["largest_distance"] = _compare(store, drawn, open_engine())
        makers.append(entry)
        write_json(path, makers)
        return makers


def _draw(store: Store) -> list[str]:
    """The same few samples of the same store, spread by hash."""
    samples = [record["sample_id"] for record in store.records()]
    drawn = sorted(samples, key=lambda sample: hashlib.sha256(f"adopt:{sample}".encode()).digest())[:SAMPLES]
    return [sample for sample in drawn if store.find(sample)]


def _compare(store: Store, drawn: list[str], engine: Any) -> float:
    """The largest distance between stored and new states. Raises UserError above the tolerance."""
    limit, largest, differing = TOLERANCE[store.key.compute_dtype], (0.0, "", ""), 0
    for sample in drawn:
        stored = load_sample(store.path(sample))
        ids = stored["input_ids"].tolist()
        rows = stored["last_rows"].tolist() if "last_rows" in stored else []
        (states,) = engine.extract([ids], list(store.key.aux_layer_ids))
        new = pack_sample(store.key, ids, [], [*states.aux, states.last], engine.version, "", rows)
        names = [*map(str, store.key.aux_layer_ids), "last"]
        here = [(distance(a, b), sample, layer) for layer, a, b in zip(names, unpack(new), unpack(stored), strict=True)]
        largest = max(largest, *here)
        differing += max(here)[0] > limit
    if differing:
        raise UserError(
            f"{store.folder}: made by other code or another engine version, and {differing} of {len(drawn)} samples "
            f"come out differently now (layer {largest[2]} of sample {largest[1][:12]}: relative distance "
            f"{largest[0]:.3g}, tolerance {limit}). Go back to the version in made_by.json there, or set these states "
            f"aside with `python -m eagle3lib gc --delete {store.key.short}` and extract them again"
        )
    return largest[0]
