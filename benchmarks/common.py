"""What the benchmarks share: CPU time, sides taken in turns, medians, a target, text of realistic lengths."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3lib.errors import UserError
from eagle3lib.plan import RESULTS

TARGET = Path("results/targets/smollm2-135m/model")
WORDS = (
    "the of and to in a is that for it as was with be by on not he this are or his from at which but have an had they "
    "you were their one all we can her has there been if more when will would who so no model token draft number city "
    "water music history letter machine school question answer between because north river energy people language"
)


def parser(description: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--target", type=Path, default=TARGET, help="folder of the target")
    made.add_argument("--seed", type=int, default=0, help="seed of the lengths and texts")
    return made


def check_target(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise UserError(f"{folder}: no target here; run `snakemake prepare_target`, or give --target FOLDER")
    return folder


def main(run: Callable[[], None]) -> None:
    """Run a benchmark on one thread; a UserError is one line."""
    import torch

    torch.set_num_threads(1)
    try:
        run()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(1) from None


def finished_draft(given: Path | None) -> Path:
    """The exported folder that a benchmark is given, or the first under results/."""
    draft = given or next(iter(sorted(RESULTS.glob("*/*/*/*/export"))), None)
    if draft is None:
        raise UserError(f"{RESULTS}: no exported draft here; run `make demo` first")
    return draft


@contextmanager
def scratch(folder: Path = Path("results")) -> Iterator[Path]:
    """A folder for as long as it is needed, on the disk (not in /tmp) and where git does not look."""
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="benchmark-") as name:
        yield Path(name)


class Stopwatch:
    """CPU-seconds and tokens of one side, round by round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.tokens: list[int] = []

    @contextmanager
    def round(self) -> Iterator[Callable[[int], None]]:
        """Times what is inside of it, in CPU time of this process; call the result with tokens done."""
        done: list[int] = []
        start = time.process_time()
        yield done.append
        self.seconds.append(time.process_time() - start)
        self.tokens.append(sum(done))

    @property
    def rates(self) -> list[float]:
        """Tokens per CPU-second of each round."""
        return [n / s for n, s in zip(self.tokens, self.seconds, strict=True)]

    @property
    def rate(self) -> float:
        """Tokens per CPU-second over all rounds."""
        return sum(self.tokens) / sum(self.seconds)


def in_turns(sides: Mapping[str, Callable[[], int]], rounds: int) -> dict[str, Stopwatch]:
    """Run the sides A B A B ...; each call returns the tokens it has done."""
    watches = {name: Stopwatch() for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            with watches[name].round() as done:
                done(side())
    return watches


def median_ratio(ours: Stopwatch, other: Stopwatch) -> float:
    """Median over the rounds of the ratio of the two rates."""
    return statistics.median(a / b for a, b in zip(ours.rates, other.rates, strict=True))


def table(header: list[str], rows: list[list[Any]]) -> None:
    cells = [header, *([f"{c:.2f}" if isinstance(c, float) else str(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))))
    print(f"1 thread, CPU time; load {os.getloadavg()[0]:.1f} of {os.cpu_count()} cores")


def length(generator: random.Random, median: float, sigma: float, most: int) -> int:
    """A length as texts have them: log-normal."""
    return max(1, min(most, round(generator.lognormvariate(0, sigma) * median)))


def text(generator: random.Random, words: int) -> str:
    return " ".join(generator.choices(WORDS.split(), k=words))
