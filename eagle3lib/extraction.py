"""One shard of samples -> their hidden states in the store, linked into the shard's folder.

A job run again finds what the store holds and computes the rest only; killed at any moment it loses
at most the batch in flight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from eagle3lib import hidden_states
from eagle3lib.config import StorageConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import Progress, file_lock, write_json
from eagle3lib.lineage import digest
from eagle3lib.shards import Sample, read_shard
from eagle3lib.store import Store, link
from eagle3lib.targets import TargetInfo

# Tokens handed to the engine at once: it packs them into passes, so more is denser; this is also
# what waits in memory and what a kill can lose.
TOKENS_IN_FLIGHT = 8192


def extract_shard(
    shard_file: Path,
    outputs: Sequence[Path],
    manifest_file: Path,
    store: Store,
    open_engine: Callable[[], Any],
    code: str,
    target: TargetInfo,
    storage: StorageConfig,
) -> dict[str, int]:
    """Make every sample of a shard present: found in the store or computed, then linked to `outputs`.

    `open_engine` is called only when something must be computed. The manifest lists, by slot,
    sample_id, n_tokens, bytes and sha256: the same whatever was computed anew. Returns the counts
    {"found", "computed"}.
    """
    samples = read_shard(shard_file)
    if len(samples) != len(outputs):
        raise UserError(
            f"{shard_file}: {len(samples)} samples, {len(outputs)} expected; delete {shard_file.parent.parent}/"
            "samples.parquet to shard again"
        )
    with file_lock(store.folder / "locks" / f"{digest([s.sample_id for s in samples])}.lock"):
        records = {s.sample_id: store.find(s.sample_id) for s in samples}
        missing = [s for s in samples if records[s.sample_id] is None]
        print(f"{shard_file.name}: {len(samples) - len(missing)} of {len(samples)} found in {store.folder}")
        if missing:
            store.remove_parts([s.sample_id for s in missing])
            _check_room(missing, store, target.hidden_size, storage)
            engine = open_engine()
            _probe_once(engine, store)
            records |= _compute(missing, store, engine, code)
        for sample, output in zip(samples, outputs, strict=True):
            link(store.path(sample.sample_id), output)
    rows = [
        {"slot": slot, "n_tokens": len(s.input_ids), **(records[s.sample_id] or {})} for slot, s in enumerate(samples)
    ]
    write_json(manifest_file, {"key": store.key.short, "samples": rows})
    return {"found": len(samples) - len(missing), "computed": len(missing)}


def _check_room(missing: list[Sample], store: Store, hidden_size: int, storage: StorageConfig) -> None:
    """The plan was made before the first shard; others may have filled the disk since."""
    n_aux = len(store.key.aux_layer_ids)
    to_come = sum(hidden_states.sample_bytes(len(s.input_ids), hidden_size, n_aux) for s in missing)
    free = shutil.disk_usage(store.folder).free
    check_storage({"bytes_to_come": to_come, "bytes_free": free, **storage.model_dump(), "limit_bytes": None})


def _compute(missing: list[Sample], store: Store, engine: Any, code: str) -> dict[str, dict]:
    progress = Progress(sum(len(s.input_ids) for s in missing), "tokens", "extract")
    records = {}
    for batch in _batches(missing):
        states = engine.extract([s.input_ids for s in batch], list(store.key.aux_layer_ids))
        for sample, state in zip(batch, states, strict=True):
            records[sample.sample_id] = _publish(sample, [*state.aux, state.last], store, engine.version, code)
            progress.update(len(sample.input_ids))
    return records


def _batches(missing: list[Sample]) -> Iterator[list[Sample]]:
    """Samples of like length together, TOKENS_IN_FLIGHT at a time (a longer one alone)."""
    batch: list[Sample] = []
    for sample in sorted(missing, key=lambda s: len(s.input_ids)):
        if batch and sum(len(s.input_ids) for s in batch) + len(sample.input_ids) > TOKENS_IN_FLIGHT:
            yield batch
            batch = []
        batch.append(sample)
    yield batch


def _publish(sample: Sample, states: list[torch.Tensor], store: Store, version: str, code: str) -> dict[str, Any]:
    try:
        content = hidden_states.pack_sample(store.key, sample.input_ids, sample.reply_bounds, states, version, code)
    except ValueError as error:
        raise UserError(
            f"sample {sample.sample_id}: {error}; the other samples are kept. Remove its line from the input, or try "
            "engine.compute_dtype: float32"
        ) from None
    return store.publish(content)


def _probe_once(engine: Any, store: Store) -> None:
    """Prove, once a store and engine version, that the engine hands out the states we ask for."""
    record = store.folder / f"probe-{engine.name}-{engine.version}.json"
    with file_lock(store.folder / "locks" / "probe.lock"):
        if not record.exists():
            print(f"probe: {engine.name} {engine.version}")
            write_json(record, engine.probe(list(store.key.aux_layer_ids)))


# --- what is to come, and what is there --------------------------------------------------------------


def index(manifests: dict[str, Path], samples: Any) -> tuple[dict[str, int], Any]:
    """Lengths by path, and a table of all samples, from the shards' manifests: no `.pt` is opened.

    `manifests` maps shard -> its manifest file; `samples` is the frame of samples.parquet. Returns
    ({"{shard}/{slot}.pt": n_tokens}, frame with the columns of samples plus path, bytes, sha256).
    Raises UserError when a manifest and samples.parquet disagree.
    """
    rows = {}
    for shard, path in manifests.items():
        for row in json.loads(path.read_text())["samples"]:
            rows[shard, row["slot"]] = row
    paths, sizes, hashes = [], [], []
    for shard, slot, sample, n in zip(
        samples["shard"], samples["slot"], samples["sample_id"], samples["n_tokens"], strict=True
    ):
        row = rows.get((shard, slot))
        if row is None or row["sample_id"] != sample or row["n_tokens"] != n:
            raise UserError(
                f"{manifests.get(shard, shard)}: slot {slot} is not the sample that samples.parquet lists; delete the "
                "manifest and run the same command again"
            )
        paths.append(hidden_states.slot_path(shard, slot))
        sizes.append(row["bytes"])
        hashes.append(row["sha256"])
    table = samples.assign(path=paths, bytes=sizes, sha256=hashes)
    return dict(zip(paths, table["n_tokens"].tolist(), strict=True)), table


def remove_stale(folder: Path, shards: Iterable[str]) -> None:
    """Remove the links of shards that the dataset has no more (the store keeps their states)."""
    current = set(shards)
    for path in folder.iterdir():
        if path.is_dir() and path.name not in current:
            print(f"{path}: no shard of this dataset any more; its links are removed")
            shutil.rmtree(path)


def data_config(table: Any, key: StateKey, target: TargetInfo) -> dict[str, Any]:
    """What a reader of the samples must know beside their files."""
    return {
        "key": key.short,
        **asdict(key),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "last_is_post_norm": True,
        "samples": len(table),
        "tokens": int(table["n_tokens"].sum()),
        "supervised_tokens": int(table["n_supervised"].sum()),
        "bytes": int(table["bytes"].sum()),
        "split": {name: int(count) for name, count in table["split"].value_counts().sort_index().items()},
    }


def storage_plan(
    samples: Any, store_root: Path, key: StateKey, hidden_size: int, storage: StorageConfig
) -> tuple[dict[str, int], dict[str, Any]]:
    """The forecast from the lengths alone (`samples`: sample_id, n_tokens), and the disk as it is now."""
    store = Store(store_root, key)
    n_aux = len(key.aux_layer_ids)
    present = [store.path(s).exists() for s in samples["sample_id"]]
    sizes = [hidden_states.sample_bytes(n, hidden_size, n_aux, key.storage_format) for n in samples["n_tokens"]]
    store.folder.mkdir(parents=True, exist_ok=True)
    forecast = {"samples": len(sizes), "tokens": int(samples["n_tokens"].sum()), "bytes_all": sum(sizes)}
    to_come = sum(size for size, there in zip(sizes, present, strict=True) if not there)
    free = shutil.disk_usage(store.folder).free
    return forecast, {"bytes_to_come": to_come, "bytes_free": free, **storage.model_dump()}


def check_storage(plan: dict) -> None:
    """Refuse before the first byte when the states to come do not fit; the numbers are in the message."""
    room = plan["bytes_free"] - plan["reserve_bytes"]
    remedy = "lower dataset.max_conversations or dataset.token_budget"
    if plan["bytes_to_come"] > max(room, 0):
        raise UserError(
            f"no disk: {plan['bytes_to_come']:,} bytes of hidden states to come, {plan['bytes_free']:,} free less "
            f"storage.reserve_bytes ({plan['reserve_bytes']:,}); "
            f"free {plan['bytes_to_come'] - room:,} bytes, or {remedy}"
        )
    if plan["limit_bytes"] is not None and plan["bytes_all"] > plan["limit_bytes"]:
        raise UserError(
            f"no disk: {plan['bytes_all']:,} bytes of hidden states in all, storage.limit_bytes allows "
            f"{plan['limit_bytes']:,}; raise it, or {remedy}"
        )
