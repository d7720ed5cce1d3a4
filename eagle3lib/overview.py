"""What is missing, what a plan would make again, what nobody uses any more: questions to a whole configuration.

No torch: the first two are asked by Snakemake's main process before any job.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3lib import hidden_states, ledger, shards
from eagle3lib import plan as planning
from eagle3lib.config import StorageConfig
from eagle3lib.disk import Disk, check_plan, size
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey
from eagle3lib.ledger import Redo
from eagle3lib.links import doubled_bytes
from eagle3lib.plan import STORE, Plan, Run
from eagle3lib.store import Store, is_held, open_stores, shared_stores
from eagle3lib.targets import TargetInfo

FORECAST_COLUMNS = ["sample_id", "n_tokens", "reply_bounds"]
NOT_READY = (OSError, ValueError, TypeError)  # of reading what is not there yet, or is of an earlier version
NAMED_SLOTS = 8  # a line names so many slots at most


def refuse(plan: Plan) -> None:
    """Raise UserError when this run would make dear work again unasked, or fill the disk."""
    if again := redo(plan):
        raise UserError("\n".join(map(str, again)))
    check_room(plan)


# --- missing ------------------------------------------------------------------------------------------


def missing(plan: Plan) -> str:
    """Which samples have no hidden states yet, shard by shard, and what they will take."""
    return "\n".join(map(_missing_of, plan.runs_by_states)) + "\n"


def _missing_of(run: Run) -> str:
    target, dataset, key, _ = run.names.values()
    head = f"{target} / {dataset} / {key}"
    folder = run.samples_file.parent
    if not (folder / "shards.json").exists() or not run.samples_file.exists():
        return f"{head}: not sharded yet; `snakemake samples` does that"
    about = planning.read_shards(folder / "shards.json")
    absent = {shard: _absent(folder / key / "hidden_states" / shard, about[shard]["n_samples"]) for shard in about}
    absent = {shard: slots for shard, slots in absent.items() if slots}
    total = sum(one["n_samples"] for one in about.values())
    lines = [*_shard_lines(absent, about), *(_totals(run, absent, total) if absent else ()), *_rows_missing(run)]
    return "\n".join([f"{head}:", *lines] if lines else [f"{head}: nothing missing, {total:,} samples"])


def _absent(folder: Path, slots: int) -> list[int]:
    """Slots of a shard that have no file."""
    try:
        there = {entry.name for entry in os.scandir(folder)}
    except FileNotFoundError:
        there = set()
    return [slot for slot in range(slots) if f"{slot:04d}.pt" not in there]


def _shard_lines(absent: dict[str, list[int]], about: dict[str, dict]) -> Iterator[str]:
    """A line a shard; neighbours that are missing as a whole share one."""
    order = {shard: number for number, shard in enumerate(about)}

    def whole(shard: str) -> bool:
        return len(absent[shard]) == about[shard]["n_samples"]

    def stretch(item: tuple[int, str]) -> tuple:
        position, shard = item
        return (True, order[shard] - position) if whole(shard) else (False, shard)

    for (is_whole, _), group in itertools.groupby(enumerate(absent), stretch):
        these = [shard for _, shard in group]
        if is_whole:
            name = f"shard {these[0]}" if len(these) == 1 else f"shards {these[0]} to {these[-1]}"
            yield f"  {name}: all {sum(about[s]['n_samples'] for s in these):,} missing"
        else:
            slots = absent[these[0]]
            yield f"  shard {these[0]}: {len(slots)} of {about[these[0]]['n_samples']} missing: {_named(slots)}"


def _totals(run: Run, absent: dict[str, list[int]], total: int) -> Iterator[str]:
    import pandas as pd

    table = pd.read_parquet(run.samples_file, columns=["shard", "slot", *FORECAST_COLUMNS])
    wanted = {(shard, slot) for shard, slots in absent.items() for slot in slots}
    table = table[[place in wanted for place in zip(table["shard"], table["slot"], strict=True)]]
    stores = [Store(STORE, run.key), *shared_stores(run.cfg.storage.shared_stores, run.key)]
    to_compute = table[[not is_held(sample, stores) for sample in table["sample_id"]]]
    linked = len(table) - len(to_compute)
    yield f"  {len(table):,} of {total:,} samples missing; {linked:,} of them are in the store and only linked"
    if len(to_compute):
        tokens = int(to_compute["n_tokens"].sum())
        sizes = _bytes(run, to_compute)
        yield f"  to compute: {len(to_compute):,} samples, {tokens:,} tokens, {sizes}, {_hours(tokens)}"


def _rows_missing(run: Run) -> Iterator[str]:
    """Samples that were trimmed for a narrower mask than that of now: their jobs make them anew."""
    import pandas as pd

    if not run.key.storage_format.endswith("-trimmed"):
        return
    store, slots = Store(STORE, run.key), dict[str, list[int]]()
    kept = {record["sample_id"]: record["last_rows"] for record in store.records() if "last_rows" in record}
    table = pd.read_parquet(run.samples_file, columns=["shard", "slot", "sample_id", "reply_bounds"])
    for shard, slot, sample, bounds in table.itertuples(index=False):
        if sample in kept and not hidden_states.covers(kept[sample], bounds):
            slots.setdefault(shard, []).append(slot)
    for shard, these in slots.items():
        yield f"  shard {shard}: {len(these)} lack rows of their last state under this mask: {_named(these)}"


def _named(slots: list[int]) -> str:
    return ", ".join(f"{slot:04d}" for slot in slots[:NAMED_SLOTS]) + (" …" if slots[NAMED_SLOTS:] else "")


def _bytes(run: Run, samples: Any) -> str:
    try:
        return size(sum(_sizes(samples, run.key, TargetInfo.read(run.target_file).hidden_size)))
    except NOT_READY:
        return "bytes unknown (no target.json yet)"


def _hours(tokens: int) -> str:
    rate = ledger.rate(e for e in ledger.read(STORE) if e.kind == "states")
    return f"{tokens / rate / 3600:.1f} h at the measured {rate:,.0f} tokens/s" if rate else "no rate measured yet"


# --- room ---------------------------------------------------------------------------------------------


def storage_plan(
    samples: Any, store: Store, hidden_size: int, storage: StorageConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """The forecast from the lengths alone (`samples`: sample_id, n_tokens, reply_bounds), and what store and disk
    hold now."""
    store.prepare()
    stores = [store, *shared_stores(storage.shared_stores, store.key)]
    present = [is_held(s, stores) for s in samples["sample_id"]]
    sizes = _sizes(samples, store.key, hidden_size)
    forecast = {"samples": len(sizes), "tokens": int(samples["n_tokens"].sum()), "bytes_all": sum(sizes)}
    # Shared ones take nobody's room here.
    stored = {
        one.key.short: sum(r["bytes"] for r in one.records() if not _is_shared(one, r))
        for one in open_stores(store.root)
    }
    now = {
        "samples_to_come": present.count(False),
        "bytes_to_come": sum(size for size, there in zip(sizes, present, strict=True) if not there),
        "bytes_stored": sum(stored.values()),
        "bytes_other_keys": sum(stored.values()) - stored[store.key.short],
        "bytes_doubled": doubled_bytes(store.root.parent, store.key.short),
        "bytes_free": Disk(store.folder, storage).free(),
    }
    return forecast, now


def _is_shared(store: Store, record: dict[str, Any]) -> bool:
    """Does its file lie in another project's store? (A moved project brings it along.)"""
    return "shared" in record and store.path(record["sample_id"]).is_symlink()


def _sizes(samples: Any, key: StateKey, hidden_size: int) -> list[int]:
    """Bytes that each sample takes in the store."""
    lengths = zip(samples["n_tokens"].tolist(), samples["reply_bounds"], strict=True)
    return [hidden_states.stored_bytes(key, hidden_size, n, bounds) for n, bounds in lengths]


def check_room(plan: Plan) -> None:
    """Refuse a run whose missing states do not fit, each time one starts: others may have filled the disk since."""
    import pandas as pd

    for run in plan.runs_by_states:
        try:
            samples = pd.read_parquet(run.samples_file, columns=FORECAST_COLUMNS)
            hidden_size = TargetInfo.read(run.target_file).hidden_size
        except NOT_READY:
            continue  # `plan_storage` comes before the first byte
        _, now = storage_plan(samples, Store(STORE, run.key), hidden_size, run.cfg.storage)
        if now["bytes_to_come"]:
            check_plan(now, run.cfg.storage)


# --- made again ---------------------------------------------------------------------------------------


def redo(plan: Plan) -> list[Redo]:
    """Finished work that this configuration makes again, above its limit and not confirmed."""
    entries = ledger.read(STORE)
    found: dict[str, Redo] = {}
    for run in plan.runs:
        for one in _redo_of(run, plan, entries):
            if one.hours > run.cfg.storage.confirm_above_hours and not ledger.confirmed(STORE, one.token):
                found[one.token] = one
    return list(found.values())


def _redo_of(run: Run, plan: Plan, entries: list[ledger.Entry]) -> Iterator[Redo]:
    name, key = planning.dataset_name(run.cfg), run.key
    if run.cfg.replies_regenerated and (one := ledger.redo(entries, "replies", name, run.reply_shaping())):
        yield one
    shaping = _draft_shaping(run)
    if shaping is None:
        return
    # What another run of this configuration asks for is not given up.
    current = [other.key.values() for other in plan.runs if other.key != key]
    if one := ledger.redo([e for e in entries if e.shaping not in current], "states", name, key.values()):
        share = _share(Store(STORE, StateKey.of(one.finished)), Store(STORE, key), run)
        yield replace(one, samples=round(one.samples * share), hours=one.hours * share)
    if one := ledger.redo(entries, "draft", planning.draft_name(run.cfg, key), shaping):
        yield one


def _share(old: Store, new: Store, run: Run) -> float:
    """Which part of the old store's samples is asked for again and not there."""
    import pandas as pd

    if old.folder in [source.folder for source in new.convertible_from()]:
        return 0.0
    finished = {record["sample_id"] for record in old.records()}
    samples = pd.read_parquet(run.samples_file, columns=["sample_id"])["sample_id"]
    again = sum(s in finished and not new.path(s).exists() for s in samples)
    return again / max(len(finished), 1)


# --- no longer used -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Garbage:
    """Something in the store that the configuration does not ask for."""

    name: str
    about: str
    bytes: int
    folders: list[Path]

    def delete(self) -> None:
        for folder in self.folders:
            shutil.rmtree(folder)


def garbage(plan: Plan, named: Iterable[str] = ()) -> list[Garbage]:
    """Keys, drafts and quarantined files that the configuration does not ask for, or that are `named`."""
    current = {run.key.short for run in plan.runs} - set(named)
    found = []
    for store in open_stores(STORE):
        if store.key.short not in current:
            records = list(store.records())
            about = f"{len(records):,} samples; " + ", ".join(f"{k} {v}" for k, v in store.key.values().items())
            links = planning.RESULTS.glob(f"*/*/{store.key.short}")
            folders = [*(path for path in sorted(links) if path != store.folder), store.folder]
            found.append(Garbage(store.key.short, about, sum(r["bytes"] for r in records), folders))
    drafts = [_draft_made_from(run) for run in plan.runs]
    for folder in sorted(STORE.glob("drafts/*")):
        made_from = _read(folder / "made_from.json")
        if made_from not in drafts or folder.name in named:
            state = "finished" if (folder / "training.json").exists() else "unfinished"
            about = f"{state} draft of {made_from.get('name', 'an earlier version')}, other settings, samples or code"
            found.append(Garbage(folder.name, about, _bytes_in(folder), [folder]))
    for folder in sorted(STORE.glob("quarantine/*")):
        found.append(Garbage(f"quarantine/{folder.name}", "files that failed a check", _bytes_in(folder), [folder]))
    return found


def _draft_made_from(run: Run) -> dict:
    return {"name": planning.draft_name(run.cfg, run.key), "shaping": _draft_shaping(run)}


def _draft_shaping(run: Run) -> dict | None:
    """All that decides the run's draft; None before sharding."""
    import pandas as pd

    if not run.samples_file.exists():
        return None
    table = pd.read_parquet(run.samples_file, columns=["sample_id", "split", "reply_bounds"])
    return {**run.draft_shaping(), "dataset": shards.dataset_digest(table)}


def _read(path: Path) -> dict:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def gc(plan: Plan, delete: list[str] | None, say: Callable[[str], None]) -> None:
    """List what is not used; free what `delete` names (`all`: everything listed)."""
    listed = garbage(plan, delete or ())
    for one in listed:
        say(f"{one.name}: {size(one.bytes)}: {one.about}")
    chosen = [one for one in listed if delete is not None and (one.name in delete or "all" in delete)]
    for one in chosen:
        one.delete()
        say(f"deleted {one.name}: {size(one.bytes)} freed")
    if not listed:
        say("nothing to free")
    elif delete is None:
        say(
            f"in all {size(sum(one.bytes for one in listed))}; nothing was deleted: add --delete NAME … or --delete all"
        )
