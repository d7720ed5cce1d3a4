"""The EAGLE-3 draft model: fusion of aux states, one decoder layer, a head over the draft vocabulary.

Departures from a plain Llama layer: the query, key and value projections read
2H ([norm of the token's embedding; norm of the hidden state]), the residual is
the hidden state without its norm, and what the next draft step reads is the
layer's output without the final norm (EAGLE-3, arXiv:2503.01840). `VARIANTS` have
more norms; the attention may be a latent one (`eagle3lib.mla`).

The layer is written as its parts (`mix`, `query`, `key_value`, `finish`), because
training and serving differ in exactly one thing: what attends to what.
`DraftModel.decode` is serving, eagle3lib.training_time_test is training.

Shape letters: B batch, T tokens, H hidden, D head, V vocabulary, Vd draft vocabulary, L aux layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3lib import mla
from eagle3lib.errors import UserError
from eagle3lib.norm import RMSNorm
from eagle3lib.vocab_mapping import VocabMapping

if TYPE_CHECKING:
    from eagle3lib.config import DraftConfig

# The norms of each `draft.variant`, by the keys that SGLang and vLLM read. EAGLE-3.1: arXiv:2605.09992; speculators:
# what its trainer (0.9) makes unasked.
VARIANTS: dict[str, dict[str, bool]] = {
    "eagle3": {},
    "eagle3.1": {"fc_norm": True, "norm_output": True},
    "speculators": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
}
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
KNOWN_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic")


@dataclass(frozen=True)
class DraftModelConfig:
    """The draft's shape in plain values; names as in the HF configs of Llama and DeepSeek-V2, and as engines read them.

    norm_before_residual: the residual is the hidden state with its norm. norm_before_fc: one norm over all aux states
    together; fc_norm: one for each. norm_output: what the next step reads has the final norm.
    With latent attention all of `mla.SIZES` are set, and head_dim is qk_rope_head_dim.
    """

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
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

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
        if self.latent and self.rope_parameters.get("rope_type", "default") not in mla.KNOWN_ROPE_TYPES:
            raise UserError(
                f"draft.attention: mla with rope_type {self.rope_parameters['rope_type']!r} is not what engines "
                f"compute; known: {', '.join(mla.KNOWN_ROPE_TYPES)}; set it to gqa"
            )

    @property
    def latent(self) -> bool:
        return self.kv_lora_rank is not None

    @property
    def variant(self) -> str:
        """The name of its norms in `VARIANTS`; `own` where another trainer mixed them otherwise."""
        mine = {name: True for name in NORMS if getattr(self, name)}
        return next((name for name, norms in VARIANTS.items() if norms == mine), "own")

    @classmethod
    def from_target(cls, info: Any, draft: DraftConfig, num_aux_hidden_states: int = 3) -> DraftModelConfig:
        """As the target (a `targets.TargetInfo`) where `draft` says null; head size and RoPE always."""
        heads = draft.num_attention_heads or info.num_attention_heads
        latent = _latent_sizes(info) if draft.attention == "mla" else {}
        return cls(
            hidden_size=info.hidden_size,
            intermediate_size=draft.intermediate_size or info.intermediate_size,
            num_attention_heads=heads,
            num_key_value_heads=heads if latent else draft.num_key_value_heads or info.num_key_value_heads,
            head_dim=latent.get("qk_rope_head_dim", info.head_dim),
            vocab_size=info.vocab_size,
            draft_vocab_size=draft.draft_vocab_size,
            rms_norm_eps=info.rms_norm_eps,
            max_position_embeddings=info.max_position_embeddings,
            rope_parameters=dict(info.rope_parameters),
            hidden_act=info.hidden_act,
            num_aux_hidden_states=num_aux_hidden_states,
            **VARIANTS[draft.variant],
            **latent,
        )

    def to_dict(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> DraftModelConfig:
        """The inverse of `to_dict`; keys of others are ignored."""
        return cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})


def _latent_sizes(info: Any) -> dict[str, Any]:
    """`mla.SIZES` of a target that has them all; SGLang takes no draft without q_lora_rank."""
    sizes = info.latent_attention or {}
    if missing := [name for name in mla.SIZES if not sizes.get(name)]:
        raise UserError(
            f"draft.attention: mla needs a target with latent attention (DeepSeek's, Kimi); this {info.model_type} has "
            f"no {missing[0]}; set it to gqa"
        )
    return {name: sizes[name] for name in mla.SIZES}


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


# Ours in `midlayer.` -> the target's, where it differs. The hidden state goes through what was the layer's input norm.
_NAMES_IN_TARGET = {"hidden_norm.weight": "input_layernorm.weight", "input_layernorm.weight": None}
_READ_BOTH = tuple(f"self_attn.{n}.weight" for n in ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"))


# How a layer's projections meet what they read: called with one of those that read both, gives its output [..., out].
Read = Callable[[nn.Linear], Tensor]


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
        self.head_dim = config.head_dim
        self.of_query, self.of_key_value = ("q_proj",), ("k_proj", "v_proj")  # those that read both

    def query(self, read: Read, rotate: Callable[[Tensor], Tensor]) -> Tensor:
        """Queries [..., heads, D]."""
        return rotate(read(self.q_proj).unflatten(-1, (-1, self.head_dim)))

    def key_value(self, read: Read, rotate: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [..., KV heads, D] each."""
        k = read(self.k_proj).unflatten(-1, (-1, self.head_dim))
        v = read(self.v_proj).unflatten(-1, (-1, self.head_dim))
        return rotate(k), v


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
        self.self_attn = mla.LatentAttention(config) if config.latent else Attention(config)
        self.mlp = MLP(config)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)


def _reader(mixed: Tensor | Read) -> Read:
    return (lambda projection: projection(mixed)) if isinstance(mixed, Tensor) else mixed


class DraftCache:
    """Keys and values of the slots so far: k, v [B, KV, S, D] (v's D may differ). Slot j has RoPE position j."""

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
        aux = config.num_aux_hidden_states
        if config.norm_before_fc:
            self.input_norm = RMSNorm(aux * config.hidden_size, config.rms_norm_eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(aux))
        self.fc = nn.Linear(aux * config.hidden_size, config.hidden_size, bias=False)
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
        for ours, weight in self.midlayer.named_parameters():
            source = layer.get(_NAMES_IN_TARGET.get(ours, ours) or "")
            columns = slice(size, None) if ours in _READ_BOTH else ...
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
        aux = aux.to(self.fc.weight.dtype)
        if self.config.norm_before_fc:
            aux = self.input_norm(aux)
        if self.config.fc_norm:
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def embed(self, input_ids: Tensor) -> Tensor:
        """[...] -> [..., H] in the draft's dtype."""
        return self.embed_tokens(input_ids).to(self.fc.weight.dtype)

    def mix(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """Embeddings and hidden states, [..., H] each -> what the projections read, [..., 2H]."""
        layer = self.midlayer
        return torch.cat([layer.input_layernorm(embeddings).to(hidden.dtype), layer.hidden_norm(hidden)], dim=-1)

    def query(self, mixed: Tensor | Read, positions: Tensor) -> Tensor:
        """[..., 2H] (or how to read it), positions [...] -> queries [..., heads, D], rotated."""
        return self.midlayer.self_attn.query(_reader(mixed), partial(self._rotate, positions=positions))

    def key_value(self, mixed: Tensor | Read, positions: Tensor) -> tuple[Tensor, Tensor]:
        """[..., 2H] (or how to read it), positions [...] -> rotated keys and values, [..., KV heads, D] each."""
        return self.midlayer.self_attn.key_value(_reader(mixed), partial(self._rotate, positions=positions))

    def finish(self, hidden: Tensor, attended: Tensor) -> Tensor:
        """Hidden state [..., H] and attention's output [..., heads, D] -> the layer's output [..., H], un-normed."""
        layer = self.midlayer
        residual = layer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        after = residual + layer.self_attn.o_proj(attended.flatten(-2))
        return after + layer.mlp(layer.post_attention_layernorm(after))

    def carry(self, hidden: Tensor) -> Tensor:
        """The layer's output [..., H] -> what the next step reads."""
        return self.norm(hidden) if self.config.norm_output else hidden

    def logits(self, carried: Tensor) -> Tensor:
        """What the next step reads [..., H] -> logits over the draft vocabulary [..., Vd]."""
        return self.lm_head(carried if self.config.norm_output else self.norm(carried))

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
        return self.carry(self.finish(hidden, attended.transpose(1, 2)))

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
