"""Served as trained? A finished draft's accuracy by step on its held-out samples, along both paths.

Served: exported files, states freshly out of the engine, each slot drafting alone with a cache (`eagle3lib.replay`).
Trained: the weights and stored states through the trainer. Needs a finished run (`make demo`). Last line:
`replay gap=…`: the largest difference of two accuracies (goal <= 0.01; above it this is an error).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks import common
from eagle3lib import engines, replay
from eagle3lib.config import EngineConfig
from eagle3lib.plan import STORE


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("draft", type=Path, nargs="?", help="an exported folder; default: the first under results/")
    parser.add_argument("--samples", type=int, default=16, help="at most so many (16)")
    arguments = parser.parse_args()
    draft = common.finished_draft(arguments.draft)
    job = replay.job_of(draft, STORE)
    result = replay.replay(draft, job, engines.open_engine(EngineConfig(), job.target.path), arguments.samples)
    print(replay.describe(result))
    print(f"replay gap={result['gap']:.4f} samples={result['samples']} slots={sum(result['supervised'])}")


if __name__ == "__main__":
    common.main(run)
