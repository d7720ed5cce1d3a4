"""Each loss against its formula written out, by itself and where the trainer makes it: values and gradients."""

from __future__ import annotations

import pytest
import torch

from eagle3lib import training_time_test as ttt
from eagle3lib.losses import LOSSES
from eagle3lib.training_time_test import _HeadLoss

WRITTEN_OUT = {
    "soft_ce": lambda p, q: -(p * q.log()).sum(-1),
    "kl": lambda p, q: (p * (p / q).log()).sum(-1),
    "lk": lambda p, q: -torch.minimum(p, q).sum(-1).log(),
}


def distributions(rows=7, vocab=50, scale=2.0):
    g = torch.Generator().manual_seed(0)
    p = (torch.randn(rows, vocab, generator=g) * scale).softmax(-1)
    return p, (torch.randn(rows, vocab, generator=g) * scale).requires_grad_()


def loss_of(name, p, logits, wants_grad):
    return LOSSES[name](p, logits.softmax(-1), logits, logits.logsumexp(-1), wants_grad)


def test_all_losses_are_tested():
    assert WRITTEN_OUT.keys() == LOSSES.keys()


@pytest.mark.parametrize("name", LOSSES)
def test_value_and_gradient_are_the_formulas(name):
    p, logits = distributions()
    expected = WRITTEN_OUT[name](p, logits.softmax(-1))
    expected.sum().backward()
    value, gradient = loss_of(name, p, logits.detach(), True)
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-4, atol=1e-6)
    alone, none = loss_of(name, p, logits.detach(), False)
    assert none is None and torch.equal(alone, value)


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_better_than_the_target_itself(name):
    p, _ = distributions()
    value, gradient = loss_of(name, p, p.log(), True)
    if name != "lk":  # has a kink there
        torch.testing.assert_close(gradient, torch.zeros_like(p), rtol=0, atol=1e-6)
    floor = torch.special.entr(p).sum(-1) if name == "soft_ce" else torch.zeros(len(p))
    torch.testing.assert_close(value, floor, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", LOSSES)
def test_draft_that_never_agrees_has_a_finite_gradient(name):
    p, logits = torch.tensor([[1.0, 0.0]]), torch.tensor([[-200.0, 0.0]])
    value, gradient = loss_of(name, p, logits, True)
    assert value.isfinite().all() and gradient.isfinite().all()


@pytest.mark.parametrize("name", LOSSES)
def test_trainer_makes_the_gradient_of_the_whole_sum(name, monkeypatch):
    """Three steps over four chunks of rows, some slots not counted: the gradients of hidden states and head."""
    monkeypatch.setattr(ttt, "ROWS_PER_CHUNK", 3)
    g = torch.Generator().manual_seed(1)
    hidden = torch.randn(3, 12, 8, generator=g).requires_grad_()
    head = torch.randn(20, 8, generator=g).requires_grad_()
    last, target_head = torch.randn(10, 8, generator=g), torch.randn(20, 8, generator=g)
    slots = torch.stack([torch.randperm(12, generator=g)[:10] for _ in range(3)])
    weights = torch.rand(3, 10, generator=g) * (torch.rand(3, 10, generator=g) > 0.3)
    wanted = (last @ target_head.t()).argmax(-1)
    total, per_row = _HeadLoss.apply(hidden, head, last, target_head, slots, weights, wanted, LOSSES[name], True)
    ours = torch.autograd.grad(total, (hidden, head))
    p = (last @ target_head.t()).softmax(-1)
    q = torch.stack([hidden[step, slots[step]] @ head.t() for step in range(3)]).softmax(-1)
    values = WRITTEN_OUT[name](p, q)
    torch.testing.assert_close(per_row[0], values.detach())
    torch.testing.assert_close(total, (weights * values).sum())
    for one, other in zip(ours, torch.autograd.grad((weights * values).sum(), (hidden, head)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
