"""Acceptance figures against cases counted by hand."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib import acceptance
from eagle3lib.acceptance import NgramDrafter, Pass, judge


def test_histogram_of_an_engine_gives_the_same_figures():
    passes = [Pass(3, k) for k in (0, 2, 1, 0, 3, 1, 0)]
    histogram = [3, 2, 1, 1]
    assert acceptance.summarize(acceptance.of_histogram(histogram, 3), 3) == acceptance.summarize(passes, 3)


def test_length_counts_the_bonus():
    assert acceptance.acceptance_length([0, 0]) == 1.0
    assert acceptance.acceptance_length([3, 0, 1]) == pytest.approx((4 + 1 + 2) / 3)
    assert acceptance.acceptance_length([]) is None


def test_summary_by_position():
    passes = [Pass(4, 4), Pass(4, 1), Pass(4, 0), Pass(2, 2), Pass(0, 0)]
    figures = acceptance.summarize(passes, 4)
    assert figures["drafted"] == [4, 4, 3, 3]
    assert figures["accepted"] == [3, 2, 1, 1]
    assert figures["acceptance_rate"] == [3 / 4, 2 / 4, 1 / 3, 1 / 3]
    assert figures["acceptance_length"] == (5 + 7) / 5
    assert (figures["passes"], figures["tokens"]) == (5, 12)


def test_a_position_never_drafted_has_no_rate():
    assert acceptance.summarize([Pass(1, 1)], 3)["acceptance_rate"] == [1.0, None, None]


@pytest.mark.parametrize(
    ("drafts", "wanted", "room", "emitted", "one"),
    [
        ([5, 6, 7], [5, 6, 7, 8], 9, [5, 6, 7, 8], Pass(3, 3)),
        ([5, 0, 7], [5, 6, 7, 8], 9, [5, 6], Pass(3, 1)),
        ([0, 6, 7], [5, 6, 7, 8], 9, [5], Pass(3, 0)),
        ([], [5], 9, [5], Pass(0, 0)),
        ([5, 2, 7], [5, 2, 7, 8], 9, [5, 2], Pass(1, 1)),  # the end of turn (2) was guessed: it is the bonus
        ([5, 6, 7], [5, 2, 7, 8], 9, [5, 2], Pass(1, 1)),  # it was not guessed: same figures
        ([2, 6, 7], [2, 6, 7, 8], 9, [2], Pass(0, 0)),
        ([5, 6, 7], [5, 6, 7, 8], 2, [5, 6], Pass(1, 1)),  # the limit cuts
        ([5, 6, 7], [5, 6, 7, 8], 4, [5, 6, 7, 8], Pass(3, 3)),
    ],
)
def test_judge(drafts, wanted, room, emitted, one):
    assert judge(drafts, wanted, room, stop_ids=[2]) == (emitted, one)


def test_ngram_drafter_takes_the_longest_then_the_latest_match():
    drafter = NgramDrafter(max_n=3)
    assert drafter([1, 2, 3, 9, 8, 2, 3, 7, 1, 2, 3], 3) == [9, 8, 2]  # [1 2 3] beats the later [2 3]
    assert drafter([4, 5, 6, 4, 7, 6, 4], 2) == [7, 6]  # both [6 4]? only the first is older: 4 7 follows it
    assert drafter([1, 5, 1, 6, 1], 2) == [6, 1]
    assert drafter([1, 2, 3], 4) == []
    assert drafter([7, 7], 4) == [7]
    assert drafter([], 4) == []


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=8), st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 5))
def test_every_token_of_a_reply_is_accounted_for(prompt, reply, k):
    passes = acceptance.replay(prompt, reply, k, NgramDrafter())
    assert len(reply) == 1 + acceptance.summarize(passes, k)["tokens"]
    assert all(0 <= one.accepted <= one.drafted <= k for one in passes)


def test_replay_of_a_perfect_and_of_a_silent_drafter():
    reply = list(range(10, 21))  # 11 tokens: 1 + 10
    perfect = acceptance.replay([1], reply, 4, lambda ids, k: list(range(ids[-1] + 1, ids[-1] + 1 + k)))
    assert perfect == [Pass(4, 4), Pass(4, 4)]
    assert acceptance.replay([1], reply, 4, lambda ids, k: []) == [Pass(0, 0)] * 10


def test_degenerate():
    assert acceptance.is_degenerate([1, 2, 3] * 20)
    assert not acceptance.is_degenerate(list(range(40)))
    assert not acceptance.is_degenerate([7, 7, 7])  # no two 4-grams: nothing can be said
    assert not acceptance.is_degenerate([])
    half_loop = list(range(30)) + [99] * 23  # 50 4-grams, 27 + 3 + 1 = 31 of them distinct
    assert acceptance.distinct_share(half_loop) == 31 / 50
    assert acceptance.is_degenerate(half_loop, below=0.63) and not acceptance.is_degenerate(half_loop, below=0.62)


def test_formulas_name_their_denominators():
    assert "passes + accepted drafts) / passes" in acceptance.FORMULA
    assert "/ passes in which draft k was drafted" in acceptance.RATE_FORMULA


@pytest.mark.parametrize(
    ("accepted", "reply", "limit", "kept"),
    [
        ([1, 0, 2], [4, 5, 6, 7, 8, 9, 9], 7, 3),  # 1 + 2 + 1 + 3 tokens: the limit is the last pass's end
        ([1, 0, 2], [4, 5, 6, 7, 8, 9, 9], 5, 3),  # and inside of it
        ([1, 0, 2], [4, 5, 6, 7, 8, 9, 9], 4, 2),
        ([1, 0, 2], [4, 5, 2, 7, 8, 9, 9], 7, 1),  # end of turn (2) in the first pass
        ([1, 0, 2], [4, 5, 6, 2, 8, 9, 9], 7, 2),
        ([1, 0, 2], [2, 5, 6, 7, 8, 9, 9], 7, 0),  # the prompt's own pass ended it
        ([1, 0, 2], [4, 5, 6, 7, 8, 9, 9], 1, 0),
    ],
)
def test_passes_until_the_end(accepted, reply, limit, kept):
    passes = [Pass(3, n) for n in accepted]
    assert acceptance.until_end(passes, reply, limit, stop_ids=[2]) == passes[:kept]
