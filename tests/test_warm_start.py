"""Warm start: the initial draft's weights, map, norms and RoPE, by content; and what cannot be gone on from."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import edit_config, edit_weights
from test_mla import latent_target
from test_training import DRAFT, SETTINGS, VD, H, V, job_of, weights, world  # noqa: F401 - a fixture

from eagle3lib import export, preflight, targets, training, warm_start
from eagle3lib.config import DraftConfig
from eagle3lib.draft_model import VARIANTS, DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.training import Ranks, Trainer
from eagle3lib.vocab_mapping import VocabMapping

AUX = [2, 4, 5]
LONGER = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def make_initial(folder, target, ids=range(VD), **changes):
    """An exported draft of random weights that knows `ids`."""
    torch.manual_seed(3)
    mapping = VocabMapping.from_target_ids(torch.tensor(list(ids)), V)
    config = DraftModelConfig.from_target(target, DRAFT)
    model = DraftModel(replace(config, **{"draft_vocab_size": mapping.draft_vocab_size, **changes}))
    for p in model.trainable().values():
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.2)
    # An own RoPE is let through only in a draft that says where it comes from.
    about = {"initial": "of another trainer"} if "rope_parameters" in changes else {}
    export.export_draft(model.state_dict(), model.config, mapping, target, AUX, folder, about, dtype="float32")
    return model, mapping


@pytest.fixture
def initial(world, tmp_path):  # noqa: F811
    return tmp_path / "initial", *make_initial(tmp_path / "initial", world[1])


def warm(folder, **more):
    return DraftConfig(initial=str(folder), **more)


def job_from(world, folder, draft, mapping=None, settings=SETTINGS):  # noqa: F811
    initial = draft.initial and warm_start.fingerprint(draft.initial)
    job = replace(job_of(world, folder, settings), draft=draft, initial=initial)
    if mapping is None:
        return job
    path = folder.with_name(f"{folder.name}-map") / "map.safetensors"
    mapping.save(path)
    return replace(job, mapping=str(path))


def first_model(job):
    return Trainer(job, Ranks.join(job.training), lambda step: False).model


# --- what is taken over ------------------------------------------------------------------------------------------


def test_a_training_begins_where_the_initial_draft_ended(world, tmp_path, initial):  # noqa: F811
    folder, model, mapping = initial
    job = job_from(world, tmp_path / "draft", warm(folder), mapping)
    begun = first_model(job)
    assert begun.config == model.config
    for name, parameter in model.trainable().items():
        assert torch.equal(begun.get_parameter(name), parameter), name
    assert torch.equal(begun.embed_tokens.weight, targets.load_embedding(world[1]))
    assert preflight.rehearse(job, begun.config)["counted"] > 0
    result = training.train(job)
    assert result["initial"] == warm_start.fingerprint(str(folder))
    assert result["draft_model"] == model.config.to_dict()
    assert any(not torch.equal(weights(tmp_path / "draft")[n], p) for n, p in model.trainable().items())
    cold = training.train(job_of(world, tmp_path / "cold"))
    assert cold["initial"] is None and cold["weights_sha256"] != result["weights_sha256"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_norms_are_the_initial_drafts(world, tmp_path, variant):  # noqa: F811
    model, mapping = make_initial(tmp_path / "initial", world[1], **VARIANTS[variant])
    begun = first_model(job_from(world, tmp_path / "draft", warm(tmp_path / "initial"), mapping))
    assert begun.config.variant == variant
    assert all(torch.equal(begun.get_parameter(name), p) for name, p in model.trainable().items())


def test_rope_is_the_initial_drafts_and_is_exported(world, tmp_path):  # noqa: F811
    target = world[1]
    _, mapping = make_initial(tmp_path / "initial", target, rope_parameters=LONGER)
    job = job_from(world, tmp_path / "draft", warm(tmp_path / "initial"), mapping)
    result = training.train(job)
    assert result["draft_model"]["rope_parameters"]["rope_type"] == "linear"
    config = DraftModelConfig.from_dict(result["draft_model"])
    trained = weights(tmp_path / "draft")
    about = {"initial": result["initial"]}
    export.export_draft(trained, config, mapping, target, AUX, tmp_path / "export", about)
    assert export.read_export(tmp_path / "export")[0].rope_parameters["factor"] == 4.0
    assert "started from" in (tmp_path / "export" / "README.md").read_text()
    with pytest.raises(UserError, match="rope_parameters"):  # unsaid, it is a fault
        export.export_draft(trained, config, mapping, target, AUX, tmp_path / "unsaid")


def test_shorter_positions_of_the_same_rope_are_the_targets(world, tmp_path, initial):  # noqa: F811
    folder, model, _ = initial
    edit_config(folder, lambda c: c.update(max_position_embeddings=32))
    assert warm_start.read(str(folder), world[1]).config == model.config


def test_a_new_vocabulary_carries_the_heads_rows_over_by_target_id(world, tmp_path):  # noqa: F811
    """The initial draft knows the even tokens; the new one those from 20 on: even ones keep their rows."""
    target = world[1]
    model, _ = make_initial(tmp_path / "initial", target, range(0, V, 2))
    new = VocabMapping.from_target_ids(torch.arange(20, V), V)
    draft = warm(tmp_path / "initial", initial_vocabulary="new", draft_vocab_size=V - 20)
    begun = first_model(job_from(world, tmp_path / "draft", draft, new))
    assert begun.config.draft_vocab_size == V - 20
    head = targets.load_head(target)
    for row, token in enumerate(range(20, V)):
        expected = model.lm_head.weight[token // 2] if token % 2 == 0 else head[token]
        assert torch.equal(begun.lm_head.weight[row], expected), token
    assert torch.equal(begun.fc.weight, model.fc.weight)
    assert warm_start.dictated_mapping(draft, target) is None


def test_map_is_kept_and_another_is_refused(world, tmp_path, initial):  # noqa: F811
    folder, _, mapping = initial
    assert torch.equal(warm_start.dictated_mapping(warm(folder), world[1]).t2d, mapping.t2d)
    assert warm_start.dictated_mapping(DRAFT, world[1]) is None
    other = VocabMapping.from_target_ids(torch.arange(1, VD + 1), V)
    with pytest.raises(UserError, match=r"draft\.initial: the vocabulary map is not the initial draft's"):
        first_model(job_from(world, tmp_path / "draft", warm(folder), other))


def as_speculators(values, tensors):
    """Nested sizes, plain layer names, an embedding of its own."""
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    sizes += ("rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act")
    values["transformer_layer_config"] = {name: values.pop(name) for name in sizes}
    del values["eagle3lib"], values["rope_theta"], values["rope_scaling"]
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)
    tensors["embed_tokens.weight"] = torch.zeros(V, H)


def test_drafts_of_others(world, tmp_path):  # noqa: F811
    model, mapping = make_initial(tmp_path / "initial", world[1], **VARIANTS["speculators"])
    values, tensors = (
        json.loads((tmp_path / "initial/config.json").read_text()),
        load_file(tmp_path / "initial/model.safetensors"),
    )
    as_speculators(values, tensors)
    (tmp_path / "initial/config.json").write_text(json.dumps(values))
    save_file(tensors, tmp_path / "initial/model.safetensors")
    begun = first_model(job_from(world, tmp_path / "draft", warm(tmp_path / "initial"), mapping))
    assert begun.config == model.config
    assert all(torch.equal(begun.get_parameter(name), p) for name, p in model.trainable().items())


def test_latent_attention_is_the_initial_drafts(tmp_path):
    """As lightseekorg's drafts for Kimi say it: a type that transformers does not know, SGLang's layer ids only."""
    target = latent_target()
    torch.manual_seed(0)
    settings = DraftConfig(draft_vocab_size=20, attention="mla", variant="eagle3.1")
    model = DraftModel(DraftModelConfig.from_target(target, settings))
    mapping = VocabMapping.from_target_ids(torch.randperm(50)[:20], 50)
    export.export_draft(model.state_dict(), model.config, mapping, target, [2, 3, 4], tmp_path / "d", dtype="float32")

    def theirs(values):
        values["model_type"] = "kimi_k2"
        del values["eagle_aux_hidden_state_layer_ids"], values["eagle3lib"]

    edit_config(tmp_path / "d", theirs)
    warm_start.check_layer_ids(str(tmp_path / "d"), [2, 3, 4])
    given = warm_start.read(str(tmp_path / "d"), target)
    assert given.config == model.config and given.aux_layer_ids == [2, 3, 4]


# --- identity ----------------------------------------------------------------------------------------------------


def test_what_shapes_is_the_content_not_the_place(tmp_path, initial):
    folder, _, _ = initial
    first = warm_start.fingerprint(str(folder))
    shutil.copytree(folder, tmp_path / "elsewhere")
    assert warm_start.fingerprint(str(tmp_path / "elsewhere")) == first
    (folder / "README.md").write_text("another card")
    assert warm_start.fingerprint(str(folder), tmp_path / "cache") == first
    assert warm_start.fingerprint(str(folder), tmp_path / "cache") == first  # out of the cache
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(json.dumps({"fingerprint": "kept"}))
    assert warm_start.fingerprint(str(folder), tmp_path / "cache") == "kept"
    edit_weights(folder, lambda t: t["fc.weight"][0].zero_())
    os.utime(folder / "model.safetensors", (1, 1))
    assert warm_start.fingerprint(str(folder), tmp_path / "cache") not in (first, "kept")


def test_hub_id(tmp_path, initial, monkeypatch):
    folder, _, _ = initial
    monkeypatch.setattr(targets, "hub_snapshot", lambda target: folder if target.model == "org/draft" else None)
    assert warm_start.fingerprint("org/draft") == warm_start.fingerprint(str(folder))
    with pytest.raises(UserError, match=r"draft\.initial: org/none is not in the hub's cache; .*hf download org/none"):
        warm_start.fingerprint("org/none")


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_draft_that_changed_since_it_was_planned_with(world, initial):  # noqa: F811
    folder, _, _ = initial
    planned = warm_start.fingerprint(str(folder))
    warm_start.check(warm(folder), world[1], AUX, planned)
    warm_start.check(DRAFT, world[1], AUX, None)
    edit_weights(folder, lambda t: t["fc.weight"][0].zero_())
    with pytest.raises(UserError, match="changed since the run was planned; run the same command again"):
        warm_start.check(warm(folder), world[1], AUX, planned)


def test_other_aux_layers(world, tmp_path, initial):  # noqa: F811
    folder, _, mapping = initial
    says = r"draft\.initial: it was trained on the aux layers \[2, 4, 5\], the states are of \[1, 4, 5\]; set hidden_"
    warm_start.check_layer_ids(str(folder), AUX)
    with pytest.raises(UserError, match=says):
        warm_start.check_layer_ids(str(folder), [1, 4, 5])
    with pytest.raises(UserError, match=says):
        warm_start.check(warm(folder), world[1], [1, 4, 5], warm_start.fingerprint(str(folder)))
    edit_config(folder, lambda c: c.pop("eagle_aux_hidden_state_layer_ids"))
    with pytest.raises(UserError, match=says):
        warm_start.check_layer_ids(str(folder), [1, 4, 5])
    with pytest.raises(UserError, match=r"draft\.initial: it takes 3 aux states, 2 are stored"):
        warm_start.model_config(warm(folder), world[1], 2, mapping)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (shutil.rmtree, "no folder .*; give a folder with a draft, or a hub id"),
        (lambda f: (f / "config.json").unlink(), "no config.json in"),
        (lambda f: (f / "model.safetensors").unlink(), "no weights .* in"),
        (lambda f: (f / "config.json").write_text("["), "config.json: not a config"),
        (lambda f: edit_weights(f, lambda t: t.pop("d2t")), "d2t is missing, so nobody knows which 40 of 60 tokens"),
        (lambda f: edit_weights(f, lambda t: t.update(d2t=t["d2t"] - 1)), "d2t: as offsets its ids are not ascending"),
        (lambda f: edit_weights(f, lambda t: t.pop("norm.weight")), "norm.weight: missing"),
        (lambda f: edit_weights(f, lambda t: t["fc.weight"].fill_(torch.nan)), "fc.weight: holds NaN"),
        (
            lambda f: edit_weights(f, lambda t: t.update({"fc.weight": torch.ones(8, 24)})),
            "hidden size 8, the target has 16",
        ),
        (lambda f: edit_config(f, lambda c: c.update(fc_norm=True)), "fc_norm.0.weight: missing"),
    ],
)
def test_what_no_training_can_go_on_from(world, initial, spoil, says):  # noqa: F811
    folder, _, _ = initial
    spoil(folder)
    with pytest.raises(UserError, match=rf"config: draft\.initial: .*{says}") as error:
        warm_start.read(str(folder), world[1])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"variant": "eagle3.1"}, "variant: draft.initial dictates it; leave it out"),
        ({"intermediate_size": 8}, "intermediate_size: draft.initial dictates it"),
        ({"draft_vocab_size": 9}, "draft_vocab_size: .*or set draft.initial_vocabulary: new"),
    ],
)
def test_settings_that_the_initial_draft_dictates(settings, says):
    with pytest.raises(ValueError, match=says):
        DraftConfig(initial="folder", **settings)
    with pytest.raises(ValueError, match="initial_vocabulary: only with draft.initial"):
        DraftConfig(initial_vocabulary="new")
    assert DraftConfig(initial="folder", initial_vocabulary="new", draft_vocab_size=9).draft_vocab_size == 9
