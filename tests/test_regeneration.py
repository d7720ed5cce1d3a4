"""Regeneration with a real engine on a random small target: resumed, cut to a budget, in prompt order."""

import itertools
import json

import pytest
from tiny import make_target, make_tokenizer, write_conversations

from eagle3lib import samples
from eagle3lib.chat import prompt_ids
from eagle3lib.config import DatasetConfig, RegenerateConfig
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError
from eagle3lib.regeneration import regenerate, reply_key

CFG = RegenerateConfig(max_new_tokens=12, batch_size=4)
WHO = ["fingerprint", "transformers", "float32"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return TransformersEngine(make_target(tmp_path_factory.mktemp("target"), layers=4))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = write_conversations(tmp_path_factory.mktemp("input") / "in.jsonl", 24)
    return list(samples.read([path]))


class Cut(TransformersEngine):
    """The same engine, ended in the middle: after `n` replies."""

    def __init__(self, engine, n):
        self.__dict__.update(engine.__dict__, n=n)

    def generate(self, *args, **kwargs):
        yield from itertools.islice(super().generate(*args, **kwargs), self.n)
        raise ConnectionError("power cut")


def run(folder, conversations, engine, cfg=CFG, budget=None, name="a.000", max_tokens=128, out="out.jsonl", who=WHO):
    opened = []
    counts = regenerate(
        iter(conversations), make_tokenizer(), lambda: opened.append(1) or engine, dataset(max_tokens), cfg, who,
        budget, folder / "store", folder / out, name,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / out).read_text().splitlines()]
    return counts | {"opened": len(opened)}, rows


def dataset(max_tokens):
    return DatasetConfig(name="d", conversations=["in.jsonl"], max_tokens=max_tokens)


def stored(folder):
    return [line for path in sorted((folder / "store").glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def test_replies_are_the_targets_own_in_prompt_order(tmp_path, conversations, engine):
    counts, rows = run(tmp_path, conversations, engine)
    prompts = [prompt_ids(make_tokenizer(), one.messages[:1]) for one in conversations]
    assert [row["prompt_ids"] for row in rows] == prompts
    assert [row["reply_ids"] for row in rows] == engine.greedy(prompts, 12)
    assert all((row["reply_ids"][-1] == 2) == (row["finish"] == "stop") for row in rows)
    assert [(r["file"], r["line"], r["sha256"]) for r in rows] == [(c.file, c.line, c.sha256) for c in conversations]
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in rows)
    total = sum(len(row["reply_ids"]) for row in rows)
    assert counts == {"prompts": 24, "found": 0, "computed": 24, "reply_tokens": total, "opened": 1}
    replies = list(samples.read_replies([tmp_path / "out.jsonl"]))
    assert [reply.reply_ids for reply in replies] == [row["reply_ids"] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resume_computes_only_what_is_missing(tmp_path, conversations, engine, temperature):
    cfg = CFG.model_copy(update={"temperature": temperature})
    _, whole = run(tmp_path / "whole", conversations, engine, cfg)
    with pytest.raises(ConnectionError):
        run(tmp_path, conversations, Cut(engine, 9), cfg)
    assert len(stored(tmp_path)) == 9
    assert not (tmp_path / "out.jsonl").exists()
    with open(tmp_path / "store" / "a.000.jsonl", "ab") as file:
        file.write(b'{"key": "torn", "reply_i')  # killed while writing
    counts, rows = run(tmp_path, conversations, engine, cfg)
    assert (counts["found"], counts["computed"]) == (9, 15)
    assert rows == whole
    assert len(stored(tmp_path)) == 25  # the torn line among them, ended
    counts, again = run(tmp_path, conversations, engine, cfg, name="b.000", out="again.jsonl")
    assert (counts["found"], counts["computed"], counts["opened"]) == (24, 0, 0)
    assert again == whole


def test_other_settings_and_targets_have_other_keys():
    ids = [1, 2, 3]
    assert reply_key(ids, CFG, WHO) == reply_key(ids, CFG.model_copy(update={"batch_size": 1, "seed": 3}), WHO)
    sampled = CFG.model_copy(update={"temperature": 1.0})
    keys = {
        reply_key(ids, CFG, WHO), reply_key([1, 2], CFG, WHO), reply_key(ids, CFG, ["other", *WHO[1:]]),
        reply_key(ids, CFG.model_copy(update={"max_new_tokens": 13}), WHO), reply_key(ids, sampled, WHO),
        reply_key(ids, sampled.model_copy(update={"seed": 1}), WHO),
        reply_key(ids, sampled.model_copy(update={"top_p": 0.5}), WHO),
    }  # fmt: skip
    assert len(keys) == 7


@pytest.mark.parametrize("budget", [1, 60, 130])
def test_budget_cuts_to_the_smallest_prefix(tmp_path, conversations, engine, budget):
    """The same cut whatever the batch size (so the order in which replies end), resumed or not."""
    _, whole = run(tmp_path / "whole", conversations, engine)
    sizes = list(itertools.accumulate(len(row["reply_ids"]) for row in whole))
    assert sizes[-1] > budget
    expected = whole[: next(i for i, size in enumerate(sizes) if size >= budget) + 1]
    for batch_size in (1, 4, 16):
        folder = tmp_path / str(batch_size)
        cfg = CFG.model_copy(update={"batch_size": batch_size})
        counts, rows = run(folder, conversations, engine, cfg, budget)
        assert rows == expected
        assert counts["reply_tokens"] >= budget
        assert len(stored(folder)) <= len(expected) + batch_size, "no more than a batch is computed in vain"
    with pytest.raises(ConnectionError):
        run(tmp_path / "cut", conversations, Cut(engine, len(expected) // 2), CFG, budget)
    assert run(tmp_path / "cut", conversations, engine, CFG, budget)[1] == expected
    assert run(tmp_path / "whole", conversations, engine, CFG, budget)[1] == expected  # more is stored than needed


def test_repeated_prompts_are_answered_once(tmp_path, conversations, engine):
    doubled = [conversations[0], *conversations[:3], conversations[1]]
    counts, rows = run(tmp_path, doubled, engine)
    assert (counts["computed"], counts["prompts"]) == (3, 5)
    assert rows[0]["reply_ids"] == rows[1]["reply_ids"]
    assert counts["reply_tokens"] == sum(len(rows[i]["reply_ids"]) for i in (0, 2, 3))


def test_what_cannot_be_answered_is_marked(tmp_path, conversations, engine):
    long = samples.Conversation([{"role": "user", "content": "long " * 100}], "in.jsonl", 98, "x")
    silent = samples.Conversation([{"role": "assistant", "content": "hello"}], "in.jsonl", 99, "y")
    counts, rows = run(tmp_path, [long, conversations[0], silent], engine)
    assert [row["finish"] for row in rows][::2] == ["too_long", "no_prompt"]
    assert rows[0]["reply_ids"] == rows[2]["reply_ids"] == []
    assert counts["computed"] == 1


def test_a_template_that_cannot_render_names_the_line(tmp_path, conversations, engine):
    broken = make_tokenizer()
    broken.chat_template = "{{ raise_exception('no system prompt please') }}"
    with pytest.raises(UserError, match=r"in.jsonl:1: .*no system prompt please"):
        regenerate(conversations, broken, lambda: engine, dataset(128), CFG, WHO, None, tmp_path, tmp_path / "o", "a")
