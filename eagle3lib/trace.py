"""What a file under results/ came from, up to the input line; and what became of an input line.

Nothing is written down for this: samples.parquet knows each sample's file and line, a state's file who made it, the
store which samples shaped a draft, and Snakemake's records (or our copies of them) each job with its inputs and log.
"""

from __future__ import annotations

import ast
import json
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib import readers, records, remote, shards
from eagle3lib.comparison import figure
from eagle3lib.disk import size
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey, load_sample, slot_path
from eagle3lib.job import read_lines
from eagle3lib.lineage import file_sha256
from eagle3lib.plan import RESULTS, STORE
from eagle3lib.store import Store
from eagle3lib.tables import Table, facts

RECORDS = (Path(".snakemake/metadata"), STORE / "records")
SHOWN = 100  # characters of a text
SLOT = re.compile(r"\d{4,}\.pt")
CODE = re.compile(r"'([0-9a-f]{12})'")


def trace(path: str) -> list[Table]:
    """Where `path` comes from: a state, a draft or any file of it, another result, or an input line (FILE:LINE).

    To be asked in the folder of the results. Raises UserError for what is none of these.
    """
    file, _, line = path.rpartition(":")
    if file and line.isdigit() and not os.path.exists(path):
        return input_line(file, int(line))
    match _parts(path):
        case ["store", "hidden_states", _, _, name] if name.endswith(".pt"):
            return stored_sample(Path(path).stem)
        case ["store", "drafts", digest, *_]:
            return stored_draft(digest)
        case [target, dataset, key, "hidden_states", shard, name] if SLOT.fullmatch(name):
            return linked_sample(Dataset(RESULTS / target / dataset), key, shard, int(Path(name).stem))
        case [target, dataset, key, draft, *rest] if (RESULTS / target / dataset / key / draft / "training").is_dir():
            folder = RESULTS / target / dataset / key / draft
            return [*([_file(folder.joinpath(*rest))] if rest else []), *of_draft(folder, folder.joinpath(*rest))]
        case parts:
            result = RESULTS.joinpath(*parts)
            if records.of(str(result), *RECORDS) is None:
                raise UserError(f"{path}: no job in this folder made it; give one of its results, or FILE:LINE")
            return [_file(result), jobs(result)]


def _parts(path: str) -> list[str]:
    try:
        return list(Path(os.path.abspath(path)).relative_to(RESULTS.absolute()).parts)
    except ValueError:
        raise UserError(
            f"{path}: not under {RESULTS.absolute()}; ask in the folder of the results, of an input line as FILE:LINE"
        ) from None


# --- samples ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """The samples of one target and dataset: `results/{target}/{dataset}`."""

    folder: Path

    @cached_property
    def samples(self) -> pd.DataFrame:
        try:
            return pd.read_parquet(self.folder / "samples.parquet")
        except FileNotFoundError:
            raise UserError(f"{self.folder}: not sharded yet; `snakemake samples` does that") from None

    @property
    def name(self) -> str:
        return str(self.folder.relative_to(RESULTS))

    @property
    def stores(self) -> list[Store]:
        """Of the keys under which this dataset has states."""
        keys = [path.parent.name for path in sorted(self.folder.glob("*/hidden_states"))]
        found = [STORE / "hidden_states" / key / "key.json" for key in keys]
        return [Store(STORE, StateKey.of(json.loads(path.read_text()))) for path in found if path.exists()]

    @property
    def template(self) -> str:
        """The chat template that rendered them, from the record of the job that did."""
        record = records.of(str(self.folder / "samples.parquet"), *RECORDS) or {}
        asked = [p["chat_template"] for p in map(_literal, record.get("params", [])) if "chat_template" in p]
        if not asked:
            return "not on record"
        sha256 = record.get("input_checksums", {}).get(asked[0], "sha256 not on record")
        return f"{asked[0]} ({sha256})" if asked[0] else "the target's own"

    def reply(self, file: str, line: int) -> tuple[str, dict[str, Any]] | None:
        """("file:line" of the target's own reply to an input line, what stands there)."""
        wanted = f'"file": {json.dumps(file, ensure_ascii=False)}, "line": {line},'
        for path in sorted(self.folder.glob("replies/*.jsonl")):
            with open(path, encoding="utf-8") as lines:
                for number, text in enumerate(lines, 1):
                    # Only the wanted line is parsed: there may be 100,000.
                    if wanted in text and (reply := json.loads(text))["file"] == file and reply["line"] == line:
                        return f"{path}:{number}", reply
        return None


def datasets() -> list[Dataset]:
    return [Dataset(path.parent) for path in sorted(RESULTS.glob("*/*/samples.parquet"))]


def linked_sample(dataset: Dataset, key: str, shard: str, slot: int) -> list[Table]:
    """A sample by its place in a dataset."""
    table = dataset.samples
    rows = table[(table["shard"] == shard) & (table["slot"] == slot)]
    if rows.empty:
        raise UserError(f"{dataset.folder}: no sample at {slot_path(shard, slot)} any more; `snakemake extract`")
    return sample(dataset, rows.iloc[0], key)


def stored_sample(identity: str) -> list[Table]:
    """A sample by the sha256 of its token ids, wherever a dataset has it."""
    found = []
    for dataset in datasets():
        for _, row in dataset.samples[dataset.samples["sample_id"] == identity].iterrows():
            found += sample(dataset, row)
    if not found:
        raise UserError(f"sample {identity}: in the store, but in no dataset under {RESULTS}/ any more")
    return found


def input_line(file: str, line: int) -> list[Table]:
    """What became of a line of an input file, in every dataset that read it."""
    found: list[Table] = []
    for dataset in datasets():
        table = dataset.samples
        names = [name for name in table["file"].unique() if os.path.realpath(name) == os.path.realpath(file)]
        rows = table[table["file"].isin(names) & (table["line"] == line)]
        for _, row in rows.iterrows():
            found += sample(dataset, row)
        for left_out in read_lines(dataset.folder / "rejected.jsonl"):
            if left_out["line"] == line and os.path.realpath(left_out["file"]) == os.path.realpath(file):
                about = {"input": f"{file}:{line}", "reason": left_out["reason"], "detail": left_out["detail"]}
                found.append(facts(f"Rejected by {dataset.name}", about))
    if not found:
        raise UserError(
            f"{file}:{line}: no sample under {RESULTS}/ comes from it, and none was rejected; not sharded yet, or "
            "beyond dataset.max_conversations or dataset.token_budget"
        )
    return found


def sample(dataset: Dataset, row: pd.Series, key: str | None = None) -> list[Table]:
    """One row of samples.parquet: its input, its states (under `key`, or all of the dataset), the drafts."""
    place = slot_path(row["shard"], row["slot"])
    replied = dataset.reply(row["file"], int(row["line"]))
    now = _line_now(row["file"], int(row["line"]), row["origin_sha256"])
    about: dict[str, object] = {
        "sample id": row["sample_id"],
        "place": f"{dataset.folder}/…/hidden_states/{place}",
        "tokens": f"{row['n_tokens']:,}, {row['n_supervised']:,} of them supervised; {row['split']} split",
        "input": f"{_named(row['file'])}:{row['line']} ({now})",
        "reply": "as in the input line",
    }
    if replied:
        where, reply = replied
        if reply["messages"]:
            about["prompt"] = _short(reply["messages"][-1]["content"])
        about["reply"] = f"the target's own: {where} ({len(reply['reply_ids']):,} tokens, finish {reply['finish']})"
        about["log of the reply"] = _logs(where.rpartition(":")[0])
    about |= {"template": dataset.template, "log": _logs(str(dataset.folder / "samples.parquet"))}
    found = [facts(f"Sample {place} of {dataset.name}", about)]
    for store in dataset.stores:
        if key in (None, store.key.short):
            found += [_states_of(dataset, store, row), _drafts_of(dataset, store, row)]
    return found


def _line_now(file: str, line: int, sha256: str) -> str:
    """Is an input line still what it was? Line 0: a whole file of another tool."""
    try:
        if line == 0:
            return "unchanged since" if file_sha256(file) == sha256 else "changed since"
        now = next((row for row in readers.rows(file) if row.number == line), None)
    except OSError:
        return "the file is gone"
    except UserError as error:
        return "the file is gone" if not os.path.exists(file) else str(error)
    if now is None:
        return "the file has fewer rows now"
    return "unchanged since" if now.sha256 == sha256 else "changed since"


def _states_of(dataset: Dataset, store: Store, row: pd.Series) -> Table:
    folder, key = dataset.folder / store.key.short / "hidden_states", store.key
    file = folder / slot_path(row["shard"], row["slot"])
    about: dict[str, object] = {"file": file, "store": store.path(row["sample_id"]), **_target_facts(dataset, key)}
    if not file.exists():
        return facts(f"Hidden states {key.short}: missing; `snakemake extract` makes them", about)
    try:
        meta = load_sample(file)["meta"]
    except UserError as error:
        return facts(f"Hidden states {key.short}: {error}", about)
    record = store.record(row["sample_id"]) or {}
    about |= {
        "engine": f"{key.engine} {meta['engine_version']}, computing in {key.compute_dtype}",
        "code": meta["code"],
        "bytes": record and size(record["bytes"]),
        "sha256": record.get("sha256"),
        "written": record and _time(record["written"]),
        # Snakemake keeps its records of states for itself; the manifest beside them is of the same job.
        "log": _logs(str(file.with_name("manifest.json"))),
    }
    return facts(f"Hidden states {key.short}", about)


def _target_facts(dataset: Dataset, key: StateKey) -> dict[str, object]:
    name = dataset.folder.parent.name
    path = RESULTS / "targets" / name / "target.json"
    where = json.loads(path.read_text())["path"] if path.exists() else "no target.json"
    return {
        "target": f"{name} ({where})",
        "target fingerprint": key.target_fingerprint,
        "aux layers": f"{', '.join(map(str, key.aux_layer_ids))} of output_hidden_states, and the last, after its norm",
        "format": f"{key.storage_format}, version {key.format_version}",
    }


# --- drafts -------------------------------------------------------------------------------------------


def _drafts_of(dataset: Dataset, store: Store, row: pd.Series) -> Table:
    """The drafts, also those that only the store still has, that a sample helped to train or to validate."""
    record = store.record(row["sample_id"]) or {}
    whole = shards.dataset_digest(dataset.samples)
    rows = []
    for folder, made_from in stored_drafts():
        shaping = made_from["shaping"]
        if shaping["key"] != store.key.values():
            continue
        if shaping["dataset"] == whole:
            split = row["split"]
        else:  # an earlier state of the dataset: it may have had this sample
            seen = {one["sha256"]: one["split"] for one in json.loads((folder / "job.json").read_text())["samples"]}
            split = seen.get(record.get("sha256"))
        if split:
            role = "trained on it" if split == "train" else "validated with it"
            rows.append((_place_of(folder, made_from), role, _acceptance(RESULTS / made_from["name"]), folder.name))
    if not rows:
        return Table(f"Drafts of the states {store.key.short}", [("none yet",)])
    return Table(f"Drafts of the states {store.key.short}", rows, ("draft", "role", "acceptance length", "digest"))


def stored_drafts() -> Iterator[tuple[Path, dict[str, Any]]]:
    """Folder in the store, and what it was made from, of every draft."""
    for path in sorted(STORE.glob("drafts/*/made_from.json")):
        made_from = _read(path)
        if "shaping" in made_from:
            yield path.parent, made_from


def _place_of(folder: Path, made_from: dict[str, Any]) -> str:
    place = RESULTS / made_from["name"]
    record = _read(place / "training" / "training.json")
    return str(place) if record.get("digest") == folder.name else f"{folder} (no longer linked)"


def _acceptance(draft: Path) -> str:
    return figure(_read(draft / "acceptance.json").get("acceptance_length"))


def stored_draft(digest: str) -> list[Table]:
    """A draft by its name in the store."""
    for folder, made_from in stored_drafts():
        if folder.name == digest:
            place = RESULTS / made_from["name"]
            if _read(place / "training" / "training.json").get("digest") == digest:
                return of_draft(place, place)
            return [_shaping(folder, made_from)]
    raise UserError(f"{STORE / 'drafts' / digest}: no draft that says what it was made from")


def of_draft(folder: Path, result: Path | None = None) -> list[Table]:
    """A draft by its folder: itself, its states, its samples, their input files, all jobs up to `result`."""
    dataset = Dataset(folder.parent.parent)
    training = _read(folder / "training" / "training.json")
    stored = STORE / "drafts" / training.get("digest", "")
    asked = result if result is not None and result != folder else folder / "acceptance.json"
    tables = [_draft(folder, training)]
    if (stored / "made_from.json").exists():
        tables.append(_shaping(stored, _read(stored / "made_from.json")))
    tables += [_states(store, dataset) for store in dataset.stores if store.key.short == folder.parent.name]
    return [*tables, _samples(dataset), _input_files(dataset), jobs(asked, folder / "export", folder / "training")]


def _draft(folder: Path, training: dict[str, Any]) -> Table:
    weights = sorted((folder / "export").glob("*.safetensors"))
    acceptance = _read(folder / "acceptance.json")
    about: dict[str, object] = {"folder": folder}
    if training:
        validation = training["metrics"].get("validation", {})
        about |= {
            "digest": training["digest"],
            "parameters": f"{training['parameters']:,} trained",
            "trained": f"epochs {training['epochs']}, steps {training['steps']:,}, tokens {training['tokens']:,}, "
            f"minutes {training['seconds'] / 60:.1f}, processes {training['processes']}",
            "trained with": ", ".join(f"{name} {version}" for name, version in training["versions"].items()),
            "weights sha256": training["weights_sha256"],
            "predicted acceptance length": validation and f"{validation['acceptance_length']:.3f}, by its validation",
        }
    about |= {f"export/{path.name} sha256": file_sha256(path) for path in weights}
    if acceptance:
        about["acceptance length"] = f"{_acceptance(folder)}, measured on {acceptance.get('prompts', '?')} prompts"
    return facts("Draft", {name: value for name, value in about.items() if value})


def _shaping(folder: Path, made_from: dict[str, Any]) -> Table:
    shaping = made_from["shaping"]
    return facts(
        "Settings that shaped it",
        {
            "draft": _settings(shaping["draft"]),
            "training": _settings(shaping["training"]),
            "code of the trainer": shaping["code"],
            "samples and their split": shaping["dataset"],
            "target fingerprint": shaping["key"]["target_fingerprint"],
            "kept in": folder,
        },
    )


def _settings(section: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in section.items() if value is not None)


def _states(store: Store, dataset: Dataset) -> Table:
    makers = json.loads((store.folder / "made_by.json").read_text()) if (store.folder / "made_by.json").exists() else []
    config = _read(dataset.folder / store.key.short / "data_config.json")
    about = {
        **_target_facts(dataset, store.key),
        "engine": f"{store.key.engine}, computing in {store.key.compute_dtype}",
        "engine version": "; ".join(dict.fromkeys(maker["engine_version"] for maker in makers)) or "not on record",
        "code of engine and format": ", ".join(dict.fromkeys(maker["code"] for maker in makers)) or "not on record",
        "bytes": config and size(config["bytes"]),
    }
    return facts(f"Hidden states {store.key.short}", about)


def _samples(dataset: Dataset) -> Table:
    table = dataset.samples
    split = table["split"].value_counts()
    about = {
        "dataset": dataset.folder,
        "samples": f"{len(table):,}: {split.get('train', 0):,} to train, {split.get('validation', 0):,} to validate",
        "tokens": f"{table['n_tokens'].sum():,}, {table['n_supervised'].sum():,} of them supervised",
        "replies": "the target's own" if (dataset.folder / "replies").is_dir() else "those of the input",
        "template": dataset.template,
        "digest": shards.dataset_digest(table),
    }
    return facts("Samples", about, "To follow one of them: python -m eagle3lib trace …/hidden_states/SHARD/SLOT.pt")


def _input_files(dataset: Dataset) -> Table:
    """Which lines of which files the samples come from."""
    lines = dataset.samples.groupby("file")["line"].agg(["size", "min", "max"])
    known = _checksums(dataset.folder / "samples.parquet")
    rows = [
        (_named(str(file)), f"{row['size']:,}", f"{row['min']:,}", f"{row['max']:,}", _file_now(str(file), known))
        for file, row in lines.iterrows()
    ]
    note = "What became of a line: python -m eagle3lib trace FILE:LINE"
    return Table("Input files", rows, ("file", "samples", "first line", "last line", "since then"), note)


def _named(file: str) -> str:
    """A file, and what was fetched to it."""
    fetched = remote.record_of(file)
    return f"{file} ({fetched['spec']}, revision {fetched['revision']})" if fetched else file


def _file_now(file: str, known: dict[str, str]) -> str:
    if not os.path.exists(file):
        return "gone"
    if file not in known:
        return "not on record"
    return "unchanged" if known[file].removeprefix("sha256:") == file_sha256(file) else "changed"


def _checksums(result: Path) -> dict[str, str]:
    """What Snakemake noted of the inputs of all jobs up to `result`."""
    return {file: sha256 for record in _chain([result]) for file, sha256 in record.get("input_checksums", {}).items()}


# --- jobs ---------------------------------------------------------------------------------------------


def jobs(*results: Path) -> Table:
    """Every job up to these results, in the order in which they ended; those of one rule together."""
    rules: dict[str, list[dict[str, Any]]] = {}
    for record in _chain(results):
        rules.setdefault(_rule(record), []).append(record)
    rows = [
        (
            rule,
            str(len(found)),
            ", ".join(dict.fromkeys(code for record in found if (code := _code(record)))) or "-",
            _common([log for record in found for log in record.get("log", [])]),
            _time(max(record["endtime"] for record in found)),
        )
        for rule, found in sorted(rules.items(), key=lambda item: max(record["endtime"] for record in item[1]))
    ]
    return Table("Jobs", rows or [("no record",) * 5], ("rule", "jobs", "code", "log", "ended"))


def _chain(results: Iterable[Path]) -> list[dict[str, Any]]:
    """The records of all jobs that made these results or what they were made from, each job once."""
    todo, seen, found = [str(result) for result in results], set(), {}
    while todo:
        output = todo.pop()
        if output in seen:
            continue
        seen.add(output)
        record = records.of(output, *RECORDS)
        if record:
            found[record["rule"], tuple(record.get("log") or [output])] = record
            todo += record["input"]
    return list(found.values())


def _rule(record: dict[str, Any]) -> str:
    """By its log, which rules that do the same share (`extract_tail_8` logs as `extract_hidden_states`)."""
    parts = Path(record["log"][0]).parts if record.get("log") else ()
    return Path(parts[1]).stem if parts[:1] == ("logs",) else record["rule"]


def _code(record: dict[str, Any]) -> str | None:
    """The digest of the code among a job's params."""
    for param in record.get("params", []):
        if match := CODE.fullmatch(param):
            return match[1]
        if code := _literal(param).get("code"):
            return code
    return None


def _literal(param: str) -> dict[str, Any]:
    """A param that is a dict, out of its text; {} for another."""
    try:
        value = ast.literal_eval(param)
    except (ValueError, SyntaxError):
        return {}
    return value if isinstance(value, dict) else {}


def _common(logs: list[str]) -> str:
    """The log of a rule, or the folder of several."""
    if not logs:
        return "-"
    return logs[0] if len(set(logs)) == 1 else os.path.commonpath(logs)


def _file(path: Path) -> Table:
    record = records.of(str(path), *RECORDS)
    about: dict[str, object] = {"path": path, "rule": "not on record"}
    if record:
        about |= {
            "rule": record["rule"],
            "code": _code(record),
            "log": _common(record.get("log", [])),
            "made": _time(record["endtime"]),
            "from": ", ".join(_few(record["input"])) or None,
        }
    return facts("File", about)


def _few(names: list[str], shown: int = 8) -> list[str]:
    return names[:shown] + ([f"… ({len(names) - shown} more)"] if names[shown:] else [])


def _logs(output: str) -> str:
    record = records.of(output, *RECORDS)
    return _common(record.get("log", [])) if record else "not on record"


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S %Z")


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= SHOWN else line[: SHOWN - 1] + "…"


def _read(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
