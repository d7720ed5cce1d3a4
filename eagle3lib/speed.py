"""How fast a training goes, against what its matrix products alone would take.

The *floor* of a step: each linear forward and backward (three products; fc's input needs no gradient, so two) on the
rows that must meet it, the draft's head on counted rows, the target's head over the draft vocabulary once. No
attention, no recomputation, and nothing saved: what is clever in the trainer shows in its share. It is taken at the
rate of a square product in the training's dtype, measured on its device when it starts.

Shape letters: H hidden, Vd draft vocabulary, K draft steps.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from eagle3lib.draft_model import DraftModelConfig


def floor_flop(config: DraftModelConfig, tokens: int, supervised: Sequence[float], counted: Sequence[float]) -> float:
    """FLOP of a step on `tokens` tokens; supervised, counted [K]: its slots by draft step (`SUMS`)."""
    hidden, both = config.hidden_size, 2 * config.hidden_size
    if config.latent:
        assert config.q_lora_rank and config.kv_lora_rank and config.qk_nope_head_dim and config.v_head_dim
        nope, turning, value = config.qk_nope_head_dim, config.head_dim, config.v_head_dim
        heads, rank = config.num_attention_heads, config.kv_lora_rank
        keys = both * (rank + turning) + rank * heads * (nope + value)
        queries = both * config.q_lora_rank + config.q_lora_rank * heads * (nope + turning) + heads * value * hidden
    else:
        width = config.num_attention_heads * config.head_dim
        keys = both * 2 * config.num_key_value_heads * config.head_dim
        queries = both * width + width * hidden
    layer = queries + 3 * hidden * config.intermediate_size
    head = config.draft_vocab_size * hidden
    tripled = keys * (tokens + sum(supervised[1:])) + layer * sum(supervised) + head * sum(counted)
    return 2.0 * (3 * tripled + 2 * config.num_aux_hidden_states * hidden**2 * tokens + head * counted[0])


def matmul_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.05) -> float:
    """FLOP/s of a square product."""
    size = 8192 if device.type == "cuda" else 768
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    a @ b
    done, start = 0, now(device)
    while (spent := now(device) - start) < seconds:
        a @ b
        done += 2 * size**3
    return done / spent


def now(device: torch.device) -> float:
    """Seconds, when all that the device was given is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def peak_memory(device: torch.device) -> int:
    """Bytes: the most that tensors have taken of this GPU, or this process of the machine's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


class Speedometer:
    """Tokens and FLOP over the time that this process has trained for."""

    def __init__(self, config: DraftModelConfig, rate: float):
        """rate: FLOP/s of all ranks together."""
        self.config, self.rate = config, rate
        self.start = self.last = time.monotonic()
        self.tokens, self.flop, self.waited = 0, 0.0, 0.0
        self._before = (0, 0.0, 0.0)  # what of these the last figures had

    def step(self, tokens: int, supervised: Sequence[float], counted: Sequence[float]) -> None:
        self.tokens += tokens
        self.flop += floor_flop(self.config, tokens, supervised, counted)

    def since_last(self) -> dict[str, float]:
        """Figures since they were last asked for."""
        now, before = time.monotonic(), self._before
        figures = self._figures(now - self.last, *(a - b for a, b in zip(self._sums(), before, strict=True)))
        self.last, self._before = now, self._sums()
        return figures

    def overall(self) -> dict[str, float]:
        return self._figures(time.monotonic() - self.start, *self._sums())

    def _sums(self) -> tuple[int, float, float]:
        return self.tokens, self.flop, self.waited

    def _figures(self, seconds: float, tokens: float, flop: float, waited: float) -> dict[str, float]:
        seconds = max(seconds, 1e-9)
        return {
            "tokens_per_second": tokens / seconds,
            "gemm_share": flop / seconds / self.rate,
            "loader_wait": waited / seconds,
        }
