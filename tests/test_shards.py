"""Sharding: plan, order, filters, split, files."""

from __future__ import annotations

import hashlib
import json
import re

import pandas
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from eagle3lib import shards
from eagle3lib.config import DatasetConfig
from eagle3lib.errors import UserError

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADER = len("_user\n_\n_assistant\n")  # tokens of CHATML around one exchange, `_` a special token; bytes otherwise
VOCAB = 258


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte: lengths can be counted by eye."""
    alphabet = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = CHATML
    assert len(tokenizer) == VOCAB
    return tokenizer


def dataset(**settings) -> DatasetConfig:
    return DatasetConfig(**{"name": "d", "conversations": ["x"], "validation_fraction": 0.25} | settings)


def exchange(number: int, reply: str = "yes") -> dict:
    return {"prompt": f"{number:04d}", "response": reply}


def write(path, rows) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tokenizer, tmp_path, rows, vocab_size=VOCAB, regenerated=False, **settings):
    path = write(tmp_path / "in.jsonl", rows)
    out = tmp_path / "out"
    counts = shards.shard_samples(
        [path],
        tokenizer,
        dataset(**settings),
        out,
        vocab_size=vocab_size,
        kind="replies" if regenerated else "conversations",
    )
    return counts, pandas.read_parquet(out / "samples.parquet"), out


def rejected(out) -> list[tuple[int, str]]:
    return [(row["line"], row["reason"]) for row in map(json.loads, open(out / "rejected.jsonl"))]


# The plan


@given(st.integers(0, 5000), st.integers(1, 300))
def test_plan(n, k):
    plan = shards.plan_shards(n, k)
    names, sizes = [name for name, _ in plan], [size for _, size in plan]
    tails = [size for name, size in plan if name.startswith("tail")]
    assert sum(sizes) == n
    assert len(set(names)) == len(names)
    assert names[: n // k] == [f"{i:05d}" for i in range(n // k)] and set(sizes[: n // k]) <= {k}
    assert tails == sorted(tails, reverse=True) and set(tails) <= set(shards.tail_sizes(k))
    assert all(name == f"tail_{size}" for name, size in plan[n // k :])


def test_plan_written_out():
    assert shards.plan_shards(64 + 41, 64) == [("00000", 64), ("tail_32", 32), ("tail_8", 8), ("tail_1", 1)]
    assert shards.plan_shards(37_312, 64)[-1] == ("00582", 64)
    assert shards.tail_sizes(64) == [32, 16, 8, 4, 2, 1]
    assert shards.tail_sizes(65) == [64, 32, 16, 8, 4, 2, 1]
    assert shards.tail_sizes(1) == []
    with pytest.raises(UserError, match="dataset.shard_size: 1 makes more than 100000 shards"):
        shards.plan_shards(100_001, 1)


# The files


def test_samples_lie_in_order_in_the_planned_shards(tokenizer, tmp_path):
    counts, frame, out = run(tokenizer, tmp_path, map(exchange, range(15)), shard_size=4)
    plan = shards.plan_shards(15, 4)
    assert [tuple(pair) for pair in frame.groupby("shard", sort=False).size().items()] == plan
    assert list(frame.slot) == [slot for _, size in plan for slot in range(size)]
    assert list(frame.line) == list(range(1, 16))
    assert sorted(path.stem for path in (out / "shards").iterdir()) == sorted(name for name, _ in plan)
    index = json.loads((out / "shards.json").read_text())
    assert list(index) == [name for name, _ in plan]
    for name, size in plan:
        content = (out / "shards" / f"{name}.jsonl").read_bytes()
        assert index[name] == {
            "sha256": hashlib.sha256(content).hexdigest(),
            "n_samples": size,
            "n_tokens": size * (HEADER + len("0000yes_\n")),
        }
    assert counts.samples == 15 and counts.supervised == 15 * len("yes_") and not counts.rejected


def test_rows_describe_the_shard_files(tokenizer, tmp_path):
    _, frame, out = run(tokenizer, tmp_path, map(exchange, range(5)), shard_size=4)
    read = {name: shards.read_shard(out / "shards" / f"{name}.jsonl") for name in frame.shard.unique()}
    for row in frame.itertuples():
        sample = read[row.shard][row.slot]
        assert (row.sample_id, row.n_tokens) == (sample.sample_id, len(sample.input_ids))
        assert list(row.reply_bounds) == sample.reply_bounds == [HEADER + 4, HEADER + 8]
        assert tokenizer.decode(sample.input_ids[HEADER + 4 : HEADER + 8]) == "yes<|im_end|>"
        assert row.n_supervised == sample.n_supervised == 4
        line = json.dumps(exchange(row.line - 1)).encode()
        assert row.origin_sha256 == sample.origin["sha256"] == hashlib.sha256(line).hexdigest()
        assert row.file == str(tmp_path / "in.jsonl")


def test_a_second_smaller_run_leaves_no_stale_shard_and_the_same_bytes(tokenizer, tmp_path):
    run(tokenizer, tmp_path, map(exchange, range(15)), shard_size=4)
    first = (tmp_path / "out/shards/00000.jsonl").read_bytes()
    run(tokenizer, tmp_path, map(exchange, range(9)), shard_size=4)
    assert (tmp_path / "out/shards/00000.jsonl").read_bytes() == first
    names = sorted(path.name for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert names == sorted(
        ["00000.jsonl", "00001.jsonl", "tail_1.jsonl", "samples.parquet", "shards.json", "rejected.jsonl"]
    )


# The filters


def test_filters(tokenizer, tmp_path):
    rows = [exchange(0), {"prompt": "no reply"}, exchange(1, "y" * 90), exchange(0), exchange(2, "")]
    counts, frame, out = run(tokenizer, tmp_path, rows, max_tokens=64, too_long="drop")
    assert list(frame.line) == [1]
    # an empty reply is a lone end-of-turn token: there is no second token to draft
    assert rejected(out) == [
        (2, "no_supervised_tokens"),
        (3, "too_long"),
        (4, "duplicate"),
        (5, "no_supervised_tokens"),
    ]
    assert counts.rejected == {"no_supervised_tokens": 2, "too_long": 1, "duplicate": 1}


def test_truncation_clips_replies_and_drops_those_beyond(tokenizer, tmp_path):
    two_turns = {"messages": [{"role": role, "content": "abcdef"} for role in ("user", "assistant") * 2]}
    full = run(tokenizer, tmp_path, [two_turns])[1].reply_bounds[0]
    start, end, second, _ = full
    cut_second, cut_between, cut_first = [start, end, second, second + 2], [start, end], [start, end - 3]
    for limit, bounds in [(second + 2, cut_second), (second, cut_between), (end - 3, cut_first)]:
        counts, frame, _ = run(tokenizer, tmp_path, [two_turns], max_tokens=limit)
        assert (list(frame.reply_bounds[0]), frame.n_tokens[0], counts.truncated) == (bounds, limit, 1)
    with pytest.raises(UserError, match="no conversation is left as a sample .*1 no_supervised_tokens"):
        run(tokenizer, tmp_path, [two_turns], max_tokens=int(start))


def test_token_budget_stops_at_the_sample_that_reaches_it(tokenizer, tmp_path):
    counts, frame, _ = run(tokenizer, tmp_path, map(exchange, range(50)), token_budget=9)
    assert (len(frame), counts.supervised) == (3, 12)


def test_max_conversations(tokenizer, tmp_path):
    assert len(run(tokenizer, tmp_path, map(exchange, range(50)), max_conversations=7)[1]) == 7


def test_train_on_last(tokenizer, tmp_path):
    rows = [{"messages": [{"role": role, "content": "abc"} for role in ("user", "assistant") * 2]}]
    both, last = (run(tokenizer, tmp_path, rows, train_on=which)[1].reply_bounds[0] for which in ("all", "last"))
    assert list(last) == list(both)[2:]


def test_unaligned_reply_is_rejected_and_the_rest_goes_on(tokenizer, tmp_path):
    begins_with_reply = {"messages": [{"role": role, "content": "abc"} for role in ("assistant", "user")]}
    _, frame, out = run(tokenizer, tmp_path, [begins_with_reply, exchange(1)])
    assert list(frame.line) == [2] and rejected(out) == [(1, "unaligned_reply")]


def test_template_that_cannot_render_names_the_line(tokenizer, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% if '0001' in messages[0].content %}{{ raise_exception('no') }}{% endif %}" + CHATML)
    with pytest.raises(UserError, match=r"in.jsonl:2: chat template .*t.jinja cannot render.*TemplateError: no"):
        run(tokenizer, tmp_path, map(exchange, range(3)), chat_template=template)


def test_id_out_of_the_vocabulary_stops(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"in.jsonl:1: token id 25\d is not in the target's vocabulary of 256"):
        run(tokenizer, tmp_path, [exchange(0)], vocab_size=256)
    assert not (tmp_path / "out/samples.parquet").exists() and not list((tmp_path / "out").rglob("*.part"))


def test_template_that_marks_everything_is_refused(tokenizer, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}")
    with pytest.raises(UserError, match="every token counts as reply"):
        run(tokenizer, tmp_path, map(exchange, range(3)), chat_template=template)


def test_regenerated_replies_keep_their_ids(tokenizer, tmp_path):
    """Ids that no text of this tokenizer would give: they must pass untouched."""
    row = {"messages": [], "prompt_ids": [5, 5, 5], "finish": "length", "file": "p.jsonl", "line": 3, "sha256": "ab"}
    rows = [row | {"reply_ids": [9, 9, 257]}, row | {"reply_ids": list(range(9))}, row | {"reply_ids": []}]
    counts, _, out = run(tokenizer, tmp_path, rows, regenerated=True, max_tokens=8)
    first, second = shards.read_shard(out / "shards/tail_2.jsonl")
    assert (first.input_ids, first.reply_bounds) == ([5, 5, 5, 9, 9, 257], [3, 6])
    assert (second.input_ids, second.reply_bounds) == ([5, 5, 5, 0, 1, 2, 3, 4], [3, 8])
    assert first.origin == {"file": "p.jsonl", "line": 3, "sha256": "ab"}
    assert counts.truncated == 1 and rejected(out) == [(3, "no_supervised_tokens")]


# The split


def test_split_is_stable_under_insertion_order_and_shard_size(tokenizer, tmp_path):
    def split(rows, **settings):
        frame = run(tokenizer, tmp_path, rows, **settings)[1]
        return dict(zip(frame.sample_id, frame.split, strict=True))

    rows = list(map(exchange, range(40)))
    before = split(rows)
    assert 2 < sum(which == "validation" for which in before.values()) < 20
    after = split([exchange(99), *reversed(rows), exchange(98)], shard_size=7)
    assert {key: after[key] for key in before} == before
    assert split(rows, seed=1) != before
    assert set(split(rows, validation_fraction=0).values()) == {"train"}


@given(st.integers(0, 2**32), st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_larger_fraction_only_adds_to_the_validation_samples(seed, a, b):
    small, large = sorted((a, b))
    assert not shards.is_drawn("x", seed, small) or shards.is_drawn("x", seed, large)


def test_names_fit_the_wildcard_of_the_workflow():
    assert all(re.fullmatch(r"\d{5}|tail_\d+", name) for name, _ in shards.plan_shards(1000, 48))
