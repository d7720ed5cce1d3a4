"""Messages that cannot be a sample, each with what is said of it (tests/bad_inputs/messages)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
from word_tokenizer import word_tokenizer

from eagle3lib import chat, messages
from eagle3lib.errors import UserError
from eagle3lib.messages import Unfit
from eagle3lib.template_check import CONVERSATIONS

TESTS = Path(__file__).parent
TEMPLATES = TESTS / "templates"
FILES = sorted((TESTS / "bad_inputs/messages").glob("*.jsonl"))
CASES = [(path.stem, json.loads(line)) for path in FILES for line in path.read_text().splitlines()]
SPECIAL = ["<s>", "</s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|call|>", "<|User|>", "<|Assistant|>"]


@functools.cache
def tokenizer():
    return word_tokenizer(["hi yes"], SPECIAL, bos="<s>", eos="<|endoftext|>")


def attempt(row):
    template = TEMPLATES / f"{row.get('template', 'smollm2')}.jinja"
    options, tools = row.get("options"), row.get("tools")
    return chat.render(tokenizer(), row["messages"], template, tools=tools, options=options)


def said(error):
    return str(error).replace(f"{TEMPLATES}/", "")


@pytest.mark.parametrize(("file", "row"), CASES, ids=[f"{file}: {row['case']}" for file, row in CASES])
def test_bad_messages(file, row):
    """A `reason` is what rejected.jsonl counts it under; without one the run stops, for it concerns all samples."""
    with pytest.raises(UserError) as error:
        attempt(row)
    assert said(error.value) == row["says"]
    assert "\n" not in row["says"] and ";" in row["says"], "one line, with a remedy"
    assert getattr(error.value, "reason", None) == row["reason"]


def test_arguments_nested_too_deeply_for_json():
    deep = '{"a":' * 100_000 + "1" + "}" * 100_000
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "sky", "arguments": deep}}]}
    with pytest.raises(Unfit, match=r"messages\[1\].tool_calls\[0\].function.arguments: nested too deeply"):
        attempt({"messages": [{"role": "user", "content": "hi"}, call]})


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_checked_messages_stay_as_they_are(name):
    """What the readers have checked is checked again by `chat`."""
    once = messages.check(CONVERSATIONS[name]["messages"])
    assert messages.check(once) == once
    tools = messages.check_tools(CONVERSATIONS[name].get("tools"))
    assert messages.check_tools(tools) == tools


def test_older_names_of_calls_and_results():
    call = {"role": "assistant", "content": None, "function_call": {"name": "sky", "arguments": ""}}
    result = {"role": "function", "name": "sky", "content": "blue"}
    checked = messages.check([{"role": "user", "content": "hi"}, call, result])
    assert checked[1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": {"name": "sky", "arguments": {}}}],
        },
        {"role": "tool", "content": "blue", "name": "sky"},
    ]


def test_there_are_many():
    assert len(CASES) >= 65
    assert len({row["case"] for _, row in CASES}) == len(CASES)
