"""Every variant: the layer against its formulas, training against serving, and what is exported of it."""

from __future__ import annotations

import json
import math
import typing
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from test_export import AUX, make_config, make_target
from test_training_time_test import (
    CONFIG,
    V,
    assert_training_equals_serving,
    assert_training_equals_the_slow_reference,
    make_head,
    make_model,
)

from eagle3lib import export
from eagle3lib.config import DraftConfig, EngineConfig, RunConfig
from eagle3lib.draft_model import NORMS, VARIANTS, DraftCache, DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.vocab_mapping import VocabMapping

H, D = CONFIG.hidden_size, CONFIG.head_dim


@pytest.fixture(params=VARIANTS)
def model(request):
    return make_model(replace(CONFIG, **VARIANTS[request.param]))


@pytest.fixture
def head():
    return make_head()


def test_the_config_offers_what_the_model_knows():
    assert list(typing.get_args(DraftConfig.model_fields["variant"].annotation)) == list(VARIANTS)
    for name, norms in VARIANTS.items():
        assert replace(CONFIG, **norms).variant == name
    assert replace(CONFIG, fc_norm=True).variant == "own"


# --- the formulas ------------------------------------------------------------------------------------------------


def written_out(weights, flags, ids, aux):
    """Logits of slot 0's second step: x_1, x_2 and g_0 in; after vLLM 0.32's llama_eagle3.py, in words of one slot."""

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weights[f"{name}.weight"]

    def linear(x, name):
        return x @ weights[f"{name}.weight"].t()

    def heads(z, name, position):
        x = linear(z, f"midlayer.self_attn.{name}_proj").view(-1, D)
        if name == "v":
            return x
        angle = position * 10000.0 ** (-torch.arange(0, D, 2) / D)
        a, b = x[:, : D // 2], x[:, D // 2 :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    if flags.get("norm_before_fc"):
        aux = norm(aux, "input_norm")
    if flags.get("fc_norm"):
        aux = torch.cat([norm(aux[i * H : (i + 1) * H], f"fc_norm.{i}") for i in range(3)])
    hidden, keys, values = linear(aux, "fc"), [], []
    for step in range(2):
        normed = norm(hidden, "midlayer.hidden_norm")
        residual = normed if flags.get("norm_before_residual") else hidden
        embedded = norm(weights["embed_tokens.weight"][ids[1 + step]], "midlayer.input_layernorm")
        z = torch.cat([embedded, normed])
        keys.append(heads(z, "k", step).repeat_interleave(2, dim=0))
        values.append(heads(z, "v", step).repeat_interleave(2, dim=0))
        scores = torch.stack([(heads(z, "q", step) * k).sum(-1) for k in keys]) / math.sqrt(D)
        attended = sum(p[:, None] * v for p, v in zip(scores.softmax(0), values, strict=True))
        after = residual + linear(attended.flatten(), "midlayer.self_attn.o_proj")
        y = norm(after, "midlayer.post_attention_layernorm")
        gated = F.silu(linear(y, "midlayer.mlp.gate_proj")) * linear(y, "midlayer.mlp.up_proj")
        out = after + linear(gated, "midlayer.mlp.down_proj")
        hidden = norm(out, "norm") if flags.get("norm_output") else out
    return linear(norm(out, "norm"), "lm_head")


def test_decode_is_the_formulas(model):
    g = torch.Generator().manual_seed(2)
    ids, aux = torch.randint(0, V, (3,), generator=g), torch.randn(3 * H, generator=g) * 3
    cache = DraftCache()
    hidden = model.decode(ids[None, 1:2], model.fuse(aux)[None, None], cache)
    hidden = model.decode(ids[None, 2:3], hidden, cache)
    flags = VARIANTS[model.config.variant]
    expected = written_out(dict(model.named_parameters()), flags, ids, aux)
    torch.testing.assert_close(model.logits(hidden)[0, 0], expected, rtol=1e-4, atol=1e-5)


# --- training ----------------------------------------------------------------------------------------------------


def test_training_equals_the_slow_reference(model, head):
    assert_training_equals_the_slow_reference(model, head)


def test_training_equals_serving(model, head):
    assert_training_equals_serving(model, head)


# --- the export --------------------------------------------------------------------------------------------------

# What engines read at the top level of config.json, and the weights that go with it; absent flags are false to both.
SERVED = {
    "eagle3": (set(), set()),
    "eagle3.1": ({"fc_norm", "norm_output"}, {f"fc_norm.{i}.weight" for i in range(3)}),
    "speculators": ({"norm_before_residual", "norm_before_fc", "norm_output"}, {"input_norm.weight"}),
}


def export_variant(folder, name):
    target = make_target()
    torch.manual_seed(0)
    model = DraftModel(replace(make_config(target), **VARIANTS[name]))
    for p in model.trainable().values():
        torch.nn.init.normal_(p)
    mapping = VocabMapping.from_target_ids(torch.randperm(50)[:20], 50)
    export.export_draft(model.state_dict(), model.config, mapping, target, AUX, folder, dtype="float32")
    return model, target


@pytest.mark.parametrize("name", VARIANTS)
def test_export_says_which_norms_and_reads_back(tmp_path, name):
    model, target = export_variant(tmp_path / "draft", name)
    values, tensors = (
        json.loads((tmp_path / "draft" / "config.json").read_text()),
        load_file(tmp_path / "draft" / "model.safetensors"),
    )
    flags, weights = SERVED[name]
    assert {norm for norm in NORMS if values[norm]} == flags
    assert {n for n in tensors if "fc_norm" in n or "input_norm" in n} == weights
    assert values["eagle3lib"]["variant"] == name
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    export.check_export(tmp_path / "draft", target, AUX)
    loaded, _, _ = export.load_exported(tmp_path / "draft", model.embed_tokens.weight)
    assert loaded.config == model.config and loaded.config.variant == name
    for parameter, ours in model.trainable().items():
        assert torch.equal(loaded.get_parameter(parameter), ours), parameter
    card = (tmp_path / "draft" / "README.md").read_text()
    assert ("vLLM only" in card) == (name == "speculators")


def test_exports_and_records_from_before_the_variants_are_eagle3(tmp_path):
    model, _ = export_variant(tmp_path / "draft", "eagle3")
    path = tmp_path / "draft" / "config.json"
    old = json.loads(path.read_text())
    path.write_text(json.dumps({k: v for k, v in old.items() if k not in ("fc_norm", "norm_output")}))
    assert export.load_exported(tmp_path / "draft", model.embed_tokens.weight)[0].config == model.config
    assert DraftModelConfig.from_dict({**model.config.to_dict(), "variant": "eagle3"}) == model.config


def test_what_no_engine_serves_is_refused():
    with pytest.raises(ValueError, match="no engine serves speculators' norms with attention mla"):
        DraftConfig(variant="speculators", attention="mla")
    sections = {"target": {"name": "t", "model": "m"}, "dataset": {"name": "d", "conversations": ["c"]}}
    sections |= {"acceptance": {"prompts": ["p"]}, "draft": {"variant": "speculators"}}
    RunConfig(**sections)
    with pytest.raises(ValueError, match="a norm that SGLang does not read"):
        RunConfig(**sections, engine=EngineConfig(name="sglang", gpus=1))


def test_latent_attention_needs_a_latent_target():
    with pytest.raises(UserError, match=r"draft\.attention: mla needs a target with latent attention"):
        DraftModelConfig.from_target(make_target(), DraftConfig(draft_vocab_size=20, attention="mla"))
