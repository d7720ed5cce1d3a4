"""The EAGLE-3 draft model: fusion of aux states, one decoder layer, a head over the draft vocabulary.

Departures from a plain Llama layer: the query, key and value projections read
2H ([norm of the token's embedding; norm of the hidden state]), the residual is
the hidden state without its norm, and what the next draft step reads is the
layer's output without the final norm (EAGLE-3, arXiv:2503.01840).

The layer is written as its parts (`mix`, `query`, `key_value`, `finish`), because
training and serving differ in exactly one thing: what attends to what.
`DraftModel.decode` is serving, eagle3lib.training_time_test is training.

Shape letters: B batch, T tokens, H hidden, D head, V vocabulary, Vd draft vocabulary, L aux layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3lib.errors import UserError
from eagle3lib.vocab_mapping import VocabMapping

if TYPE_CHECKING:
    from eagle3lib.config import DraftConfig

KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class DraftModelConfig:
    """The draft's shape in plain values; field names as in a HF Llama config."""

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    hidden_act: str = "silu"
    num_aux_hidden_states: int = 3
    variant: str = "eagle3"

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"draft.num_key_value_heads: {self.num_key_value_heads} does not divide num_attention_heads "
                f"({self.num_attention_heads}); set both"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft.draft_vocab_size: {self.draft_vocab_size} is larger than the target's vocabulary "
                f"({self.vocab_size}); lower it"
            )
        if self.rope_parameters.get("rope_type", "default") not in KNOWN_ROPE_TYPES:
            raise UserError(
                f"target.model: rope_type {self.rope_parameters['rope_type']!r} is not supported; "
                f"known: {', '.join(KNOWN_ROPE_TYPES)}"
            )

    @classmethod
    def from_target(cls, info: Any, draft: DraftConfig, num_aux_hidden_states: int = 3) -> DraftModelConfig:
        """As the target (a `targets.TargetInfo`) where `draft` says null; head size and RoPE always."""
        return cls(
            hidden_size=info.hidden_size,
            intermediate_size=draft.intermediate_size or info.intermediate_size,
            num_attention_heads=draft.num_attention_heads or info.num_attention_heads,
            num_key_value_heads=draft.num_key_value_heads or info.num_key_value_heads,
            head_dim=info.head_dim,
            vocab_size=info.vocab_size,
            draft_vocab_size=draft.draft_vocab_size,
            rms_norm_eps=info.rms_norm_eps,
            max_position_embeddings=info.max_position_embeddings,
            rope_parameters=dict(info.rope_parameters),
            hidden_act=info.hidden_act,
            num_aux_hidden_states=num_aux_hidden_states,
            variant=draft.variant,
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftModelConfig:
        """The inverse of `to_dict`; keys of others are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


def rotary_frequencies(config: DraftModelConfig) -> tuple[Tensor, float]:
    """inv_freq [D_rotary / 2] and the attention scaling (factor on cos and sin), by transformers' own rules."""
    rope = {"rope_type": "default", **config.rope_parameters}
    kind = rope["rope_type"]
    if kind == "default":
        rotary = int(config.head_dim * rope.get("partial_rotary_factor", 1.0))
        return rope["rope_theta"] ** (-torch.arange(0, rotary, 2, dtype=torch.float32) / rotary), 1.0
    # Imported where it is needed: it takes longer than many a job.
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    as_llama = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
    )
    inv_freq, scaling = ROPE_INIT_FUNCTIONS[kind](as_llama, device=torch.device("cpu"))
    return inv_freq, float(scaling)


# Ours in `midlayer.` -> the target's. The hidden state goes through what was the layer's input norm.
_LAYER_NAMES = {
    **{f"self_attn.{n}_proj.weight": f"self_attn.{n}_proj.weight" for n in "qkvo"},
    **{f"mlp.{n}_proj.weight": f"mlp.{n}_proj.weight" for n in ("gate", "up", "down")},
    "hidden_norm.weight": "input_layernorm.weight",
    "post_attention_layernorm.weight": "post_attention_layernorm.weight",
}


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight, in fp32, returned in x's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class Attention(nn.Module):
    """The four projections; q, k and v read 2H."""

    def __init__(self, config: DraftModelConfig):
        super().__init__()
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(2 * config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name == "silu":
        return F.silu
    from transformers.activations import ACT2FN

    return ACT2FN[name]


class MLP(nn.Module):
    def __init__(self, config: DraftModelConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self.act = _activation(config.hidden_act)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DraftModelConfig):
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class DraftCache:
    """Keys and values of the slots so far: k, v [B, KV, S, D]. Slot j has RoPE position j."""

    def __init__(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    @property
    def length(self) -> int:
        return 0 if self.k is None else self.k.shape[2]

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Add k, v [B, KV, T, D]; return all of them."""
        self.k = k if self.k is None else torch.cat([self.k, k], dim=2)
        self.v = v if self.v is None else torch.cat([self.v, v], dim=2)
        return self.k, self.v

    def truncate(self, length: int) -> None:
        """Keep the first `length` slots: what drafting added is taken back before the verified tokens go in."""
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]


class DraftModel(nn.Module):
    """See the module's docstring. Parameter names are those of the exported checkpoint."""

    def __init__(self, config: DraftModelConfig):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(False)
        self.fc = nn.Linear(config.num_aux_hidden_states * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = DecoderLayer(config)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        # Kept out of the buffers: `.to(bfloat16)` would round the frequencies.
        self._inv_freq, self._rope_scaling = rotary_frequencies(config)

    @torch.no_grad()
    def init_from_target(self, embedding: Tensor, head: Tensor, mapping: VocabMapping) -> None:
        """Take the target's embedding [V, H], shared and in its dtype, and copy the head's [V, H] rows of the draft
        vocabulary."""
        self.embed_tokens.weight = nn.Parameter(embedding, requires_grad=False)
        self.lm_head.weight.copy_(head[mapping.target_ids])

    @torch.no_grad()
    def init_layer_from_target(self, norm: Tensor, layer: Mapping[str, Tensor]) -> list[str]:
        """Start as the target's last layer on top of its highest aux state; returns the names that were set.

        norm: weight [H] of the target's final norm. layer: its last decoder layer by HF Llama's names; what is
        missing or of another shape there (MoE, MLA) stays as it is. The projections' embedding halves stay random, at
        half scale; fc starts near the identity on the highest aux state. Measured: docs/benchmarks.md.
        """
        size = self.config.hidden_size
        done = []
        for ours, theirs in _LAYER_NAMES.items():
            weight, source = self.get_parameter(f"midlayer.{ours}"), layer.get(theirs)
            columns = slice(size, None) if ours.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")) else ...
            if source is None or weight[..., columns].shape != source.shape:
                continue
            if columns is not ...:
                weight.mul_(0.5)
            weight[..., columns].copy_(source)
            done.append(ours)
        if norm.shape == self.norm.weight.shape:
            self.norm.weight.copy_(norm)
            self.fc.weight.mul_(0.3)
            self.fc.weight[:, -size:] += torch.eye(size)
            done += ["norm.weight", "fc.weight"]
        return done

    def trainable(self) -> dict[str, nn.Parameter]:
        """All parameters but the frozen embedding, by name."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}

    def fuse(self, aux: Tensor) -> Tensor:
        """Aux states [..., L*H], ascending layers -> the first hidden state [..., H]."""
        return self.fc(aux.to(self.fc.weight.dtype))

    def embed(self, input_ids: Tensor) -> Tensor:
        """[...] -> [..., H] in the draft's dtype."""
        return self.embed_tokens(input_ids).to(self.fc.weight.dtype)

    def mix(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings and hidden states, [..., H] each -> what the projections read, [..., 2H]."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embeddings).to(hidden.dtype), layer.hidden_norm(hidden)], dim=-1)

    def query(self, mixed: Tensor, positions: Tensor) -> Tensor:
        """[..., 2H], positions [...] -> rotated queries [..., heads, D]."""
        q = self.midlayer.self_attn.q_proj(mixed).unflatten(-1, (-1, self.config.head_dim))
        return self._rotate(q, positions)

    def key_value(self, mixed: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2H], positions [...] -> rotated keys and values, [..., KV heads, D] each."""
        k = self.midlayer.self_attn.k_proj(mixed).unflatten(-1, (-1, self.config.head_dim))
        v = self.midlayer.self_attn.v_proj(mixed).unflatten(-1, (-1, self.config.head_dim))
        return self._rotate(k, positions), v

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Residual hidden [..., H] and attention's output [..., heads, D] -> the layer's output [..., H], un-normed."""
        layer = self.midlayer
        after = hidden + layer.self_attn.o_proj(attended.flatten(-2))
        return after + layer.mlp(layer.post_attention_layernorm(after))

    def logits(self, hidden: Tensor) -> Tensor:
        """The layer's output [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(self.norm(hidden))

    def decode(self, input_ids: Tensor, hidden: Tensor, cache: DraftCache) -> Tensor:
        """Serving: run T more slots through the layer and keep their keys and values in `cache`.

        input_ids [B, T]: slot j takes token x_{j+1}. hidden [B, T, H]: `fuse(aux_j)` of verified
        slots, this function's own output of the slot before when drafting on. Returns [B, T, H].
        """
        tokens = input_ids.shape[1]
        positions = torch.arange(cache.length, cache.length + tokens, device=input_ids.device)
        mixed = self.mix(self.embed(input_ids), hidden)
        q = self.query(mixed, positions).transpose(1, 2)
        k, v = (x.transpose(1, 2) for x in self.key_value(mixed, positions))
        k, v = cache.append(k, v)
        # The last query sees every key; query t sees those up to its own.
        mask = torch.ones(tokens, k.shape[2], dtype=torch.bool, device=k.device).tril(k.shape[2] - tokens)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.finish(hidden, attended.transpose(1, 2))

    def _rotate(self, x: Tensor, positions: Tensor) -> Tensor:
        """RoPE in the halves convention of HF Llama on the first rotary dimensions of x [..., heads, D]."""
        cos, sin = self.rotary(positions)
        half = cos.shape[-1]
        cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
        first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of the positions [...], fp32 [..., D_rotary / 2], attention scaling applied."""
        if self._inv_freq.device != positions.device:
            self._inv_freq = self._inv_freq.to(positions.device)
        angles = positions.float().unsqueeze(-1) * self._inv_freq
        return angles.cos() * self._rope_scaling, angles.sin() * self._rope_scaling
