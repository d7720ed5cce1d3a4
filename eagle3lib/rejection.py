"""Speculative sampling: whatever is drafted, the tokens come from the target's own distribution.

Leviathan et al. 2023 and Chen et al. 2023: a draft x that was drawn from q is accepted with probability
min(1, p(x) / q(x)), p being the target's distribution there; in place of the first refused one comes a draw from the
residual max(p - q, 0) / sum max(p - q, 0); when none is refused, one more token is drawn from p. So for every token y

    q(y) min(1, p(y) / q(y)) + P(refused) residual(y) = min(q(y), p(y)) + max(p(y) - q(y), 0) = p(y).

This holds for any q, also for one that knows a part of the vocabulary only, and for a draft that was not drawn but
chosen (q is 1 there): then x is accepted with probability p(x), which is how SGLang and vLLM draft unless told
otherwise.

Shape letters: V vocabulary, K drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eagle3lib.acceptance import Pass, cut


def accept_probability(p: Tensor, q: Tensor, token: int) -> float:
    """min(1, p(x) / q(x)); p, q [V] are distributions and q(x) > 0."""
    return min(1.0, float(p[token]) / float(q[token]))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What is left of p [V] where q [V] was refused, not normalised."""
    return (p - q).clamp_min(0)


def draw(weights: Tensor, uniform: float) -> int:
    """The token at which the cumulated weights [V] (of any sum > 0) pass `uniform` in [0, 1) of their sum."""
    cumulated = weights.double().cumsum(-1)
    return int(torch.searchsorted(cumulated, uniform * cumulated[-1], right=True))


def judge(
    drafts: Sequence[int],
    q: Sequence[Tensor],
    p: Tensor,
    room: int,
    stop_ids: Sequence[int],
    uniform: Callable[[], float],
) -> tuple[list[int], Pass]:
    """Verification of one chain of K drafts, drawn from the distributions q (K of [V]), against p [K+1, V].

    As `acceptance.judge` otherwise: the emitted tokens, cut at a stop token or at `room`, and the Pass. `uniform` gives
    independent numbers in [0, 1).
    """
    emitted: list[int] = []
    for place, token in enumerate(drafts):
        if uniform() >= accept_probability(p[place], q[place], token):
            rest = residual(p[place], q[place])
            # p = q to the last bit leaves nothing to draw from, and refuses with probability 0 but for rounding.
            emitted.append(draw(rest if float(rest.sum()) > 0 else p[place], uniform()))
            break
        emitted.append(token)
    else:
        emitted.append(draw(p[len(drafts)], uniform()))
    return cut(emitted, len(drafts), room, stop_ids)
