"""Near copies, questions of the evaluation, languages: left out or counted, with their reason."""

from __future__ import annotations

import json
import random

import pytest

from eagle3lib import curation, samples
from eagle3lib.config import AcceptanceConfig, DatasetConfig

WORDS = "river city letter machine school water music history token number people language energy night".split()


def conversation(line: int, *said: str) -> samples.Conversation:
    roles = ("user", "assistant") * len(said)
    messages = [{"role": role, "content": text} for role, text in zip(roles, said, strict=False)]
    return samples.Conversation(messages, "in.jsonl", line, "00")


def dataset(**settings) -> DatasetConfig:
    return DatasetConfig(**{"name": "d", "conversations": ["x"]} | settings)


def sentence(seed: int, words: int = 60) -> str:
    return " ".join(random.Random(seed).choices(WORDS, k=words))


def curate(conversations, asked=(), prompts_only=False, **settings):
    return list(curation.Curator(dataset(**settings), asked, prompts_only).curate(conversations))


def reasons(conversations, *args, **settings):
    return [one.unfit and one.unfit[0] for one in curate(conversations, *args, **settings)]


def test_words():
    assert curation.words("Don't stop, 42 times!") == ["don", "t", "stop", "42", "times"]
    assert curation.words("天気はいいgood日") == ["天", "気", "は", "い", "い", "good", "日"]


def test_near_copies_are_left_out_and_the_first_stays():
    pytest.importorskip("datasketch")
    text = sentence(1)
    almost, half = text.replace("river", "RIVER!", 1), sentence(1, 30) + " " + sentence(2, 30)
    given = [conversation(1, text, "yes"), conversation(2, almost, "yes"), conversation(3, half, "yes")]
    first, copy, other = curate(given, near_duplicates=0.8)
    assert (first.unfit, other.unfit) == (None, None)
    assert copy.unfit == ("near_duplicate", "100% of its words as in in.jsonl:1")
    assert reasons(given, near_duplicates=None) == [None] * 3
    assert reasons(given, near_duplicates=0.2) == [None, "near_duplicate", "near_duplicate"]


def test_near_copies_found_agree_with_the_similarities_written_out():
    """Of 60 pairs whose Jaccard similarity is known, those far from the threshold are told right."""
    pytest.importorskip("datasketch")

    def shingles(text):
        said = curation.words(text)
        return {tuple(said[i : i + curation.SHINGLE]) for i in range(len(said) - curation.SHINGLE + 1)}

    told = 0
    for seed in range(60):
        rng, text = random.Random(seed), sentence(1000 + seed, 200).split()
        changed = [word if rng.random() > seed / 300 else "changed" for word in text]
        a, b = " ".join(text), " ".join(changed)
        similarity = len(shingles(a) & shingles(b)) / len(shingles(a) | shingles(b))
        if abs(similarity - 0.6) > 0.2:
            found = reasons([conversation(1, a), conversation(2, b)], near_duplicates=0.6)[1]
            assert (found == "near_duplicate") == (similarity > 0.6), (seed, similarity)
            told += 1
    assert told > 20


def test_near_copies_do_not_depend_on_the_process_but_on_the_seed():
    pytest.importorskip("datasketch")
    given = [conversation(i, sentence(i % 30, 40) + f" {i}", "yes") for i in range(60)]
    once = reasons(given, near_duplicates=0.7, seed=3)
    assert once == reasons(given, near_duplicates=0.7, seed=3) and once.count("near_duplicate") > 20


def test_replies_to_come_are_not_compared():
    pytest.importorskip("datasketch")
    given = [conversation(1, "What is the capital of France?", sentence(1)), conversation(2, "Why?", sentence(1))]
    assert reasons(given, near_duplicates=0.8) == [None, "near_duplicate"]
    assert reasons(given, (), True, near_duplicates=0.8) == [None, None]
    asked_again = conversation(3, "what is THE capital of France", sentence(2))
    assert reasons([given[0], asked_again], (), True, near_duplicates=0.8) == [None, "near_duplicate"]


def test_questions_of_the_evaluation_are_left_out():
    question = sentence(5, 40)
    asked = [("eval.jsonl:7", question), ("eval.jsonl:8", "Who is he?")]
    inside = "Please: " + " ".join(question.split()[10:25]) + " and so on"
    given = [
        conversation(1, inside, "yes"),
        conversation(2, " ".join(question.split()[:12]), "yes"),  # twelve words alone
        conversation(3, "who is he", "nobody"),
        conversation(4, "Tell me, who is he?", "nobody"),
        conversation(5, "no", f"The question is {question}"),
    ]
    found = curate(given, asked, decontaminate_words=13)
    assert [one.unfit and one.unfit[0] for one in found] == ["contaminated", None, "contaminated", None, "contaminated"]
    assert found[0].unfit[1] == "shares words with eval.jsonl:7"
    assert reasons(given, asked) == [None] * 5


def test_questions_come_from_prompts_and_sets(tmp_path):
    prompts, own = tmp_path / "prompts.jsonl", tmp_path / "own.jsonl"
    prompts.write_text(json.dumps({"prompt": "one"}) + "\n")
    own.write_text(json.dumps({"turns": ["two", "three"]}) + "\n")
    cfg = AcceptanceConfig(prompts=[str(prompts)], sets=[f"own:{own}"])
    found = list(curation.questions([prompts], cfg, tmp_path))
    assert found == [(f"{prompts}:1", "one"), ("own:own question 1", "two"), ("own:own question 1", "three")]


def test_what_is_unfit_already_keeps_its_reason():
    one = samples.Conversation([], "in.jsonl", 1, "00", unfit=("media", "an image"))
    assert curate([one], [("x", "")], decontaminate_words=3) == [one]


def test_languages():
    pytest.importorskip("py3langid")
    assert curation.language("The weather is nice today, and we walk along the river.") == "en"
    assert curation.language("Das Wetter war heute schön, und wir gingen am Fluss spazieren.") == "de"
    assert curation.language("今日は天気がいいので、川沿いを歩きます。") == "ja"
    assert curation.language("12 + 3") == "-"
