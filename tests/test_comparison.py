"""Intervals that hold what they say, paired differences, and tables."""

from __future__ import annotations

import numpy as np
import pytest

from eagle3lib import comparison


def replies(passes, accepted, degenerate=()):
    rows = zip(passes, accepted, strict=True)
    return [
        {"question": n, "turn": 0, "passes": p, "accepted": a, "degenerate": n in degenerate}
        for n, (p, a) in enumerate(rows)
    ]


def row(draft, of, temperature=0.0):
    figures = {"acceptance_length": 2.0, "acceptance_rate": [0.5, None], "replies_counted": 2, "degenerate": 1}
    others = {"specforge": 2.1, "sglang_mean": 2.2, "vllm": None}
    bucket = {"context": "0-2k", "passes": 9, "acceptance_length": 2.0, "acceptance_rate": [0.5, None]}
    place = {"draft": draft, "set": "mt-bench", "temperature": temperature}
    return {**place, **figures, "others": others, "buckets": [bucket], "replies": of}


def measured(draft, of, **about):
    chain = {"draft_steps": 4, "topk": 1, "draft_tokens": 5, "max_new_tokens": 64, "measured_by": "here"}
    return {"about": chain | about, "rows": [row(draft, of)], "throughput": []}


def test_counts_pool_turns_and_leave_degenerate_replies_out():
    rows = replies([3, 4, 5], [1, 2, 3], degenerate=[1])
    rows += [{"question": 0, "turn": 1, "passes": 7, "accepted": 2, "degenerate": False}]
    rows += [{"question": 1, "turn": 1, "passes": 7, "accepted": 2, "degenerate": False}]
    rows += [{"question": 4, "turn": 0, "passes": 0, "accepted": 0, "degenerate": False}]
    assert comparison.counts(rows) == {0: (10, 3), 1: (7, 2), 2: (5, 3)}
    assert comparison.counts(rows, {(0, 1)}) == {0: (3, 1), 1: (11, 4), 2: (5, 3)}


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """400 samples of 40 questions of unlike lengths and rates; true length 2: about 380 intervals hold it."""
    random = np.random.default_rng(3)
    held = 0
    for trial in range(400):
        passes = random.integers(5, 60, 40)
        accepted = random.binomial(passes * 4, random.beta(2, 6, 40))  # mean rate 1/4 of 4 drafts
        low, high = comparison.interval(dict(enumerate(zip(passes, accepted, strict=True))), trial, 500)
        held += low <= 2.0 <= high
    assert 0.90 <= held / 400 <= 0.98


def test_alike_questions_leave_no_doubt_and_none_no_interval():
    assert comparison.interval(dict.fromkeys(range(5), (10, 5))) == pytest.approx([1.5, 1.5])
    assert comparison.interval({}) is None
    assert comparison.interval({0: (10, 0)}, resamples=10) == [1.0, 1.0]


def test_the_same_draft_differs_by_nothing():
    a = comparison.counts(replies([9, 20, 4], [3, 30, 2]))
    assert comparison.difference(a, a) == {"questions": 3, "difference": 0.0, "low": 0.0, "high": 0.0}


def test_pairing_sees_what_the_questions_spread_hides():
    """Each question gives `b` one accepted draft more; the questions differ by far more than that."""
    a = {n: (20, 4 * n) for n in range(20)}
    b = {n: (20, 4 * n + 2) for n in range(20)}
    found = comparison.difference(a, b)
    assert found["difference"] == pytest.approx(0.1) and found["low"] > 0.09 and found["high"] < 0.11
    (low_a, high_a), (low_b, _) = comparison.interval(a), comparison.interval(b)
    assert low_a < low_b < high_a  # the intervals alone overlap


def test_only_questions_of_both_are_compared():
    a, b = {0: (10, 5), 1: (10, 9)}, {0: (10, 6), 2: (10, 0)}
    assert comparison.difference(a, b)["questions"] == 1
    assert comparison.difference(a, b)["difference"] == pytest.approx(0.1)
    assert comparison.difference(a, {7: (1, 1)}) == {"questions": 0, "difference": None, "low": None, "high": None}


def test_differences_are_to_the_first_draft_by_set_and_temperature():
    ours = [row("ours", replies([9], [3])), row("ours", replies([9], [1]), 1.0)]
    (found,) = comparison.compare([{"rows": ours}, {"rows": [row("theirs", replies([9], [6]))]}])
    assert (found["draft"], found["less"], found["temperature"]) == ("theirs", "ours", 0.0)
    assert found["difference"] == pytest.approx(3 / 9)


def test_a_reply_degenerate_with_either_draft_is_compared_with_neither():
    ours, theirs = row("ours", replies([9, 9], [9, 0], [0])), row("theirs", replies([9, 9], [0, 3]))
    (found,) = comparison.compare([{"rows": [ours]}, {"rows": [theirs]}])
    assert (found["questions"], found["difference"]) == (1, pytest.approx(3 / 9))


def test_a_draft_by_another_name():
    one = comparison.named(measured("ours", replies([9], [3])), "theirs")
    assert [r["draft"] for r in one["rows"]] == ["theirs"] and one["about"]["topk"] == 1


def test_tables_say_the_settings_once_and_miss_no_figure():
    of = replies([9, 8], [3, 4])
    same = comparison.describe([measured("ours", of), measured("theirs", of)])
    assert same.startswith("draft_steps 4, topk 1, draft_tokens 5, max_new_tokens 64")
    assert "| theirs | mt-bench | 0 | 2.000 [" in same and "| 0.500 - | 2 (1) | 2.100 | 2.200 | - |" in same
    assert "| theirs | ours | mt-bench | 0 | 2 | +0.000 | [+0.000, +0.000] |" in same
    other = comparison.describe([measured("ours", of), measured("theirs", of, draft_steps=3)])
    assert "theirs: draft_steps 3" in other and "ours: draft_steps 4" in other
    for line in same.splitlines():
        assert not line.startswith("|") or line.count("|") in (8, 10), line


def test_a_result_keeps_intervals_in_place_of_replies():
    of = replies([9, 8], [3, 4])
    result = comparison.result([measured("ours", of), measured("theirs", of)])
    assert all("replies" not in one and len(one["interval"]) == 2 for one in result["rows"])
    assert len(result["about"]) == 2 and len(result["differences"]) == 1
