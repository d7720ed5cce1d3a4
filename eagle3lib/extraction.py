"""One shard of samples -> their hidden states in the store, linked into the shard's folder.

A job run again finds what the store holds and computes the rest only; killed at any moment it loses
at most the batch in flight.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle3lib import hidden_states, in_place
from eagle3lib.config import StorageConfig
from eagle3lib.disk import Disk
from eagle3lib.engines import File
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey, load_sample
from eagle3lib.job import Progress, file_lock, write_json
from eagle3lib.ledger import Work
from eagle3lib.lineage import digest
from eagle3lib.shards import Sample, read_shard
from eagle3lib.store import Store, link, shared_stores
from eagle3lib.targets import TargetInfo

# Tokens handed to the engine at once: it packs them into passes, so more is denser; this is also
# what waits in memory and what a kill can lose.
TOKENS_IN_FLIGHT = 8192
BLOCKS = 3 * 4096  # what a sample may take beside its bytes: the ends of its file, its manifest and its folder
ROW = ("sample_id", "bytes", "sha256")  # of a store's record, what a shard's manifest holds: not when it was written

ANSWER = ("bytes", "sha256", "fsync_seconds")  # of an engine that writes files

Published = Iterator[tuple[Sample, dict[str, Any] | ValueError]]
Records = dict[str, Any]  # sample_id -> the store's record, None: still missing


def extract_shard(
    shard_file: Path,
    outputs: Sequence[Path],
    manifest_file: Path,
    store: Store,
    open_engine: Callable[[], Any],
    code: str,
    target: TargetInfo,
    storage: StorageConfig,
    name: str,
) -> dict[str, int]:
    """Make every sample of a shard present: found in the store or computed, then linked to `outputs`.

    `open_engine` is called only when something must be computed. The manifest lists, by slot,
    sample_id, n_tokens, bytes and sha256: the same whatever was computed anew. `name` (target/dataset) is who
    the work is put down to. Returns the counts {"found", "converted", "computed"}.
    """
    samples = read_shard(shard_file)
    if len(samples) != len(outputs):
        raise UserError(
            f"{shard_file}: {len(samples)} samples, {len(outputs)} expected; delete {shard_file.parent.parent}/"
            "samples.parquet to shard again"
        )
    store.prepare()
    with file_lock(store.folder / "locks" / f"{digest([s.sample_id for s in samples])}.lock"):
        records: Records = {s.sample_id: _find(s, store) for s in samples}
        absent = [s for s in samples if records[s.sample_id] is None]
        records |= _share(absent, store, storage)
        absent = [s for s in absent if records[s.sample_id] is None]
        found = len(samples) - len(absent)
        print(f"{shard_file.name}: {found} of {len(samples)} found in {store.folder} and shared stores")
        store.remove_parts([s.sample_id for s in absent])
        guard = Guard(store, target.hidden_size, storage)
        records |= _convert(absent, store, guard)
        missing = [s for s in absent if records[s.sample_id] is None]
        if missing:
            engine = open_engine()
            probed = _probe_once(engine, store)
            with Work(store.root, "states", name, store.key.values()) as work:
                records |= _compute(missing, store, engine, code, guard, work, probed)
        if absent:
            store.mark_synced()
        for sample, output in zip(samples, outputs, strict=True):
            link(store.path(sample.sample_id), output)
    rows = [
        {"slot": slot, "n_tokens": len(s.input_ids), **{name: records[s.sample_id][name] for name in ROW}}
        for slot, s in enumerate(samples)
    ]
    write_json(manifest_file, {"key": store.key.short, "samples": rows})
    return {"found": found, "converted": len(absent) - len(missing), "computed": len(missing)}


class Guard:
    """Stops the writer before the disk is full, while the samples so far are kept."""

    def __init__(self, store: Store, hidden_size: int, storage: StorageConfig):
        self.store, self.hidden_size, self.disk = store, hidden_size, Disk(store.folder, storage)

    def before(self, batch: Iterable[Sample], under_way: Iterable[Sample] = ()) -> None:
        self.disk.check_room(self._bytes(batch), self._bytes(under_way))

    def _bytes(self, samples: Iterable[Sample]) -> int:
        sizes = (
            hidden_states.stored_bytes(self.store.key, self.hidden_size, len(s.input_ids), s.reply_bounds)
            for s in samples
        )
        return sum(size + BLOCKS for size in sizes)

    def after_each(self) -> None:
        self.disk.check_fsync(self.store.fsync_seconds)


def _find(sample: Sample, store: Store) -> dict[str, Any] | None:
    """The store's record of a sample that has all that its mask asks for."""
    record = store.find(sample.sample_id)
    if record and (rows := store.lacks_rows(sample.sample_id, sample.reply_bounds)):
        print(f"{sample.sample_id}: {len(rows)} rows of its last state are missing under a wider mask; made anew")
        return None
    return record


def _share(absent: list[Sample], store: Store, storage: StorageConfig) -> Records:
    """Samples that other projects' stores have, with all that the mask asks for."""
    others = shared_stores(storage.shared_stores, store.key)
    bad = store.found_bad() if others else []
    taken = {s.sample_id: store.share(s.sample_id, others, bad) for s in absent} if others else {}
    whole = {
        s.sample_id for s in absent if taken.get(s.sample_id) and not store.lacks_rows(s.sample_id, s.reply_bounds)
    }
    return {sample: record for sample, record in taken.items() if sample in whole}


def _convert(absent: list[Sample], store: Store, guard: Guard) -> Records:
    """Samples whose states the store holds in a format that ours can be made from: no target is needed."""
    records: Records = {}
    for source in store.convertible_from() if absent else []:
        for sample in absent:
            if sample.sample_id in records or not source.find(sample.sample_id, full=True):
                continue
            stored = load_sample(source.path(sample.sample_id))
            if hidden_states.missing_rows(stored, sample.reply_bounds):
                continue
            guard.before([sample])
            meta, states = stored["meta"], hidden_states.unpack(stored)
            records[sample.sample_id] = _publish(sample, states, store, meta["engine_version"], meta["code"])
            guard.after_each()
    return records


def _compute(
    missing: list[Sample], store: Store, engine: Any, code: str, guard: Guard, work: Work, probed: dict[str, Any]
) -> Records:
    """Extract and publish, batch by batch."""
    progress = Progress(sum(len(s.input_ids) for s in missing), "tokens", "extract")
    records, faults = {}, []
    published: Any = _written if hasattr(engine, "write") else _extracted
    if hasattr(engine, "refer"):
        published = partial(_referred, probed=probed)
    for sample, record in published(missing, store, engine, code, guard):
        if isinstance(record, ValueError):  # not finite: the others do not wait for it
            faults.append(f"{sample.origin.get('file')}:{sample.origin.get('line')}: {record}")
        else:
            records[sample.sample_id] = record
            work.count(1, len(sample.input_ids))
            guard.after_each()
        progress.update(len(sample.input_ids), samples=len(records), bytes=sum(r["bytes"] for r in records.values()))
    if faults:
        raise UserError(
            f"{len(faults)} samples have no usable states; the others are kept. {faults[0]}. Remove the line from the "
            "input, or try engine.compute_dtype: float32" + "".join(f"\n  {fault}" for fault in faults[1:])
        )
    return records


def _extracted(missing: list[Sample], store: Store, engine: Any, code: str, guard: Guard) -> Published:
    """The engine hands out states: written here."""
    for batch in _batches(missing):
        guard.before(batch)
        states = engine.extract([s.input_ids for s in batch], list(store.key.aux_layer_ids))
        for sample, state in zip(batch, states, strict=True):
            try:
                yield sample, _publish(sample, [*state.aux, state.last], store, engine.version, code)
            except ValueError as error:
                yield sample, error


def _referred(
    missing: list[Sample], store: Store, engine: Any, code: str, guard: Guard, probed: dict[str, Any]
) -> Published:
    """The states stay where they are: a file that says where is written here."""
    set_aside = {path.stem for path in (store.root / "quarantine" / store.key.short).glob("*.pt")}
    for sample in missing:
        guard.before([sample])
        try:
            content = engine.refer(store.key, sample, code, probed)
            if sample.sample_id in set_aside and (fault := in_place.reference_fault(content, full=True)):
                raise ValueError(f"{fault}; put it back, or `snakemake --forcerun import_states` leaves it out")
            yield sample, store.publish(content)
        except ValueError as error:
            yield sample, error


def _written(missing: list[Sample], store: Store, engine: Any, code: str, guard: Guard) -> Published:
    """The engine writes the files, several at once, the longest first; checked and published here."""
    samples: dict[Path, Sample] = {}

    def files() -> Iterator[File]:
        for sample in sorted(missing, key=lambda s: -len(s.input_ids)):
            guard.before([sample], samples.values())
            part = store.part(sample.sample_id).resolve()
            samples[part] = sample
            rows, form = _rows(sample, store), store.key.storage_format
            yield File(sample.input_ids, part, form, sample.reply_bounds, rows, code)

    try:
        for file, answer in engine.write(files()):
            sample = samples.pop(file.part)
            if isinstance(answer, ValueError):
                yield sample, answer
            else:
                yield sample, store.accept(sample.sample_id, file.part, *(answer[name] for name in ANSWER))
    finally:
        for part in samples:
            part.unlink(missing_ok=True)


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
    """Write one sample; of one that was trimmed for another mask the rows of both are kept."""
    ids, bounds, rows = sample.input_ids, sample.reply_bounds, _rows(sample, store)
    return store.publish(hidden_states.pack_sample(store.key, ids, bounds, states, version, code, rows))


def _rows(sample: Sample, store: Store) -> list[int]:
    """Rows of the last state that the store has of a sample that was trimmed for another mask."""
    path = store.path(sample.sample_id)
    return load_sample(path).get("last_rows", torch.empty(0)).tolist() if path.exists() else []


def _probe_once(engine: Any, store: Store) -> dict[str, Any]:
    """Prove, once a store and engine version, that the engine hands out the states we ask for; the record of it."""
    path = store.folder / f"probe-{engine.name}-{engine.version}.json"
    with file_lock(store.folder / "locks" / "probe.lock"):
        with suppress(OSError, ValueError):  # there is none yet, or a failing disk has damaged it
            return json.loads(path.read_text())
        print(f"probe: {engine.name} {engine.version}")
        record = engine.probe(list(store.key.aux_layer_ids))
        write_json(path, record)
        return record


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
    columns = ("shard", "slot", "sample_id", "n_tokens")
    paths, sizes, hashes = [], [], []
    for shard, slot, sample, n in zip(*(samples[name].tolist() for name in columns), strict=True):
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
        **key.values(),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "last_is_post_norm": True,
        "samples": len(table),
        "tokens": int(table["n_tokens"].sum()),
        "supervised_tokens": int(table["n_supervised"].sum()),
        "bytes": int(table["bytes"].sum()),
        "split": {name: int(count) for name, count in table["split"].value_counts().sort_index().items()},
    }
