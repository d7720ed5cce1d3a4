"""Conversations to samples (token ids and replies), in shards: what the checkpoint writes.

    shards/{shard}.jsonl   a line a sample: sample_id, input_ids, reply_bounds, origin
    samples.parquet        a row a sample, in order; no token ids
    rejected.jsonl         a line a conversation left out: file, line, reason, detail
    shards.json            {shard: {sha256 of its file, n_samples, n_tokens}}

Shards hold `shard_size` samples and are called 00000, 00001, ...; the samples left over lie
in tail shards whose sizes are distinct powers of two, so that a workflow can name a fixed
number of slots for each: 41 left over of 64 are tail_32, tail_8, tail_1.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from eagle3lib import chat, in_place, samples
from eagle3lib.config import DatasetConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import pairs, sample_id
from eagle3lib.job import Progress, atomic_write, write_json
from eagle3lib.lineage import digest

MAX_FULL_SHARDS = 100_000  # five digits
COLUMNS = {
    "sample_id": "string",
    "shard": "string",
    "slot": "int64",
    "split": "string",
    "n_tokens": "int64",
    "n_supervised": "int64",
    "reply_bounds": "list<int64>",
    "file": "string",
    "line": "int64",
    "origin_sha256": "string",
}


@dataclass(frozen=True)
class Sample:
    """One tokenised conversation: ids [T], reply bounds [s0, e0, s1, e1, ...], and the line it comes from."""

    sample_id: str
    input_ids: list[int]
    reply_bounds: list[int]
    origin: dict[str, Any]

    @property
    def n_supervised(self) -> int:
        """Tokens inside of replies."""
        return sum(self.reply_bounds[1::2]) - sum(self.reply_bounds[::2])


@dataclass
class Counts:
    """What became of the input."""

    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    validation: int = 0
    truncated: int = 0
    rejected: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        reasons = ", ".join(f"{n} {reason}" for reason, n in sorted(self.rejected.items()))
        share = self.supervised / max(self.tokens, 1)
        return (
            f"{self.samples} samples ({self.validation} validation), {self.tokens} tokens, "
            f"{self.supervised} supervised ({share:.1%}), {self.truncated} truncated; rejected: {reasons or 'none'}"
        )


def tail_sizes(shard_size: int) -> list[int]:
    """Sizes that tail shards can have: the powers of two below `shard_size`, descending."""
    return [1 << bit for bit in reversed(range((shard_size - 1).bit_length()))]


def plan_shards(n_samples: int, shard_size: int) -> list[tuple[str, int]]:
    """Name and size of each shard that `n_samples` samples fill, in order.

    The remainder's binary digits are its tail shards, so each size occurs at most once.
    Raises UserError when there are more full shards than five digits can count.
    """
    full, left = divmod(n_samples, shard_size)
    plan = [(_full_shard(number, shard_size), shard_size) for number in range(full)]
    return plan + [(f"tail_{size}", size) for size in tail_sizes(shard_size) if left & size]


def _full_shard(number: int, shard_size: int) -> str:
    if number >= MAX_FULL_SHARDS:
        raise UserError(f"dataset.shard_size: {shard_size} makes more than {MAX_FULL_SHARDS} shards; raise it")
    return f"{number:05d}"


def dataset_digest(table: Any) -> str:
    """What a trainer learns from (`table`: frame of samples.parquet): samples in their order, their replies and
    their split; not where they lie."""
    bounds = [[int(b) for b in row] for row in table["reply_bounds"]]
    return digest([table["sample_id"].tolist(), table["split"].tolist(), bounds], 32)


def is_drawn(sample: str, seed: float, fraction: float) -> bool:
    """Does a sample belong to a seeded share of all? Decided by its content and the seed alone, whatever the others."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:8], "big")
    return number < fraction * 2**64


def shard_samples(
    entries: Sequence[str | Path],
    tokenizer: Any,
    dataset: DatasetConfig,
    out: str | Path,
    *,
    vocab_size: int,
    kind: Literal["conversations", "replies", "imported"],
) -> Counts:
    """Tokenise, filter and shard the conversations of JSONL files (or the lines of `regenerate_replies`, or of
    `in_place.scan`) into `out`.

    `vocab_size` is the number of rows of the target's embedding. One shard's token ids are
    in memory at a time. Raises UserError at a malformed line, a template that cannot
    render, an id out of the vocabulary, when nothing is left, and when nothing is prompt.
    """
    out = Path(out)
    counts, rows, index = Counts(), [], {}
    with atomic_write(out / "rejected.jsonl") as rejected:
        accept = _Filter(tokenizer, dataset, vocab_size, counts, rejected)
        accepted = getattr(accept, kind)(entries)
        for shard, batch in _batches(accepted, dataset.shard_size):
            index[shard] = _write_shard(out / "shards" / f"{shard}.jsonl", batch)
            rows += [_row(sample, shard, slot, dataset) for slot, sample in enumerate(batch)]
    counts.validation = sum(row["split"] == "validation" for row in rows)
    _refuse_useless(counts, entries)
    _remove_stale(out / "shards", index)
    write_json(out / "shards.json", index)
    _write_parquet(out / "samples.parquet", rows)
    print(counts)
    return counts


def read_shard(path: str | Path) -> list[Sample]:
    """The samples of a shard file, by slot. UserError names a line that is broken or was edited."""
    remedy = f"delete {Path(path).parent.parent / 'samples.parquet'} to shard again"
    found = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), start=1):
        try:
            sample = Sample(**json.loads(line))
        except (ValueError, TypeError) as error:
            raise UserError(f"{path}:{number}: not a sample ({error}); {remedy}") from None
        if sample_id(sample.input_ids) != sample.sample_id:
            raise UserError(f"{path}:{number}: its token ids do not match its sample_id; {remedy}")
        found.append(sample)
    return found


def count_supervised_tokens(folder: str | Path, rows: Any, vocab_size: int) -> list[int]:
    """How often each target id occurs in the replies of the training split (`rows`: frame of samples.parquet)."""
    counts: Counter = Counter()
    train = set(rows["sample_id"][rows["split"] == "train"])
    for shard in dict.fromkeys(rows["shard"]):
        for sample in read_shard(Path(folder) / f"{shard}.jsonl"):
            if sample.sample_id in train:
                for start, end in zip(sample.reply_bounds[::2], sample.reply_bounds[1::2], strict=True):
                    counts.update(sample.input_ids[start:end])
    return [counts[i] for i in range(vocab_size)]


class _Unfit(Exception):
    """A conversation that is left out, and why."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class _Filter:
    """Tokenised conversations one after the other, the unfit ones written to `rejected` with their reason."""

    def __init__(self, tokenizer: Any, dataset: DatasetConfig, vocab_size: int, counts: Counts, rejected: Any):
        self.tokenizer, self.dataset, self.vocab_size = tokenizer, dataset, vocab_size
        self.counts, self.rejected = counts, rejected
        self.seen: set[bytes] = set()

    def conversations(self, entries: Sequence[str | Path]) -> Iterator[Sample]:
        return self._fit(samples.read(entries, self.dataset.max_conversations), self._render)

    def replies(self, entries: Sequence[str | Path]) -> Iterator[Sample]:
        return self._fit(samples.read_replies(entries), lambda r: chat.append_reply(r.prompt_ids, r.reply_ids))

    def imported(self, entries: Sequence[str | Path]) -> Iterator[Sample]:
        lines = (line for entry in entries for line in in_place.imported_lines(Path(entry)))
        files = (_File(line["file"], line.get("sha256", ""), line) for line in lines)
        return self._fit(itertools.islice(files, self.dataset.max_conversations), _of_file)

    def _render(self, one: samples.Conversation) -> chat.Rendered:
        return chat.render(self.tokenizer, one.messages, self.dataset.chat_template, self.dataset.train_on)

    def _fit(self, inputs: Iterator[Any], render: Any) -> Iterator[Sample]:
        progress = Progress(None, "conversations", "shard samples")
        for one in inputs:
            progress.update(samples=self.counts.samples, supervised=self.counts.supervised)
            try:
                sample = self._sample(one, render)
            except _Unfit as unfit:
                self._reject(one, unfit)
                continue
            self.counts.samples += 1
            self.counts.tokens += len(sample.input_ids)
            self.counts.supervised += sample.n_supervised
            yield sample
            if self.dataset.token_budget and self.counts.supervised >= self.dataset.token_budget:
                return

    def _sample(self, one: Any, render: Any) -> Sample:
        try:
            rendered = render(one)
        except chat.UnalignedReply as error:
            raise _Unfit("unaligned_reply", str(error)) from None
        except UserError as error:
            raise UserError(f"{one.file}:{one.line}: {error}") from None
        self._check_vocabulary(one, rendered.input_ids)
        ids, spans = self._cut(rendered)
        if not any(end - start >= 2 for start, end in spans):
            raise _Unfit("no_supervised_tokens", "no reply of two tokens or more to learn from")
        identity = sample_id(ids)
        if (key := bytes.fromhex(identity)) in self.seen:
            raise _Unfit("duplicate", f"same token ids as an earlier sample, {identity}")
        self.seen.add(key)
        self.counts.truncated += len(ids) < len(rendered.input_ids)
        origin = {"file": one.file, "line": one.line, "sha256": one.sha256}
        return Sample(identity, ids, [position for span in spans for position in span], origin)

    def _cut(self, rendered: chat.Rendered) -> tuple[list[int], list[chat.Span]]:
        """Ids and replies within max_tokens."""
        limit, ids = self.dataset.max_tokens, rendered.input_ids
        if len(ids) > limit and self.dataset.too_long == "drop":
            raise _Unfit("too_long", f"{len(ids)} tokens, dataset.max_tokens {limit}")
        clipped = [(start, min(end, limit)) for start, end in rendered.reply_bounds]
        return ids[:limit], [(start, end) for start, end in clipped if start < end]

    def _check_vocabulary(self, one: Any, ids: Sequence[int]) -> None:
        wrong = next((i for i in ids if not 0 <= i < self.vocab_size), None)
        if wrong is not None:
            raise UserError(
                f"{one.file}:{one.line}: token id {wrong} is not in the target's vocabulary of {self.vocab_size}; "
                "the tokenizer or the reply file belongs to another model"
            )

    def _reject(self, one: Any, unfit: _Unfit) -> None:
        self.counts.rejected[unfit.reason] += 1
        line = {"file": one.file, "line": one.line, "reason": unfit.reason, "detail": unfit.detail}
        self.rejected.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")


@dataclass(frozen=True)
class _File:
    """A file of another tool, as `in_place.scan` found it. It has no lines."""

    file: str
    sha256: str
    found: dict[str, Any]
    line: int = 0


def _of_file(one: _File) -> chat.Rendered:
    if "fault" in one.found:
        raise _Unfit("bad_file", one.found["fault"])
    return chat.Rendered(one.found["input_ids"], pairs(one.found["reply_bounds"]))


def _batches(accepted: Iterator[Sample], size: int) -> Iterator[tuple[str, list[Sample]]]:
    """Shard names and their samples; only the last batch can be short, and is split as `plan_shards` says."""
    for number in itertools.count():
        batch = list(itertools.islice(accepted, size))
        if len(batch) < size:
            break
        yield _full_shard(number, size), batch
    for shard, length in plan_shards(len(batch), size):
        yield shard, batch[:length]
        batch = batch[length:]


def _write_shard(path: Path, batch: Sequence[Sample]) -> dict[str, Any]:
    content = b"".join(json.dumps(vars(sample), ensure_ascii=False).encode() + b"\n" for sample in batch)
    with atomic_write(path) as file:
        file.write(content)
    n_tokens = sum(len(sample.input_ids) for sample in batch)
    return {"sha256": hashlib.sha256(content).hexdigest(), "n_samples": len(batch), "n_tokens": n_tokens}


def _row(sample: Sample, shard: str, slot: int, dataset: DatasetConfig) -> dict[str, Any]:
    held_out = is_drawn(sample.sample_id, dataset.seed, dataset.validation_fraction)
    return {
        "sample_id": sample.sample_id,
        "shard": shard,
        "slot": slot,
        "split": "validation" if held_out else "train",
        "n_tokens": len(sample.input_ids),
        "n_supervised": sample.n_supervised,
        "reply_bounds": sample.reply_bounds,
        "file": sample.origin["file"],
        "line": sample.origin["line"],
        "origin_sha256": sample.origin["sha256"],
    }


def _refuse_useless(counts: Counts, entries: Sequence[str | Path]) -> None:
    where = ", ".join(map(str, entries))
    if not counts.samples:
        raise UserError(
            f"{where}: no conversation is left as a sample ({counts}); change dataset.max_tokens or the input "
            "(prompts without replies need regenerate.enabled: true)"
        )
    if counts.supervised == counts.tokens:
        raise UserError(
            f"{where}: every token counts as reply, none as prompt; the chat template marks too much, "
            "set dataset.chat_template"
        )


def _remove_stale(folder: Path, index: dict[str, Any]) -> None:
    """Shards of an earlier run that this one does not have."""
    for path in folder.glob("*.jsonl"):
        if path.stem not in index:
            path.unlink()


def _write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    types = {"string": pyarrow.string(), "int64": pyarrow.int64(), "list<int64>": pyarrow.list_(pyarrow.int64())}
    schema = pyarrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    with atomic_write(path) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), file)
