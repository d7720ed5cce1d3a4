"""Conversations to samples (token ids and replies), in shards: what the checkpoint writes.

    shards/{shard}.jsonl   a line a sample: sample_id, input_ids, reply_bounds, origin
    samples.parquet        a row a sample, in order; no token ids
    rejected.jsonl         a line a conversation left out: file, line, reason, detail
    shards.json            {shard: {sha256 of its file, n_samples, n_tokens}}
    mixture.json           what became of each source; lengths, languages

Shards hold `shard_size` samples and are called 00000, 00001, ...; the samples left over lie
in tail shards whose sizes are distinct powers of two, so that a workflow can name a fixed
number of slots for each: 41 left over of 64 are tail_32, tail_8, tail_1.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eagle3lib import acceptance, chat, curation, in_place, remote, samples
from eagle3lib.config import DatasetConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import pairs, sample_id
from eagle3lib.job import Progress, atomic_write, in_order, write_json
from eagle3lib.lineage import digest
from eagle3lib.messages import Unfit

BATCH = 64  # conversations that are tokenised in one call
TOKENIZERS = 2  # calls at once: while one looks for its replies, the other keeps the cores busy
AHEAD = 3  # batches that are tokenised before they are needed
_Prepared = chat.Marked | chat.Rendered | str
"""Marked text, raw text, or token ids as they are."""

MAX_FULL_SHARDS = 100_000  # five digits
COLUMNS = {
    "sample_id": "string",
    "shard": "string",
    "slot": "int64",
    "split": "string",
    "n_tokens": "int64",
    "n_supervised": "int64",
    "weight": "double",
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
class Tally:
    """What became of the conversations of one source."""

    conversations: int = 0
    samples: int = 0
    tokens: int = 0
    supervised: int = 0
    rejected: Counter = field(default_factory=Counter)


@dataclass
class Counts(Tally):
    """What became of the input. lengths: samples by the least power of two that holds their tokens."""

    validation: int = 0
    truncated: int = 0
    sources: dict[str, Tally] = field(default_factory=dict)
    lengths: Counter = field(default_factory=Counter)
    languages: Counter = field(default_factory=Counter)

    def __str__(self) -> str:
        every = max(self.conversations, 1)
        reasons = ", ".join(f"{n} {reason} ({n / every:.1%})" for reason, n in sorted(self.rejected.items()))
        share = self.supervised / max(self.tokens, 1)
        return (
            f"{self.samples} samples ({self.validation} validation), {self.tokens} tokens, "
            f"{self.supervised} supervised ({share:.1%}), {self.truncated} truncated; rejected: {reasons or 'none'}"
        )

    def mixture(self, sources: Sequence[samples.Source]) -> dict[str, Any]:
        """For mixture.json. taken: a source's share of the training tokens of an epoch, by its weight."""
        weighted = {one.name: one.weight * self.sources[one.name].tokens for one in sources if one.name in self.sources}
        every = sum(weighted.values()) or 1
        rows = [
            {
                "source": one.name,
                "format": one.format,
                "weight": one.weight,
                "limit": one.limit,
                "fetched": [record for path in one.files if (record := remote.record_of(path))],
                **vars(self.sources.get(one.name, Tally())),
                "taken": weighted.get(one.name, 0) / every,
            }
            for one in sources
        ]
        lengths = {str(length): self.lengths[length] for length in sorted(self.lengths)}
        rejected = dict(self.rejected.most_common())
        return {
            "conversations": self.conversations,
            "rejected": rejected,
            "sources": rows,
            "lengths": lengths,
            "languages": dict(self.languages.most_common()),
        }


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
    """What a trainer learns from (`table`: frame of samples.parquet): samples in their order, their replies, their
    split and how often an epoch takes them; not where they lie."""
    bounds = [[int(b) for b in row] for row in table["reply_bounds"]]
    weights = weights_of(table)
    weighted = [weights] if any(weight != 1 for weight in weights) else []
    return digest([table["sample_id"].tolist(), table["split"].tolist(), bounds, *weighted], 32)


def weights_of(table: Any) -> list[float]:
    """How often an epoch takes each sample; those sharded before there were weights are taken once."""
    return table["weight"].tolist() if "weight" in table else [1.0] * len(table)


def is_drawn(sample: str, seed: float, fraction: float) -> bool:
    """Does a sample belong to a seeded share of all? Decided by its content and the seed alone, whatever the others."""
    number = int.from_bytes(hashlib.sha256(f"{seed}:{sample}".encode()).digest()[:8], "big")
    return number < fraction * 2**64


def shard_samples(
    entries: Sequence[str | Path | samples.Source],
    tokenizer: Any,
    dataset: DatasetConfig,
    out: str | Path,
    *,
    vocab_size: int,
    replies: Sequence[str | Path] | None = None,
    imported: Sequence[str | Path] | None = None,
    asked: Iterable[curation.Question] = (),
) -> Counts:
    """Tokenise, filter and shard the conversations of `entries` into `out`; or the `replies` that were made to them, or
    what `in_place.scan` found (`imported`).

    `vocab_size` is the number of rows of the target's embedding. `asked`: the evaluation's questions, for
    dataset.decontaminate_words (of replies: left out before they were made). One shard's token ids are in memory at a
    time. Raises UserError at a malformed line, a template that cannot render, an id out of the vocabulary, when
    nothing is left, and when nothing is prompt.
    """
    out, sources = Path(out), samples.as_sources(entries)
    counts, rows, index = Counts(), [], {}
    with atomic_write(out / "rejected.jsonl") as rejected:
        accept = _Filter(tokenizer, dataset, vocab_size, counts, rejected, sources)
        if imported is not None:
            accepted = accept.imported(imported)
        else:
            accepted = accept.conversations(asked) if replies is None else accept.replies(replies)
        with closing(accepted):
            for shard, batch in _batches(accepted, dataset.shard_size):
                index[shard] = _write_shard(out / "shards" / f"{shard}.jsonl", batch)
                rows += [accept.row(sample, shard, slot) for slot, sample in enumerate(batch)]
    counts.validation = sum(row["split"] == "validation" for row in rows)
    _refuse_useless(counts, imported or replies or [path for source in sources for path in source.files])
    _remove_stale(out / "shards", index)
    write_json(out / "shards.json", index)
    write_json(out / "mixture.json", counts.mixture(sources))
    _write_parquet(out / "samples.parquet", rows)
    print(counts)
    return counts


def tokenised(
    entries: Sequence[str | Path | samples.Source], tokenizer: Any, dataset: DatasetConfig, vocab_size: int
) -> Iterator[Sample]:
    """The samples of `entries` that `shard_samples` would write, one after the other."""
    with open(os.devnull, "wb") as rejected:
        accept = _Filter(tokenizer, dataset, vocab_size, Counts(), rejected, samples.as_sources(entries))
        yield from accept.conversations(())


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
    """How often an epoch takes each target id out of a reply of the training split (`rows`: frame of
    samples.parquet)."""
    counts: defaultdict[float, Counter] = defaultdict(Counter)
    train = rows["split"] == "train"
    weights = dict(zip(rows["sample_id"][train], itertools.compress(weights_of(rows), train), strict=True))
    for shard in dict.fromkeys(rows["shard"]):
        for sample in read_shard(Path(folder) / f"{shard}.jsonl"):
            if weight := weights.get(sample.sample_id):
                for start, end in pairs(sample.reply_bounds):
                    counts[weight].update(sample.input_ids[start:end])
    return [round(sum(weight * of[i] for weight, of in counts.items())) for i in range(vocab_size)]


class _Unfit(Exception):
    """A conversation that is left out, and why."""

    def __init__(self, reason: str, detail: str):
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


class _Filter:
    """Tokenised conversations one after the other, the unfit ones written to `rejected` with their reason."""

    def __init__(
        self,
        tokenizer: Any,
        dataset: DatasetConfig,
        vocab_size: int,
        counts: Counts,
        rejected: Any,
        sources: Sequence[samples.Source],
    ):
        self.tokenizer, self.dataset, self.vocab_size = tokenizer, dataset, vocab_size
        self.counts, self.rejected = counts, rejected
        self.source_of = {str(path): source for source in sources for path in source.files}
        self.sources = sources
        self.seen: set[bytes] = set()

    def conversations(self, asked: Iterable[curation.Question]) -> Generator[Sample, None, None]:
        read = samples.read(self.sources, self.dataset.max_conversations)
        return self._fit(curation.Curator(self.dataset, asked).curate(read), self._prepare)

    def replies(self, files: Sequence[str | Path]) -> Generator[Sample, None, None]:
        return self._fit(samples.read_replies(files), self._of_reply)

    def imported(self, entries: Sequence[str | Path]) -> Generator[Sample, None, None]:
        lines = (line for entry in entries for line in in_place.imported_lines(Path(entry)))
        files = (_File(line["file"], line.get("sha256", ""), line) for line in lines)
        return self._fit(itertools.islice(files, self.dataset.max_conversations), _of_file)

    # What comes before tokenising, and what is left to tokenise.

    def _prepare(self, one: samples.Conversation) -> _Prepared:
        if one.unfit:
            raise _Unfit(*one.unfit)
        if one.input_ids is not None:
            return chat.Rendered(one.input_ids, pairs(one.reply_bounds or []))
        if one.text is not None:
            return one.text
        dataset = self.dataset
        return chat.mark(
            self.tokenizer,
            one.messages,
            dataset.chat_template,
            dataset.train_on,
            reasoning=dataset.train_on_reasoning,
            tools=one.tools,
            options=dataset.chat_template_options,
        )

    def _of_reply(self, one: samples.Reply) -> _Prepared:
        if not one.reply_ids and one.finish not in ("stop", "length"):
            raise _Unfit(one.finish, one.detail or "no reply was made")
        rendered = chat.append_reply(one.prompt_ids, one.reply_ids)
        return replace(rendered, reply_bounds=[*pairs(one.reply_bounds), *rendered.reply_bounds])

    def _tokenize(self, batch: list[tuple[Any, _Prepared | Exception]]) -> list[tuple[Any, chat.Rendered | Exception]]:
        """The marked texts of a batch in one call, on all cores."""
        marked = [prepared for _, prepared in batch if isinstance(prepared, chat.Marked)]
        rendered = iter(chat.tokenize_all(self.tokenizer, marked))
        found: list[tuple[Any, chat.Rendered | Exception]] = []
        for one, prepared in batch:
            if isinstance(prepared, chat.Marked):
                found.append((one, next(rendered)))
            elif isinstance(prepared, str):
                ids = list(self.tokenizer(prepared)["input_ids"])
                spans = [(1, len(ids))] if len(ids) > 1 else []  # the first token follows nothing
                found.append((one, chat.Rendered(ids, spans)))
            else:
                found.append((one, prepared))
        return found

    def _rendered(
        self, inputs: Iterable[Any], prepare: Callable[[Any], _Prepared]
    ) -> Generator[tuple[Any, chat.Rendered | Exception], None, None]:
        """Each input tokenised, or what it raised; batches ahead are read, marked and tokenised meanwhile."""

        def prepared(one: Any) -> tuple[Any, _Prepared | Exception]:
            try:
                return one, prepare(one)
            except (_Unfit, UserError) as error:
                return one, error

        with closing(in_order(self._tokenize, _in_batches(map(prepared, inputs), BATCH), TOKENIZERS, AHEAD)) as work:
            for batch in work:
                yield from batch

    def _fit(self, inputs: Iterator[Any], prepare: Callable[[Any], _Prepared]) -> Generator[Sample, None, None]:
        progress = Progress(None, "conversations", "shard samples")
        with closing(self._rendered(inputs, prepare)) as work:
            for one, rendered in work:
                progress.update(samples=self.counts.samples, supervised=self.counts.supervised)
                tallies = self._tallies(one)
                for tally in tallies:
                    tally.conversations += 1
                try:
                    sample = self._sample(one, rendered)
                except _Unfit as unfit:
                    self._reject(one, unfit, tallies)
                    continue
                self._count(one, sample, tallies)
                yield sample
                if self.dataset.token_budget and self.counts.supervised >= self.dataset.token_budget:
                    return

    def _tallies(self, one: Any) -> list[Tally]:
        source = self.source_of.get(one.file)
        return [self.counts, *([self.counts.sources.setdefault(source.name, Tally())] if source else [])]

    def _count(self, one: Any, sample: Sample, tallies: list[Tally]) -> None:
        for tally in tallies:
            tally.samples += 1
            tally.tokens += len(sample.input_ids)
            tally.supervised += sample.n_supervised
        self.counts.lengths[1 << (len(sample.input_ids) - 1).bit_length()] += 1
        if self.dataset.count_languages:
            self.counts.languages[curation.language(samples.words(one))] += 1

    def _sample(self, one: Any, rendered: chat.Rendered | Exception) -> Sample:
        if isinstance(rendered, Unfit):
            raise _Unfit(rendered.reason, str(rendered))
        if isinstance(rendered, UserError):
            raise UserError(f"{one.file}:{one.line}: {rendered}")
        if isinstance(rendered, Exception):
            raise rendered
        self._check_vocabulary(one, rendered.input_ids)
        ids, spans = self._cut(rendered)
        if not any(end - start >= 2 for start, end in spans):
            raise _Unfit("no_supervised_tokens", "no reply of two tokens or more to learn from")
        if self.dataset.drop_degenerate and any(acceptance.is_degenerate(ids[start:end]) for start, end in spans):
            raise _Unfit("degenerate", acceptance.DEGENERATE_RULE)
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
        wrong = max(ids, default=0) if min(ids, default=0) >= 0 else min(ids)
        if not 0 <= wrong < self.vocab_size:
            raise UserError(
                f"{one.file}:{one.line}: token id {wrong} is not in the target's vocabulary of {self.vocab_size}; "
                "the tokenizer or the reply file belongs to another model"
            )

    def _reject(self, one: Any, unfit: _Unfit, tallies: list[Tally]) -> None:
        for tally in tallies:
            tally.rejected[unfit.reason] += 1
        line = {"file": one.file, "line": one.line, "reason": unfit.reason, "detail": unfit.detail}
        self.rejected.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def row(self, sample: Sample, shard: str, slot: int) -> dict[str, Any]:
        """Of samples.parquet."""
        held_out = is_drawn(sample.sample_id, self.dataset.seed, self.dataset.validation_fraction)
        source = self.source_of.get(sample.origin["file"])
        return {
            "sample_id": sample.sample_id,
            "shard": shard,
            "slot": slot,
            "split": "validation" if held_out else "train",
            "n_tokens": len(sample.input_ids),
            "n_supervised": sample.n_supervised,
            "weight": source.weight if source else 1.0,
            "reply_bounds": sample.reply_bounds,
            "file": sample.origin["file"],
            "line": sample.origin["line"],
            "origin_sha256": sample.origin["sha256"],
        }


def _in_batches(items: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """What reading them raises comes behind the last, shorter batch."""
    batch: list[Any] = []
    fault = None
    try:
        for item in items:
            batch.append(item)
            if len(batch) == size:
                yield batch
                batch = []
    except Exception as error:
        fault = error
    if batch:
        yield batch
    if fault:
        raise fault


@dataclass(frozen=True)
class _File:
    """A file of another tool, as `in_place.scan` found it. It has no lines."""

    file: str
    sha256: str
    found: dict[str, Any]
    line: int = 0
    messages: tuple[()] = ()  # token ids only


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


def _refuse_useless(counts: Counts, files: Iterable[str | Path]) -> None:
    where = ", ".join(map(str, files))
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

    types = {
        "string": pyarrow.string(),
        "int64": pyarrow.int64(),
        "double": pyarrow.float64(),
        "list<int64>": pyarrow.list_(pyarrow.int64()),
    }
    schema = pyarrow.schema([(name, types[kind]) for name, kind in COLUMNS.items()])
    with atomic_write(path) as file:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), file)
