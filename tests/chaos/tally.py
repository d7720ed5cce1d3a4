"""What was broken, how often, and what came out: a line a test, from all processes of a run."""

from __future__ import annotations

import json
import os
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass
class Outcome:
    """Of trials of one kind.

    kept: finished samples (of a training: finished trainings) that stood when it broke, and were neither touched nor
    made again. lost: those that were gone or were made again. wrong: bytes that differ from those of a run that nobody
    broke. redone: unfinished samples that the engine was asked for again, what the breaks cost.
    """

    what: str
    trials: int = 0
    kills: int = 0
    kept: int = 0
    lost: int = 0
    wrong: int = 0
    redone: int = 0
    flips: int = 0
    flips_found: int = 0

    def put_down(self) -> None:
        """Before any assert: the last line must not hide what a failing test has seen."""
        if path := os.environ.get("CHAOS_TALLY"):  # --chaos=full
            with open(path, "a") as file:
                file.write(json.dumps(asdict(self)) + "\n")

    def check(self) -> None:
        self.put_down()
        assert (self.lost, self.wrong) == (0, 0), self


def _read() -> list[Outcome]:
    path = Path(os.environ["CHAOS_TALLY"])
    return [Outcome(**json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []


def table() -> str:
    rows = [
        "| what was broken | trials | kills | finished kept | lost | wrong | unfinished computed again |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for o in sorted(_read(), key=lambda o: o.what):
        rows.append(f"| {o.what} | {o.trials} | {o.kills} | {o.kept} | {o.lost} | {o.wrong} | {o.redone} |")
    return "\n".join(rows)


def last_line() -> str:
    total: Counter[str] = Counter()
    for outcome in _read():
        total.update({name: value for name, value in asdict(outcome).items() if name != "what"})
    return (
        f"chaos kills={total['kills']} lost={total['lost']} wrong={total['wrong']} redone={total['redone']} "
        f"flips_found={total['flips_found']}/{total['flips']}"
    )
