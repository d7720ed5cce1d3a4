"""Training of a draft model: from stored hidden states to weights, resumable to the bit.

One optimiser step takes one pack of documents per process. A rank may hold several packs
of a step (accumulation) or none; the loss is weighted by the counted tokens of all packs
together, so how packs are dealt to ranks changes nothing but the order of a sum. How
weights and gradients lie on them: `eagle3lib.parallel`.

A step waits for no device: what meets what is planned on the CPU, the ranks agree by CPU
tensors, a step that must not count is left out by the optimiser's kernel, and a step's
figures are read while the next one is computed.

What resumes: weights, optimiser, place in the epoch, learning rate (a function of the
tokens seen), random state, metrics file. Order and packing of an epoch depend on seed
and epoch only. With as many processes as before, to the bit; with another number or kind
(DDP, FSDP2) within the rounding of sums in another order.

In `folder`: `model.safetensors` (by the names of `DraftModel.trainable()`, fp32), `training.json`,
`metrics.jsonl`, `speed.jsonl` (what a clock says, so never twice the same), `tensorboard/` (or what `training.trackers`
leave), and `checkpoints/` until the training is finished.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor

from eagle3lib import __version__, checkpoint, compilation, parallel, speed, targets, trackers, warm_start
from eagle3lib.config import DraftConfig, TrainingConfig, plain
from eagle3lib.disk import vanished
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.early_stopping import Best
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import load_sample
from eagle3lib.job import Progress, atomic_write, file_lock, write_json
from eagle3lib.lineage import file_sha256
from eagle3lib.loader import Documents, Pack, Sample, epoch_packs, first_fit_decreasing, read_ahead, readers, taken
from eagle3lib.processes import end_with_parent
from eagle3lib.targets import TargetInfo
from eagle3lib.training_time_test import SUMS, Batch, Plan, TrainingTimeTest, summarise
from eagle3lib.vocab_mapping import VocabMapping

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
SPEED_SECONDS = 15  # between two lines of speed.jsonl
BY_SOURCE = (
    *("loss", "acceptance_length", "prefix_of_supervised"),
    *("accuracy_of_supervised", "accuracy_of_counted", "supervised"),
)


class Interrupted(SystemExit):
    """Stopped on request after a checkpoint; as an exit code 130. The same command goes on from there."""

    def __init__(self) -> None:
        super().__init__(130)


@dataclass(frozen=True)
class Job:
    """All that a training needs, as plain values: what the processes of a torchrun read from one JSON file."""

    samples: list[Sample]
    target: TargetInfo
    draft: DraftConfig
    training: TrainingConfig
    mapping: str
    folder: str
    digest: str
    initial: str | None = None  # digest of the draft that it starts from (`warm_start.fingerprint`)

    def write(self, path: str | os.PathLike) -> None:
        values = vars(self) | {
            "samples": [asdict(sample) for sample in self.samples],
            "target": asdict(self.target),
            "draft": plain(self.draft),
            "training": plain(self.training),
        }
        write_json(path, values)

    @classmethod
    def read(cls, path: str | os.PathLike) -> Job:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
        values["samples"] = [Sample(**{**s, "reply_bounds": tuple(s["reply_bounds"])}) for s in values["samples"]]
        values["target"] = TargetInfo(**values["target"])
        values["draft"] = DraftConfig(**values["draft"])
        values["training"] = TrainingConfig(**values["training"])
        return cls(**values)


def train(job: Job, stop: Callable[[int], bool] | None = None) -> dict[str, Any]:
    """Train, or go on training, or return what a finished training of this digest left; the content of training.json.

    stop: asked after each step (its number is given); true means checkpoint and raise `Interrupted`; None: SIGTERM and
    SIGINT do that. Raises UserError for samples that do not fit. In this process alone, or as a rank of torchrun.
    """
    finished = result_of(job)
    if finished:
        return finished
    trackers.check(job.training.trackers)
    ranks = Ranks.join(job.training)
    if stop is not None:
        return Trainer(job, ranks, stop).run()
    with StopOnSignal() as signalled:
        return Trainer(job, ranks, signalled).run()


# --- the order of things -----------------------------------------------------------------------------------------


def learning_rate(training: TrainingConfig, progress: float) -> float:
    """Linear warm-up, then half a cosine down to 0; progress: share of all tokens seen, 0..1."""
    if progress < training.warmup_fraction:
        return training.learning_rate * progress / training.warmup_fraction
    rest = (progress - training.warmup_fraction) / (1 - training.warmup_fraction)
    return training.learning_rate * 0.5 * (1 + math.cos(math.pi * min(rest, 1.0)))


# --- processes and signals ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """This process among those of the training. `packs_per_step` is the configuration's, whoever computes them."""

    rank: int
    world: int
    packs_per_step: int
    device: torch.device

    @classmethod
    def join(cls, training: TrainingConfig) -> Ranks:
        if training.gpus and not torch.cuda.is_available():
            raise UserError(f"training.gpus: {training.gpus} asked for, but torch sees none; set it to 0")
        rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if training.gpus else torch.device("cpu")
        return cls(rank, world, processes(training), device)

    def sum(self, tensor: Tensor) -> Tensor:
        """Add up over the ranks, in place; the same bits on all of them."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def same(self, tensor: Tensor) -> None:
        """Make it rank 0's, in place."""
        if self.world > 1:
            dist.broadcast(tensor, src=0)

    def wait(self) -> None:
        if self.world > 1:
            dist.barrier()

    def mine(self, packs: Sequence[list[int]]) -> list[list[int]]:
        return list(packs[self.rank :: self.world])


def processes(training: TrainingConfig) -> int:
    """One for each GPU; without GPUs as configured."""
    return training.gpus or training.processes


class StopOnSignal:
    """True once SIGTERM or SIGINT has come. The handlers that were there before come back at the end."""

    def __init__(self) -> None:
        self.came = False
        self.then: Callable[[], None] = lambda: None

    def __call__(self, step: int = 0) -> bool:
        return self.came

    def __enter__(self) -> StopOnSignal:
        self.before = {s: signal.signal(s, self._note) for s in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def _note(self, *_: object) -> None:
        first, self.came = not self.came, True
        if first:
            self.then()


# --- training ----------------------------------------------------------------------------------------------------


class Trainer:
    """One rank's training. `run` is the whole story."""

    def __init__(self, job: Job, ranks: Ranks, stop: Callable[[int], bool]):
        self.job, self.training, self.ranks, self.stop = job, job.training, ranks, stop
        self.folder, mapping = Path(job.folder), VocabMapping.load(job.mapping)
        check_samples(job)
        self.lengths = [sample.n_tokens for sample in job.samples]
        self.train = [i for i, sample in enumerate(job.samples) if sample.split == "train"]
        self.validation = [i for i, sample in enumerate(job.samples) if sample.split == "validation"]
        aux_states = len(load_sample(job.samples[0].path)["hidden_states"]) - 1
        pinned = ranks.device.type == "cuda"
        self.documents = Documents(job.samples, aux_states, job.target.hidden_size, pinned)
        self.model = self._initial_model(warm_start.model_config(job.draft, job.target, aux_states, mapping), mapping)
        self.spread = self._spread(mapping)
        self.test = self.spread.test
        self.optimizer = torch.optim.AdamW(
            self.spread.parameters.values(),
            betas=job.training.betas,
            weight_decay=job.training.weight_decay,
            fused=True,
        )
        epochs = job.training.epochs
        self.total_tokens = sum(self.lengths[i] for epoch in range(epochs) for i in self._taken(epoch))
        if self.train and not self.total_tokens:
            raise UserError("dataset.conversations: their weights leave no sample to any epoch; raise one")
        self.epoch = self.packs_done = self.steps = self.tokens = 0
        self.seconds_before = 0.0
        self.epoch_sums = self._no_sums()
        self.results: dict[str, Any] = {}
        self.best = Best(job.training.early_stopping_epochs, job.training.best_by)
        self.deferred = Deferred(self._report)

    def run(self) -> dict[str, Any]:
        self.started = self.saved_at = time.monotonic()
        rate = speed.matmul_rate(self.ranks.device, self.test.compute_dtype)
        self.speed = speed.Speedometer(self.model.config, self.ranks.sum(torch.tensor(rate)).item())
        with Log(self.job, self.ranks.rank == 0) as self.log, readers() as self.readers:
            self._resume()
            self.progress = Progress(self.total_tokens, "tokens", "train_draft_model")
            self.progress.start -= self.seconds_before  # of a resumed run too the rate is that of all of it
            self.progress.update(self.tokens)
            while self.epoch < self.training.epochs and not self.best.ends(self.epoch):
                self._train_epoch()
                self._finish_epoch()
            return self._finish()

    # one epoch

    def _train_epoch(self) -> None:
        capacity, seed = self.training.batch_tokens, self.training.seed
        packs = epoch_packs(self._taken(self.epoch), self.lengths, capacity, f"{seed}/{self.epoch}")
        each = self.ranks.packs_per_step
        steps = [packs[start : start + each] for start in range(self.packs_done, len(packs), each)]
        mine = [self.ranks.mine(step) for step in steps]
        for step, read in zip(steps, self._read(mine), strict=True):
            self._step(step, read)
            self.packs_done += len(step)
            self._control()
        self.deferred.flush()

    def _taken(self, epoch: int) -> list[int]:
        return taken(self.job.samples, self.train, epoch)

    def _step(self, packs: list[list[int]], mine: list[Pack]) -> None:
        """One step of the optimiser on the packs of all ranks; `mine`: those of this rank, read."""
        batches = [self.documents.packed(pack, self.test, self.ranks.device) for pack in mine]
        counted = sum((plan.counted for _, plan in batches), torch.zeros(self.test.steps, dtype=torch.int64))
        tokens = sum(self.lengths[i] for pack in packs for i in pack)
        rate = learning_rate(self.training, (self.tokens + tokens / 2) / self.total_tokens)  # at the middle of the step
        figures = self._update(batches, self.test.step_weights(self.ranks.sum(counted)), rate)
        self.steps += 1
        self.tokens += tokens
        where = {"step": self.steps, "epoch": self.epoch, "tokens": self.tokens}
        self.deferred.put(figures, {"kind": "train", **where, "learning_rate": rate}, tokens)

    def _update(self, batches: list[tuple[Batch, Plan]], weights: Tensor, rate: float) -> Tensor:
        """Gradients, optimiser, sums: all that is on the device, which is not waited for; figures for `_report`."""
        sums = self._no_sums()
        for these in self.spread.backward(batches, weights):
            sums += _stack(these)
        norm = self.spread.clip(self.training.max_grad_norm)
        # Where it is not finite the optimiser's kernel does nothing, and `_report` ends the training.
        self.optimizer.found_inf = norm.isfinite().logical_not().float()  # type: ignore[attr-defined]
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.epoch_sums += self.ranks.sum(sums)
        return torch.cat([sums.sum(1).flatten(), norm.double().view(1)])

    def _report(self, figures: Tensor, line: dict[str, Any], tokens: int) -> None:
        """A step's line, when its figures are on the CPU: sums [SUMS, K], flattened, and the norm of the gradient."""
        sums, norm = _unstack(figures[:-1].view(len(SUMS), -1)), figures[-1].item()
        if not math.isfinite(norm):
            raise UserError(
                f"training: step {line['step']}: the gradient is not finite; lower training.learning_rate "
                f"(checkpoints from before are in {self.folder / 'checkpoints'})"
            )
        found = summarise(sums, self.training.step_decay)
        self.log.write(line | {"gradient_norm": norm} | found)
        self.speed.step(tokens, sums["supervised"].tolist(), sums["counted"].tolist())
        if time.monotonic() - self.speed.last > SPEED_SECONDS:
            self._report_speed(line["step"])
        if self.ranks.rank == 0:
            shown = {"loss": found["loss"], "accuracy": found["accuracy_of_supervised"][0]}
            if "validation" in self.results:  # of the last epoch that has ended
                shown["acceptance_length"] = self.results["validation"]["acceptance_length"]
            self.progress.update(tokens, epoch=line["epoch"] + 1, **shown)

    def _report_speed(self, step: int) -> None:
        memory = speed.peak_memory(self.ranks.device) / 2**30
        self.log.write_speed({"kind": "speed", "step": step, **self.speed.since_last(), "memory_gib": memory})

    def _control(self) -> None:
        """All ranks agree, at the same step, whether to stop or to save."""
        due = time.monotonic() - self.saved_at > 60 * self.training.checkpoint_minutes and self.ranks.rank == 0
        flags = torch.tensor([float(self.stop(self.steps)), float(due)])
        stop, save = self.ranks.sum(flags).bool().tolist()
        if save or stop:
            self._save()
        if stop:
            self.ranks.wait()
            if self.ranks.rank == 0:
                print(f"training stopped at step {self.steps}; the same command goes on from here")
            raise Interrupted

    def _finish_epoch(self) -> None:
        """Validate, report, checkpoint: the state saved is the beginning of the next epoch."""
        where = {"step": self.steps, "epoch": self.epoch, "tokens": self.tokens}
        self._report_speed(self.steps)
        self.results["train"] = self._figures(self.epoch_sums)
        self.log.write({"kind": "epoch", **where, **self.results["train"]})
        if self.validation:
            self.results["validation"] = self._figures(self._validate())
            self.log.write({"kind": "validation", **where, **self.results["validation"]})
            self.best.offer(self.epoch, self.results, self.spread.weights)
        self.epoch, self.packs_done, self.epoch_sums = self.epoch + 1, 0, self._no_sums()
        self._save()

    def _validate(self) -> Tensor:
        """Sums over the held-out samples, packs dealt to the ranks."""
        packs = first_fit_decreasing(self.validation, self.lengths, self.training.batch_tokens)
        sums = self._no_sums()
        with self.spread.evaluating() as test:
            for (pack,) in self._read([[pack] for pack in self.ranks.mine(packs)]):
                batch, plan = self.documents.packed(pack, test, self.ranks.device)
                sums += _stack(test(batch, plan=plan)[1])
        return self.ranks.sum(sums)

    def _figures(self, sums: Tensor) -> dict[str, Any]:
        """Of sums [SUMS, sources, K]: in all, and `by_source` where there are several."""
        found = summarise(_unstack(sums.sum(1)), self.training.step_decay)
        if len(self.documents.sources) > 1:
            each = zip(self.documents.sources, sums.cpu().unbind(1), strict=True)
            of = {name: summarise(_unstack(one), self.training.step_decay) for name, one in each if one.any()}
            found["by_source"] = {name: {key: one[key] for key in BY_SOURCE} for name, one in of.items()}
        return found

    def _read(self, steps: Sequence[Sequence[list[int]]]) -> Iterator[list[Pack]]:
        """`loader.read_ahead`, with the time counted that a step waits for it."""
        ahead = read_ahead(self.documents, steps, self.readers)
        while True:
            start = time.monotonic()
            packs = next(ahead, None)
            self.speed.waited += time.monotonic() - start
            if packs is None:
                return
            yield packs

    # state

    def _initial_model(self, config: DraftModelConfig, mapping: VocabMapping) -> DraftModel:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.training.seed)
            model = DraftModel(config)
        target = self.job.target
        model.init_from_target(targets.load_embedding(target), targets.load_head(target), mapping)
        if self.job.draft.initial:
            rows = warm_start.load_into(model, self.job.draft.initial, target, mapping)
            print(f"initial weights out of {self.job.draft.initial}; {rows} of {len(mapping.d2t)} rows of its head")
        elif self.job.draft.initial_layer == "target":
            done = model.init_layer_from_target(targets.load_norm(target), targets.load_last_layer(target))
            print(f"initial weights out of the target: {', '.join(done) or 'none fits'}")
        return model.to(self.ranks.device)

    def _spread(self, mapping: VocabMapping) -> parallel.Spread:
        """The loss and its model over the ranks, all of which start from rank 0's weights."""
        training, device = self.training, self.ranks.device
        if training.compile:
            compilation.check()
            compilation.compile_parts(self.model)
        test = TrainingTimeTest(
            self.model,
            targets.load_head(self.job.target).to(device),
            mapping,
            training.ttt_steps,
            training.step_decay,
            getattr(torch, training.compute_dtype),
            training.loss,
            training.recompute,
            sources=len(self.documents.sources),
        )
        trained = self.model.trainable().values()
        for p in trained:
            self.ranks.same(p.data)
        memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
        kind = parallel.choose(training.parallel, sum(p.numel() for p in trained), memory)
        choice = torch.tensor(parallel.KINDS.index(kind))
        self.ranks.same(choice)  # GPUs may differ
        return parallel.spread(test, self.ranks.world, parallel.KINDS[int(choice)], device)

    def _save(self) -> None:
        self.deferred.flush()
        self.saved_at = time.monotonic()
        if self.ranks.rank and not self.spread.shared:
            return
        weights, optimizer = self.spread.weights(), self.spread.optimizer_state(self.optimizer)
        if self.ranks.rank:
            return
        if not self.folder.exists():  # a checkpoint must not make it again below a volume that is gone
            raise vanished(self.folder)
        state = {
            "model": weights,
            "optimizer": optimizer,
            "rng": torch.get_rng_state(),
            "epoch_sums": self.epoch_sums,
            "results": self.results,
            "best": self.best.state,
            "seconds": self._seconds(),
            "metrics_bytes": self.log.flush(),
        }
        state |= {name: getattr(self, name) for name in ("epoch", "packs_done", "steps", "tokens")}
        checkpoint.save(self.folder / "checkpoints", self.job.digest, self.steps, state)

    def _resume(self) -> None:
        state = checkpoint.latest(self.folder / "checkpoints", self.job.digest)
        self._agree_on(state["steps"] if state else 0)
        self.log.start(state["metrics_bytes"] if state else 0, state["steps"] if state else 0)
        if state is not None:
            self.spread.load_weights(state["model"])
            self.spread.load_optimizer_state(self.optimizer, state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.epoch_sums = state["epoch_sums"].to(self.ranks.device)
            self.results, self.seconds_before = state["results"], state["seconds"]
            self.best.state = state.get("best", {})
            for name in ("epoch", "packs_done", "steps", "tokens"):
                setattr(self, name, state[name])
            print(f"training goes on at step {self.steps} (epoch {self.epoch + 1} of {self.training.epochs})")

    def _agree_on(self, steps: int) -> None:
        """Every rank reads its checkpoint itself: where one sees another folder, or a damaged file, nobody goes on."""
        first = torch.tensor(steps)
        self.ranks.same(first)
        if first != steps:
            raise UserError(
                f"training: rank {self.ranks.rank} finds the checkpoint of step {steps} in {self.folder}, rank 0 that "
                f"of step {int(first)}; all nodes must see one folder: mount it there, then run the same command again"
            )

    def _finish(self) -> dict[str, Any]:
        best = self.best.state
        weights = best.get("weights") or self.spread.weights()
        data = safetensors.torch.save(weights, metadata={"format": "pt"})
        result = {
            "digest": self.job.digest,
            "draft_model": self.model.config.to_dict(),
            "initial": self.job.initial,
            "metrics": best.get("results", self.results),
            "train_samples": len(self.train),
            "validation_samples": len(self.validation),
            "epochs": self.epoch,
            "from_epoch": best.get("epoch", self.epoch - 1),
            "steps": self.steps,
            "tokens": self.tokens,
            "seconds": self._seconds(),
            **self.speed.overall(),
            "peak_memory": speed.peak_memory(self.ranks.device),
            "processes": self.ranks.world,
            "parameters": sum(p.numel() for p in self.spread.parameters.values()),
            "weights_sha256": hashlib.sha256(data).hexdigest(),
            "versions": {"eagle3lib": __version__, "torch": torch.__version__},
        }
        if self.ranks.rank == 0:
            with atomic_write(self.folder / "model.safetensors") as file:
                file.write(data)
            write_json(self.folder / "training.json", result)
            checkpoint.clear(self.folder / "checkpoints", self.job.digest)
        self.ranks.wait()
        return result

    def _seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def _no_sums(self) -> Tensor:
        return torch.stack([self.test.no_sums()] * len(SUMS))


class Deferred:
    """Figures of a step, read while the next one is computed."""

    def __init__(self, then: Callable[..., None]):
        """then: called with the figures, on the CPU, and all else that was put beside them."""
        self.then = then
        self.held: tuple[Tensor, torch.cuda.Event | None, tuple[Any, ...]] | None = None

    def put(self, figures: Tensor, *about: Any) -> None:
        """Have them copied, and read those of the step before."""
        copy, copied = figures.to("cpu", non_blocking=True), None
        if figures.is_cuda:
            copied = torch.cuda.Event()
            copied.record()
        self.flush()
        self.held = copy, copied, about

    def flush(self) -> None:
        if self.held is None:
            return
        (copy, copied, about), self.held = self.held, None
        if copied is not None:
            copied.synchronize()
        self.then(copy, *about)


def _stack(sums: dict[str, Tensor]) -> Tensor:
    return torch.stack([sums[name] for name in SUMS])


def _unstack(sums: Tensor) -> dict[str, Tensor]:
    return dict(zip(SUMS, sums, strict=True))


def check_samples(job: Job) -> None:
    if not any(sample.split == "train" for sample in job.samples):
        raise UserError(
            "training: no sample is in the split 'train'; lower dataset.validation_fraction or add conversations"
        )
    asked = next((name for name in ("early_stopping_epochs", "best_by") if getattr(job.training, name)), None)
    if asked and not any(sample.split == "validation" for sample in job.samples):
        raise UserError(
            f"training.{asked}: no sample is held out to tell which epoch is the best; raise "
            "dataset.validation_fraction, or leave it out"
        )
    held_out = sorted({sample.source for sample in job.samples if sample.split == "validation"})
    if job.training.best_by and job.training.best_by not in ("validation", *held_out):
        raise UserError(
            f"training.best_by: no held-out sample is of {job.training.best_by!r}; known here: "
            f"{', '.join(['validation', *held_out])}"
        )
    room = job.training.batch_tokens
    for sample in job.samples:
        if sample.n_tokens > room:
            raise UserError(
                f"training.batch_tokens: {room} cannot hold {sample.path} of {sample.n_tokens} tokens; raise it"
            )


def result_of(job: Job) -> dict[str, Any] | None:
    """What a training of this digest has left, if it is whole."""
    folder = Path(job.folder)
    try:
        result = json.loads((folder / "training.json").read_text(encoding="utf-8"))
        whole = result["digest"] == job.digest and file_sha256(folder / "model.safetensors") == result["weights_sha256"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not whole:
        return None
    checkpoint.clear(folder / "checkpoints", job.digest)  # a kill may have come in between
    return result


class Log:
    """`metrics.jsonl` and the trackers, written by rank 0; a resumed run takes both back to its checkpoint."""

    def __init__(self, job: Job, writes: bool):
        self.job, self.folder, self.writes = job, Path(job.folder), writes

    def __enter__(self) -> Log:
        return self

    def start(self, keep_bytes: int, steps: int) -> None:
        if not self.writes:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        self.file = open(self.folder / "metrics.jsonl", "ab")  # noqa: SIM115 - closed by __exit__
        self.file.truncate(min(keep_bytes, self.file.tell()))
        self.speed = open(self.folder / "speed.jsonl", "ab")  # noqa: SIM115 - the same
        training = self.job.training
        run = trackers.Run(self.job.digest, training.tracker_project, self.folder, plain(training), steps)
        self.trackers = trackers.Trackers(training.trackers, run)

    def write(self, line: dict[str, Any]) -> None:
        """One line; lists (by draft step) become one curve for each step.

        `accuracy` says the same as `accuracy_of_supervised`: the name that plots know.
        """
        if not self.writes:
            return
        self.file.write((json.dumps(line | {"accuracy": line["accuracy_of_supervised"]}) + "\n").encode())
        self._track(line)

    def write_speed(self, line: dict[str, Any]) -> None:
        """What a clock says: beside the metrics, which are the same for the same training."""
        if self.writes:
            self.speed.write((json.dumps(line | {"time": round(time.time(), 3)}) + "\n").encode())
            self._track(line)

    def _track(self, line: dict[str, Any]) -> None:
        shown = {name: value for name, value in line.items() if name not in ("kind", "step")}
        self.trackers.log(scalars(shown, line["kind"]), line["step"])

    def flush(self) -> int:
        """Make it durable; the length of the file in bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.speed.flush()
        self.trackers.flush()
        return self.file.tell()

    def __exit__(self, *_: object) -> None:
        if self.writes and hasattr(self, "file"):
            self.file.close()
            self.speed.close()
            self.trackers.close()


def scalars(value: Any, name: str) -> dict[str, float]:
    """A number, or lists and dicts of numbers, by paths that begin with `name`."""
    if not isinstance(value, (list, dict)):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {path: number for key, one in items for path, number in scalars(one, f"{name}/{key}").items()}


# --- several processes -------------------------------------------------------------------------------------------


def launch(job_file: str | os.PathLike, training: TrainingConfig) -> dict[str, Any]:
    """Run the `Job` in `job_file`: here for one process, by torchrun for more; the content of training.json.

    SIGTERM and SIGINT are handed on: all ranks checkpoint at the next step, then `Interrupted` is raised here.
    The workers end with this process, however it ends. A worker's UserError is raised here.
    """
    job = Job.read(job_file)
    if processes(training) == 1:
        return train(job)
    finished = result_of(job)
    if finished:
        return finished
    workers_log = Path(job.folder) / "workers.log"
    workers_log.parent.mkdir(parents=True, exist_ok=True)
    with StopOnSignal() as stop, open(workers_log, "w", encoding="utf-8") as stderr:
        agent = _start_workers(job_file, training, stderr)
        stop.then = agent.terminate
        if stop():
            agent.terminate()
        error = _follow(agent)
    result = result_of(job)
    if stop() and not result:
        raise Interrupted
    if agent.returncode or not result:
        raise UserError(error or f"training: a worker ended with code {agent.returncode}; see {workers_log}")
    return result


def _start_workers(job_file: str | os.PathLike, training: TrainingConfig, stderr: IO[str]) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes(training)}"]
    command += ["-m", "eagle3lib.training", os.fspath(job_file)]
    environment = dict(os.environ)
    root = str(Path(__file__).resolve().parents[1])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // processes(training))))
    return subprocess.Popen(
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        start_new_session=True,  # Ctrl-C reaches the workers once, through us
        preexec_fn=end_with_parent,  # noqa: PLW1509 - no thread of ours runs yet
    )


def _follow(agent: subprocess.Popen) -> str | None:
    """Print the workers' lines until they end; the message of the last `error:` line."""
    error = None
    try:
        for line in agent.stdout or ():
            if line.startswith("error: "):
                error = line.removeprefix("error: ").strip()
            else:
                print(line, end="")
        agent.wait()
    finally:
        if agent.poll() is None:
            agent.terminate()
            agent.wait()
    return error


def main() -> None:
    """A worker of torchrun: `python -m eagle3lib.training JOB.json`."""
    end_with_parent()
    job = Job.read(sys.argv[1])
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if int(os.environ["LOCAL_RANK"]):
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - rank 0 speaks for all
    if job.training.gpus:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Ranks of a killed training may still be writing their last checkpoint.
    with file_lock(Path(job.folder) / f"rank{os.environ['RANK']}.lock"):
        _work(job)


def _work(job: Job) -> None:
    # On the CPU the ranks agree without waiting for their GPUs.
    dist.init_process_group("cpu:gloo,cuda:nccl" if job.training.gpus else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        train(job)
    except UserError as error:
        print(f"error: {error}", file=sys.__stdout__, flush=True)
        os._exit(1)  # the other ranks wait in a collective: no orderly end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
