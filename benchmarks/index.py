"""The index at the size of the headline case, against a plain `stat` pass over all files.

37,312 samples as sparse files of their real sizes (about 4.6 TiB apparent, nothing on the disk), with the
manifests that 583 shard jobs leave. Last line: `index bytes_ratio=… stat_ratio=…`: bytes that indexing reads
over bytes stored (goal < 0.001), and its time over that of the `stat` pass (goal <= 5), medians of five.
"""

from __future__ import annotations

import hashlib
import os
import random
import statistics
import time
from pathlib import Path

import pandas as pd

from benchmarks import common
from eagle3lib import extraction, hidden_states, shards
from eagle3lib.job import write_json, write_parquet

SAMPLES, SHARD_SIZE, HIDDEN_SIZE, MEAN_TOKENS, MAX_TOKENS = 37_312, 64, 7168, 2353, 8192
ROUNDS = 5


def build(folder: Path) -> tuple[pd.DataFrame, dict[str, Path], int]:
    """samples.parquet's frame, the manifests, and the bytes that all states have."""
    rng = random.Random(0)
    rows, manifests, stored = [], {}, 0
    for shard, size in shards.plan_shards(SAMPLES, SHARD_SIZE):
        lines = []
        (folder / shard).mkdir(parents=True)
        for slot in range(size):
            n = min(MAX_TOKENS, max(16, int(rng.expovariate(1 / MEAN_TOKENS))))
            sample = hashlib.sha256(f"{shard}/{slot}".encode()).hexdigest()
            size_bytes = hidden_states.sample_bytes(n, HIDDEN_SIZE, 3)
            with open(folder / hidden_states.slot_path(shard, slot), "wb") as file:
                file.truncate(size_bytes)
            stored += size_bytes
            lines.append({"slot": slot, "n_tokens": n, "sample_id": sample, "bytes": size_bytes, "sha256": sample})
            rows.append(
                (sample, shard, slot, "train", n, n // 2, 1.0, [n // 2, n], "conversations.jsonl", len(rows), sample)
            )
        manifests[shard] = folder / shard / "manifest.json"
        write_json(manifests[shard], {"key": "k", "samples": lines})
    return pd.DataFrame(rows, columns=list(shards.COLUMNS)), manifests, stored


def read_bytes() -> int:
    """Bytes that this process has read so far, from the page cache or the disk."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


def stat_pass(folder: Path) -> float:
    """Seconds to find every file and ask for its size: the least that an index without manifests must do."""
    start = time.perf_counter()
    total = sum(entry.stat().st_size for shard in os.scandir(folder) if shard.is_dir() for entry in os.scandir(shard))
    assert total
    return time.perf_counter() - start


def index_pass(folder: Path, manifests: dict[str, Path], out: Path) -> tuple[float, int]:
    """Seconds and bytes read, from samples.parquet to the written index."""
    before, start = read_bytes(), time.perf_counter()
    lengths, table = extraction.index(manifests, pd.read_parquet(folder / "samples.parquet"))
    write_json(out / "sample_lengths.json", lengths, indent=None)
    write_parquet(out / "hidden_states.parquet", table)
    return time.perf_counter() - start, read_bytes() - before


def main() -> None:
    with common.scratch() as folder:
        samples, manifests, stored = build(folder)
        write_parquet(folder / "samples.parquet", samples)
        rounds = [(stat_pass(folder), *index_pass(folder, manifests, folder)) for _ in range(ROUNDS)]
    stat, seconds, read = (statistics.median(column) for column in zip(*rounds, strict=True))
    print(f"{len(samples):,} samples, {stored / 2**40:.2f} TiB stored, {read:,} bytes read; stat {stat:.2f} s")
    print(
        f"index bytes_ratio={read / stored:.2e} stat_ratio={seconds / stat:.2f} seconds={seconds:.2f} samples={SAMPLES}"
    )


if __name__ == "__main__":
    main()
