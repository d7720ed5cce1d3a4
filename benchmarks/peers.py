"""What a training step costs here, in SpecForge 0.2.0 and in speculators 0.9.0: the same draft, samples and losses.

Each side is a process of its own (`make venv-peers`: the peers' environment) with one thread and the same torch. All
train fc, the layer, both norms and the draft head from the same weights on the same samples of 512 tokens, three
steps, fp32, forward and backward without an optimiser. That their losses agree is asserted: to 1e-5 with every token
supervised; with 60 % (the demo's share) to 1e-2, because at step i the peers count i slots more than serving has.

Where the work is not the same, the table has both: `as it comes` and `same work`.
- SpecForge normalises its targets over the full vocabulary and measures the acceptance rate at each step; taken out
  by the time spent there. Its loss is the reference beside its Triton kernel, which needs a GPU.
- speculators freezes the draft head; trained for the same work. It has no targets over the full vocabulary.
- We need the target's argmax over the full vocabulary once a sample, not once an epoch: `first epoch` has it.
- The peers compute every row; we compute what supervises. This is no inequality, it is the point.

Last line: `peers specforge_ratio=… speculators_ratio=… gemm_share=…`: their CPU time over ours for the same work with
every token supervised, the smaller of the sizes (goal >= 2.0), and the share of our time that its matrix products
take at the rate of a square product of this machine, measured in between (goal >= 0.60). The `supervised_` ratios
are those at 60 %.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks import common
from benchmarks.peer_sides import SAMPLES, SIDES, STEPS, TOKENS, Sizes, reply
from eagle3lib.errors import UserError
from eagle3lib.speed import floor_flop

SIZES = {
    "H 256, V 8k": Sizes(256, 704, heads=4, kv_heads=2, vocab=8192, draft_vocab=4096),
    "H 1024, V 128k": Sizes(1024, 2816, heads=16, kv_heads=8, vocab=131_072, draft_vocab=32_000),
}
SHARES = {1.0: 1e-5, 0.6: 1e-2}  # supervised -> how far the losses may be apart, relatively


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="interpreter with the peers")
    parser.add_argument("--rounds", type=int, default=12, help="at the small size; the large one takes a quarter")
    options = parser.parse_args()

    def run() -> None:
        if not Path(options.python).exists():
            raise UserError(f"{options.python}: not here; run `make venv-peers`, or give --python")
        ratios: dict[tuple[str, float], list[float]] = defaultdict(list)
        for name, sizes in SIZES.items():
            rounds = options.rounds // (4 if sizes.hidden > 512 else 1)
            show(name, measure(sizes, options.python, max(1, rounds)), ratios)
        summarise(ratios)

    common.main(run)


class Side:
    """A process of `benchmarks.peer_sides`."""

    def __init__(self, name: str, python: str, sizes: Sizes, log: Path):
        self.name, self.log = name, log
        command = [python, "-m", "benchmarks.peer_sides", name, json.dumps(asdict(sizes))]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        environment["PYTHONPATH"] = str(Path(__file__).parents[1])
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True
            )
        try:
            self.about = self._answer()
        except BaseException:
            self.close()
            raise

    def step(self, **request: Any) -> dict[str, Any]:
        print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self.process.stdout.readline()  # type: ignore[union-attr]
        if not line:
            last = (self.log.read_text().strip().splitlines() or ["no word"])[-1]
            raise UserError(f"{self.name}: its process ended: {last}")
        return json.loads(line)

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def started(python: str, sizes: Sizes) -> Iterator[dict[str, Side]]:
    sides: dict[str, Side] = {}
    with common.scratch() as logs:
        try:
            for name in SIDES:
                sides[name] = Side(name, sys.executable if name == "ours" else python, sizes, logs / name)
            yield sides
        finally:
            for side in sides.values():
                side.close()


def measure(sizes: Sizes, python: str, rounds: int) -> dict[float, dict[str, list[float]]]:
    """share supervised -> what the table shows -> by round: CPU-seconds of a step, and `floor` for our products."""
    found: dict[float, dict[str, list[float]]] = {share: defaultdict(list) for share in SHARES}
    with started(python, sizes) as sides:
        check_equal({name: side.about for name, side in sides.items()})
        for number in range(rounds + 1):
            for share, within in SHARES.items():
                request = {"number": number % SAMPLES, "share": share}
                answers = {name: side.step(**request) for name, side in sides.items()}
                answers["frozen"] = sides["speculators"].step(**request, train_head=False)
                check_losses(answers, within)
                rate = matmul_rate()
                if not number:  # the first round warms up
                    losses = [f"{name} {[round(x, 4) for x in answer['losses']]}" for name, answer in answers.items()]
                    print(f"losses by step, {share:.0%} supervised:", ", ".join(losses), flush=True)
                    continue
                for row, seconds in rows(answers).items():
                    found[share][row].append(seconds)
                found[share]["floor"].append(floor_of(sizes, share) / rate)
    return found


def check_equal(about: dict[str, dict[str, Any]]) -> None:
    """The same torch, BLAS, threads and number of trained parameters on all sides."""
    for key in next(iter(about.values())):
        if len({str(side[key]) for side in about.values()}) > 1:
            raise UserError(f"the sides are not alike: {key} is { ({n: a[key] for n, a in about.items()}) }")
    one = next(iter(about.values()))
    shown = f"torch {one['torch']}, threads: {one['threads']}, {one['blas']}, trained parameters: {one['trained']:,}"
    print(f"on all sides: {shown}", flush=True)


def check_losses(answers: dict[str, dict[str, Any]], within: float) -> None:
    """Cross entropy with the target by counted slot and step: the same on all sides."""
    ours = answers["ours"]["losses"]
    for name, answer in answers.items():
        if any(abs(a - b) > within * b for a, b in zip(answer["losses"], ours, strict=True)):
            raise UserError(f"{name}: its losses are {answer['losses']}, ours {ours}")


def rows(answers: dict[str, dict[str, Any]]) -> dict[str, float]:
    ours, forge = answers["ours"], answers["specforge"]
    return {
        "ours": ours["seconds"],
        "ours, first epoch": ours["seconds"] + ours["once_a_sample"],
        "SpecForge, same work": forge["seconds"] - forge["full_vocabulary"] - forge["acceptance"],
        "SpecForge, as it comes": forge["seconds"],
        "speculators, same work": answers["speculators"]["seconds"],
        "speculators, as it comes": answers["frozen"]["seconds"],
    }


def matmul_rate(size: int = 1024, seconds: float = 0.2) -> float:
    """FLOP per CPU-second of a square fp32 product on one thread."""
    a, b, done, start = torch.randn(size, size), torch.randn(size, size), 0, time.process_time()
    while time.process_time() < start + seconds:
        a @ b.t()
        done += 2 * size**3
    return done / (time.process_time() - start)


def floor_of(sizes: Sizes, share: float) -> float:
    """`speed.floor_flop` of a step: every supervised token is in the draft vocabulary."""
    start, end = reply(share)
    counted = [end - 2 - step - max(start - 1, 0) for step in range(STEPS)]
    return floor_flop(sizes.config(), TOKENS, counted, counted)


def show(
    size: str, by_share: dict[float, dict[str, list[float]]], ratios: dict[tuple[str, float], list[float]]
) -> None:
    """The table of one size; what the last line needs is added to `ratios`."""
    shown: list[list[Any]] = []
    for share, found in by_share.items():
        for name, seconds in found.items():
            if name == "floor":
                continue
            over_ours = by_round(seconds, found["ours"], lambda a, b: a / b)
            of_floor = by_round(seconds, found["floor"], lambda a, b: b / a)
            ratios[name, share].append(over_ours)
            ratios[f"{name}: floor", share].append(of_floor)
            median = statistics.median(seconds)
            shown.append([f"{share:.0%}: {name}", f"{median:.3f}", TOKENS / median, over_ours, of_floor])
    common.table([f"{size}; supervised: side", "CPU-s", "tokens/CPU-s", "over ours", "share of floor"], shown)
    sys.stdout.flush()


def summarise(ratios: dict[tuple[str, float], list[float]]) -> None:
    least = {name: min(values) for name, values in ratios.items()}
    figures = {
        prefix + figure: least[name, share]
        for share, prefix in ((1.0, ""), (0.6, "supervised_"))
        for figure, name in (
            ("specforge_ratio", "SpecForge, same work"),
            ("speculators_ratio", "speculators, same work"),
            ("gemm_share", "ours: floor"),
        )
    }
    print("peers", *(f"{name}={value:.2f}" for name, value in figures.items()))


def by_round(a: list[float], b: list[float], figure: Callable[[float, float], float]) -> float:
    return statistics.median(figure(x, y) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
