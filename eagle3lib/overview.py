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
from eagle3lib.ledger import Redo
from eagle3lib.plan import STORE, Plan, Run
from eagle3lib.store import Store, open_stores

NAMED_SLOTS = 8  # a line names so many slots at most


def refuse(plan: Plan) -> None:
    """Raise UserError when this run would make dear work again unasked, or fill the disk."""
    if again := redo(plan):
        raise UserError("\n".join(map(str, again)))
    check_room(plan)


# --- missing ------------------------------------------------------------------------------------------


def missing(plan: Plan) -> str:
    """Which samples have no hidden states yet, shard by shard, and what they will take."""
    names = list(dict.fromkeys((r.cfg.target.name, r.cfg.dataset.name, r.key.short) for r in plan.runs))
    runs = {(r.cfg.target.name, r.cfg.dataset.name, r.key.short): r for r in reversed(plan.runs)}
    return "\n".join(_missing_of(runs[name]) for name in names) + "\n"


def _missing_of(run: Run) -> str:
    target, dataset, key, _ = run.names.values()
    head = f"{target} / {dataset} / {key}"
    folder = planning.RESULTS / target / dataset
    if not (folder / "shards.json").exists() or not (folder / "samples.parquet").exists():
        return f"{head}: not sharded yet; `snakemake samples` does that"
    about = planning.read_shards(folder / "shards.json")
    absent = {shard: _absent(folder / key / "hidden_states" / shard, about[shard]["n_samples"]) for shard in about}
    absent = {shard: slots for shard, slots in absent.items() if slots}
    total = sum(one["n_samples"] for one in about.values())
    if not absent:
        return f"{head}: nothing missing, {total:,} samples"
    return "\n".join([f"{head}:", *_shard_lines(absent, about), *_totals(run, folder, absent, total)])


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
            named = ", ".join(f"{slot:04d}" for slot in slots[:NAMED_SLOTS]) + (" …" if slots[NAMED_SLOTS:] else "")
            yield f"  shard {these[0]}: {len(slots)} of {about[these[0]]['n_samples']} missing: {named}"


def _totals(run: Run, folder: Path, absent: dict[str, list[int]], total: int) -> Iterator[str]:
    import pandas as pd

    table = pd.read_parquet(folder / "samples.parquet", columns=["shard", "slot", "sample_id", "n_tokens"])
    columns = zip(table["shard"], table["slot"], table["sample_id"], table["n_tokens"], strict=True)
    wanted = {(shard, slot) for shard, slots in absent.items() for slot in slots}
    rows = [(str(sample), int(n)) for shard, slot, sample, n in columns if (shard, slot) in wanted]
    store = Store(STORE, run.key)
    lengths = [n for sample, n in rows if not store.path(sample).exists()]
    linked = len(rows) - len(lengths)
    yield f"  {len(rows):,} of {total:,} samples missing; {linked:,} of them are in the store and only linked"
    if lengths:
        tokens = sum(lengths)
        yield f"  to compute: {len(lengths):,} samples, {tokens:,} tokens, {_bytes(run, lengths)}, {_hours(tokens)}"


def _bytes(run: Run, lengths: list[int]) -> str:
    info = planning.RESULTS / "targets" / run.cfg.target.name / "target.json"
    try:
        hidden_size = planning.hidden_size(info)
    except (OSError, ValueError, KeyError):
        return "bytes unknown (no target.json yet)"
    form, n_aux = run.key.storage_format, len(run.key.aux_layer_ids)
    return size(sum(hidden_states.sample_bytes(n, hidden_size, n_aux, form) for n in lengths))


def _hours(tokens: int) -> str:
    rate = ledger.rate(e for e in ledger.read(STORE) if e.kind == "states")
    return f"{tokens / rate / 3600:.1f} h at the measured {rate:,.0f} tokens/s" if rate else "no rate measured yet"


# --- room ---------------------------------------------------------------------------------------------


def storage_plan(
    samples: Any, store: Store, hidden_size: int, storage: StorageConfig
) -> tuple[dict[str, int], dict[str, int]]:
    """The forecast from the lengths alone (`samples`: sample_id, n_tokens), and what store and disk hold now."""
    n_aux = len(store.key.aux_layer_ids)
    store.prepare()
    present = [store.path(s).exists() for s in samples["sample_id"]]
    sizes = [hidden_states.sample_bytes(n, hidden_size, n_aux, store.key.storage_format) for n in samples["n_tokens"]]
    forecast = {"samples": len(sizes), "tokens": int(samples["n_tokens"].sum()), "bytes_all": sum(sizes)}
    stored = {one.key.short: sum(r["bytes"] for r in one.records()) for one in open_stores(store.root)}
    now = {
        "samples_to_come": present.count(False),
        "bytes_to_come": sum(size for size, there in zip(sizes, present, strict=True) if not there),
        "bytes_stored": sum(stored.values()),
        "bytes_other_keys": sum(stored.values()) - stored[store.key.short],
        "bytes_free": Disk(store.folder, storage).free(),
    }
    return forecast, now


def check_room(plan: Plan) -> None:
    """Refuse a run whose missing states do not fit, each time one starts: others may have filled the disk since."""
    import pandas as pd

    for run in plan.runs:
        folder = planning.RESULTS / run.cfg.target.name
        try:
            samples = pd.read_parquet(
                folder / run.cfg.dataset.name / "samples.parquet", columns=["sample_id", "n_tokens"]
            )
            hidden_size = planning.hidden_size(planning.RESULTS / "targets" / run.cfg.target.name / "target.json")
        except (OSError, ValueError, KeyError):
            continue  # not there yet: `plan_storage` comes before the first byte
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
    if run.cfg.regenerate.enabled and (one := ledger.redo(entries, "replies", run.dataset_name, run.reply_shaping())):
        yield one
    shaping = _draft_shaping(run)
    if shaping is None:
        return
    # What another run of this configuration asks for is not given up.
    current = [other.key.values() for other in plan.runs if other.key != run.key]
    states = [e for e in entries if e.kind == "states" and e.shaping not in current]
    if one := ledger.redo(states, "states", run.dataset_name, run.key.values()):
        old = [e for e in states if e.name == run.dataset_name][-1].shaping
        share = _share(Store(STORE, hidden_states.StateKey.of(old)), Store(STORE, run.key), run)
        yield replace(one, samples=round(one.samples * share), hours=one.hours * share)
    if one := ledger.redo(entries, "draft", planning.draft_name(run.cfg, run.key.values()), shaping):
        yield one


def _share(old: Store, new: Store, run: Run) -> float:
    """Which part of the old store's samples is asked for again and not there."""
    import pandas as pd

    if old.convertible_to(new):
        return 0.0
    finished = {record["sample_id"] for record in old.records()}
    path = planning.RESULTS / run.cfg.target.name / run.cfg.dataset.name / "samples.parquet"
    samples = pd.read_parquet(path, columns=["sample_id"])["sample_id"]
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
    return {"name": planning.draft_name(run.cfg, run.key.values()), "shaping": _draft_shaping(run)}


def _draft_shaping(run: Run) -> dict | None:
    """All that decides the run's draft; None before sharding."""
    import pandas as pd

    path = planning.RESULTS / run.cfg.target.name / run.cfg.dataset.name / "samples.parquet"
    if not path.exists():
        return None
    table = pd.read_parquet(path, columns=["sample_id", "split", "reply_bounds"])
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
