"""`check DRAFT`: does a draft of whatever origin do what its folder says, and if not, what was probably meant?

A wrong layer id, a norm that is not applied, a map of ids where offsets belong or another RoPE all load without a word
and cost acceptance. So the draft is replayed (`replay.Accuracy`) on the target's own replies under each of these
readings; where another reading is clearly better than that of the folder, it names the likely cause.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig

from eagle3lib import export, targets
from eagle3lib.config import TargetConfig
from eagle3lib.draft_model import NORMS, DraftModel, DraftModelConfig, rotary_frequencies
from eagle3lib.errors import UserError
from eagle3lib.replay import Accuracy, target_choice
from eagle3lib.targets import TargetInfo
from eagle3lib.training_time_test import reply_index
from eagle3lib.vocab_mapping import VocabMapping

MARGIN = 0.05  # of the accuracy over all steps: by so much another reading must be better to be named
STEPS = 3


@dataclass(frozen=True)
class Draft:
    """A draft's folder as it says it is; `notes` are faults that can be seen without running it."""

    config: DraftModelConfig
    mapping: VocabMapping
    weights: dict[str, Tensor]
    aux_layer_ids: list[int]
    d2t: Tensor | None
    notes: list[str]


@dataclass(frozen=True)
class Reading:
    """One way to understand the folder; `about` says what is wrong with it if this is the right one."""

    about: str
    config: DraftModelConfig
    mapping: VocabMapping
    aux_layer_ids: list[int]
    model: type[DraftModel] = DraftModel


class HeadWithoutNorm(DraftModel):
    def logits(self, carried: Tensor) -> Tensor:
        return self.lm_head(carried)


def check(
    folder: str | os.PathLike, target: TargetInfo, engine: Any, prompts: Sequence[Sequence[int]], max_new_tokens: int
) -> dict[str, Any]:
    """Replay a draft on the target's greedy replies to `prompts` (token ids) under every reading of its folder.

    Returns plain values: `readings` (about -> accuracy by step, the folder's own first), `cause` (None, or what is
    probably wrong) and `notes`. Raises UserError for a folder that cannot be read as an EAGLE-3 draft of this target.
    """
    draft = read_draft(folder, target)
    readings = list(_readings(draft, target))
    layers = sorted({k for reading in readings for k in reading.aux_layer_ids})
    embedding, head = targets.load_embedding(target), targets.load_head(target)
    models = [_model(reading, draft.weights, embedding) for reading in readings]
    accuracies = [Accuracy(STEPS) for _ in readings]
    for prompt, reply in zip(prompts, engine.greedy(prompts, max_new_tokens), strict=True):
        ids = [*prompt, *reply]
        (states,) = engine.extract([ids], layers)
        aux = {k: state.float().cpu() for k, state in zip(layers, states.aux, strict=True)}
        wanted, replies = target_choice(head, states.last.cpu()), reply_index([len(prompt), len(ids)], len(ids))
        for reading, model, accuracy in zip(readings, models, accuracies, strict=True):
            fused = torch.cat([aux[k] for k in reading.aux_layer_ids], -1)
            accuracy.add(model, reading.mapping, ids, replies, fused, wanted)
    overall = [sum(a.correct) / max(1, sum(a.of)) for a in accuracies]
    best = max(range(len(readings)), key=overall.__getitem__)
    return {
        "readings": {r.about: a.by_step for r, a in zip(readings, accuracies, strict=True)},
        "slots": accuracies[0].of,
        "cause": readings[best].about if overall[best] > overall[0] + MARGIN else None,
        "notes": draft.notes,
    }


def find_target(model: str) -> TargetInfo:
    """The target in a folder, or of a hub id whose files are here; UserError for any other."""
    config = TargetConfig(name="target", model=model)
    kind, where = targets.source(config)
    folder = Path(where) if kind == "folder" else targets.hub_snapshot(config) if kind == "hub" else None
    if folder is None:
        raise UserError(f"{model}: its files are not here; give a folder (of a package: results/targets/…/model)")
    return targets.load_info(folder)


def describe(result: dict[str, Any]) -> str:
    """For a terminal."""
    lines = [f"note: {note}" for note in result["notes"]]
    lines += [f"share of {result['slots']} slots in which the draft's best token is the target's, by draft step"]
    lines += [f"  {' '.join(f'{a:.3f}' for a in steps)}   {about}" for about, steps in result["readings"].items()]
    if result["cause"]:
        return "\n".join([*lines, f"likely cause of low acceptance: {result['cause']}"])
    return "\n".join([*lines, "no other reading is clearly better: the folder says what the draft is"])


def _readings(draft: Draft, target: TargetInfo) -> list[Reading]:
    given = Reading("as the folder says", draft.config, draft.mapping, draft.aux_layer_ids)
    found = [given]
    for shift, word in ((1, "too low"), (-1, "too high")):
        ids = [k + shift for k in draft.aux_layer_ids]
        if ids[0] >= 0 and ids[-1] < target.num_hidden_layers:
            found.append(replace(given, about=f"layer ids: one {word}; trained on {ids}", aux_layer_ids=ids))
    if draft.d2t is not None and _are_ids(draft.d2t, target.vocab_size):
        mapping = VocabMapping.from_target_ids(draft.d2t, target.vocab_size)
        found.append(replace(given, about="map: d2t holds target ids where offsets belong", mapping=mapping))
    rope = replace(draft.config, rope_parameters=target.rope_parameters)
    rope = replace(rope, max_position_embeddings=target.max_position_embeddings)
    if not _same_rope(rope, draft.config):
        found.append(replace(given, about="RoPE: trained with the target's", config=rope))
    if not draft.config.norm_output:
        found.append(replace(given, about="norm: trained without the one before the head", model=HeadWithoutNorm))
    for norm, what in (
        ("norm_output", "a normed hidden state for the next step"),
        ("norm_before_residual", "the normed hidden state as residual"),
    ):
        has = getattr(draft.config, norm)
        flipped: dict[str, Any] = {norm: not has}
        other = replace(draft.config, **flipped)
        found.append(replace(given, about=f"norm: trained {'without' if has else 'with'} {what}", config=other))
    return found


def _are_ids(d2t: Tensor, vocab_size: int) -> bool:
    return bool((d2t.diff() > 0).all() and d2t[0] >= 0 and d2t[-1] < vocab_size)


def _same_rope(one: DraftModelConfig, other: DraftModelConfig) -> bool:
    (a, a_scaling), (b, b_scaling) = rotary_frequencies(one), rotary_frequencies(other)
    return torch.equal(a, b) and a_scaling == b_scaling


def _model(reading: Reading, weights: dict[str, Tensor], embedding: Tensor) -> DraftModel:
    model = reading.model(reading.config)
    model.load_state_dict(weights | {"embed_tokens.weight": embedding})
    return model.float().eval().requires_grad_(False)


# --- reading what others wrote -----------------------------------------------------------------------


def read_draft(folder: str | os.PathLike, target: TargetInfo) -> Draft:
    """An EAGLE-3 draft of one Llama layer: ours, SpecForge's, EAGLE's own (`pytorch_model.bin`), speculators'."""
    path = Path(folder) / export.CONFIG
    values, tensors = _config_values(path), _tensors(Path(folder))
    notes: list[str] = []
    d2t, _ = tensors.pop("d2t", None), tensors.pop("t2d", None)
    for name in ("fc.weight", "lm_head.weight"):
        if name not in tensors:
            raise UserError(
                f"{folder}: {name}: missing; this is no EAGLE-3 draft of its own head (found {list(tensors)})"
            )
    config = _shape(values, tensors, target, path)
    weights = export.checked_shapes(tensors, config, str(folder), "is it a draft of this target?")
    mapping = _mapping(config, d2t, notes)
    ids = _layer_ids(values, target, config.num_aux_hidden_states, notes)
    if config.max_position_embeddings < target.max_position_embeddings:
        notes.append(
            f"max_position_embeddings: {config.max_position_embeddings}, the target has "
            f"{target.max_position_embeddings}: engines fail or slow down behind it"
        )
    as_target = replace(config, rope_parameters=target.rope_parameters)
    if not _same_rope(config, replace(as_target, max_position_embeddings=target.max_position_embeddings)):
        notes.append(f"RoPE: {config.rope_parameters} is not the target's {target.rope_parameters}")
    return Draft(config, mapping, weights, ids, d2t, notes)


def _config_values(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values.get("transformer_layer_config", {}) | values  # speculators' are nested
    except FileNotFoundError:
        raise UserError(f"{path}: missing; give the folder of a draft") from None
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path}: not a config ({error})") from None


def _tensors(folder: Path) -> dict[str, Tensor]:
    """By our names, without the embedding (the target's is used)."""
    legacy = folder / "pytorch_model.bin"
    if legacy.exists() and not (folder / export.WEIGHTS).exists():
        tensors = torch.load(legacy, weights_only=True, map_location="cpu")
    else:
        tensors = export.read_weights(folder)
    named = {n.removeprefix("model.").replace("layers.0.", "midlayer."): t for n, t in tensors.items()}
    return {name: t for name, t in named.items() if not name.startswith("embed_tokens.")}


def _shape(values: dict[str, Any], tensors: dict[str, Tensor], target: TargetInfo, path: Path) -> DraftModelConfig:
    """Sizes from the weights where they tell; the rest as transformers reads the config."""
    read = LlamaConfig.from_dict(values)
    head, fc = tensors["lm_head.weight"], tensors["fc.weight"]
    try:
        return DraftModelConfig(
            hidden_size=fc.shape[0],
            intermediate_size=read.intermediate_size,
            num_attention_heads=read.num_attention_heads,
            num_key_value_heads=read.num_key_value_heads,
            head_dim=read.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=head.shape[0],
            rms_norm_eps=read.rms_norm_eps,
            max_position_embeddings=read.max_position_embeddings,
            rope_parameters=dict(read.rope_parameters or {}),
            hidden_act=read.hidden_act,
            num_aux_hidden_states=fc.shape[1] // target.hidden_size,
            **_norms(values),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _norms(values: dict[str, Any]) -> dict[str, bool]:
    """Both engines look for norm_before_fc in eagle_config first."""
    inner = values.get("eagle_config") or {}
    return {name: bool(inner.get(name, values.get(name, False))) for name in NORMS}


def _mapping(config: DraftModelConfig, d2t: Tensor | None, notes: list[str]) -> VocabMapping:
    size, vocab = config.draft_vocab_size, config.vocab_size
    first = torch.arange(size)
    if d2t is None and size < vocab:
        notes.append(
            f"d2t: missing, though {size} of {vocab} tokens are drafted: engines take them for ids 0..{size - 1}"
        )
    if d2t is not None and size == vocab:
        notes.append("d2t: given, though the whole vocabulary is drafted: vLLM 0.32 does not load it")
    given = first if d2t is None else first + d2t
    if not _are_ids(given, vocab):
        notes.append("d2t: as offsets its ids are not ascending within the vocabulary")
        given = first
    return VocabMapping.from_target_ids(given, vocab)


def _layer_ids(values: dict[str, Any], target: TargetInfo, aux_states: int, notes: list[str]) -> list[int]:
    """In our convention: vLLM's key as it is, SGLang's plus one, else the default of both."""
    inner = (values.get("eagle_config") or {}).get(export.LAYER_IDS)
    ids = values.get(export.LAYER_IDS) or (inner and [k + 1 for k in inner])
    if not ids:
        ids = targets.default_aux_layer_ids(target.num_hidden_layers)
        notes.append(f"layer ids: not in config.json; engines take {ids}")
    elif inner and values.get(export.LAYER_IDS) and export.sglang_layer_ids(ids, target.model_type) != inner:
        notes.append(f"layer ids: {ids} for vLLM, but {inner} for SGLang, which adds one")
    ascending = sorted(set(ids)) == list(ids) and ids[0] >= 0 and ids[-1] < target.num_hidden_layers
    if not ascending or len(ids) != aux_states:
        raise UserError(
            f"layer ids {list(ids)}: must be {aux_states} ascending ones below {target.num_hidden_layers} (fc.weight "
            f"takes {aux_states} states); set {export.LAYER_IDS} in the draft's config.json"
        )
    return list(ids)
