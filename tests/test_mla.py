"""Latent attention: against transformers' DeepSeek-V3, a slow reference, serving, and what engines load."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from test_draft_model import YARN as YARN_OF_TWO_FACTORS
from test_export import make_target
from test_training_time_test import (
    CONFIG,
    KERNELS,
    V,
    assert_training_equals_serving,
    assert_training_equals_the_slow_reference,
    make_head,
)
from test_training_time_test import make_model as make_plain_model
from transformers import AutoConfig, DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from eagle3lib import export, targets
from eagle3lib.config import DraftConfig
from eagle3lib.draft_model import VARIANTS, DraftCache, DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.vocab_mapping import VocabMapping

SIZES = {"q_lora_rank": 10, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 5}
H = CONFIG.hidden_size
LATENT = replace(CONFIG, num_key_value_heads=4, head_dim=4, **SIZES)
YARN = YARN_OF_TWO_FACTORS | {"mscale_all_dim": 1.0}
ROPES = {"default": CONFIG.rope_parameters, "yarn": YARN, "yarn of two factors": YARN_OF_TWO_FACTORS}


def make_model(**changes):
    return make_plain_model(replace(LATENT, **changes))


@pytest.fixture
def head():
    return make_head()


@pytest.mark.parametrize("rope", ROPES)
def test_equals_transformers(rope):
    """The same weights in DeepSeek-V3's own attention, whose input is 2H wide; YaRN's two factors included."""
    model = make_model(rope_parameters=ROPES[rope], max_position_embeddings=262144, rms_norm_eps=1e-6)
    config = DeepseekV3Config(
        hidden_size=2 * H, num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=262144,
        rope_parameters=dict(ROPES[rope]), attn_implementation="eager", **SIZES,
    )  # fmt: skip
    theirs = DeepseekV3Attention(config, 0).eval()
    weights = model.midlayer.self_attn.state_dict()
    theirs.o_proj = torch.nn.Linear(4 * 5, H, bias=False)
    assert weights.keys() == theirs.state_dict().keys()
    theirs.load_state_dict(weights)
    mixed, positions = torch.randn(1, 9, 2 * H), torch.arange(9)[None] + 5000
    mask = torch.full((9, 9), -torch.inf).triu(1)[None, None]
    expected, _ = theirs(mixed, DeepseekV3RotaryEmbedding(config)(mixed, positions), mask)
    q, (k, v) = model.query(mixed, positions), model.key_value(mixed, positions)
    attended = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(model.midlayer.self_attn.o_proj(attended.flatten(-2)), expected, rtol=1e-4, atol=1e-5)


def test_keys_and_values_written_out():
    """One token, head by head: which latent, which rows, which pairs turn."""
    model = make_model()
    w = {n: p.detach() for n, p in model.midlayer.self_attn.named_parameters()}
    z, position = torch.randn(2 * H), 3

    def norm(x, name):
        return x / (x.pow(2).mean() + 1e-5).sqrt() * w[f"{name}.weight"]

    def turn(x):
        out = x.clone()
        for i in range(2):
            angle = position * 10000.0 ** (-2 * i / 4)
            a, b = x[2 * i], x[2 * i + 1]
            out[2 * i], out[2 * i + 1] = (
                a * math.cos(angle) - b * math.sin(angle),
                b * math.cos(angle) + a * math.sin(angle),
            )
        return out

    down = w["kv_a_proj_with_mqa.weight"] @ z
    up = (w["kv_b_proj.weight"] @ norm(down[:12], "kv_a_layernorm")).view(4, 11)
    q = (w["q_b_proj.weight"] @ norm(w["q_a_proj.weight"] @ z, "q_a_layernorm")).view(4, 10)
    k, v = (x[0] for x in model.key_value(z[None], torch.tensor([position])))
    torch.testing.assert_close(v, up[:, 6:])
    torch.testing.assert_close(k[:, :6], up[:, :6])
    ours = model.query(z[None], torch.tensor([position]))[0]
    for h in range(4):  # the order within the rope part is ours; scores are not
        expected = q[h, :6] @ up[h, :6] + turn(q[h, 6:]) @ turn(down[12:])
        torch.testing.assert_close(ours[h] @ k[h], expected)


def attend_slowly(q, keys, values):
    scores = torch.stack([(q * k).sum(-1) for k in keys]) / math.sqrt(10)
    return sum(p[:, None] * v for p, v in zip(scores.softmax(0), values, strict=True))


@pytest.mark.parametrize("kernel", KERNELS)
def test_training_equals_the_slow_reference(head, kernel, monkeypatch):
    """Values narrower than keys, on the CPU's kernel and written out: loss and every gradient."""
    KERNELS[kernel](monkeypatch)
    monkeypatch.setattr("test_training_time_test.attend_slowly", attend_slowly)
    assert_training_equals_the_slow_reference(make_model(), head)


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("rope", ROPES)
def test_training_equals_serving(head, variant, rope):
    assert_training_equals_serving(make_model(rope_parameters=ROPES[rope], **VARIANTS[variant]), head)


def test_decode_in_pieces_equals_one_pass():
    model, ids, hidden = make_model(), torch.randint(0, V, (1, 9)), torch.randn(1, 9, H)
    cache = DraftCache()
    pieces = [model.decode(ids[:, a:b], hidden[:, a:b], cache) for a, b in [(0, 4), (4, 5), (5, 9)]]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model.decode(ids, hidden, DraftCache()))


# --- the target and the export -----------------------------------------------------------------------------------


def latent_target(rope="yarn"):
    target = make_target(rope_parameters=ROPES[rope], model_type="kimi_k2", head_dim=4, num_key_value_heads=2)
    return replace(target, num_attention_heads=2, latent_attention=dict(SIZES))


def test_sizes_are_the_targets(tmp_path):
    config = DeepseekV3Config(
        hidden_size=H, num_attention_heads=2, num_key_value_heads=2, rope_parameters=dict(YARN),
        max_position_embeddings=262144, num_hidden_layers=6, **SIZES,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    info = targets.load_info(tmp_path)
    assert info.latent_attention == SIZES
    draft = DraftModelConfig.from_target(info, DraftConfig(draft_vocab_size=20, attention="mla", variant="eagle3.1"))
    assert {name: getattr(draft, name) for name in SIZES} == SIZES
    assert (draft.head_dim, draft.num_key_value_heads, draft.variant) == (4, 2, "eagle3.1")
    assert not DraftModelConfig.from_target(info, DraftConfig(draft_vocab_size=20)).latent


# As models/kimi_k25_eagle3.py of SGLang 0.5.23 and models/deepseek_eagle3.py of vLLM 0.32 name and shape them.
ENGINES_ASK_FOR = {
    "fc.weight": (H, 3 * H),
    "midlayer.self_attn.q_a_proj.weight": (10, 2 * H),
    "midlayer.self_attn.q_a_layernorm.weight": (10,),
    "midlayer.self_attn.q_b_proj.weight": (2 * 10, 10),
    "midlayer.self_attn.kv_a_proj_with_mqa.weight": (12 + 4, 2 * H),
    "midlayer.self_attn.kv_a_layernorm.weight": (12,),
    "midlayer.self_attn.kv_b_proj.weight": (2 * 11, 12),
    "midlayer.self_attn.o_proj.weight": (H, 2 * 5),
    "midlayer.mlp.gate_proj.weight": (24, H),
    "midlayer.mlp.up_proj.weight": (24, H),
    "midlayer.mlp.down_proj.weight": (H, 24),
    "midlayer.input_layernorm.weight": (H,),
    "midlayer.hidden_norm.weight": (H,),
    "midlayer.post_attention_layernorm.weight": (H,),
    "norm.weight": (H,),
    "lm_head.weight": (20, H),
    "d2t": (20,),
    "t2d": (50,),
}


@pytest.mark.parametrize("variant", ["eagle3", "eagle3.1"])
@pytest.mark.parametrize("rope", ROPES)
def test_export_is_what_engines_ask_for(tmp_path, variant, rope):
    target = latent_target(rope)
    torch.manual_seed(0)
    settings = DraftConfig(draft_vocab_size=20, attention="mla", variant=variant)
    model = DraftModel(DraftModelConfig.from_target(target, settings))
    mapping = VocabMapping.from_target_ids(torch.randperm(50)[:20], 50)
    export.export_draft(model.state_dict(), model.config, mapping, target, [2, 3, 4], tmp_path / "d", dtype="float32")
    tensors = load_file(tmp_path / "d" / "model.safetensors")
    norms = {f"fc_norm.{i}.weight": (H,) for i in range(3)} if variant == "eagle3.1" else {}
    assert {name: tuple(t.shape) for name, t in tensors.items()} == ENGINES_ASK_FOR | norms
    values = json.loads((tmp_path / "d" / "config.json").read_text())
    assert values["architectures"] == ["Eagle3DeepseekV2ForCausalLM"] and values["model_type"] == "deepseek_v2"
    assert {name: values[name] for name in SIZES} == SIZES
    assert (values["num_hidden_layers"], values["tie_word_embeddings"]) == (1, False)
    assert values["fc_norm"] == values["norm_output"] == (variant == "eagle3.1")
    read = AutoConfig.from_pretrained(tmp_path / "d")  # both engines read it so
    assert read.rope_parameters["rope_type"] == ROPES[rope]["rope_type"]
    assert read.rope_parameters.get("mscale_all_dim") == ROPES[rope].get("mscale_all_dim")
    assert (read.kv_lora_rank, read.num_attention_heads, read.hidden_act) == (12, 2, "silu")
    loaded, _, _ = export.load_exported(tmp_path / "d", model.embed_tokens.weight)
    assert loaded.config == model.config
    for name, parameter in model.trainable().items():
        assert torch.equal(loaded.get_parameter(name), parameter), name


def test_rope_that_engines_would_take_for_yarn():
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
    with pytest.raises(UserError, match=r"draft\.attention: mla with rope_type 'linear'"):
        replace(LATENT, rope_parameters=rope)


def test_starts_as_the_targets_last_layer():
    """Its projections read the hidden half, as of a Llama; queries, keys and values behind the latent are whole."""
    model = DraftModel(LATENT)
    attention = model.midlayer.self_attn.state_dict()
    layer = {f"self_attn.{name}": torch.randn_like(t) for name, t in attention.items()}
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        layer[f"self_attn.{name}.weight"] = layer[f"self_attn.{name}.weight"][:, :H]
    done = model.init_layer_from_target(torch.ones(H), layer)
    assert {f"self_attn.{name}" for name in attention} <= set(done)
    after = model.midlayer.self_attn
    assert torch.equal(after.kv_a_proj_with_mqa.weight[:, H:], layer["self_attn.kv_a_proj_with_mqa.weight"])
    assert torch.equal(after.q_b_proj.weight, layer["self_attn.q_b_proj.weight"])
