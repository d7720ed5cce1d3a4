"""One training of `benchmarks.quality`, in a process of its own: a side, a seed, a budget of CPU-seconds -> weights.

python -m benchmarks.quality_sides SPEC: a JSON file with the fields of `Spec`. All sides read the same samples and
have the same vocabulary, layer sizes, packs and order. Everything else is the side's own way.
"""

from __future__ import annotations

import json
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.peer_sides import Timed, llama_config, speculators_model
from eagle3lib import targets, training_time_test
from eagle3lib.draft_model import VARIANTS, DraftModel, DraftModelConfig
from eagle3lib.loader import Documents, epoch_packs
from eagle3lib.processes import end_with_parent
from eagle3lib.training import Job, learning_rate
from eagle3lib.training_time_test import Batch, TrainingTimeTest
from eagle3lib.vocab_mapping import VocabMapping

AUX = 3
OF_THE_TARGET = ("t2d", "d2t", "embed_tokens", "verifier")  # what is no weight of the draft


@dataclass(frozen=True)
class Spec:
    side: str  # of SIDES
    job: str  # job.json of a finished training: its samples, vocabulary and settings
    seed: int
    budget: float  # CPU-seconds of the training loop; reading files and building the model are not in it
    learning_rate: float
    out: str  # weights by our names; beside it what was done, as JSON
    steps: int  # unrolled
    change: str = ""  # what this side does otherwise


class Side(ABC):
    """A draft model under training: `model` and its `optimizers`."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    def __init__(self, spec: Spec, job: Job):
        self.spec, self.job, self.mapping = spec, job, VocabMapping.load(job.mapping)
        self.config = DraftModelConfig.from_target(job.target, job.draft, AUX)
        self.embedding, self.head = targets.load_embedding(job.target).float(), targets.load_head(job.target).float()

    @abstractmethod
    def step(self, documents: list[Batch], share: float) -> None:
        """Train on the documents of one pack; `share` of the budget is used so far."""

    def update(self, max_norm: float, rate: float) -> None:
        """A step of the optimisers with the gradients that there are."""
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
            optimizer.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        """By our names; speculators calls the layer otherwise."""
        named = {name.replace("layers.0.", "midlayer."): w for name, w in self.model.state_dict().items()}
        return {name: w.detach().clone() for name, w in named.items() if not name.startswith(OF_THE_TARGET)}


class Ours(Side):
    """As `eagle3lib.training.Trainer`. Changes: what the ablations take away or put in its place."""

    def __init__(self, spec: Spec, job: Job):
        super().__init__(spec, job)
        self.model = DraftModel(replace(self.config, **norms_of(spec)))
        random_head = self.model.lm_head.weight.detach().clone()
        self.model.init_from_target(self.embedding, self.head, self.mapping)
        if "frozen head" in spec.change:
            self.model.lm_head.weight.requires_grad_(False)
        if "random layer" not in spec.change:
            self.model.init_layer_from_target(targets.load_norm(job.target), targets.load_last_layer(job.target))
        if spec.change == "random head":
            self.model.lm_head.weight.data.copy_(random_head)
        if spec.change in MASKS:
            training_time_test.position_mask = MASKS[spec.change]
        loss = spec.change if spec.change in ("kl", "lk") else "soft_ce"
        self.test = TrainingTimeTest(self.model, self.head, self.mapping, spec.steps, 0.8, loss=loss)
        self.settings = job.training.model_copy(update={"learning_rate": spec.learning_rate})
        options = {"betas": job.training.betas, "weight_decay": job.training.weight_decay, "fused": True}
        matrices, others = [], []  # lm_head is an embedding: Muon is not for it
        for name, p in self.model.trainable().items():
            (matrices if "muon" in spec.change and p.ndim == 2 and name != "lm_head.weight" else others).append(p)
        self.optimizers = [torch.optim.AdamW(others, **options)]
        if matrices:
            self.optimizers.append(torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"))
        self.target_tokens: dict[int, Tensor] = {}

    def step(self, documents: list[Batch], share: float) -> None:
        for one in documents:
            if id(one) not in self.target_tokens:  # once a sample, as the trainer
                self.target_tokens[id(one)] = self.test.target_tokens(one)
        pack = Batch.pack([one.with_tokens(self.target_tokens[id(one)]) for one in documents])
        self.test(pack)[0].backward()
        self.update(self.settings.max_grad_norm, learning_rate(self.settings, share))


def norms_of(spec: Spec) -> dict[str, bool]:
    """The norms of a side's draft, as `draft_model.VARIANTS`."""
    named = "speculators" if spec.side == "speculators" else spec.change
    return next((norms for name, norms in VARIANTS.items() if norms and name in named.split(", ")), {})


def mask_of(first: int) -> Any:
    """As `position_mask`, but slot j counts at step i where x_(j+first+i) is of a reply, as other trainers shift it."""

    def position_mask(replies: Tensor, step: int, documents: Tensor | None = None) -> Tensor:
        mask = torch.zeros(replies.numel(), dtype=torch.bool)
        slots = replies.numel() - (step + 2)
        if slots > 0:
            mask[:slots] = replies[first + step : first + step + slots] >= 0
            if documents is not None:
                mask[:slots] &= documents[:slots] == documents[2 + step : 2 + step + slots]
        return mask

    return position_mask


MASKS = {"mask of EAGLE": mask_of(0), "mask of speculators": mask_of(1)}


class SpecForge(Side):
    """OnlineEagle3Model as its offline trainer drives it: cosine, clip 0.5, AdamW, 0.8 a step; all of it at random but
    the embedding. Its loss is the reference beside its Triton kernel; the time of its acceptance metric is not counted.
    """

    def __init__(self, spec: Spec, job: Job):
        super().__init__(spec, job)
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.core import loss
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

        class Reference:
            apply = staticmethod(loss._compute_loss)

        eagle3.LogSoftmaxLoss = Reference
        self.metric = Timed(eagle3, "compute_acceptance_rate")
        config = llama_config(self.config)
        config.draft_vocab_size = self.config.draft_vocab_size
        self.model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
        own = {"t2d": self.mapping.t2d, "d2t": self.mapping.d2t, "embed_tokens.weight": self.embedding}
        self.model.load_state_dict(self.model.state_dict() | own)
        self.model.freeze_embedding()
        self.trainer = eagle3.OnlineEagle3Model(self.model, length=spec.steps, attention_backend="sdpa")
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizers = [torch.optim.AdamW(trained, lr=spec.learning_rate, weight_decay=0.0)]
        self.settings = job.training.model_copy(
            update={"learning_rate": spec.learning_rate, "warmup_fraction": 0.015, "max_grad_norm": 0.5}
        )

    def step(self, documents: list[Batch], share: float) -> None:
        if self.spec.change == "one sample a step":  # its default
            for one in documents:
                self._step([one], share)
        else:
            self._step(documents, share)

    def _step(self, documents: list[Batch], share: float) -> None:
        for one in documents:
            mask = (one.replies >= 0).long()
            mask[-1] = 0
            losses = self.trainer(
                input_ids=torch.cat([one.input_ids[1:], one.input_ids.new_zeros(1)])[None],
                attention_mask=torch.ones_like(one.input_ids)[None],
                target=None,
                loss_mask=mask[None, :, None].float(),
                hidden_states=one.aux[None].float(),
                target_hidden_for_compact=torch.cat([one.last[1:], torch.zeros_like(one.last[:1])])[None].float(),
                target_head_weight=self.head,
            )[0]
            (sum(0.8**i * loss for i, loss in enumerate(losses)) / len(documents)).backward()
        self.update(self.settings.max_grad_norm, learning_rate(self.settings, share))


class Speculators(Side):
    """Eagle3DraftModel with the defaults of its `train`: norms, frozen head of the target, KL, no decay of the steps,
    Muon for matrices (`adamw`: AdamW for all), a linear schedule, clip 1.0."""

    def __init__(self, spec: Spec, job: Job):
        super().__init__(spec, job)
        from speculators.models.eagle3.core import Eagle3DraftModel
        from speculators.train.optimizers import build_optimizers

        self.model = speculators_model(self.config, spec.steps, **norms_of(spec)).float()
        rows = self.head[self.mapping.target_ids]
        own = {"t2d": self.mapping.t2d, "d2t": self.mapping.d2t, "embed_tokens.weight": self.embedding}
        own |= {"lm_head.weight": rows, "verifier_lm_head.weight": rows}
        own["verifier_norm.weight"] = torch.ones(self.config.hidden_size)
        self.model.load_state_dict(self.model.state_dict() | own, assign=True)
        self.model.verifier_norm = nn.Identity()  # our last states have the final norm
        for name, p in self.model.named_parameters():
            p.requires_grad_(not name.startswith(("lm_head", "verifier", "embed_tokens")))
        self.kwargs = Eagle3DraftModel.get_trainer_kwargs(
            ttt_steps=spec.steps, ttt_step_loss_decay=1.0, loss_fn="kl_div", loss_implementation="eager"
        )[0]
        settings = SimpleNamespace(
            optimizer=spec.change or "muon", lr=spec.learning_rate, weight_decay=0.01, muon_lr=spec.learning_rate,
            muon_momentum=0.95, muon_weight_decay=0.1, muon_ns_steps=5, muon_adjust_lr_fn="match_rms_adamw",
        )  # fmt: skip
        self.optimizers = build_optimizers(self.model, settings)

    def step(self, documents: list[Batch], share: float) -> None:
        def joined(part: Any) -> Tensor:
            return torch.cat([part(one) for one in documents])[None]

        numbers = [torch.full((len(one.input_ids) - 1,), number) for number, one in enumerate(documents)]
        _, loss, _ = self.model(
            hidden_states=joined(lambda one: one.aux[:-1].float()),
            input_ids=joined(lambda one: one.input_ids[1:]),
            document_ids=torch.cat(numbers)[None],
            loss_mask=joined(lambda one: one.replies[1:] >= 0),
            position_ids=joined(lambda one: torch.arange(1, len(one.input_ids))),
            verifier_last_hidden_states=joined(lambda one: one.last[1:].float()),
            **self.kwargs,
        )
        loss.backward()
        self.update(1.0, self.spec.learning_rate * min(share / 0.01, 1 - share))


SIDES: dict[str, type[Side]] = {"eagle3lib": Ours, "SpecForge": SpecForge, "speculators": Speculators}


def train(spec: Spec) -> dict[str, Any]:
    job = Job.read(spec.job)
    torch.manual_seed(spec.seed)
    side = SIDES[spec.side](spec, job)
    chosen = [i for i, sample in enumerate(job.samples) if sample.split == "train"]
    lengths, files = [sample.n_tokens for sample in job.samples], Documents(job.samples, AUX, job.target.hidden_size)
    documents = {i: files.read(i) for i in chosen}
    start, tokens, steps, epoch = time.process_time(), 0, 0, 0
    uncounted = getattr(side, "metric", SimpleNamespace(seconds=0.0))

    def share() -> float:
        return (time.process_time() - start - uncounted.seconds) / spec.budget

    while share() < 1:
        for pack in epoch_packs(chosen, lengths, job.training.batch_tokens, f"{spec.seed}/{epoch}"):
            if share() >= 1:
                break
            side.step([documents[i] for i in pack], share())
            tokens, steps = tokens + sum(lengths[i] for i in pack), steps + 1
        epoch += 1
    save_file(side.weights(), spec.out)
    return {"tokens": tokens, "packs": steps, "epochs": tokens / sum(lengths[i] for i in chosen)}


def main() -> None:
    end_with_parent()
    spec = Spec(**json.loads(Path(sys.argv[1]).read_text()))
    torch.set_num_threads(1)
    done = train(spec)
    Path(spec.out).with_suffix(".json").write_text(json.dumps(done))


if __name__ == "__main__":
    main()
