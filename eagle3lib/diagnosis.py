"""`check DRAFT`: does a draft of whatever origin do what its folder says, and if not, what was probably meant?

A wrong layer id, a norm that is not applied, a map of ids where offsets belong or another RoPE all load without a word
and cost acceptance. So the draft is replayed (`replay.Accuracy`) on the target's own replies under each of these
readings; where another reading is clearly better than that of the folder, it names the likely cause.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eagle3lib import targets
from eagle3lib.config import TargetConfig
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.foreign import Draft, are_ids, read_draft, same_rope
from eagle3lib.replay import Accuracy, target_choice
from eagle3lib.targets import TargetInfo
from eagle3lib.training_time_test import reply_index
from eagle3lib.vocab_mapping import VocabMapping

MARGIN = 0.05  # of the accuracy over all steps: by so much another reading must be better to be named
STEPS = 3


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
    if draft.d2t is not None and are_ids(draft.d2t, target.vocab_size):
        mapping = VocabMapping.from_target_ids(draft.d2t, target.vocab_size)
        found.append(replace(given, about="map: d2t holds target ids where offsets belong", mapping=mapping))
    rope = replace(draft.config, rope_parameters=target.rope_parameters)
    rope = replace(rope, max_position_embeddings=target.max_position_embeddings)
    if not same_rope(rope, draft.config):
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


def _model(reading: Reading, weights: dict[str, Tensor], embedding: Tensor) -> DraftModel:
    model = reading.model(reading.config)
    model.load_state_dict(weights | {"embed_tokens.weight": embedding})
    return model.float().eval().requires_grad_(False)


def load_draft(
    folder: str | os.PathLike, target: TargetInfo, dtype: torch.dtype = torch.float32
) -> tuple[DraftModel, VocabMapping, list[int], list[str]]:
    """A draft of whatever origin as its folder says it is: model, mapping, aux layer ids, and `read_draft`'s notes."""
    draft = read_draft(folder, target)
    given = Reading("as the folder says", draft.config, draft.mapping, draft.aux_layer_ids)
    model = _model(given, draft.weights, targets.load_embedding(target))
    return model.to(dtype), draft.mapping, draft.aux_layer_ids, draft.notes
