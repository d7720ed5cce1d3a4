"""Samples for people: their text as the target reads it, with the tokens that supervise told apart."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib import chat, shards
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import pairs
from eagle3lib.plan import RESULTS
from eagle3lib.shards import Sample
from eagle3lib.tables import Text
from eagle3lib.targets import TargetInfo

GREEN, PLAIN = "\x1b[32m", "\x1b[0m"
OPENS, CLOSES = "[[", "]]"


def parts(tokenizer: Any, sample: Sample) -> Iterator[tuple[str, bool]]:
    """The text of a sample in pieces: (text, does it supervise?). Each reply is a piece of its own."""
    return chat.pieces(tokenizer, sample.input_ids, pairs(sample.reply_bounds))


def as_text(tokenizer: Any, sample: Sample, coloured: bool) -> str:
    """For a terminal: supervised tokens in green, or between [[ and ]]."""
    opens, closes = (GREEN, PLAIN) if coloured else (OPENS, CLOSES)
    texts = (f"{opens}{text}{closes}" if supervised else text for text, supervised in parts(tokenizer, sample))
    return f"{describe(sample)}\n\n{''.join(texts)}\n"


def describe(sample: Sample) -> str:
    replies = len(sample.reply_bounds) // 2
    return (
        f"{sample.sample_id}: {len(sample.input_ids):,} tokens, {sample.n_supervised:,} of them supervised in "
        f"{replies:,} {'reply' if replies == 1 else 'replies'}; from {sample.origin['file']}:{sample.origin['line']}"
    )


def as_table(tokenizer: Any, sample: Sample) -> Text:
    """For a page."""
    return Text(f"Sample {sample.sample_id[:12]}", list(parts(tokenizer, sample)), describe(sample))


def drawn(folder: str | Path, table: pd.DataFrame, count: int) -> list[Sample]:
    """`count` samples of a dataset (`folder`; `table`: its samples.parquet), by their ids' hash: always the same."""
    order = sorted(table["sample_id"], key=lambda one: hashlib.sha256(one.encode()).hexdigest())[:count]
    rows = table[table["sample_id"].isin(order)]
    found: dict[str, Sample] = {}
    for shard in dict.fromkeys(rows["shard"]):
        samples = shards.read_shard(Path(folder) / "shards" / f"{shard}.jsonl")
        found |= {one.sample_id: one for one in samples if one.sample_id in order}
    return [found[one] for one in order]


def find(name: str, slot: int | None = None) -> list[tuple[Path, Sample]]:
    """The samples that `show` is asked for, each with its dataset's folder; in the folder of the results.

    `name` is a shard (its file, a folder under …/hidden_states, or its bare name in any dataset) with a slot, a
    `.pt` under …/hidden_states, or the beginning of a sample id. Raises UserError when there is none.
    """
    if slot is None:
        path = Path(name)
        if path.suffix == ".pt" and path.stem.isdigit():
            return find(str(path.parent), int(path.stem))
        return _by_id(path.stem if path.suffix == ".pt" else name)
    files = _shard_files(name)
    if not files:
        raise UserError(f"{name}: no shard of a dataset under {RESULTS}/; give its file, or its name, as 00000")
    found = []
    for file in files:
        samples = shards.read_shard(file)
        if not 0 <= slot < len(samples):
            raise UserError(f"{file}: holds {len(samples)} samples, so slots 0 to {len(samples) - 1}, not {slot}")
        found.append((file.parent.parent, samples[slot]))
    return found


def _shard_files(name: str) -> list[Path]:
    path = Path(name)
    if path.suffix == ".jsonl":
        return [path] if path.is_file() else []
    if path.parent.name == "hidden_states":  # results/{target}/{dataset}/{key}/hidden_states/{shard}
        path = path.parent.parent.parent / path.name
    if path.name != name:
        return [file for file in [path.parent / "shards" / f"{path.name}.jsonl"] if file.is_file()]
    return sorted(RESULTS.glob(f"*/*/shards/{name}.jsonl"))


def _by_id(beginning: str) -> list[tuple[Path, Sample]]:
    found = []
    for file in sorted(RESULTS.glob("*/*/samples.parquet")):
        table = pd.read_parquet(file, columns=["sample_id", "shard", "slot"])
        rows = table[table["sample_id"].str.startswith(beginning)]
        for shard, slot in zip(rows["shard"], rows["slot"], strict=True):
            found.append((file.parent, shards.read_shard(file.parent / "shards" / f"{shard}.jsonl")[int(slot)]))
    if not found:
        raise UserError(f"{beginning}: no sample under {RESULTS}/ has that id; give a shard and a slot, or an id")
    if len({sample.sample_id for _, sample in found}) > 1:
        raise UserError(f"{beginning}: {len(found)} samples begin so; give more of the id")
    return found


def tokenizer_of(dataset: Path) -> Any:
    """The tokenizer of the target that the dataset in `results/{target}/{dataset}` was sharded for."""
    from transformers import AutoTokenizer

    file = dataset.parent.parent / "targets" / dataset.parent.name / "target.json"
    if not file.is_file():
        raise UserError(f"{file}: not there, so its tokenizer is not known; `snakemake {file}` makes it")
    return AutoTokenizer.from_pretrained(TargetInfo.read(file).path)
