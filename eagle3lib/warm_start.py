"""Warm start: a training that begins with an existing draft of the same target (`draft.initial`), ours or another's.

That draft dictates norms, attention, sizes and RoPE; its aux layers must be those of the stored states. Its vocabulary
map stays, or a new one is counted (`draft.initial_vocabulary`) and its head's rows go over by target id. What it is
called does not count: the sha256 of its files is what shapes the new draft.

Nothing at the top of this module imports torch: it is asked at parse time.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3lib import targets
from eagle3lib.config import DraftConfig, TargetConfig
from eagle3lib.errors import UserError
from eagle3lib.job import write_json
from eagle3lib.lineage import digest, file_sha256

if TYPE_CHECKING:
    from eagle3lib.draft_model import DraftModel, DraftModelConfig
    from eagle3lib.foreign import Draft
    from eagle3lib.targets import TargetInfo
    from eagle3lib.vocab_mapping import VocabMapping

KEY = "config: draft.initial"
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def folder_of(initial: str) -> Path:
    """Where the files of a folder or a hub id lie; nothing is fetched unasked."""
    path = Path(initial).expanduser()
    if path.is_dir():
        return path
    if not targets.is_hub_id(initial):
        raise UserError(f"{KEY}: no folder {initial!r}; give a folder with a draft, or a hub id (org/name)")
    snapshot = targets.hub_snapshot(TargetConfig(name="initial", model=initial))
    if snapshot is None:
        raise UserError(f"{KEY}: {initial} is not in the hub's cache; fetch it: hf download {initial}")
    return snapshot


def files_of(folder: Path) -> list[Path]:
    """`targets.model_files` of a whole draft."""
    files = targets.model_files(folder)
    config = any(path.name == "config.json" for path in files)
    if not config or all(path.suffix == ".json" for path in files):
        missing = f"weights ({' or '.join(targets.WEIGHTS)})" if config else "config.json"
        raise UserError(f"{KEY}: no {missing} in {folder}; give the folder of a whole draft")
    return files


def fingerprint(initial: str, cache: Path | None = None) -> str:
    """Short digest of the files' sha256; in the folder `cache`, kept for files of the same path, size and mtime."""
    files = files_of(folder_of(initial))
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    kept = cache / f"draft-{digest(stats, 16)}.json" if cache else None
    if kept and kept.exists():
        return json.loads(kept.read_text())["fingerprint"]
    found = digest([(path.name, file_sha256(path)) for path in files], 16)
    if kept:
        write_json(kept, {"files": stats, "fingerprint": found})
    return found


def check_layer_ids(initial: str, aux_layer_ids: Sequence[int]) -> None:
    """As far as its config.json says: asked before any state is extracted. UserError where they differ."""
    path = folder_of(initial) / "config.json"
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        stated, inner = values.get(LAYER_IDS), (values.get("eagle_config") or {}).get(LAYER_IDS)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"{KEY}: {path} cannot be read ({error}); give the folder of a whole draft") from None
    ours = list(aux_layer_ids)
    if stated and stated != ours:
        raise _other_layers(stated, ours)
    # SGLang's convention depends on the target's kind: `check` knows it.
    if not stated and inner and inner not in (ours, [k - 1 for k in ours]):
        raise _other_layers([k + 1 for k in inner], ours)


def check(draft: DraftConfig, target: TargetInfo, aux_layer_ids: Sequence[int], planned: str | None) -> None:
    """Before a training: is it the draft that was planned with (`fingerprint`), of this target and these states?"""
    if draft.initial is None:
        return
    if fingerprint(draft.initial) != planned:
        raise UserError(f"{KEY}: {draft.initial} changed since the run was planned; run the same command again")
    found = read(draft.initial, target).aux_layer_ids
    if found != list(aux_layer_ids):
        raise _other_layers(found, list(aux_layer_ids))


def _other_layers(theirs: list[int], ours: list[int]) -> UserError:
    return UserError(
        f"{KEY}: it was trained on the aux layers {theirs}, the states are of {ours}; set hidden_states.aux_layer_ids: "
        f"{theirs}, or leave draft.initial out"
    )


def read(initial: str, target: TargetInfo) -> Draft:
    """The draft as its folder says it is; UserError for one that this target's training cannot go on from."""
    from eagle3lib import foreign

    folder = folder_of(initial)
    files_of(folder)
    try:
        draft = foreign.read_draft(folder, target)
    except UserError as error:
        raise UserError(f"{KEY}: {error}") from None
    config = draft.config
    if draft.d2t is None and config.draft_vocab_size < config.vocab_size:
        raise UserError(
            f"{KEY}: {folder}: d2t is missing, so nobody knows which {config.draft_vocab_size} of "
            f"{config.vocab_size} tokens its head has; get the whole draft, or leave draft.initial out"
        )
    if fault := next((note for note in draft.notes if note.startswith("d2t: as offsets")), None):
        raise UserError(f"{KEY}: {folder}: {fault}; `python -m eagle3lib check` looks for the cause")
    at_target = replace(config, max_position_embeddings=target.max_position_embeddings)
    return replace(draft, config=at_target if foreign.same_rope(config, at_target) else config)


def dictated_mapping(draft: DraftConfig, target: TargetInfo) -> VocabMapping | None:
    """The initial draft's vocabulary map, where it is kept."""
    if draft.initial is None or draft.initial_vocabulary == "new":
        return None
    return read(draft.initial, target).mapping


def model_config(draft: DraftConfig, target: TargetInfo, aux_states: int, mapping: VocabMapping) -> DraftModelConfig:
    """The shape of the draft to be trained: the initial one's if there is one, with this map."""
    from eagle3lib.draft_model import DraftModelConfig

    if draft.initial is None:
        return DraftModelConfig.from_target(target, draft, aux_states)
    given = read(draft.initial, target)
    if given.config.num_aux_hidden_states != aux_states:
        raise UserError(
            f"{KEY}: it takes {given.config.num_aux_hidden_states} aux states, {aux_states} are stored; set "
            "hidden_states.aux_layer_ids to its layers, or leave draft.initial out"
        )
    if draft.initial_vocabulary == "keep" and not mapping.t2d.equal(given.mapping.t2d):
        raise UserError(
            f"{KEY}: the vocabulary map is not the initial draft's, which initial_vocabulary: keep asks for; delete "
            "vocab_mapping.safetensors and run again"
        )
    return replace(given.config, draft_vocab_size=mapping.draft_vocab_size)


def load_into(model: DraftModel, initial: str, target: TargetInfo, mapping: VocabMapping) -> int:
    """`foreign.load_into` of the initial draft."""
    from eagle3lib import foreign

    return foreign.load_into(model, read(initial, target), mapping)
