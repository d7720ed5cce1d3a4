"""An EAGLE-3 draft that somebody else wrote, as ours: SpecForge's, EAGLE's own, speculators', SGLang's latent ones."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DeepseekV2Config, LlamaConfig

from eagle3lib import export, mla, targets
from eagle3lib.draft_model import NORMS, DraftModel, DraftModelConfig, rotary_frequencies
from eagle3lib.errors import UserError
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping


@dataclass(frozen=True)
class Draft:
    """A draft's folder as it says it is; `notes` are faults that can be seen without running it."""

    config: DraftModelConfig
    mapping: VocabMapping
    weights: dict[str, Tensor]
    aux_layer_ids: list[int]
    d2t: Tensor | None
    notes: list[str]


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
    if not same_rope(config, replace(as_target, max_position_embeddings=target.max_position_embeddings)):
        notes.append(f"RoPE: {config.rope_parameters} is not the target's {target.rope_parameters}")
    return Draft(config, mapping, weights, ids, d2t, notes)


@torch.no_grad()
def load_into(model: DraftModel, draft: Draft, mapping: VocabMapping) -> int:
    """A draft's weights into a model of its shape whose embedding and head are the target's; its head by target id.

    Returns how many rows of the head were carried over; the others stay the target's.
    """
    weights = dict(draft.weights)
    head = weights.pop("lm_head.weight")
    rows = draft.mapping.to_draft(mapping.target_ids)
    known = rows >= 0
    model.load_state_dict(weights, strict=False)
    model.lm_head.weight[known] = head[rows[known]].to(model.lm_head.weight.dtype)
    return int(known.sum())


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
    head, fc = tensors["lm_head.weight"], tensors["fc.weight"]
    if fc.shape[0] != target.hidden_size:
        raise UserError(f"{path}: hidden size {fc.shape[0]}, the target has {target.hidden_size}: of another target")
    latent = "midlayer.self_attn.kv_a_proj_with_mqa.weight" in tensors
    # By their own name engines know classes of the config that transformers has not: kimi_k2.
    plain = {key: value for key, value in values.items() if key != "model_type"}
    read = (DeepseekV2Config if latent else LlamaConfig).from_dict(plain)
    try:
        return DraftModelConfig(
            hidden_size=fc.shape[0],
            intermediate_size=read.intermediate_size,
            num_attention_heads=read.num_attention_heads,
            num_key_value_heads=read.num_attention_heads if latent else read.num_key_value_heads,
            head_dim=read.head_dim,
            vocab_size=target.vocab_size,
            draft_vocab_size=head.shape[0],
            rms_norm_eps=read.rms_norm_eps,
            max_position_embeddings=read.max_position_embeddings,
            rope_parameters=dict(read.rope_parameters or {}),
            hidden_act=read.hidden_act,
            num_aux_hidden_states=fc.shape[1] // target.hidden_size,
            **_norms(values),
            **({name: getattr(read, name) for name in mla.SIZES} if latent else {}),
        )
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def _norms(values: dict[str, Any]) -> dict[str, Any]:
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
    if not are_ids(given, vocab):
        notes.append("d2t: as offsets its ids are not ascending within the vocabulary")
        given = first
    return VocabMapping.from_target_ids(given, vocab)


def _layer_ids(values: dict[str, Any], target: TargetInfo, aux_states: int, notes: list[str]) -> list[int]:
    """In our convention: vLLM's key as it is, SGLang's plus one, else the default of both."""
    inner = (values.get("eagle_config") or {}).get(export.LAYER_IDS)
    ids = values.get(export.LAYER_IDS) or (inner and export.from_sglang_layer_ids(inner, target.model_type))
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


def are_ids(d2t: Tensor, vocab_size: int) -> bool:
    return bool((d2t.diff() > 0).all() and d2t[0] >= 0 and d2t[-1] < vocab_size)


def same_rope(one: DraftModelConfig, other: DraftModelConfig) -> bool:
    (a, a_scaling), (b, b_scaling) = rotary_frequencies(one), rotary_frequencies(other)
    return torch.equal(a, b) and a_scaling == b_scaling
