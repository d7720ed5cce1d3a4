"""Weights of sources: an epoch takes a sample as often as they say, and nothing else changes."""

from __future__ import annotations

from collections import Counter

import pandas
from hypothesis import given
from hypothesis import strategies as st

from eagle3lib import drafts, shards
from eagle3lib.loader import Sample, epoch_packs, taken


def samples(weights):
    return [Sample(f"{i}.pt", 10, (4, 10), "train", None, weight) for i, weight in enumerate(weights)]


@given(st.lists(st.floats(0.01, 20), min_size=1, max_size=40), st.integers(1, 12))
def test_over_the_epochs_each_sample_is_taken_as_often_as_its_weight_says(weights, epochs):
    of, indices = samples(weights), range(len(weights))
    counts = Counter(i for epoch in range(epochs) for i in taken(of, indices, epoch))
    assert all(abs(counts[i] - weight * epochs) < 1 + 1e-6 for i, weight in enumerate(weights))


@given(st.floats(0.01, 5), st.integers(0, 20))
def test_every_epoch_has_its_share_of_a_source(weight, epoch):
    of = samples([weight] * 1000)
    assert abs(len(taken(of, range(1000), epoch)) - 1000 * weight) < 5


def test_whole_weights_are_the_same_in_every_epoch():
    of = samples([1, 2, 1, 3])
    assert all(taken(of, [0, 1, 3], epoch) == [0, 1, 1, 3, 3, 3] for epoch in range(30))
    assert taken(samples([1.0] * 4), [2, 0, 1], 5) == [2, 0, 1], "as it was before there were weights"


def test_repeated_samples_fill_packs_as_others_do():
    of = samples([2, 1, 1])
    packs = epoch_packs(taken(of, range(3), 0), [10, 10, 10], 20, "0/0")
    assert Counter(i for pack in packs for i in pack) == {0: 2, 1: 1, 2: 1} and len(packs) == 2


def test_weights_come_from_the_table(tmp_path):
    columns = {"path": ["a", "b"], "n_tokens": [5, 6], "reply_bounds": [[1, 5], [2, 6]], "split": ["train"] * 2}
    table = pandas.DataFrame(columns | {"sha256": ["x", "y"], "file": ["in.jsonl"] * 2, "weight": [1.0, 2.5]})
    assert [one.weight for one in drafts.samples_of(table, tmp_path)] == [1.0, 2.5]
    assert [one.weight for one in drafts.samples_of(table.drop(columns="weight"), tmp_path)] == [1.0, 1.0]
    assert shards.weights_of(table) == [1.0, 2.5]
