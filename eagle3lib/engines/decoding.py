"""Continuous batching: replies that run at once, each slot refilled as soon as its reply has ended.

A step is one ragged pass: a row for every running reply and all rows of the prompts that have just been
admitted, so that a prefill costs no pass of its own. What a new prompt has in common with a running one
(the system prompt) is copied, not computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from eagle3lib.engines import Prompt, Reply, Temperature, of_prompt
from eagle3lib.engines.ragged import BANK, Piece, RaggedPass, SlotCache, common_prefix

if TYPE_CHECKING:
    from eagle3lib.engines.transformers import TransformersEngine


@dataclass
class _Running:
    """A prompt and the reply so far."""

    key: Any
    prompt: Sequence[int]
    temperature: float
    uniforms: torch.Tensor | None  # one number in [0, 1) for each token to come
    reply: list[int] = field(default_factory=list)

    @property
    def cached(self) -> int:
        """Positions in the cache: all but the newest token."""
        return len(self.prompt) + len(self.reply) - 1


class Decoding:
    """Replies that run at once. Slots 0..n-1 of the cache are the running ones, newly admitted ones at the end."""

    def __init__(
        self,
        engine: TransformersEngine,
        slots: int,
        max_new_tokens: int,
        temperature: Temperature,
        top_p: float,
        stop: set[int],
    ):
        self.engine, self.slots, self.max_new_tokens = engine, slots, max_new_tokens
        self.temperature, self.top_p, self.stop = temperature, top_p, stop
        self.cache = SlotCache(slots)
        self.running: list[_Running] = []
        self.n_started = 0  # of the running ones, those whose prompt is in the cache

    def admit(self, waiting: Iterator[Prompt]) -> None:
        """Fill free slots, with at most `batch_tokens` rows to prefill in one pass."""
        rows = 0
        while len(self.running) < self.slots and rows < self.engine.batch_tokens:
            prompt = next(waiting, None)
            if prompt is None:
                return
            key, ids, seed = prompt
            self.engine._check_ids(ids)
            uniforms, temperature = None, of_prompt(self.temperature, key)
            if temperature > 0:
                uniforms = torch.rand(self.max_new_tokens, generator=torch.Generator().manual_seed(seed))
            self.running.append(_Running(key, ids, temperature, uniforms))
            rows += len(ids)
            if not self.n_started:
                return  # alone: the others copy from it what they share

    def step(self) -> Iterator[Reply]:
        """One token for every running reply; those that have ended leave."""
        for running, token in zip(self.running, self._next_tokens(), strict=True):
            running.reply.append(token)
        self.n_started = len(self.running)
        for slot in reversed(range(len(self.running))):
            running = self.running[slot]
            stopped = running.reply[-1] in self.stop
            if stopped or len(running.reply) == self.max_new_tokens:
                self._free(slot)
                yield running.key, running.reply, "stop" if stopped else "length"

    @torch.no_grad()
    def _free(self, slot: int) -> None:
        """Close the gap: from each bank of slots behind it the longest moves up, so that banks stay of like length."""
        for start in range((slot // BANK + 1) * BANK, len(self.running), BANK):
            behind = range(start, min(start + BANK, len(self.running)))
            longest = max(behind, key=lambda s: self.running[s].cached)
            self._move(longest, slot)
            slot = longest
        self._move(len(self.running) - 1, slot)
        self.running.pop()
        self.n_started = len(self.running)

    def _move(self, source: int, target: int) -> None:
        self.running[target] = self.running[source]
        self.cache.copy(source, target, self.running[target].cached)

    @torch.no_grad()
    def _next_tokens(self) -> list[int]:
        """Advance the running replies by one row and prefill the new prompts, in one pass."""
        started, new = self.running[: self.n_started], self.running[self.n_started :]
        pieces, rows = [], [r.reply[-1:] for r in started]
        for slot, running in enumerate(new, self.n_started):
            shared = self._share_prefix(slot, running.prompt)
            pieces.append(Piece(len(running.prompt) - shared, shared, slot))
            rows.append(list(running.prompt[shared:]))
        singles = [running.cached for running in started]
        ragged = RaggedPass(pieces, self.cache, singles, self.engine.device)
        logits = self.engine._run(self.engine.model, rows, ragged, logits_to_keep=ragged.last_rows()).logits[0]
        tokens = logits.argmax(-1)
        if sampled := [i for i, r in enumerate(self.running) if r.uniforms is not None]:
            drawn = torch.stack([r.uniforms[len(r.reply)] for r in self.running if r.uniforms is not None])
            temperatures = torch.tensor([self.running[i].temperature for i in sampled], device=logits.device)
            of_rows = torch.tensor(sampled, device=logits.device)
            tokens[of_rows] = sample(logits[of_rows], temperatures[:, None], self.top_p, drawn.to(logits.device))
        return tokens.tolist()

    def _share_prefix(self, slot: int, prompt: Sequence[int]) -> int:
        """Copy what a running prompt has in common with a new one (its system prompt); how many positions."""
        shared, source = 0, slot
        for other, running in enumerate(self.running[: self.n_started]):
            length = common_prefix(running.prompt, prompt[:-1])
            if length > shared:
                shared, source = length, other
        self.cache.copy(source, slot, shared)
        return shared


def sample(
    logits: torch.Tensor, temperature: float | torch.Tensor, top_p: float, uniforms: torch.Tensor
) -> torch.Tensor:
    """Draw a token a row: logits [B, V], temperature one or [B, 1], uniforms [B] in [0, 1) -> [B].

    top_p keeps the fewest most likely tokens whose probabilities sum to at least top_p (Holtzman et al. 2020).
    """
    probabilities = torch.softmax(logits.float() / temperature, -1)
    if top_p >= 1:
        cumulative = probabilities.cumsum(-1)
        return _draw(cumulative, uniforms)
    # The nucleus is nearly always small: sorting the whole vocabulary would take as long as the model.
    width = min(256, probabilities.shape[-1])
    top = probabilities.topk(width)
    if bool((top.values.sum(-1) < top_p).any()):
        top = probabilities.sort(descending=True)
    cumulative = top.values.cumsum(-1)
    cumulative = cumulative.masked_fill(cumulative - top.values >= top_p, 0).cummax(-1).values
    return top.indices.gather(-1, _draw(cumulative, uniforms)[:, None])[:, 0]


def _draw(cumulative: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    return torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)[:, 0]
