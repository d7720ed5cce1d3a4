"""Prove that an engine's states are those asked for (design.md, section 5), before any sample is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from eagle3lib.engines import Engine, States
from eagle3lib.errors import UserError

PROMPT, TOKENS = 16, 64
# Below this gap between the target's two best logits a greedy choice is a tie: another order of
# summation (a batch, a chunk of several tokens) may turn it. bfloat16 has 8 bits: steps of 1/4 at logits of 32-64.
TIE_GAP = {"float32": 1e-3, "float16": 0.06, "bfloat16": 0.5}
# Largest difference of two computations of the same states, as a share of a row's norm. Rounding in another order
# makes 1e-4 in rows where the target amplifies it (seen in SmolLM2); the next layer differs by 1e-2 and more.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def probe(
    engine: Engine,
    aux_layer_ids: Sequence[int],
    vocab_size: int,
    head: Callable[[torch.Tensor], torch.Tensor],
    reference: Callable[[list[int]], Sequence[torch.Tensor]] | None,
) -> dict[str, Any]:
    """A record of what was checked. Raises UserError naming the layer that differs.

    One greedy continuation of 64 tokens is extracted again in one pass: it must agree with `reference` (ids -> plain
    transformers' n + 1 hidden states [T, H]; None: the target is too large for it), with its own extraction among
    others, and its last states with the tokens that were chosen. head: post-norm states [T, H] -> logits [T, V].
    """
    prompt = torch.randint(0, vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(0)).tolist()
    ((_, reply, _),) = engine.generate([(0, prompt, 0)], TOKENS, eos_ids=())
    ids = prompt + reply
    (states,) = engine.extract([ids], aux_layer_ids)
    return {
        "engine": engine.name,
        "version": engine.version,
        "dtype": engine.dtype,
        "against_transformers": _against(engine, states, aux_layer_ids, reference(ids)) if reference else "too large",
        "in_a_batch": _in_a_batch(engine, ids, states, aux_layer_ids),
        "greedy_tokens": greedy_tokens(engine, reply, head(states.last[len(prompt) - 1 : -1])),
    }


def _against(
    engine: Engine, states: States, aux_layer_ids: Sequence[int], expected: Sequence[torch.Tensor]
) -> dict[str, float]:
    differences, n = {}, len(expected) - 1
    for k, tensor in [*zip(aux_layer_ids, states.aux, strict=True), (n, states.last)]:
        what = "the last hidden state (post-norm)" if k == n else f"aux layer {k}"
        differences[str(k)] = difference(tensor, expected[k])
        if not differences[str(k)] <= TOLERANCE[engine.dtype]:
            like = [i for i, e in enumerate(expected) if difference(tensor, e) <= TOLERANCE[engine.dtype]]
            hint = f"; it is output_hidden_states[{like[0]}]" if like else ""
            raise UserError(
                f"probe: {what} of engine {engine.name} {engine.version} differs from transformers' "
                f"output_hidden_states[{k}] by {differences[str(k)]:.2g} of its size{hint}; do not train on this"
            )
    return differences


def _in_a_batch(engine: Engine, ids: list[int], states: States, aux_layer_ids: Sequence[int]) -> float:
    batch = engine.extract([ids[:7], ids, ids[::-1]], aux_layer_ids)[1]
    names = [*(f"aux layer {k}" for k in aux_layer_ids), "the last hidden state"]
    largest = 0.0
    for name, alone, among in zip(names, [*states.aux, states.last], [*batch.aux, batch.last], strict=True):
        differs = difference(among, alone)
        if not differs <= TOLERANCE[engine.dtype]:
            raise UserError(
                f"probe: {name} of one sample differs by {differs:.2g} of its size when it is extracted in a "
                f"batch by engine {engine.name} {engine.version}; set engine.batch_tokens: 1"
            )
        largest = max(largest, differs)
    return largest


def greedy_tokens(engine: Engine, reply: list[int], logits: torch.Tensor) -> dict[str, Any]:
    """Do the logits [T, V] of the last states choose the tokens that the engine chose?"""
    top = logits.float().topk(2)
    gap = TIE_GAP[engine.dtype]
    decisive = top.values[:, 0] - top.values[:, 1] > gap
    equal = (top.indices[:, 0] == torch.tensor(reply, device=logits.device))[decisive]
    rows, right = int(decisive.sum()), int(equal.sum())
    if not rows or right < 0.99 * rows:
        raise UserError(
            f"probe: the last hidden state of engine {engine.name} {engine.version} chooses {right} of {rows} greedy "
            f"tokens (rows whose top two logits differ by more than {gap}); is it taken before the final norm?"
        )
    return {"rows": rows, "equal": right, "gap": gap}


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference of two rows [H] as a share of the row's norm (norms differ by orders); NaN if not finite."""
    return float(((a.float() - b.float()).norm(dim=-1) / b.float().norm(dim=-1)).max())
