"""The draft model: names, RoPE as transformers', incremental decoding equal to one pass, refusals."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from eagle3lib.config import DraftConfig
from eagle3lib.draft_model import DraftCache, DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.vocab_mapping import VocabMapping

TINY = DraftModelConfig(
    hidden_size=24,
    intermediate_size=40,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=50,
    draft_vocab_size=20,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 50000.0,
    "factor": 64.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 4096,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return DraftModel(TINY)


def test_parameter_names_and_shapes(model):
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert shapes == {
        "embed_tokens.weight": (50, 24),
        "fc.weight": (24, 72),
        "midlayer.self_attn.q_proj.weight": (32, 48),
        "midlayer.self_attn.k_proj.weight": (16, 48),
        "midlayer.self_attn.v_proj.weight": (16, 48),
        "midlayer.self_attn.o_proj.weight": (24, 32),
        "midlayer.mlp.gate_proj.weight": (40, 24),
        "midlayer.mlp.up_proj.weight": (40, 24),
        "midlayer.mlp.down_proj.weight": (24, 40),
        "midlayer.hidden_norm.weight": (24,),
        "midlayer.input_layernorm.weight": (24,),
        "midlayer.post_attention_layernorm.weight": (24,),
        "norm.weight": (24,),
        "lm_head.weight": (20, 24),
    }
    assert set(shapes) == set(model.state_dict())
    assert set(shapes) - set(model.trainable()) == {"embed_tokens.weight"}


@pytest.mark.parametrize("rope", [TINY.rope_parameters, LINEAR, LLAMA3, YARN], ids=lambda r: r["rope_type"])
def test_rotation_equals_transformers(rope):
    """Frequencies and the attention scaling (YaRN: not 1) both end up in q and k as in the target."""
    config = dataclasses.replace(TINY, rope_parameters=rope, max_position_embeddings=262144)
    llama = LlamaConfig(
        hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=262144, rope_parameters=dict(rope)
    )
    positions = torch.tensor([[0, 1, 7, 300, 9000]])
    x = torch.randn(1, 4, 5, 8)
    cos, sin = LlamaRotaryEmbedding(llama)(x, positions)
    expected, _ = apply_rotary_pos_emb(x, x, cos, sin)
    ours = DraftModel(config)._rotate(x.transpose(1, 2), positions).transpose(1, 2)
    torch.testing.assert_close(ours, expected)


def test_decode_in_pieces_equals_one_pass(model):
    ids, hidden = torch.randint(0, 50, (1, 9)), torch.randn(1, 9, 24)
    whole = model.decode(ids, hidden, DraftCache())
    cache = DraftCache()
    pieces = [model.decode(ids[:, a:b], hidden[:, a:b], cache) for a, b in [(0, 4), (4, 5), (5, 9)]]
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole)
    assert cache.length == 9


def test_truncated_cache_forgets_the_draft(model):
    ids, hidden = torch.randint(0, 50, (1, 6)), torch.randn(1, 6, 24)
    whole = model.decode(ids, hidden, DraftCache())
    cache = DraftCache()
    model.decode(ids[:, :4], hidden[:, :4], cache)
    model.decode(torch.randint(0, 50, (1, 3)), torch.randn(1, 3, 24), cache)
    cache.truncate(4)
    torch.testing.assert_close(model.decode(ids[:, 4:], hidden[:, 4:], cache), whole[:, 4:])


def test_residual_is_the_hidden_state_without_its_norm(model):
    """With attention and MLP silenced the layer hands the hidden state on unchanged."""
    torch.nn.init.zeros_(model.midlayer.self_attn.o_proj.weight)
    torch.nn.init.zeros_(model.midlayer.mlp.down_proj.weight)
    hidden = torch.randn(1, 5, 24) * 7
    assert torch.equal(model.decode(torch.randint(0, 50, (1, 5)), hidden, DraftCache()), hidden)


def test_init_from_target(model):
    embedding, head = torch.randn(50, 24), torch.randn(50, 24)
    mapping = VocabMapping.from_target_ids(torch.arange(5, 45, 2), 50)
    model.init_from_target(embedding, head, mapping)
    assert torch.equal(model.embed_tokens.weight, embedding)
    assert torch.equal(model.lm_head.weight, head[5:45:2])
    assert not model.embed_tokens.weight.requires_grad


def test_layer_starts_as_the_targets_where_shapes_fit(model):
    before = {name: p.clone() for name, p in model.named_parameters()}
    shapes = {
        "self_attn.q_proj": (32, 24),
        "self_attn.o_proj": (24, 32),
        "mlp.gate_proj": (41, 24),
        "input_layernorm": (24,),
    }
    layer = {f"{name}.weight": torch.randn(shape) for name, shape in shapes.items()}
    norm = torch.randn(24)
    done = model.init_layer_from_target(norm, layer)
    mid = model.midlayer
    assert done == [
        "self_attn.q_proj.weight",
        "self_attn.o_proj.weight",
        "hidden_norm.weight",
        "norm.weight",
        "fc.weight",
    ]
    assert torch.equal(mid.self_attn.q_proj.weight[:, 24:], layer["self_attn.q_proj.weight"])
    assert torch.equal(mid.self_attn.q_proj.weight[:, :24], before["midlayer.self_attn.q_proj.weight"][:, :24] / 2)
    assert torch.equal(mid.self_attn.o_proj.weight, layer["self_attn.o_proj.weight"])
    assert torch.equal(mid.hidden_norm.weight, layer["input_layernorm.weight"])
    assert torch.equal(mid.mlp.gate_proj.weight, before["midlayer.mlp.gate_proj.weight"])  # 41 rows do not fit 40
    assert torch.equal(model.norm.weight, norm)
    aux = torch.randn(3, 72)
    small = torch.nn.functional.linear(aux, before["fc.weight"]) * 0.3
    torch.testing.assert_close(model.fuse(aux), small + aux[:, 48:])


def test_config_from_target_and_back():
    info = SimpleNamespace(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        vocab_size=300,
        rms_norm_eps=1e-6,
        max_position_embeddings=4096,
        rope_parameters=LLAMA3,
        hidden_act="silu",
    )
    config = DraftModelConfig.from_target(info, DraftConfig(draft_vocab_size=100, intermediate_size=96))
    assert (config.intermediate_size, config.num_attention_heads, config.head_dim) == (96, 8, 16)
    assert config.rope_parameters == LLAMA3
    assert DraftModelConfig.from_dict({**config.to_dict(), "other": 1}) == config
    with pytest.raises(UserError, match="draft.num_key_value_heads: 4 does not divide"):
        DraftModelConfig.from_target(info, DraftConfig(draft_vocab_size=100, num_attention_heads=6))
    with pytest.raises(UserError, match="draft.draft_vocab_size: 301 is larger"):
        DraftModelConfig.from_target(info, DraftConfig(draft_vocab_size=301))
    info.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    with pytest.raises(UserError, match="longrope"):
        DraftModelConfig.from_target(info, DraftConfig(draft_vocab_size=100))
