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
- What the projections make of a token's embedding is the same at every step: it is
  made once a token. The attention is a flash kernel and a few dot products
  (`eagle3lib.attention`).
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
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from eagle3lib.attention import View, merged_attention, send
from eagle3lib.draft_model import DraftModel, Read
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
    argmax over the full vocabulary in rows that supervise (`TrainingTimeTest.target_tokens`), -1 elsewhere. sources
    int64 [T]: the number of the source that each token's document is from.
    """

    input_ids: Tensor
    aux: Tensor
    last: Tensor
    positions: Tensor
    documents: Tensor
    replies: Tensor
    target_tokens: Tensor
    sources: Tensor
    lengths: tuple[int, ...]

    @classmethod
    def document(
        cls,
        input_ids: Tensor,
        aux: Tensor,
        last: Tensor,
        replies: Tensor,
        target_tokens: Tensor | None = None,
        source: int = 0,
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
            sources=torch.full((tokens,), source),
            lengths=(tokens,),
        )

    @classmethod
    def pack(cls, batches: Sequence[Batch], states: tuple[Tensor, Tensor] | None = None) -> Batch:
        """Several batches as one; documents and replies are renumbered so that they stay distinct.

        states: aux [T, L*H] and last [T, H] of all of them, where they already lie one after the other.
        """
        documents, replies, next_document, next_reply = [], [], 0, 0
        for b in batches:
            documents.append(b.documents + next_document)
            replies.append(torch.where(b.replies >= 0, b.replies + next_reply, -1))
            next_document += len(b.lengths)
            next_reply = max(next_reply, int(replies[-1].max()) + 1)
        names = ["input_ids", "positions", "target_tokens", "sources", *(() if states else ("aux", "last"))]
        joined = {name: torch.cat([getattr(b, name) for b in batches]) for name in names}
        joined |= dict(zip(("aux", "last"), states, strict=True)) if states else {}
        lengths = tuple(n for b in batches for n in b.lengths)
        return cls(documents=torch.cat(documents), replies=torch.cat(replies), lengths=lengths, **joined)

    def with_tokens(self, target_tokens: Tensor) -> Batch:
        return replace(self, target_tokens=target_tokens)

    def to(self, device: torch.device) -> Batch:
        return replace(self, **{k: send(v, device) for k, v in vars(self).items() if isinstance(v, Tensor)})


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
                logits = (x @ head.t()).float()
                q = logits.softmax(dim=-1)
                top, best = logits.max(dim=-1)
                lse = top - q.gather(1, best.unsqueeze(1)).squeeze(1).log()
                per_row[1, step, part] = (best == wanted[part]).float()
                if not wants_grad:
                    per_row[2, step, part] = torch.minimum(p, q).sum(dim=-1)
                per_row[0, step, part], d = loss(p, q, logits, lse, wants_grad)
                if d is None:
                    continue
                # The weight of a row goes to its H numbers, not to its Vd.
                d, weight = d.to(x.dtype), weights[step, part, None].to(x.dtype)
                d_hidden[step].index_add_(0, slot, (d @ head).mul_(weight))
                x = x.mul_(weight)
                d_head.addmm_(d.t(), x) if d.dtype == d_head.dtype else d_head.add_(d.t() @ x)
        ctx.save_for_backward(d_hidden, d_head)
        ctx.mark_non_differentiable(per_row)
        return (weights * per_row[0]).sum(), per_row

    @staticmethod
    def backward(ctx, grad, _):
        d_hidden, d_head = ctx.saved_tensors
        return grad * d_hidden, grad * d_head, None, None, None, None, None, None, None


# --- the training-time test --------------------------------------------------------------------------------------


class TrainingTimeTest(nn.Module):
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
        recompute: bool = False,
        sources: int | None = None,
    ):
        """target_head [V, H] in any dtype, on the model's device. loss: a name in `losses.LOSSES`. recompute: make what
        a draft step leaves for its backward pass again instead of keeping it. sources: see `forward`."""
        super().__init__()
        self.model, self.mapping, self.steps, self.compute_dtype = model, mapping, steps, compute_dtype
        self.loss: Loss = LOSSES[loss]
        self.recompute, self.sources = recompute, sources
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
            for a in range(0, len(rows), FULL_HEAD_ROWS):
                part = slice(a, a + FULL_HEAD_ROWS)
                value, index = (last[part] @ head).max(dim=-1)
                better = value > best[part]  # of equals the first, as argmax
                tokens[part] = torch.where(better, index + first * FULL_HEAD_ROWS, tokens[part])
                best[part] = torch.where(better, value, best[part])
        found = torch.full_like(batch.input_ids, -1)
        found[rows] = tokens.to(found.device)
        return found

    def with_target_tokens(self, batch: Batch) -> Batch:
        return batch.with_tokens(self.target_tokens(batch))

    def step_weights(self, counted: Tensor) -> Tensor:
        """float64 [K]: what one counted slot weighs at each step, given the N_i of the whole global batch."""
        return self.step_shares.to(counted.device) / counted.clamp(min=1)

    def forward(
        self, batch: Batch | None, step_weights: Tensor | None = None, plan: Plan | None = None
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss (a scalar with gradient) and the sums it is made of.

        batch None: of nothing, 0, with a gradient of 0 for every parameter: what a rank without a batch adds.
        step_weights [K]: see `step_weights`; null: those of this batch alone. Losses of the batches of one global
        batch add up to its loss. plan: `plan` of the batch, moved to its device; made here when left out, which waits
        for that device. Sums, float64 [K] each, or [sources, K] with `sources`: `loss` S_i, `counted` N_i,
        `supervised`, `correct` (of the counted), `prefix` (supervised slots that were right at all steps 0..i), and
        without gradient `alpha`.
        """
        if batch is None:
            return self._zero(), dict.fromkeys(SUMS, self.no_sums())
        if plan is None:
            plan = self.plan(batch.to(torch.device("cpu"))).to(batch.aux.device)
        if step_weights is None:
            step_weights = self.step_weights(plan.counted)
        step_weights = send(step_weights, batch.aux.device)
        if plan.target_rows.numel() == 0:
            return self._zero(), self._sums(plan, None)
        with torch.autocast(batch.aux.device.type, torch.bfloat16, enabled=self.compute_dtype == torch.bfloat16):
            hidden = self._unroll(batch, plan)
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

    def _unroll(self, batch: Batch, plan: Plan) -> Tensor:
        """Run the plan's slots through all steps; their normed outputs [K, N, H]."""
        model, attention, rows = self.model, self.model.midlayer.self_attn, plan.view.rows
        embedded = model.midlayer.input_layernorm(model.embed(batch.input_ids))
        tokens = _Tokens(attention, attention.of_key_value, embedded)
        queried = _Tokens(attention, attention.of_query, embedded.index_select(0, plan.queried))
        fused = model.fuse(batch.aux)
        k0, v0 = model.key_value(tokens.read(model.midlayer.hidden_norm(fused), plan.following), batch.positions)

        def draft(step: int, hidden: Tensor, *later: Tensor) -> tuple[Tensor, ...]:
            """One step: its normed output, what the next step reads, its key and value (step 0 has k0 and v0)."""
            positions, normed = batch.positions[rows] + step, model.midlayer.hidden_norm(hidden)
            own: tuple[Tensor, ...] = ()
            if step:
                own = model.key_value(tokens.read(normed, plan.tokens[step]), positions)
            q = model.query(queried.read(normed, plan.query_tokens[step]), positions)
            all_later = later + own
            diagonal = list(zip(all_later[0::2], all_later[1::2], strict=True))
            hidden = model.finish(hidden, merged_attention(q, k0, v0, plan.view, diagonal))
            output = model.norm(hidden)
            return output, output if model.config.norm_output else hidden, *own

        hidden, outputs, later = fused.index_select(0, rows), [], ()
        for step in range(self.steps):
            if self.recompute and torch.is_grad_enabled():  # nothing is random, and its state need not be asked for
                done = checkpoint(draft, step, hidden, *later, use_reentrant=False, preserve_rng_state=False)
            else:
                done = draft(step, hidden, *later)
            output, hidden, *own = done
            outputs.append(output)
            later += tuple(own)
        return torch.stack(outputs)

    def plan(self, batch: Batch) -> Plan:
        """What of a batch on the CPU meets what."""
        masks = torch.stack([position_mask(batch.replies, i, batch.documents) for i in range(self.steps)])
        rows = masks[0].nonzero().squeeze(1)
        draft_tokens = self.mapping.to_draft(batch.target_tokens.clamp(min=0))
        draft_tokens[batch.target_tokens < 0] = -1
        target_rows = (rows + 1)[draft_tokens[rows + 1] >= 0]
        slot_of = torch.full_like(batch.input_ids, -1)
        slot_of[rows] = torch.arange(rows.numel())
        slots = []
        for step, mask in enumerate(masks):
            slot = target_rows - 1 - step
            counts = (slot >= 0) & mask[slot.clamp(min=0)]
            slots.append(torch.where(counts, slot_of[slot.clamp(min=0)], -1))
        count = batch.input_ids.numel()
        tokens = (rows + 1 + torch.arange(self.steps)[:, None]).clamp(max=count - 1)
        queried, query_tokens = tokens.unique(return_inverse=True)
        return Plan(
            view=View.of(rows, batch.lengths),
            supervised=masks[:, rows],
            target_rows=target_rows,
            wanted=draft_tokens[target_rows],
            slots=torch.stack(slots),
            counted=torch.stack([(row >= 0).sum() for row in slots]),
            following=torch.arange(1, count + 1).clamp(max=count - 1),
            tokens=tokens,
            queried=queried,
            query_tokens=query_tokens,
            sources=batch.sources[rows],
            target_sources=batch.sources[target_rows],
        )

    def _zero(self) -> Tensor:
        """A loss of zero that still gives every parameter a gradient."""
        return sum(p.flatten()[0] * 0.0 for p in self.model.parameters() if p.requires_grad)

    def no_sums(self) -> Tensor:
        """Sums of nothing: float64 [K], or [sources, K]."""
        shape = (self.steps,) if self.sources is None else (self.sources, self.steps)
        return torch.zeros(shape, dtype=torch.float64, device=self.draft_rows.device)

    def _sums(self, plan: Plan, per_row: Tensor | None) -> dict[str, Tensor]:
        counts = plan.slots >= 0
        cross, right, alpha = torch.zeros(3, *counts.shape, device=counts.device) if per_row is None else per_row
        hits = torch.zeros(self.steps, plan.view.rows.numel() + 1, dtype=torch.bool, device=counts.device)
        hits.scatter_(1, plan.slots.where(counts, plan.view.rows.numel()), right.bool() & counts)
        prefix = hits[:, :-1].cummin(dim=0).values & plan.supervised
        by_slot = {"supervised": plan.supervised, "prefix": prefix}
        by_row = {"loss": cross * counts, "counted": counts, "correct": right * counts, "alpha": alpha * counts}
        found = {name: self._sum(values, plan.sources) for name, values in by_slot.items()}
        found |= {name: self._sum(values, plan.target_sources) for name, values in by_row.items()}
        return {name: found[name] for name in SUMS}

    def _sum(self, values: Tensor, sources: Tensor) -> Tensor:
        """[K, n] -> float64 [K], or by source [sources, K]."""
        if self.sources is None:
            return values.sum(1, dtype=torch.float64).detach()
        of_source = torch.arange(self.sources, device=sources.device)[:, None] == sources
        return (of_source.double() @ values.double().t()).detach()


class _Tokens:
    """What some projections make of tokens' embeddings, once a token, and the halves of their weights that read the
    hidden state: W [e; h] = W_e e + W_h h, and W_e e is the same at each draft step that reads the token."""

    def __init__(self, attention: nn.Module, names: Sequence[str], embedded: Tensor):
        """embedded [U, H]: the tokens' embeddings, normed."""
        self.halves = {}
        for projection in (getattr(attention, name) for name in names):
            of_embedding, of_hidden = projection.weight.split(embedded.shape[-1], dim=1)
            self.halves[projection] = F.linear(embedded, of_embedding), of_hidden

    def read(self, hidden: Tensor, index: Tensor) -> Read:
        """hidden [N, H], normed; index int64 [N]: which token each slot reads."""

        def read(projection: nn.Linear) -> Tensor:
            of_tokens, of_hidden = self.halves[projection]
            return of_tokens.index_select(0, index) + F.linear(hidden, of_hidden)

        return read


@dataclass(frozen=True)
class Plan:
    """What meets what in a batch of T tokens; made on the CPU, so that a device is not waited for.

    view: the N slots supervised at step 0, and what they see. supervised bool [K, N]. target_rows int64 [R]: those
    whose token the draft knows; wanted [R]: that token; slots [K, R]: who answers for each target row, -1: nobody;
    counted int64 [K]: the N_i, which stay on the CPU. following [T]: the token after each; tokens [K, N]: the one that
    each slot reads at each step; queried [U]: all of these once; query_tokens [K, N]: where in it. sources [N],
    target_sources [R]: the number of each slot's and row's source.
    """

    view: View
    supervised: Tensor
    target_rows: Tensor
    wanted: Tensor
    slots: Tensor
    counted: Tensor
    following: Tensor
    tokens: Tensor
    queried: Tensor
    query_tokens: Tensor
    sources: Tensor
    target_sources: Tensor

    def to(self, device: torch.device) -> Plan:
        moved = {k: send(v, device) for k, v in vars(self).items() if isinstance(v, Tensor) and k != "counted"}
        return replace(self, view=self.view.to(device), **moved)


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
