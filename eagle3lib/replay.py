"""Is a draft served as it was trained? Its accuracy by draft step along the path of serving, slot by slot.

The trainer computes all slots of a pack at once, from stored states, with an attention of its own
(`training_time_test`). Here nothing of that is used: states come freshly out of the engine, weights out of the exported
files, and each slot drafts alone with a cache that grows as in serving. The tokens read are the sample's own at every
step, as in training, so both must find the same accuracies.

Shape letters: T tokens, H hidden, V vocabulary, L aux layers, K draft steps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from eagle3lib import export, targets
from eagle3lib.draft_model import DraftCache, DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import load_sample
from eagle3lib.loader import Documents, Pack, Sample
from eagle3lib.training import Job
from eagle3lib.training_time_test import SUMS, TrainingTimeTest, position_mask, reply_index, summarise
from eagle3lib.vocab_mapping import VocabMapping

TOLERANCE = 0.01  # of an accuracy; bf16 in the export or the store turns a few near ties in a thousand tokens
ROWS = 256  # that meet the target's whole head at once


class Accuracy:
    """How often the draft's best token is the target's, by draft step; `of` [K] are the supervised slots of each."""

    def __init__(self, steps: int):
        self.correct, self.of = [0] * steps, [0] * steps

    @property
    def by_step(self) -> list[float]:
        return [c / n if n else 0.0 for c, n in zip(self.correct, self.of, strict=True)]

    @torch.inference_mode()
    def add(
        self, draft: DraftModel, mapping: VocabMapping, ids: Sequence[int], replies: Tensor, aux: Tensor, wanted: Tensor
    ) -> None:
        """Draft from every supervised slot of one sequence.

        replies int64 [T]: as `training_time_test.reply_index`. aux [T, L*H]. wanted int64 [T]: the target's own choice
        after each token. A token that the draft does not know counts as wrong.
        """
        tokens, steps = torch.tensor([list(ids)]), len(self.of)
        masks = torch.stack([position_mask(replies, step) for step in range(steps)])
        verified = DraftCache()
        first = draft.decode(tokens[:, 1:], draft.fuse(aux[:-1])[None], verified)
        assert verified.k is not None and verified.v is not None
        for slot in masks[0].nonzero().flatten().tolist():
            cache, hidden = DraftCache(), first[:, slot : slot + 1]
            cache.append(verified.k[:, :, : slot + 1], verified.v[:, :, : slot + 1])
            for step in range(int(masks[:, slot].sum())):  # a slot that a step leaves out is left out from there on
                if step:
                    hidden = draft.decode(tokens[:, slot + 1 + step : slot + 2 + step], hidden, cache)
                said = mapping.to_target(draft.logits(hidden[0, -1]).argmax())
                self.correct[step] += int(said == wanted[slot + 1 + step])
                self.of[step] += 1


def target_choice(head: Tensor, last: Tensor) -> Tensor:
    """int64 [T]: the target's best token after each row of `last` [T, H] (post-norm); head [V, H]."""
    return torch.cat([(part.float() @ head.float().t()).argmax(-1) for part in last.split(ROWS)])


def job_of(folder: str | os.PathLike, store: Path) -> Job:
    """The training that an exported draft comes from, by the lineage in its config.json; UserError when it is gone."""
    _, _, values, _ = export.read_export(folder)
    path = store / "drafts" / str((values.get("eagle3lib") or {}).get("lineage")) / "job.json"
    if not path.exists():
        raise UserError(
            f"{path}: missing: the training of {folder} is not in this store; `python -m eagle3lib check` needs none"
        )
    return Job.read(path)


def replay(folder: str | os.PathLike, job: Job, engine: Any, samples: int = 16) -> dict[str, Any]:
    """Accuracies of the exported draft by step, on held-out samples of its training: served against trained.

    job: the training (`job.json` in the draft's folder of the store), whose samples and weights are the other side.
    engine: the target. Returns plain values; `gap` is the largest difference of two accuracies. Raises UserError when
    it exceeds TOLERANCE, or when nothing was held out.
    """
    chosen = [sample for sample in job.samples if sample.split == "validation"][:samples]
    if not chosen:
        raise UserError("dataset.validation_fraction: the training held no sample out; raise it and train again")
    export.check_export(folder, job.target)
    draft, mapping, values = export.load_exported(folder, targets.load_embedding(job.target))
    head, served = targets.load_head(job.target), Accuracy(job.training.ttt_steps)
    for sample in chosen:
        ids = load_sample(sample.path)["input_ids"].tolist()
        (states,) = engine.extract([ids], values[export.LAYER_IDS])
        aux, wanted = torch.cat(states.aux, -1).float().cpu(), target_choice(head, states.last.cpu())
        served.add(draft, mapping, ids, reply_index(sample.reply_bounds, len(ids)), aux, wanted)
    trained = trained_accuracy(job, chosen)
    gaps = [abs(a - b) for a, b in zip(served.by_step, trained["accuracy_of_supervised"], strict=True)]
    if trained["supervised"] != served.of or max(gaps) > TOLERANCE:
        raise UserError(
            f"{folder}: served, its accuracy by step is {_figures(served.by_step)} over {served.of} slots, in training "
            f"{_figures(trained['accuracy_of_supervised'])} over {trained['supervised']} (tolerance {TOLERANCE:g}): "
            "the export or the serving path differs from the training; `python -m eagle3lib check` looks for the cause"
        )
    return {
        "samples": len(chosen),
        "supervised": served.of,
        "served": served.by_step,
        "trained": trained["accuracy_of_supervised"],
        "gap": max(gaps),
        "tolerance": TOLERANCE,
    }


def describe(result: dict[str, Any]) -> str:
    """For a terminal."""
    return "\n".join(
        [
            f"slots of {result['samples']} samples, by draft step: {' '.join(map(str, result['supervised']))}",
            f"served   {_figures(result['served'])}",
            f"trained  {_figures(result['trained'])}   share whose best token is the target's",
            f"gap      {result['gap']:.4f}   (tolerance {result['tolerance']:g})",
        ]
    )


def trained_accuracy(job: Job, samples: Sequence[Sample]) -> dict[str, Any]:
    """`training_time_test.summarise` of the finished training's weights on these samples' stored states."""
    return summarise(dict(zip(SUMS, trained_sums(job, samples).sum(0), strict=True)), job.training.step_decay)


@torch.no_grad()
def trained_sums(job: Job, samples: Sequence[Sample]) -> Tensor:
    """`TrainingTimeTest`'s sums of each sample by the finished training's weights, float64 [samples, SUMS, K]."""
    tensors = load_file(Path(job.folder) / "model.safetensors")
    aux_states = len(load_sample(samples[0].path)["hidden_states"]) - 1
    record = json.loads((Path(job.folder) / "training.json").read_text(encoding="utf-8"))
    model = DraftModel(DraftModelConfig.from_dict(record["draft_model"]))
    model.load_state_dict(tensors | {"embed_tokens.weight": targets.load_embedding(job.target)})
    head, mapping, training = targets.load_head(job.target), VocabMapping.load(job.mapping), job.training
    test = TrainingTimeTest(model, head, mapping, training.ttt_steps, training.step_decay)
    documents = Documents(samples, aux_states, model.config.hidden_size)
    rows = []
    for index in range(len(samples)):
        batch, plan = documents.packed(Pack([index], [documents.read(index)]), test, torch.device("cpu"))
        sums = test(batch, plan=plan)[1]
        rows.append(torch.stack([sums[name] for name in SUMS]))
    return torch.stack(rows)


def _figures(values: Sequence[float]) -> str:
    return " ".join(f"{value:.4f}" for value in values)
