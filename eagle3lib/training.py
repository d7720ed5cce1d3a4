"""Training of a draft model: from stored hidden states to weights, resumable to the bit.

One optimiser step takes one pack of documents per process. A rank may hold several packs
of a step (accumulation) or none; the loss is weighted by the counted tokens of all packs
together, so how packs are dealt to ranks changes nothing but the order of a sum.

What resumes: weights, optimiser, place in the epoch, learning rate (a function of the
tokens seen), random state, metrics file. Order and packing of an epoch depend on seed
and epoch only.

In `folder`: `model.safetensors` (by the names of `DraftModel.trainable()`, fp32), `training.json`,
`metrics.jsonl`, `tensorboard/` (or what `training.trackers` leave), and `checkpoints/` until the training is finished.
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

from eagle3lib import __version__, checkpoint, targets, trackers, warm_start
from eagle3lib.config import DraftConfig, TrainingConfig, plain
from eagle3lib.disk import vanished
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.early_stopping import Best
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import load_sample
from eagle3lib.job import Progress, atomic_write, file_lock, write_json
from eagle3lib.lineage import file_sha256
from eagle3lib.loader import Documents, Sample, epoch_packs, first_fit_decreasing, read_ahead, readers, taken
from eagle3lib.processes import end_with_parent
from eagle3lib.targets import TargetInfo
from eagle3lib.training_time_test import SUMS, Batch, TrainingTimeTest, summarise
from eagle3lib.vocab_mapping import VocabMapping

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


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
        self.documents = Documents(job.samples, aux_states)
        self.model = self._initial_model(warm_start.model_config(job.draft, job.target, aux_states, mapping), mapping)
        self.parameters = self.model.trainable()
        training, head = job.training, targets.load_head(job.target).to(ranks.device)
        dtype = getattr(torch, training.compute_dtype)
        options = (training.ttt_steps, training.step_decay, dtype, training.loss)
        self.test = TrainingTimeTest(self.model, head, mapping, *options)
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), betas=training.betas, weight_decay=training.weight_decay, fused=True
        )
        self.total_tokens = sum(self.lengths[i] for epoch in range(training.epochs) for i in self._taken(epoch))
        if self.train and not self.total_tokens:
            raise UserError("dataset.conversations: their weights leave no sample to any epoch; raise one")
        self.epoch = self.packs_done = self.steps = self.tokens = 0
        self.seconds_before = self.waited = 0.0  # waited: for documents, since this process began
        self.epoch_sums = self._no_sums()
        self.results: dict[str, Any] = {}
        self.best = Best(training.early_stopping_epochs)

    def run(self) -> dict[str, Any]:
        self.started = self.saved_at = time.monotonic()
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
        for step, documents in zip(steps, self._read(mine), strict=True):
            self._step(step, documents)
            self.packs_done += len(step)
            self._control()

    def _taken(self, epoch: int) -> list[int]:
        return taken(self.job.samples, self.train, epoch)

    def _step(self, packs: list[list[int]], documents: list[list[Batch]]) -> None:
        """One step of the optimiser on the packs of all ranks; `documents` are those of this rank's packs."""
        device, test = self.ranks.device, self.test
        pairs = zip(self.ranks.mine(packs), documents, strict=True)
        batches = [self.documents.packed(pack, docs, test, device) for pack, docs in pairs]
        counted = sum((test.counted(b) for b in batches), torch.zeros(test.steps, dtype=torch.int64, device=device))
        weights = test.step_weights(self.ranks.sum(counted))
        sums = self._no_sums()
        for batch in batches:
            loss, these = test(batch, weights)
            loss.backward()
            sums += _stack(these)
        norm = self._sum_gradients()
        tokens = sum(self.lengths[i] for pack in packs for i in pack)
        rate = learning_rate(self.training, (self.tokens + tokens / 2) / self.total_tokens)  # at the middle of the step
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps += 1
        self.tokens += tokens
        self._report(self.ranks.sum(sums), tokens, rate, norm)

    def _sum_gradients(self) -> float:
        """Add up gradients over the ranks, clip; the norm before clipping. A rank without a pack adds zeros."""
        for p in self.parameters.values():
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            self.ranks.sum(p.grad)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters.values(), self.training.max_grad_norm).item()
        if not math.isfinite(norm):
            raise UserError(
                f"training: step {self.steps + 1}: the gradient is not finite; lower training.learning_rate "
                f"(checkpoints from before are in {self.folder / 'checkpoints'})"
            )
        return norm

    def _report(self, sums: Tensor, tokens: int, rate: float, norm: float) -> None:
        self.epoch_sums += sums
        figures = summarise(_unstack(sums), self.training.step_decay)
        where = {"kind": "train", "step": self.steps, "epoch": self.epoch, "tokens": self.tokens}
        self.log.write(where | {"learning_rate": rate, "gradient_norm": norm} | figures)
        if self.ranks.rank == 0:
            shown = {"loss": figures["loss"], "accuracy": figures["accuracy_of_supervised"][0]}
            self.progress.update(tokens, epoch=self.epoch + 1, **shown)

    def _control(self) -> None:
        """All ranks agree, at the same step, whether to stop or to save."""
        due = time.monotonic() - self.saved_at > 60 * self.training.checkpoint_minutes and self.ranks.rank == 0
        flags = torch.tensor([float(self.stop(self.steps)), float(due)], device=self.ranks.device)
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
        self.results["train"] = summarise(_unstack(self.epoch_sums), self.training.step_decay)
        self.log.write({"kind": "epoch", **where, **self.results["train"]})
        if self.validation:
            self.results["validation"] = summarise(_unstack(self._validate()), self.training.step_decay)
            self.log.write({"kind": "validation", **where, **self.results["validation"]})
            self.best.offer(self.epoch, self.results, lambda: self.parameters)
        self.epoch, self.packs_done, self.epoch_sums = self.epoch + 1, 0, self._no_sums()
        self._save()

    @torch.no_grad()
    def _validate(self) -> Tensor:
        """Sums over the held-out samples, packs dealt to the ranks."""
        packs = first_fit_decreasing(self.validation, self.lengths, self.training.batch_tokens)
        sums, mine = self._no_sums(), self.ranks.mine(packs)
        for pack, (documents,) in zip(mine, self._read([[pack] for pack in mine]), strict=True):
            sums += _stack(self.test(self.documents.packed(pack, documents, self.test, self.ranks.device))[1])
        return self.ranks.sum(sums)

    def _read(self, steps: Sequence[Sequence[list[int]]]) -> Iterator[list[list[Batch]]]:
        """`loader.read_ahead`, with the time counted that a step waits for it."""
        ahead = read_ahead(self.documents, steps, self.readers)
        while True:
            start = time.monotonic()
            documents = next(ahead, None)
            self.waited += time.monotonic() - start
            if documents is None:
                return
            yield documents

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

    def _save(self) -> None:
        self.saved_at = time.monotonic()
        if self.ranks.rank:
            return
        if not self.folder.exists():  # a checkpoint must not make it again below a volume that is gone
            raise vanished(self.folder)
        state = {
            "model": {name: p.detach() for name, p in self.parameters.items()},
            "optimizer": self.optimizer.state_dict(),
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
        self.log.start(state["metrics_bytes"] if state else 0, state["steps"] if state else 0)
        if state is not None:
            self.model.load_state_dict(state["model"], strict=False)
            self.optimizer.load_state_dict(state["optimizer"])
            torch.set_rng_state(state["rng"])
            self.epoch_sums = state["epoch_sums"].to(self.ranks.device)
            self.results, self.seconds_before = state["results"], state["seconds"]
            self.best.state = state.get("best", {})
            for name in ("epoch", "packs_done", "steps", "tokens"):
                setattr(self, name, state[name])
            print(f"training goes on at step {self.steps} (epoch {self.epoch + 1} of {self.training.epochs})")
        for p in self.parameters.values():
            self.ranks.same(p.data)

    def _finish(self) -> dict[str, Any]:
        best = self.best.state
        weights = best.get("weights") or {n: p.detach().cpu().contiguous() for n, p in self.parameters.items()}
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
            "loader_wait": self.waited / (time.monotonic() - self.started),
            "processes": self.ranks.world,
            "parameters": sum(p.numel() for p in self.parameters.values()),
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
        return torch.zeros(len(SUMS), self.training.ttt_steps, dtype=torch.float64, device=self.ranks.device)


def _stack(sums: dict[str, Tensor]) -> Tensor:
    return torch.stack([sums[name] for name in SUMS])


def _unstack(sums: Tensor) -> dict[str, Tensor]:
    return dict(zip(SUMS, sums, strict=True))


def check_samples(job: Job) -> None:
    if not any(sample.split == "train" for sample in job.samples):
        raise UserError(
            "training: no sample is in the split 'train'; lower dataset.validation_fraction or add conversations"
        )
    if job.training.early_stopping_epochs and not any(sample.split == "validation" for sample in job.samples):
        raise UserError(
            "training.early_stopping_epochs: no sample is held out to tell which epoch is the best; raise "
            "dataset.validation_fraction, or leave it out"
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
        scalars: dict[str, float] = {}
        for name, value in line.items():
            values = {f"/{i}": v for i, v in enumerate(value)} if isinstance(value, list) else {"": value}
            if name not in ("kind", "step"):
                scalars |= {f"{line['kind']}/{name}{suffix}": number for suffix, number in values.items()}
        self.trackers.log(scalars, line["step"])

    def flush(self) -> int:
        """Make it durable; the length of the file in bytes."""
        self.file.flush()
        os.fsync(self.file.fileno())
        self.trackers.flush()
        return self.file.tell()

    def __exit__(self, *_: object) -> None:
        if self.writes and hasattr(self, "file"):
            self.file.close()
            self.trackers.close()


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
    dist.init_process_group("nccl" if job.training.gpus else "gloo", timeout=COLLECTIVE_TIMEOUT)
    try:
        train(job)
    except UserError as error:
        print(f"error: {error}", file=sys.__stdout__, flush=True)
        os._exit(1)  # the other ranks wait in a collective: no orderly end
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
