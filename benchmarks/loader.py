"""The trainer's loader against the disk, and how full its packs are.

- ratio: bytes/s of reading, checking (sha256, finite values) and packing cold bf16 samples of H 7168
  over bytes/s of a plain sequential read of the same cold files, in turns, medians (goal >= 0.9).
- packing: tokens over the room of all packs, an epoch of 37,312 lengths (log-normal, mean about 2,350, at most 8,192;
  packs of 8,192 tokens; goal >= 0.97).
"""

from __future__ import annotations

import os
import random
import statistics
import time
from pathlib import Path

import torch

from benchmarks import common
from eagle3lib import loader
from eagle3lib.hidden_states import StateKey, pack_sample, sample_id
from eagle3lib.store import Store
from eagle3lib.training_time_test import Batch

SAMPLES, CAPACITY, HIDDEN = 37_312, 8192, 7168


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--files", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    def run() -> None:
        generator = random.Random(options.seed)
        lengths = [common.length(generator, 1_900, 0.75, CAPACITY) for _ in range(SAMPLES)]
        packs = loader.epoch_packs(range(SAMPLES), lengths, CAPACITY, "0/0")
        packing = sum(lengths) / (len(packs) * CAPACITY)
        print(f"{SAMPLES:,} samples, {sum(lengths):,} tokens, {len(packs):,} packs of {CAPACITY:,}: {packing:.1%} full")
        with common.scratch() as folder:
            samples = make(folder, lengths[: options.files])
            rates: dict[str, list[float]] = {"loader": [], "raw": []}
            for _ in range(options.rounds):
                rates["loader"].append(load(samples))
                rates["raw"].append(read(samples))
        common.table(["cold", "MB/s"], [[name, statistics.median(values)] for name, values in rates.items()])
        ratio = statistics.median(a / b for a, b in zip(rates["loader"], rates["raw"], strict=True))
        print(f"loader ratio={ratio:.3f} packing={packing:.4f}")

    common.main(run)


def make(folder: Path, lengths: list[int]) -> list[loader.Sample]:
    store = Store(folder, StateKey("f" * 64, (2, 30, 58), "benchmark", "bfloat16", "bf16"))
    store.prepare()
    samples = []
    for number, n in enumerate(lengths):
        ids, bounds = [number, *range(n - 1)], [n // 4, n]
        states = [torch.randn(n, HIDDEN).to(torch.bfloat16) for _ in range(4)]
        record = store.publish(pack_sample(store.key, ids, bounds, states, "benchmark", "benchmark"))
        samples.append(loader.Sample(str(store.path(sample_id(ids))), n, tuple(bounds), "train", record["sha256"]))
    return samples


def forget(samples: list[loader.Sample]) -> int:
    """Take the files out of the page cache; their bytes."""
    total = 0
    for sample in samples:
        with open(sample.path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            total += os.fstat(file.fileno()).st_size
    return total


def load(samples: list[loader.Sample]) -> float:
    """MB/s from files to packed batches, all checks of a first read included."""
    total, lengths = forget(samples), [sample.n_tokens for sample in samples]
    start = time.monotonic()
    documents = loader.Documents(samples, 3, HIDDEN)
    packs = loader.first_fit_decreasing(range(len(samples)), lengths, CAPACITY)
    with loader.readers() as readers:
        for (pack,) in loader.read_ahead(documents, [[pack] for pack in packs], readers):
            Batch.pack(pack.documents, (pack.room.aux, pack.room.last))
    return total / (time.monotonic() - start) / 1e6


def read(samples: list[loader.Sample]) -> float:
    """MB/s of reading them one after the other, doing nothing with it."""
    total, buffer = forget(samples), bytearray(2**23)
    start = time.monotonic()
    for sample in samples:
        with open(sample.path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return total / (time.monotonic() - start) / 1e6


if __name__ == "__main__":
    main()
