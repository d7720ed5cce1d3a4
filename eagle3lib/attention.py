"""Attention of the training-time test: a slot sees the causal keys of step 0 and its own keys of the steps after.

Both parts are one softmax. The first is a flash kernel, the second a handful of dot products; they are merged by
log-sum-exp, so no [T, (i+1)T] mask ever exists. Three ways to one result:

- on the CPU its flash kernel, with the gradients of the merged softmax (`_MergedFlash`);
- on CUDA flex_attention with a block mask, whose log-sum-exp has a gradient;
- the scores written out, for other devices and dtypes.

Shape letters: T tokens, N slots, D head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

BLOCK = 128  # of queries and of keys, in flex_attention's block mask

KeyValue = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class View:
    """Which tokens of step 0 the slots see: those of their document, up to their own.

    rows int64 [N]: the slots, ascending. starts int64 [N]: the first token of each one's document. spans: (start, end,
    a, b) for each document that has slots: its tokens, and which of `rows` lie in it. blocks: on CUDA.
    """

    rows: Tensor
    starts: Tensor
    spans: tuple[tuple[int, int, int, int], ...]
    tokens: int
    blocks: BlockMask | None = None

    @classmethod
    def of(cls, rows: Tensor, lengths: Sequence[int]) -> View:
        """rows: on the CPU, so that nobody waits for a device."""
        ends = torch.tensor(lengths).cumsum(0)
        cuts = torch.searchsorted(rows, ends).tolist()
        bounds = [0, *ends.tolist()]
        spans = zip(bounds[:-1], bounds[1:], [0, *cuts[:-1]], cuts, strict=True)
        kept = tuple((start, end, a, b) for start, end, a, b in spans if b > a)
        starts = torch.cat([rows.new_full((b - a,), start) for start, _, a, b in kept] or [rows])
        return cls(rows, starts, kept, bounds[-1])

    def to(self, device: torch.device) -> View:
        if device.type == "cpu":
            return self
        moved = replace(self, rows=send(self.rows, device), starts=send(self.starts, device))
        return replace(moved, blocks=block_mask(moved)) if device.type == "cuda" and len(self.rows) else moved


def send(x: Tensor, device: torch.device) -> Tensor:
    """To a device without waiting for it, which only pinned memory allows; on the same device nothing is copied."""
    pin = device.type == "cuda" and x.device.type == "cpu" and not x.is_pinned()
    return (x.pin_memory() if pin else x).to(device, non_blocking=True)


def merged_attention(q: Tensor, k0: Tensor, v0: Tensor, view: View, diagonal: Sequence[KeyValue]) -> Tensor:
    """q [N, heads, D]: the slots of `view`. k0, v0 [T, KV heads, D]: step 0, all tokens. diagonal: k, v
    [N, KV heads, D] of steps 1..i, the query's own step last. Values may be narrower than keys.

    Returns [N, heads, D of the values].
    """
    if view.blocks is not None:
        return _flex_merged(q, k0, v0, view, diagonal)
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
        narrower = q.shape[-1] - v0.shape[-1]
        if narrower:  # latent attention: the kernel takes one size only, and zeros add nothing
            wide = [(k, F.pad(v, (0, narrower))) for k, v in [(k0, v0), *diagonal]]
            return merged_attention(q, *wide[0], view, wide[1:])[..., :-narrower]
        group = q.shape[1] // k0.shape[1]
        k0, v0 = k0.repeat_interleave(group, dim=1), v0.repeat_interleave(group, dim=1)
        later = [tensor for pair in diagonal for tensor in pair]
        return _MergedFlash.apply(q, k0, v0, view, *later)
    return explicit_attention(q, k0, v0, view, diagonal)


def explicit_attention(q: Tensor, k0: Tensor, v0: Tensor, view: View, diagonal: Sequence[KeyValue]) -> Tensor:
    """`merged_attention` with the scores written out per document."""
    n, heads, size = q.shape
    q = q.view(n, k0.shape[1], -1, size) * size**-0.5
    own = [torch.einsum("nkgd,nkd->nkg", q, k).float().unsqueeze(-1) for k, _ in diagonal]
    outputs = []
    for start, end, a, b in view.spans:
        scores = torch.einsum("nkgd,tkd->nkgt", q[a:b], k0[start:end]).float()
        future = torch.arange(start, end, device=q.device) > view.rows[a:b, None]
        scores = scores.masked_fill(future[:, None, None], float("-inf"))
        p = torch.cat([scores, *(s[a:b] for s in own)], dim=-1).softmax(dim=-1).to(v0.dtype)
        out = torch.einsum("nkgt,tkd->nkgd", p[..., : end - start], v0[start:end])
        for step, (_, v) in enumerate(diagonal):
            out = out + p[..., end - start + step, None] * v[a:b, :, None]
        outputs.append(out)
    return torch.cat(outputs).reshape(n, heads, -1)


# --- CUDA --------------------------------------------------------------------------------------------------------


def sees(view: View) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    """flex_attention's mask function: does the slot number `q` see the token `kv`?"""
    rows, starts = view.rows, view.starts

    def mask(batch: Tensor, head: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        return (kv <= rows[q]) & (kv >= starts[q])

    return mask


def block_mask(view: View) -> BlockMask:
    """Which blocks of keys a block of slots meets, and which of them need no mask.

    Slots ascend and documents lie one after the other, so the keys of a block of slots are one stretch of blocks: found
    from its first and last slot, without the [N, T] mask that `create_block_mask` would make, and without waiting for
    the device.
    """
    rows, starts = view.rows, view.starts
    first = torch.arange(0, len(rows), BLOCK, device=rows.device)
    last = (first + BLOCK - 1).clamp(max=len(rows) - 1)
    block = torch.arange(-(-view.tokens // BLOCK), device=rows.device)
    met = (block >= starts[first, None] // BLOCK) & (block <= rows[last, None] // BLOCK)
    whole = (block * BLOCK >= starts[last, None]) & ((block + 1) * BLOCK - 1 <= rows[first, None])

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks, and which (the chosen ones first)."""
        order = chosen.int().argsort(dim=-1, descending=True, stable=True)
        return chosen.sum(-1, dtype=torch.int32)[None, None], order.int()[None, None]

    return BlockMask.from_kv_blocks(
        *listed(met & ~whole),
        *listed(met & whole),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees(view),
        seq_lengths=(len(rows), view.tokens),
    )


@functools.cache
def _compiled_flex() -> Callable[..., tuple[Tensor, Tensor]]:
    """flex_attention is a template: only compiled is it a kernel."""
    return torch.compile(_flex, dynamic=True)


def _flex(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> tuple[Tensor, Tensor]:
    grouped = q.shape[1] != k.shape[1]
    out, aux = flex_attention(q, k, v, block_mask=blocks, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    return out, aux.lse


def _flex_merged(q: Tensor, k0: Tensor, v0: Tensor, view: View, diagonal: Sequence[KeyValue]) -> Tensor:
    kernel = _compiled_flex() if q.device.type == "cuda" else _flex
    out, lse = kernel(_heads_first(q), _heads_first(k0), _heads_first(v0), view.blocks)
    return _merge(out[0].transpose(0, 1), lse[0].t(), q, diagonal)


def _merge(out: Tensor, lse: Tensor, q: Tensor, diagonal: Sequence[KeyValue]) -> Tensor:
    """Add the slot's own later keys to a softmax over the others: its out [N, heads, D] and lse [N, heads]."""
    if not diagonal:
        return out
    scores = _own_scores(q, [k for k, _ in diagonal])
    merged = torch.logaddexp(lse, scores.logsumexp(dim=0))
    total = out * (lse - merged).exp().unsqueeze(-1).to(out.dtype)
    for p, (_, v) in zip((scores - merged).exp().to(q.dtype), diagonal, strict=True):
        total = total + _times_kv(p, v)
    return total


# --- the CPU -----------------------------------------------------------------------------------------------------


class _MergedFlash(torch.autograd.Function):
    """`merged_attention` by the CPU's flash kernel, whose log-sum-exp carries no gradient of its own.

    With the *merged* output and log-sum-exp handed to the kernel's backward, its gradients are exact:
    p = exp(s - lse) are then the merged softmax's weights, and the only other term, sum(grad * out), is the
    merged output's. The slot's own keys get the same formula written out.
    """

    @staticmethod
    def forward(ctx, q, k0, v0, view, *later):
        rows = view.rows
        out, lse = _flash_documents(q, k0, v0, view)
        if later:
            scores = _own_scores(q, later[0::2])
            merged = torch.logaddexp(lse[rows], scores.logsumexp(dim=0))
            own = out[rows] * (lse[rows] - merged).exp().unsqueeze(-1)
            weights = (scores - merged).exp().to(q.dtype)
            for p, v in zip(weights, later[1::2], strict=True):
                own += _times_kv(p, v)
            out[rows], lse[rows] = own.to(out.dtype), merged
        ctx.view = view
        ctx.save_for_backward(q, k0, v0, out, lse, *later)
        return out[rows]

    @staticmethod
    def backward(ctx, grad):
        q, k0, v0, out, lse, *later = ctx.saved_tensors
        dq, dk0, dv0 = _flash_documents_backward(grad, q, k0, v0, ctx.view, out, lse)
        scale, later_grads = q.shape[-1] ** -0.5, []
        if later:
            inner = (grad * out[ctx.view.rows]).sum(-1, dtype=torch.float32)
            weights = (_own_scores(q, later[0::2]) - lse[ctx.view.rows]).exp()
            for p, k, v in zip(weights, later[0::2], later[1::2], strict=True):
                dp = _dot_kv(grad, v)
                ds = (p * (dp - inner) * scale).to(q.dtype)
                dq += _times_kv(ds, k)
                later_grads += [_sum_groups(ds, q, k), _sum_groups(p.to(q.dtype), grad, v)]
        return dq, dk0, dv0, None, *later_grads


def _dot_kv(x: Tensor, k: Tensor) -> Tensor:
    """x [N, heads, D] with each group's k [N, KV heads, D] -> fp32 [N, heads]."""
    n, heads, size = x.shape
    return (x.reshape(n, k.shape[1], -1, size) * k.unsqueeze(2)).sum(-1, dtype=torch.float32).view(n, heads)


def _times_kv(p: Tensor, v: Tensor) -> Tensor:
    """p [N, heads] times each group's v [N, KV heads, D] -> [N, heads, D]."""
    n, kv, size = v.shape
    return (p.reshape(n, kv, -1, 1) * v.unsqueeze(2)).view(n, -1, size)


def _sum_groups(p: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """Sum over each group of p [N, heads] times x [N, heads, D] -> [N, KV heads, D] as `like`."""
    return (p.unsqueeze(-1) * x).unflatten(1, (like.shape[1], -1)).sum(2)


def _own_scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled scores of the slots' own later keys, fp32 [steps, N, heads]."""
    return torch.stack([_dot_kv(q, k) for k in keys]) * q.shape[-1] ** -0.5


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _flash_documents(q, k, v, view) -> tuple[Tensor, Tensor]:
    """Causal attention of the slots in their documents: out [T, heads, D] and lse fp32 [T, heads]; other rows: any."""
    full = torch.zeros(k.shape[0], *q.shape[1:], dtype=q.dtype)
    full[view.rows] = q
    out, lse = torch.zeros_like(full), torch.zeros(full.shape[:2])
    for start, end, _, _ in view.spans:
        one = [_heads_first(x[start:end]) for x in (full, k, v)]
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*one, 0.0, True)
        out[start:end], lse[start:end] = o[0].transpose(0, 1), s[0].transpose(0, 1)
    return out, lse


def _flash_documents_backward(grad, q, k, v, view, out, lse) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [N, heads, D] and k, v [T, heads, D]. Rows without a query have no gradient, so add nothing."""
    full_q, full_grad = torch.zeros_like(out), torch.zeros_like(out)
    full_q[view.rows], full_grad[view.rows] = q, grad
    dq, dk, dv = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    for start, end, _, _ in view.spans:
        g, one_q, one_k, one_v, o = (_heads_first(x[start:end]) for x in (full_grad, full_q, k, v, out))
        s = lse[start:end].t().unsqueeze(0)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, one_q, one_k, one_v, o, s, 0.0, True
        )
        for whole, part in zip((dq, dk, dv), grads, strict=True):
            whole[start:end] = part[0].transpose(0, 1)
    return dq[view.rows], dk, dv
