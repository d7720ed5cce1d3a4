"""Public families of chat templates: the ids and what is supervised of them, written out (tests/templates)."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import yaml
from slow_tokenizer import SlowTokenizer
from word_tokenizer import read, word_tokenizer, written

from eagle3lib import chat
from eagle3lib.errors import UserError
from eagle3lib.template_check import CONVERSATIONS

FOLDER = Path(__file__).parent / "templates"
FAMILIES = {path.stem: yaml.safe_load(path.read_text()) for path in sorted(FOLDER.glob("*.yaml"))}
CASES = [(family, name, case) for family, about in FAMILIES.items() for name, case in about["cases"].items()]


@functools.cache
def tokenizer(family):
    about = FAMILIES[family]
    texts = [
        (FOLDER / f"{family}.jinja").read_text().replace("\\n", " "),
        json.dumps(CONVERSATIONS),
        "\n\t 2026 Jan January 01 medium low",
    ]
    return word_tokenizer(texts, about["special"], about.get("plain", ()), about.get("bos"), about["eos"])


@functools.cache
def without_offsets(family):
    return SlowTokenizer(tokenizer(family))


def rendered(family, case, tokenizer):
    one = CONVERSATIONS[case["conversation"]]
    return chat.render(
        tokenizer,
        one["messages"],
        FOLDER / f"{family}.jinja",
        case.get("train_on", "all"),
        reasoning=case.get("reasoning", True),
        tools=one.get("tools"),
        options=case.get("options"),
    )


@pytest.mark.parametrize(("family", "name", "case"), CASES, ids=[f"{family}-{name}" for family, name, _ in CASES])
def test_family(family, name, case):
    if "refused" in case:
        with pytest.raises(UserError) as error:
            rendered(family, case, tokenizer(family))
        assert case["refused"] in str(error.value)
        return
    found = rendered(family, case, tokenizer(family))
    assert written(tokenizer(family), found.input_ids, found.reply_bounds) == " ".join(case["tokens"].split())
    assert read(tokenizer(family), case["tokens"]) == (found.input_ids, found.reply_bounds)
    assert rendered(family, case, without_offsets(family)) == found
    assert tokenizer(family).unk_token_id not in found.input_ids and "<unk>" not in case["tokens"]


def test_families_are_there():
    assert len(FAMILIES) >= 12
    for family, about in FAMILIES.items():
        kinds = {case["conversation"] for case in about["cases"].values()}
        assert {"single", "multi with system", "tools", "thinking"} <= kinds, f"{family}: {kinds}"
