"""The training-time test: drafting, unrolled in training exactly as it happens in serving.

A *slot* j holds one draft chain. At step i it reads its hidden state (step 0: the
fused aux states g_j of the target; later: its own last output) and the true token
x_{j+1+i}, and predicts x_{j+2+i}; what it should have said is the target's own
distribution softmax(head(y_{j+1+i})).

    step 0   slot j:  g_j            x_{j+1}   ->  x_{j+2}    against y_{j+1}
    step 1   slot j:  its output     x_{j+2}   ->  x_{j+3}    against y_{j+2}
    step i   slot j:  its output   x_{j+1+i}   ->  x_{j+2+i}  against y_{j+1+i}

Three ideas keep it cheap, and none is an approximation:

- Only slots that supervise something are computed; of all others (the prompt) only
  keys and values of step 0 are needed.
- At step i a slot sees the causal keys of step 0 plus i keys of its own. The first
  part is a flash kernel, the rest a handful of dot products, merged by log-sum-exp.
- The two heads meet rows in chunks, all steps of a chunk together: the target's
  softmax is made once for all steps, and the gradient is made with the loss, so
  no [T, V] tensor ever exists and nothing is computed twice.

Shape letters: T tokens, H hidden, D head, V vocabulary, Vd draft vocabulary, L aux layers, K draft steps,
N slots that supervise at step 0, R target rows that count at step 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from eagle3lib.draft_model import DraftModel
from eagle3lib.losses import LOSSES, Loss
from eagle3lib.vocab_mapping import VocabMapping

ROWS_PER_CHUNK = 256  # rows that meet the draft heads at once; fewer where their logits would be more than
HEAD_ELEMENTS = 2**23
FULL_HEAD_ROWS = 4096  # rows of the whole head, and rows that meet them, at once
SUMS = ("loss", "counted", "supervised", "correct", "prefix", "alpha")


# --- what counts -------------------------------------------------------------------------------------------------


def reply_index(reply_bounds: Sequence[int], tokens: int) -> Tensor:
    """int64 [T]: the number of the reply that each token belongs to, -1 outside of replies.

    reply_bounds: [start, end) pairs, flattened: adjacent replies stay two replies.
    """
    index = torch.full((tokens,), -1, dtype=torch.int64)
    for number, (start, end) in enumerate(zip(reply_bounds[0::2], reply_bounds[1::2], strict=True)):
        index[start:end] = number
    return index


def position_mask(replies: Tensor, step: int, documents: Tensor | None = None) -> Tensor:
    """bool [T]: slot j counts at `step` iff x_{j+1} .. x_{j+2+step} all lie in one reply (and in j's document).

    This is what happens in serving: the first draft call of a reply that starts at a has
    g_{a-1} and the target's own first token x_a. replies, documents: int64 [T]; a reply is
    one span of tokens, so its first and last token tell.
    """
    mask = torch.zeros(replies.numel(), dtype=torch.bool, device=replies.device)
    slots = replies.numel() - (step + 2)
    if slots <= 0:
        return mask
    first, last = replies[1 : 1 + slots], replies[2 + step : 2 + step + slots]
    mask[:slots] = (first == last) & (first >= 0)
    if documents is not None:
        mask[:slots] &= documents[:slots] == documents[1 : 1 + slots]
    return mask


@dataclass(frozen=True)
class Batch:
    """Documents one after the other, nothing padded.

    input_ids, positions (restart per document), documents, replies (-1 outside; unique across documents):
    int64 [T]. aux [T, L*H], last [T, H] (post-norm): any float dtype. target_tokens: int64 [T], the target's
    argmax over the full vocabulary in rows that supervise (`TrainingTimeTest.target_tokens`), -1 elsewhere.
    """

    input_ids: Tensor
    aux: Tensor
    last: Tensor
    positions: Tensor
    documents: Tensor
    replies: Tensor
    target_tokens: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def document(
        cls, input_ids: Tensor, aux: Tensor, last: Tensor, replies: Tensor, target_tokens: Tensor | None = None
    ) -> Batch:
        """One document; `target_tokens` may be filled in later (`TrainingTimeTest.with_target_tokens`)."""
        tokens = input_ids.numel()
        unknown = torch.full_like(input_ids, -1)
        return cls(
            input_ids=input_ids,
            aux=aux,
            last=last,
            positions=torch.arange(tokens),
            documents=torch.zeros(tokens, dtype=torch.int64),
            replies=replies,
            target_tokens=unknown if target_tokens is None else target_tokens,
            lengths=(tokens,),
        )

    @classmethod
    def pack(cls, batches: Sequence[Batch]) -> Batch:
        """Several batches as one; documents and replies are renumbered so that they stay distinct."""
        documents, replies, next_document, next_reply = [], [], 0, 0
        for b in batches:
            documents.append(b.documents + next_document)
            replies.append(torch.where(b.replies >= 0, b.replies + next_reply, -1))
            next_document += len(b.lengths)
            next_reply = max(next_reply, int(replies[-1].max()) + 1)
        joined = {
            name: torch.cat([getattr(b, name) for b in batches])
            for name in ("input_ids", "aux", "last", "positions", "target_tokens")
        }
        lengths = tuple(n for b in batches for n in b.lengths)
        return cls(documents=torch.cat(documents), replies=torch.cat(replies), lengths=lengths, **joined)

    def with_tokens(self, target_tokens: Tensor) -> Batch:
        return replace(self, target_tokens=target_tokens)

    def to(self, device: torch.device) -> Batch:
        moved = {k: v.to(device, non_blocking=True) for k, v in vars(self).items() if isinstance(v, Tensor)}
        return replace(self, **moved)


# --- attention ---------------------------------------------------------------------------------------------------


def merged_attention(
    q: Tensor, k0: Tensor, v0: Tensor, rows: Tensor, lengths: Sequence[int], diagonal: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Causal attention to step 0 within each document, and to the slot's own later keys, in one fp32 softmax.

    q [N, heads, D]: the slots `rows` (int64 [N], ascending) of the T tokens. k0, v0 [T, KV heads, D]: step 0, all
    tokens. diagonal: k, v [N, KV heads, D] of steps 1..i, the query's own step last. Values may be narrower than keys.
    Returns [N, heads, D of the values].
    """
    if q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16):
        narrower = q.shape[-1] - v0.shape[-1]
        if narrower:  # latent attention: the kernel takes one size only, and zeros add nothing
            wide = [(k, F.pad(v, (0, narrower))) for k, v in [(k0, v0), *diagonal]]
            return merged_attention(q, *wide[0], rows, lengths, wide[1:])[..., :-narrower]
        group = q.shape[1] // k0.shape[1]
        k0, v0 = k0.repeat_interleave(group, dim=1), v0.repeat_interleave(group, dim=1)
        later = [tensor for pair in diagonal for tensor in pair]
        return _MergedFlash.apply(q, k0, v0, rows, tuple(lengths), *later)
    return _explicit_attention(q, k0, v0, rows, lengths, diagonal)


def _explicit_attention(
    q: Tensor, k0: Tensor, v0: Tensor, rows: Tensor, lengths: Sequence[int], diagonal: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """The same with the scores written out per document: for devices without the CPU's flash kernel."""
    n, heads, size = q.shape
    q = q.view(n, k0.shape[1], -1, size) * size**-0.5
    own = [torch.einsum("nkgd,nkd->nkg", q, k).float().unsqueeze(-1) for k, _ in diagonal]
    outputs = []
    for start, end, a, b in _spans(lengths, rows):
        scores = torch.einsum("nkgd,tkd->nkgt", q[a:b], k0[start:end]).float()
        future = torch.arange(start, end, device=q.device) > rows[a:b, None]
        scores = scores.masked_fill(future[:, None, None], float("-inf"))
        p = torch.cat([scores, *(s[a:b] for s in own)], dim=-1).softmax(dim=-1).to(v0.dtype)
        out = torch.einsum("nkgt,tkd->nkgd", p[..., : end - start], v0[start:end])
        for step, (_, v) in enumerate(diagonal):
            out = out + p[..., end - start + step, None] * v[a:b, :, None]
        outputs.append(out)
    return torch.cat(outputs).reshape(n, heads, -1)


def _spans(lengths: Sequence[int], rows: Tensor) -> list[tuple[int, int, int, int]]:
    """(start, end, a, b) for each document that has rows: its tokens, and which of `rows` lie in it."""
    ends = torch.tensor(lengths).cumsum(0)
    cuts = torch.searchsorted(rows.cpu(), ends).tolist()
    ends = ends.tolist()
    spans = zip([0, *ends[:-1]], ends, [0, *cuts[:-1]], cuts, strict=True)
    return [(start, end, a, b) for start, end, a, b in spans if b > a]


class _MergedFlash(torch.autograd.Function):
    """`merged_attention` by the CPU's flash kernel, whose log-sum-exp carries no gradient of its own.

    With the *merged* output and log-sum-exp handed to the kernel's backward, its gradients are exact:
    p = exp(s - lse) are then the merged softmax's weights, and the only other term, sum(grad * out), is the
    merged output's. The slot's own keys get the same formula written out.
    """

    @staticmethod
    def forward(ctx, q, k0, v0, rows, lengths, *later):
        out, lse = _flash_documents(q, k0, v0, rows, lengths)
        if later:
            scores = _own_scores(q, later[0::2])
            merged = torch.logaddexp(lse[rows], scores.logsumexp(dim=0))
            own = out[rows] * (lse[rows] - merged).exp().unsqueeze(-1)
            weights = (scores - merged).exp().to(q.dtype)
            for p, v in zip(weights, later[1::2], strict=True):
                own += _times_kv(p, v)
            out[rows], lse[rows] = own.to(out.dtype), merged
        ctx.lengths = lengths
        ctx.save_for_backward(q, k0, v0, rows, out, lse, *later)
        return out[rows]

    @staticmethod
    def backward(ctx, grad):
        q, k0, v0, rows, out, lse, *later = ctx.saved_tensors
        dq, dk0, dv0 = _flash_documents_backward(grad, q, k0, v0, rows, out, lse, ctx.lengths)
        scale, later_grads = q.shape[-1] ** -0.5, []
        if later:
            inner = (grad * out[rows]).sum(-1, dtype=torch.float32)
            weights = (_own_scores(q, later[0::2]) - lse[rows]).exp()
            for p, k, v in zip(weights, later[0::2], later[1::2], strict=True):
                dp = _dot_kv(grad, v)
                ds = (p * (dp - inner) * scale).to(q.dtype)
                dq += _times_kv(ds, k)
                later_grads += [_sum_groups(ds, q, k), _sum_groups(p.to(q.dtype), grad, v)]
        return dq, dk0, dv0, None, None, *later_grads


def _dot_kv(x: Tensor, k: Tensor) -> Tensor:
    """x [N, heads, D] with each group's k [N, KV heads, D] -> fp32 [N, heads]."""
    n, heads, size = x.shape
    return (x.view(n, k.shape[1], -1, size) * k.unsqueeze(2)).sum(-1, dtype=torch.float32).view(n, heads)


def _times_kv(p: Tensor, v: Tensor) -> Tensor:
    """p [N, heads] times each group's v [N, KV heads, D] -> [N, heads, D]."""
    n, kv, size = v.shape
    return (p.view(n, kv, -1, 1) * v.unsqueeze(2)).view(n, -1, size)


def _sum_groups(p: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """Sum over each group of p [N, heads] times x [N, heads, D] -> [N, KV heads, D] as `like`."""
    return (p.unsqueeze(-1) * x).unflatten(1, (like.shape[1], -1)).sum(2)


def _own_scores(q: Tensor, keys: Sequence[Tensor]) -> Tensor:
    """Scaled scores of the slots' own later keys, fp32 [steps, N, heads]."""
    return torch.stack([_dot_kv(q, k) for k in keys]) * q.shape[-1] ** -0.5


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).unsqueeze(0)


def _flash_documents(q, k, v, rows, lengths) -> tuple[Tensor, Tensor]:
    """Causal attention of `rows` in their documents: out [T, heads, D] and lse fp32 [T, heads]; other rows: any."""
    full = torch.zeros(k.shape[0], *q.shape[1:], dtype=q.dtype)
    full[rows] = q
    out, lse = torch.zeros_like(full), torch.zeros(full.shape[:2])
    for start, end, _, _ in _spans(lengths, rows):
        one = [_heads_first(x[start:end]) for x in (full, k, v)]
        o, s = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*one, 0.0, True)
        out[start:end], lse[start:end] = o[0].transpose(0, 1), s[0].transpose(0, 1)
    return out, lse


def _flash_documents_backward(grad, q, k, v, rows, out, lse, lengths) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q [N, heads, D] and k, v [T, heads, D]. Rows without a query have no gradient, so add nothing."""
    full_q, full_grad = torch.zeros_like(out), torch.zeros_like(out)
    full_q[rows], full_grad[rows] = q, grad
    dq, dk, dv = torch.zeros_like(out), torch.zeros_like(k), torch.zeros_like(v)
    for start, end, _, _ in _spans(lengths, rows):
        g, one_q, one_k, one_v, o = (_heads_first(x[start:end]) for x in (full_grad, full_q, k, v, out))
        s = lse[start:end].t().unsqueeze(0)
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, one_q, one_k, one_v, o, s, 0.0, True
        )
        for whole, part in zip((dq, dk, dv), grads, strict=True):
            whole[start:end] = part[0].transpose(0, 1)
    return dq[rows], dk, dv


# --- the two heads and the loss ----------------------------------------------------------------------------------


class _HeadLoss(torch.autograd.Function):
    """sum of weights * loss(target's softmax, draft's softmax), gradients made on the way (`eagle3lib.losses`).

    hidden [K, N, H] (normed), draft_head [Vd, H], last fp32 [R, H], target_head fp32 [Vd, H]; slots int64 [K, R]:
    which slot answers for target row r at step i; weights fp32 [K, R], 0 where none does; wanted int64 [R]: the
    target's argmax as a draft index. Returns the weighted sum, and without gradient the loss, whether the draft's
    argmax is right, and alpha = sum of min(p, q), fp32 [K, R] each.
    """

    @staticmethod
    def forward(ctx, hidden, draft_head, last, target_head, slots, weights, wanted, loss, wants_grad):
        per_row = torch.zeros(3, *weights.shape, device=hidden.device)
        d_hidden = torch.zeros_like(hidden if wants_grad else hidden[:0])
        d_head = torch.zeros_like(draft_head if wants_grad else draft_head[:0], dtype=torch.float32)
        head = draft_head.to(hidden.dtype)
        rows = max(1, min(ROWS_PER_CHUNK, HEAD_ELEMENTS // head.shape[0]))
        for a in range(0, last.shape[0], rows):
            part = slice(a, a + rows)
            p = (last[part] @ target_head.t()).softmax(dim=-1)
            for step, slot in enumerate(slots[:, part]):
                x = hidden[step].index_select(0, slot)
                log_q = (x @ head.t()).float().log_softmax(dim=-1)
                per_row[1, step, part] = (log_q.max(dim=-1).indices == wanted[part]).float()
                if not wants_grad:
                    per_row[2, step, part] = torch.minimum(p, log_q.exp()).sum(dim=-1)
                per_row[0, step, part], d = loss(p, log_q, wants_grad)
                if d is None:
                    continue
                d = d.mul_(weights[step, part, None]).to(x.dtype)
                d_hidden[step].index_add_(0, slot, d @ head)
                d_head.addmm_(d.t(), x) if d.dtype == d_head.dtype else d_head.add_(d.t() @ x)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(per_row)
        return (weights * per_row[0]).sum(), per_row

    @staticmethod
    def backward(ctx, grad, _):
        d_hidden, d_head = ctx.saved_tensors
        return grad * d_hidden, grad * d_head, None, None, None, None, None, None, None


# --- the training-time test --------------------------------------------------------------------------------------


class TrainingTimeTest:
    """The loss of a draft model on packed batches.

    With S_i = sum over counted slots of loss(p~, q), N_i = the number of counted slots, p~ the target's softmax over
    the draft vocabulary: loss = sum_i decay^i S_i / N_i / sum_i decay^i (EAGLE-3, arXiv:2503.01840; its loss(p~, q) is
    the cross entropy, `losses.LOSSES` has others).
    A slot is *supervised* at a step by `position_mask`, and *counted* if also the target's argmax over the full
    vocabulary is in the draft vocabulary.
    """

    def __init__(
        self,
        model: DraftModel,
        target_head: Tensor,
        mapping: VocabMapping,
        steps: int,
        step_decay: float,
        compute_dtype: torch.dtype = torch.float32,
        loss: str = "soft_ce",
    ):
        """target_head [V, H] in any dtype, on the model's device. loss: a name in `losses.LOSSES`."""
        self.model, self.mapping, self.steps, self.compute_dtype = model, mapping, steps, compute_dtype
        self.loss: Loss = LOSSES[loss]
        self.target_head = target_head  # as it is: of a large target it is mapped from its file
        self.draft_rows = target_head[mapping.target_ids.to(target_head.device)].float()
        decay = step_decay ** torch.arange(steps, dtype=torch.float64)
        self.step_shares = decay / decay.sum()

    @torch.no_grad()
    def target_tokens(self, batch: Batch) -> Tensor:
        """int64 [T]: argmax of the target over the full vocabulary in rows that supervise at step 0, -1 elsewhere.

        Depends on the target only: the trainer makes it once a sample, not once an epoch.
        """
        rows = position_mask(batch.replies, 0, batch.documents).nonzero().squeeze(1) + 1
        last = batch.last[rows].to(self.target_head.device, torch.float32)
        best = last.new_full((len(rows),), float("-inf"))
        tokens = torch.zeros(len(rows), dtype=torch.int64, device=last.device)
        for first, some in enumerate(self.target_head.split(FULL_HEAD_ROWS)):
            head = some.float().t()
            for part in torch.arange(len(rows), device=last.device).split(FULL_HEAD_ROWS):
                value, index = (last[part] @ head).max(dim=-1)
                better = value > best[part]  # of equals the first, as argmax
                best[part[better]], tokens[part[better]] = value[better], index[better] + first * FULL_HEAD_ROWS
        found = torch.full_like(batch.input_ids, -1)
        found[rows] = tokens.to(found.device)
        return found

    def with_target_tokens(self, batch: Batch) -> Batch:
        return batch.with_tokens(self.target_tokens(batch))

    def counted(self, batch: Batch) -> Tensor:
        """int64 [K]: the N_i of a batch. They need no pass of the model, so several ranks can add theirs first."""
        return torch.stack([(row >= 0).sum() for row in self._plan(batch).slots])

    def step_weights(self, counted: Tensor) -> Tensor:
        """float64 [K]: what one counted slot weighs at each step, given the N_i of the whole global batch."""
        return self.step_shares.to(counted.device) / counted.clamp(min=1)

    def __call__(self, batch: Batch, step_weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (a scalar with gradient) and the sums it is made of.

        step_weights [K]: see `step_weights`; null: those of this batch alone. Losses of the batches of one global
        batch add up to its loss. Sums, float64 [K] each: `loss` S_i, `counted` N_i, `supervised`, `correct` (of the
        counted), `prefix` (supervised slots that were right at all steps 0..i), and without gradient `alpha`.
        """
        plan = self._plan(batch)
        if step_weights is None:
            step_weights = self.step_weights((plan.slots >= 0).sum(1))
        if plan.target_rows.numel() == 0:
            return self._zero(), self._sums(plan, None)
        with torch.autocast(batch.aux.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            hidden = self._unroll(batch, plan.rows)
        weights = (step_weights[:, None] * (plan.slots >= 0)).float()
        loss, per_row = _HeadLoss.apply(
            hidden,
            self.model.lm_head.weight,
            batch.last[plan.target_rows].float(),
            self.draft_rows,
            plan.slots.clamp(min=0),
            weights,
            plan.wanted,
            self.loss,
            torch.is_grad_enabled(),
        )
        return loss, self._sums(plan, per_row)

    def _unroll(self, batch: Batch, rows: Tensor) -> Tensor:
        """Run the slots `rows` [N] through all steps; their normed outputs [K, N, H]."""
        model, tokens = self.model, batch.input_ids.numel()
        following = torch.arange(1, tokens + 1, device=rows.device).clamp(max=tokens - 1)
        fused = model.fuse(batch.aux)
        mixed = model.mix(model.embed(batch.input_ids[following]), fused)
        k0, v0 = model.key_value(mixed, batch.positions)
        mixed, hidden, outputs, diagonal = mixed[rows], fused[rows], [], []
        for step in range(self.steps):
            positions = batch.positions[rows] + step
            if step:
                ids = batch.input_ids[(rows + 1 + step).clamp(max=tokens - 1)]
                mixed = model.mix(model.embed(ids), hidden)
                diagonal.append(model.key_value(mixed, positions))
            q = model.query(mixed, positions)
            hidden = model.finish(hidden, merged_attention(q, k0, v0, rows, batch.lengths, diagonal))
            outputs.append(model.norm(hidden))
            hidden = outputs[-1] if model.config.norm_output else hidden
        return torch.stack(outputs)

    def _plan(self, batch: Batch) -> _Plan:
        masks = torch.stack([position_mask(batch.replies, i, batch.documents) for i in range(self.steps)])
        rows = masks[0].nonzero().squeeze(1)
        draft_tokens = self.mapping.to_draft(batch.target_tokens.clamp(min=0))
        draft_tokens[batch.target_tokens < 0] = -1
        target_rows = (rows + 1)[draft_tokens[rows + 1] >= 0]
        slot_of = torch.full_like(batch.input_ids, -1)
        slot_of[rows] = torch.arange(rows.numel(), device=rows.device)
        slots = []
        for step, mask in enumerate(masks):
            slot = target_rows - 1 - step
            counts = (slot >= 0) & mask[slot.clamp(min=0)]
            slots.append(torch.where(counts, slot_of[slot.clamp(min=0)], -1))
        return _Plan(rows, masks[:, rows], target_rows, draft_tokens[target_rows], torch.stack(slots))

    def _zero(self) -> Tensor:
        """A loss of zero that still gives every parameter a gradient."""
        return sum(p.flatten()[0] * 0.0 for p in self.model.parameters() if p.requires_grad)

    def _sums(self, plan: _Plan, per_row: Tensor | None) -> dict[str, Tensor]:
        counts = plan.slots >= 0
        cross, right, alpha = torch.zeros(3, *counts.shape, device=counts.device) if per_row is None else per_row
        hits = torch.zeros(self.steps, plan.rows.numel() + 1, dtype=torch.bool, device=counts.device)
        hits.scatter_(1, plan.slots.where(counts, plan.rows.numel()), right.bool() & counts)
        prefix = hits[:, :-1].cummin(dim=0).values & plan.supervised
        found = {
            "loss": cross * counts,
            "counted": counts,
            "supervised": plan.supervised,
            "correct": right * counts,
            "prefix": prefix,
            "alpha": alpha * counts,
        }
        return {name: found[name].sum(1, dtype=torch.float64).detach() for name in SUMS}


@dataclass(frozen=True)
class _Plan:
    """What meets what: rows [N] slots supervised at step 0; supervised bool [K, N]; target_rows [R], those whose
    token the draft knows; wanted [R], that token; slots [K, R], who answers for each target row, -1: nobody."""

    rows: Tensor
    supervised: Tensor
    target_rows: Tensor
    wanted: Tensor
    slots: Tensor


def summarise(sums: dict[str, Tensor], step_decay: float) -> dict[str, Any]:
    """Sums of one or many batches -> figures, each with its denominator in its name; lists are by draft step.

    `prefix_of_supervised` = (slots right at all steps 0..i) / (slots supervised at step i): how often the target takes
    draft i. `acceptance_length` = 1 + their sum: tokens for one pass of the target, its own included, drafting
    greedily on the target's own text. `loss` is that of
    `TrainingTimeTest`; a step without a counted slot adds 0.
    """
    values = {name: value.double().cpu() for name, value in sums.items()}
    shares = step_decay ** torch.arange(len(values["loss"]), dtype=torch.float64)
    counted, supervised = values["counted"].clamp(min=1), values["supervised"].clamp(min=1)
    loss = values["loss"] / counted
    figures = {
        "loss": float((shares / shares.sum() * loss).sum()),
        "acceptance_length": 1 + float((values["prefix"] / supervised).sum()),
        "prefix_of_supervised": (values["prefix"] / supervised).tolist(),
        "accuracy_of_supervised": (values["correct"] / supervised).tolist(),
        "accuracy_of_counted": (values["correct"] / counted).tolist(),
        "loss_of_counted": loss.tolist(),
        "counted_of_supervised": (values["counted"] / supervised).tolist(),
        "supervised": values["supervised"].long().tolist(),
    }
    if values["alpha"].any():
        figures["alpha_of_counted"] = (values["alpha"] / counted).tolist()
    return figures
