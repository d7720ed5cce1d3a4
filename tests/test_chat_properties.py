"""For any messages: the mask covers exactly the replies, the ids write exactly the text, shards permute the samples."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_tokenizer import SlowTokenizer
from tiny import CHATML, make_tokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from eagle3lib import chat, shards
from eagle3lib.config import DatasetConfig
from eagle3lib.messages import reasoning_and_answer

MARKED = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' %}{% generation %}"
    "{{ m['content'] + '<|im_end|>' }}{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12) | st.text("ab \n\t.é日🙂", max_size=12)
MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), TEXT), max_size=5)


def conversation(turns):
    return [{"role": role, "content": text} for role, text in [("user", "hi"), *turns]]


def greedy_tokenizer():
    """Merges newlines, blanks and what stands around them, wherever it may."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<|im_start|>", "<|im_end|>"], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    core.train_from_iterator(["assistant\na", "\n\n", "assistant\n\n", "\n ", "\na b.\n", "日\n"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", chat_template=CHATML)


FAST, GREEDY = make_tokenizer(), greedy_tokenizer()
SLOW = SlowTokenizer(FAST)
SLOW_GREEDY = SlowTokenizer(GREEDY)


@pytest.fixture(scope="module")
def marked_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("template") / "marked.jinja"
    path.write_text(MARKED)
    return path


def chatml(messages):
    """The text, and its pieces: (is it a reply?, text)."""
    pieces = []
    for message in messages:
        is_reply = message["role"] == "assistant"
        pieces += [
            (False, f"<|im_start|>{message['role']}\n"),
            (is_reply, f"{message['content']}<|im_end|>"),
            (False, "\n"),
        ]
    return "".join(text for _, text in pieces), pieces


def decoded(tokenizer, ids):
    return tokenizer.decode(
        ids, skip_special_tokens=False, clean_up_tokenization_spaces=False, spaces_between_special_tokens=False
    )


def assert_exact(tokenizer, messages, rendered):
    text, pieces = chatml(messages)
    assert decoded(tokenizer, rendered.input_ids) == text
    replies = [piece for is_reply, piece in pieces if is_reply]
    assert [decoded(tokenizer, rendered.input_ids[start:end]) for start, end in rendered.reply_bounds] == replies
    assert [decoded(tokenizer, rendered.input_ids[:start]) for start, _ in rendered.reply_bounds] == [
        "".join(text for _, text in pieces[:i]) for i, (is_reply, _) in enumerate(pieces) if is_reply
    ]


@settings(max_examples=30, deadline=None)
@given(MESSAGES)
def test_mask_covers_exactly_the_replies(marked_file, turns):
    messages = conversation(turns)
    rendered = chat.render(FAST, messages)
    assert_exact(FAST, messages, rendered)
    assert chat.render(FAST, messages, marked_file) == rendered
    assert chat.render(SLOW, messages) == rendered
    last = chat.render(FAST, messages, train_on="last")
    assert last == chat.Rendered(rendered.input_ids, rendered.reply_bounds[-1:])


@settings(max_examples=30, deadline=None)
@given(MESSAGES)
def test_prompt_is_what_precedes_the_reply(turns):
    messages = conversation(turns)
    rendered = chat.render(FAST, messages)
    replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    for index, (start, _) in zip(replies, rendered.reply_bounds, strict=True):
        assert chat.prompt_ids(FAST, messages[:index]) == rendered.input_ids[:start]


@settings(max_examples=60, deadline=None)
@given(MESSAGES)
@pytest.mark.parametrize("tokenizer", [GREEDY, SLOW_GREEDY], ids=["fast", "slow"])
def test_greedy_tokens_are_exact_or_refused(tokenizer, turns):
    """A tokenizer that merges across the header of a reply: refused exactly where it does."""
    messages = conversation(turns)
    text, pieces = chatml(messages)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    ends = {
        len(decoded(tokenizer, ids[:count]))
        for count in range(len(ids) + 1)
        if text.startswith(decoded(tokenizer, ids[:count]))
    }
    starts, at = [], 0
    for is_reply, piece in pieces:
        starts += [at] * is_reply
        at += len(piece)
    try:
        rendered = chat.render(tokenizer, messages)
    except chat.UnalignedReply:
        assert not ends.issuperset(starts)
    else:
        assert ends.issuperset(starts)
        assert_exact(tokenizer, messages, rendered)


@settings(max_examples=30, deadline=None)
@given(TEXT, TEXT)
@pytest.mark.parametrize("tokenizer", [FAST, SLOW], ids=["fast", "slow"])
def test_no_token_of_the_thinking_is_supervised(tokenizer, thinking, answer):
    content = f"<think>\n{thinking}\n</think>\n\n{answer}"
    messages = conversation([("assistant", content)])
    [(start, end)] = chat.render(tokenizer, messages).reply_bounds
    rendered = chat.render(tokenizer, messages, reasoning=False)
    [(first, last)] = rendered.reply_bounds
    reasoning, _ = reasoning_and_answer(messages[1])
    assert last == end and start <= first
    supervised = decoded(tokenizer, rendered.input_ids[first:last])
    wanted = content[content.index(reasoning, len("<think>")) + len(reasoning) :] if reasoning else content
    assert supervised == f"{wanted}<|im_end|>"


@settings(max_examples=15, deadline=None)
@given(st.lists(MESSAGES, min_size=1, max_size=9), st.integers(1, 5), st.integers(0, 3))
def test_sharding_is_a_permutation(many, shard_size, seed):
    """Each sample lies in one slot of one shard, in the order of the input, with the replies that it has alone."""
    rows = [conversation([*turns, ("assistant", "yes")]) for turns in many]
    alone = [chat.render(FAST, messages) for messages in rows]
    wanted = {tuple(one.input_ids): [b for span in one.reply_bounds for b in span] for one in alone}
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder, "in.jsonl"), Path(folder, "out")
        source.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
        dataset = DatasetConfig(name="d", conversations=["x"], shard_size=shard_size, seed=seed)
        shards.shard_samples([source], FAST, dataset, out, vocab_size=len(FAST))
        files = json.loads((out / "shards.json").read_text())
        samples = [sample for name in files for sample in shards.read_shard(out / "shards" / f"{name}.jsonl")]
    assert [(tuple(one.input_ids), one.reply_bounds) for one in samples] == list(wanted.items())
