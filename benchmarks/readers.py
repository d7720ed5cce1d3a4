"""Readers, templates and masks beside the tokeniser alone, and memory on a file that does not fit into it.

Every kind of file is written with the same conversations and read to samples (token ids and masks) as sharding does
it. The tokeniser's own rate is that of its batch call on the same texts, on the same cores. `--gigabytes` of JSONL are
then read whole, while the process's resident memory is watched. Last line: `readers ratio=… rss_mib=… grown_mib=…`:
samples' rate over the tokeniser's own, of JSONL, median of the rounds (goal >= 0.8); the most memory while the big file
was read, most of it the libraries'; by how much it grew after the first tenth (goal: < 64, whatever the file's size).
"""

from __future__ import annotations

import gzip
import json
import os
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import common
from eagle3lib import samples, shards
from eagle3lib.config import DatasetConfig

CONVERSATIONS, TURNS, WORDS, ROUNDS = 2000, 2, 180, 5
BATCH = 64


def conversations(count: int, seed: int) -> Iterator[list[dict[str, str]]]:
    """Chats of a few turns, of lengths as texts have them, out of Python's own documentation."""
    from pydoc_data.topics import topics

    generator, prose = random.Random(seed), "\n".join(topics.values()).split(" ")
    for number in range(count):
        messages = [{"role": "system", "content": "Answer well."}]
        for turn in range(TURNS):
            for role, median in (("user", 40), ("assistant", WORDS)):
                words = common.length(generator, median, 0.7, 900)
                start = generator.randrange(len(prose) - words)
                messages.append({"role": role, "content": f"{number}.{turn} {' '.join(prose[start : start + words])}"})
        yield messages


def write_all(folder: Path, chats: list[Any]) -> dict[str, Path]:
    """The same rows in every kind of file."""
    import pyarrow
    import pyarrow.parquet

    rows = [{"messages": chat} for chat in chats]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    files = {kind: folder / f"chats.{kind}" for kind in ("jsonl", "json", "jsonl.gz", "jsonl.zst", "parquet", "arrow")}
    files["jsonl"].write_bytes(lines)
    files["json"].write_text(json.dumps(rows))
    files["jsonl.gz"].write_bytes(gzip.compress(lines))
    files["jsonl.zst"].write_bytes(pyarrow.compress(lines, "zstd", asbytes=True))
    table = pyarrow.Table.from_pylist(rows)
    pyarrow.parquet.write_table(table, files["parquet"])
    with pyarrow.OSFile(str(files["arrow"]), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return files


def tokenise(tokenizer: Any, texts: list[str]) -> int:
    """Tokens of all texts, by the tokeniser's batch call."""
    batches = (texts[start : start + BATCH] for start in range(0, len(texts), BATCH))
    return sum(len(ids) for batch in batches for ids in tokenizer(batch, add_special_tokens=False)["input_ids"])


def to_samples(tokenizer: Any, path: Path) -> int:
    """Tokens of all samples of a file; nothing is written."""
    dataset = DatasetConfig(name="benchmark", conversations=[str(path)], max_tokens=1 << 20)
    return sum(len(one.input_ids) for one in shards.tokenised([path], tokenizer, dataset, 1 << 30))


def rate(side: Any, *arguments: Any) -> float:
    """Tokens per second of wall-clock time: what matters is how well the cores are used."""
    start = time.perf_counter()
    return side(*arguments) / (time.perf_counter() - start)


def rss_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory(folder: Path, gigabytes: float, seed: int) -> tuple[float, float]:
    """MiB resident after a tenth of a big file, and the most of the rest."""
    path, block = folder / "big.jsonl", "".join(json.dumps({"messages": c}) + "\n" for c in conversations(2000, seed))
    with open(path, "w") as file:
        while file.tell() < gigabytes * 1e9:
            file.write(block)
    size, read, early, most = path.stat().st_size, 0, 0.0, 0.0
    for number, one in enumerate(samples.read([path])):
        read += sum(len(m["content"]) for m in one.messages)
        if number % 1000 == 0:
            most = max(most, rss_mib())
            early = most if read < size / 10 else early
    path.unlink()
    return early, most


def main() -> None:
    from transformers import AutoTokenizer

    parser = common.parser(__doc__ or "")
    parser.add_argument("--gigabytes", type=float, default=5.0, help="size of the big file")
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS, help="of the timed files")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(common.check_target(args.target))
    chats = list(conversations(args.conversations, args.seed))
    texts = [tokenizer.apply_chat_template(chat, tokenize=False) for chat in chats]
    with common.scratch() as folder:
        files = write_all(folder, chats)
        own: list[float] = []
        ratios: dict[str, list[float]] = {kind: [] for kind in files}
        for _ in range(args.rounds):
            for kind, path in files.items():
                own.append(rate(tokenise, tokenizer, texts))
                ratios[kind].append(rate(to_samples, tokenizer, path) / own[-1])
        rows = [[kind, statistics.median(found)] for kind, found in ratios.items()]
        for kind, ratio in rows:
            print(f"{kind:<10} {ratio:.2f} of the tokeniser's own rate")
        early, most = memory(folder, args.gigabytes, args.seed)
    print(
        f"tokeniser {statistics.median(own):,.0f} tokens/s on {os.cpu_count()} cores; resident {early:.0f} MiB after a "
        f"tenth of {args.gigabytes:g} GB, {most:.0f} MiB at most"
    )
    ratio = statistics.median(ratios["jsonl"])
    print(f"readers ratio={ratio:.2f} rss_mib={most:.0f} grown_mib={most - early:.0f}")


if __name__ == "__main__":
    main()
