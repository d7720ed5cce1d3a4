"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) for a draft: its projections, reading 2H.

Queries, and keys with values, pass through a narrow latent with a norm. Of a head's D = nope + rope dimensions only
the rope part turns with the position; that of the keys is one for all heads. Values have a size of their own.

    q        = q_b_proj(q_a_layernorm(q_a_proj(z)))            [heads, nope + rope]
    c, k^R   = kv_a_proj_with_mqa(z)                           [rank], [rope]
    k^C, v   = kv_b_proj(kv_a_layernorm(c))                    [heads, nope], [heads, V]
    k        = [k^C; rotated k^R]                              [heads, nope + rope]

The weights keep the two numbers that turn together side by side, as DeepSeek's do and as SGLang and vLLM read them.
What serving caches (the latent) differs from what is attended to, but not the result: training holds keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from eagle3lib.norm import RMSNorm

if TYPE_CHECKING:
    from eagle3lib.draft_model import DraftModelConfig, Read

SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
KNOWN_ROPE_TYPES = ("default", "yarn")  # both engines take any other for DeepSeek's YaRN


def softmax_gain(rope: dict[str, Any]) -> float:
    """By what YaRN's temperature multiplies the scores, beside its factor on cos and sin (DeepSeek-V2's code)."""
    if rope.get("rope_type", "default") != "yarn" or rope["factor"] <= 1:
        return 1.0
    return (0.1 * rope.get("mscale_all_dim", 0.0) * math.log(rope["factor"]) + 1) ** 2


def pairs_to_halves(x: Tensor) -> Tensor:
    """[..., D] whose neighbours turn together -> the order in which dimension i turns with i + D/2."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


class LatentAttention(nn.Module):
    def __init__(self, config: DraftModelConfig):
        super().__init__()
        q_rank, kv_rank, nope, rope, value = (getattr(config, name) for name in SIZES)
        heads, both, eps = config.num_attention_heads, 2 * config.hidden_size, config.rms_norm_eps
        self.q_a_proj = nn.Linear(both, q_rank, bias=False)
        self.q_a_layernorm = RMSNorm(q_rank, eps)
        self.q_b_proj = nn.Linear(q_rank, heads * (nope + rope), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(both, kv_rank + rope, bias=False)
        self.kv_a_layernorm = RMSNorm(kv_rank, eps)
        self.kv_b_proj = nn.Linear(kv_rank, heads * (nope + value), bias=False)
        self.o_proj = nn.Linear(heads * value, config.hidden_size, bias=False)
        self.heads, self.nope, self.rope = heads, nope, rope
        self.of_query, self.of_key_value = ("q_a_proj",), ("kv_a_proj_with_mqa",)  # those that read both
        self.gain = softmax_gain(config.rope_parameters)

    def query(self, read: Read, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Queries [..., heads, nope + rope], with the gain on the scores in it."""
        q = self.q_b_proj(self.q_a_layernorm(read(self.q_a_proj))).unflatten(-1, (self.heads, -1))
        still, turning = q.split([self.nope, self.rope], dim=-1)
        return torch.cat([still, rotate(pairs_to_halves(turning))], dim=-1) * self.gain

    def key_value(self, read: Read, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys [..., heads, nope + rope] and values [..., heads, V]."""
        latent, turning = read(self.kv_a_proj_with_mqa).tensor_split([-self.rope], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.heads, -1))
        still, v = kv.tensor_split([self.nope], dim=-1)
        shared = rotate(pairs_to_halves(turning).unsqueeze(-2))
        return torch.cat([still, shared.expand(*still.shape[:-1], -1)], dim=-1), v
