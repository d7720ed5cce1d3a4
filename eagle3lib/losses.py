"""How far the draft's distribution q is from the target's p in one row, with the gradient made beside the value.

| name | value | gradient by the draft's logits |
| --- | --- | --- |
| `soft_ce` | -sum p log q | q - p |
| `kl` | sum p log(p / q): soft_ce less p's entropy, a constant | q - p |
| `lk` | -log(alpha), alpha = sum min(p, q) | q (m - [q < p]) / alpha, m = sum of q where q < p |

alpha is the chance that speculative sampling accepts a token drawn from q; `lk` is its negative log-likelihood, the
LK^alpha loss of Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative Decoding"
(arXiv:2602.23881). Like everywhere here p is the target's softmax over the draft vocabulary.

Shape letters: R rows, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# p, q, the draft's logits fp32 [R, Vd], their log-sum-exp [R] and whether the gradient is wanted -> value [R], gradient
# [R, Vd] or None. q is used up.
Loss = Callable[[Tensor, Tensor, Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def soft_cross_entropy(
    p: Tensor, q: Tensor, logits: Tensor, lse: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    value = lse - torch.linalg.vecdot(p, logits)  # -sum p log q, as p sums to 1: log q is never made
    return value, q.sub_(p) if wants_grad else None


def kl_divergence(p: Tensor, q: Tensor, logits: Tensor, lse: Tensor, wants_grad: bool) -> tuple[Tensor, Tensor | None]:
    cross, gradient = soft_cross_entropy(p, q, logits, lse, wants_grad)
    return cross - torch.special.entr(p).sum(dim=-1), gradient


def negative_log_acceptance(
    p: Tensor, q: Tensor, logits: Tensor, lse: Tensor, wants_grad: bool
) -> tuple[Tensor, Tensor | None]:
    # Two disjoint point masses overlap by nothing that fp32 can say: their loss is large, not infinite.
    alpha = torch.minimum(p, q).sum(dim=-1, keepdim=True).clamp(min=torch.finfo(q.dtype).tiny)
    value = -alpha.log().squeeze(-1)
    if not wants_grad:
        return value, None
    below = (q < p).to(q.dtype)
    mass = torch.linalg.vecdot(q, below).unsqueeze(-1)
    return value, q.div_(alpha).mul_(below.neg_().add_(mass))


LOSSES: dict[str, Loss] = {"soft_ce": soft_cross_entropy, "kl": kl_divergence, "lk": negative_log_acceptance}
