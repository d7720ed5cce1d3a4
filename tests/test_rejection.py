"""Speculative sampling keeps the target's distribution: the identity to rounding, the code by its frequencies."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3lib import rejection
from eagle3lib.acceptance import Pass

V = 4
weights = st.lists(st.integers(0, 9), min_size=V, max_size=V).filter(any)


def distribution(values):
    tensor = torch.tensor(values, dtype=torch.float64)
    return tensor / tensor.sum()


@settings(max_examples=300, deadline=None)
@given(weights, weights)
def test_one_draft_leaves_the_distribution_exactly_as_it_is(p, q):
    """Summed over what may be drafted: P(accepted and y) + P(refused) times the residual at y is p(y), for any q."""
    p, q = distribution(p), distribution(q)
    accepted = p.new_tensor([float(q[x]) and float(q[x]) * rejection.accept_probability(p, q, x) for x in range(V)])
    rest = rejection.residual(p, q)
    refused = 1 - float(accepted.sum())
    assert refused == pytest.approx(float(rest.sum()), abs=1e-9)
    total = accepted + (refused * rest / rest.sum() if rest.sum() > 0 else 0)
    torch.testing.assert_close(total, p, atol=1e-9, rtol=0)


@settings(max_examples=100, deadline=None)
@given(weights, st.floats(0, 1, exclude_max=True))
def test_a_draw_is_the_inverse_of_the_cumulated_weights(values, uniform):
    token = rejection.draw(torch.tensor(values, dtype=torch.float32), uniform)
    below = sum(values[:token])
    assert values[token] > 0 and below <= uniform * sum(values) * (1 + 1e-12)
    assert uniform * sum(values) <= below + values[token]


def chain(p, q, source):
    """Two tokens and more, drafted from q and verified against p, where each depends on the token before it."""
    drafts, proposed, rows = [], [], [p[0]]
    for _ in range(2):
        before = drafts[-1] if drafts else 0
        proposed.append(q[before])
        drafts.append(rejection.draw(q[before], source()))
        rows.append(p[drafts[-1]])
    return rejection.judge(drafts, proposed, torch.stack(rows), 9, (), source)


def expected_of_chain(p, first_two):
    return float(p[0][first_two[0]] * p[first_two[0]][first_two[1]])


@pytest.mark.parametrize("kind", ["like the target", "another", "half of the vocabulary", "one token"])
def test_frequencies_of_a_chain_are_the_targets(kind):
    """Pairs of tokens of 20,000 replies, drafted two at a time, against p(x) p(y | x): chi-squared at 15 degrees."""
    generator = torch.Generator().manual_seed(1)
    p = torch.softmax(torch.randn(V, V, generator=generator), -1)
    q = {
        "like the target": p,
        "another": torch.softmax(2 * torch.randn(V, V, generator=generator), -1),
        "half of the vocabulary": torch.tensor([[0.7, 0.3, 0.0, 0.0]] * V),
        "one token": torch.nn.functional.one_hot(p.argmax(-1), V).float(),
    }[kind]
    source, n = random.Random(2).random, 20_000
    seen, accepted = Counter(), 0
    for _ in range(n):
        emitted, one = chain(p, q, source)
        accepted += one.accepted
        while len(emitted) < 2:  # the next pass
            emitted.append(rejection.draw(p[emitted[-1]], source()))
        seen[tuple(emitted[:2])] += 1
    pairs = list(itertools.product(range(V), repeat=2))
    chi = sum((seen[x] - n * expected_of_chain(p, x)) ** 2 / (n * expected_of_chain(p, x)) for x in pairs)
    assert chi < 37.7  # exceeded once in a thousand
    if kind == "like the target":
        assert accepted == 2 * n
    else:
        assert 0.1 * n < accepted < 1.9 * n


def test_accepted_share_is_the_overlap():
    """alpha = sum of min(p, q) (Leviathan et al. 2023)."""
    p, q = distribution([5, 3, 1, 1]), distribution([1, 3, 5, 1])
    source, n = random.Random(0).random, 20_000
    drafts = [rejection.draw(q, source()) for _ in range(n)]
    passes = [rejection.judge([x], [q], torch.stack([p, p]), 9, (), source)[1] for x in drafts]
    assert sum(one.accepted for one in passes) / n == pytest.approx(float(torch.minimum(p, q).sum()), abs=0.012)


def test_ends_cut_a_pass_as_in_greedy_decoding():
    p = torch.eye(V)  # says 0 1 2 3 at the four places
    q = [p[0], p[1], p[2]]
    assert rejection.judge([0, 1, 2], q, p, 9, (), lambda: 0.5) == ([0, 1, 2, 3], Pass(3, 3))
    assert rejection.judge([0, 1, 2], q, p, 9, (1,), lambda: 0.5) == ([0, 1], Pass(1, 1))
    assert rejection.judge([0, 1, 2], q, p, 2, (), lambda: 0.5) == ([0, 1], Pass(1, 1))
    assert rejection.judge([3, 1, 2], [p[3], *q[1:]], p, 9, (), lambda: 0.5) == ([0], Pass(3, 0))
    assert rejection.judge([], [], p[:1], 9, (), lambda: 0.5) == ([0], Pass(0, 0))
