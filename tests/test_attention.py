"""Which blocks CUDA's path meets, and flex_attention itself on the CPU; equality of the paths: with the trainer's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from test_training_time_test import dense_flex, dense_mask, listed_blocks
from torch._subclasses.fake_tensor import FakeTensorMode

from eagle3lib import attention
from eagle3lib.attention import View


def written_out(rows, lengths):
    """bool [N, T]: slot by slot."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    seen = torch.zeros(len(rows), sum(lengths), dtype=torch.bool)
    for i, row in enumerate(rows.tolist()):
        start = max(s for s in starts if s <= row)
        seen[i, start : row + 1] = True
    return seen


def some_view(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(rng.randint(1, 5))]
    chosen = [i for i in range(sum(lengths)) if rng.random() < 0.6] or [0]
    return torch.tensor(chosen), lengths


@pytest.mark.parametrize("seed", range(20))
def test_blocks_are_those_that_the_mask_meets(seed, monkeypatch):
    monkeypatch.setattr(attention, "BLOCK", 8)
    rows, lengths = some_view(seed)
    expected = written_out(rows, lengths)
    blocks = attention.block_mask(View.of(rows, lengths))
    assert torch.equal(dense_mask(blocks), expected)
    size = (-(-len(rows) // 8), -(-sum(lengths) // 8))
    padded = torch.zeros(size[0] * 8, size[1] * 8, dtype=torch.bool)
    padded[: len(rows), : sum(lengths)] = expected
    tiles = padded.view(size[0], 8, size[1], 8)
    met = listed_blocks(blocks.kv_num_blocks, blocks.kv_indices) | listed_blocks(
        blocks.full_kv_num_blocks, blocks.full_kv_indices
    )
    assert torch.equal(met, tiles.any(3).any(1)), "no block is met for nothing"


def test_blocks_are_found_without_looking_at_a_value():
    """On a GPU nobody waits for it."""
    view = View.of(torch.arange(5, 300), [150, 150])
    with FakeTensorMode():
        fake = replace(view, rows=torch.empty(295, dtype=torch.int64), starts=torch.empty(295, dtype=torch.int64))
        assert attention.block_mask(fake).shape == (1, 1, 295, 300)


def test_spans_and_starts():
    view = View.of(torch.tensor([1, 2, 9, 11]), [4, 3, 2, 6])
    assert view.spans == ((0, 4, 0, 2), (9, 15, 2, 4)) and view.tokens == 15
    assert view.starts.tolist() == [0, 0, 9, 9]
    assert View.of(torch.tensor([], dtype=torch.int64), [4]).spans == ()


def test_flex_attention_gives_what_the_tests_write_out():
    """Forward, on the CPU: mask function, blocks, grouped heads, narrower values, log-sum-exp."""
    rows, lengths = torch.arange(40, 300, 2), [170, 140]
    view = View.of(rows, lengths)
    blocks = attention.block_mask(view)
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, 4, len(rows), 16, generator=g)
    k, v = torch.randn(1, 2, 310, 16, generator=g), torch.randn(1, 2, 310, 8, generator=g)
    for ours, theirs in zip(attention._flex(q, k, v, blocks), dense_flex(q, k, v, blocks), strict=True):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(dense_mask(blocks), written_out(rows, lengths))


def test_merged_flex_equals_the_cpus_kernel():
    rows, lengths = torch.arange(3, 60, 2), [33, 30]
    view = View.of(rows, lengths)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(len(rows), 4, 8, generator=g)
    k0, v0 = torch.randn(2, 63, 2, 8, generator=g)
    diagonal = [tuple(torch.randn(2, len(rows), 2, 8, generator=g)) for _ in range(3)]
    flex = attention.merged_attention(q, k0, v0, replace(view, blocks=attention.block_mask(view)), diagonal)
    torch.testing.assert_close(flex, attention.merged_attention(q, k0, v0, view, diagonal))
