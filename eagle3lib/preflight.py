"""Can this training start, and will it fit? Asked while the GPUs are still full, so that nobody frees them for nothing.

Shapes and bytes come from the real draft on torch's meta device; one batch of real samples goes forward and backward
on the CPU. Where the target is wide, that batch is cut to the first columns of its states and meets a random target
head: the memory it takes does not grow with the target.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from eagle3lib import checkpoint, compilation, gpus, parallel, targets, trackers, training, warm_start
from eagle3lib.config import TrainingConfig
from eagle3lib.disk import Disk, size
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.loader import Documents, Pack
from eagle3lib.training import Job
from eagle3lib.training_time_test import Batch, TrainingTimeTest
from eagle3lib.vocab_mapping import VocabMapping

NARROW_ELEMENTS = 2**25  # of a vocabulary times a width: 128 MiB in fp32
NARROW_MLP = 256
IMPORTED_LATE = ("safetensors.torch",)
BF16_CAPABILITY = (8, 0)  # of CUDA; older devices emulate it


def check(job: Job, aux_layers: int, seen: dict[str, Any], disk: Disk) -> dict[str, Any]:
    """The record of what was found; raises UserError for whatever would stop the training, or make it worthless.

    seen: `gpus.look` for the training. disk: of the store that takes the checkpoints.
    """
    training.check_samples(job)
    check_imports()
    trackers.check(job.training.trackers)
    config = warm_start.model_config(job.draft, job.target, aux_layers, VocabMapping.load(job.mapping))
    if job.training.compile:
        compilation.check()
    keeps_best = job.training.early_stopping_epochs is not None or job.training.best_by is not None
    forecast = memory(config, keeps_best, job.training, smallest_gpu(job.training, seen))
    gpus_used = check_gpus(job.training, seen, forecast["bytes_each"])
    coming = forecast["bytes_checkpoints"] - _bytes_of_checkpoints(job)
    disk.check_room(max(coming, 0))
    return {
        "digest": job.digest,
        **forecast,
        "gpus": gpus_used,
        "batch_tokens": job.training.batch_tokens,
        "longest_sample": max(sample.n_tokens for sample in job.samples),
        "rehearsal": rehearse(job, config),
    }


def check_imports() -> None:
    """What the trainer imports only once it runs."""
    for name in IMPORTED_LATE:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UserError(
                f"{name} cannot be imported ({error}); `make venv` installs what the trainer needs"
            ) from None


def memory(
    config: DraftModelConfig,
    keeps_best: bool = False,
    settings: TrainingConfig = TrainingConfig(),  # noqa: B008 - frozen
    gpu_bytes: int | None = None,
) -> dict[str, Any]:
    """Parameters and bytes of a draft of this shape; nothing is allocated.

    `parallel`: what `training.parallel` comes to on GPUs of `gpu_bytes`. `bytes_each`: on each GPU, without
    activations: fp32 weights, gradients, two moments of AdamW, the frozen embedding and the target's head.
    `bytes_checkpoints`: the two that are kept, the next one while it is written, the result; `keeps_best`: the best
    epoch's weights in each of them too.
    """
    with torch.device("meta"):
        model = DraftModel(config)
    parameters = sum(p.numel() for p in model.trainable().values())
    heads = (config.vocab_size + config.draft_vocab_size) * config.hidden_size
    kind = parallel.choose(settings.parallel, parameters, gpu_bytes)
    spread = parallel.bytes_each(kind, parameters, training.processes(settings))
    return {
        "parameters": parameters,
        "parallel": kind,
        "bytes_each": spread + 4 * (model.embed_tokens.weight.numel() + heads),
        "bytes_checkpoints": 4 * ((3 + keeps_best) * parameters * (checkpoint.KEEP + 1) + parameters),
    }


def _bytes_of_checkpoints(job: Job) -> int:
    """Of a training that goes on: on the disk already."""
    return sum(path.stat().st_size for path in Path(job.folder).glob(f"checkpoints/{job.digest}.*.pt"))


def smallest_gpu(settings: TrainingConfig, seen: dict[str, Any]) -> int | None:
    """Bytes of the smallest GPU that training may come to use; None: it uses none, or none is seen."""
    sizes = [device["total_mib"] * gpus.MIB for device in usable(seen)] if settings.gpus else []
    return min(sizes, default=None)


def usable(seen: dict[str, Any]) -> list[dict[str, Any]]:
    return [device for device in seen["devices"] if device["state"] not in ("masked", "lost", "split")]


def check_gpus(settings: Any, seen: dict[str, Any], bytes_each: int) -> list[str]:
    """UUIDs of the GPUs that training may come to use, whoever holds them now; none for a training on the CPU."""
    need = gpus.Need(settings.gpus, "training.gpus", bytes_each)
    if not need.gpus:
        return []
    if seen["nvml"] != "ok":
        raise UserError(gpus.no_driver(need, seen["nvml"]))
    devices = usable(seen)
    if len(devices) < need.gpus:
        raise UserError(gpus.busy(seen, need, 0))
    small = [d for d in devices if d["total_mib"] * gpus.MIB < bytes_each]
    if small:
        raise UserError(
            f"training.gpus: weights, gradients and optimiser take {size(bytes_each)} on each GPU, GPU "
            f"{small[0]['index']} has {size(small[0]['total_mib'] * gpus.MIB)}; lower draft.intermediate_size or "
            "draft.draft_vocab_size, or leave that GPU out with CUDA_VISIBLE_DEVICES"
        )
    old = [d for d in devices if tuple(d["capability"]) < BF16_CAPABILITY]
    if old and settings.compute_dtype == "bfloat16":
        raise UserError(
            f"training.compute_dtype: GPU {old[0]['index']} ({old[0]['name']}) has no bfloat16; set it to float32"
        )
    if not torch.backends.cuda.is_built():
        raise UserError(
            f"training.gpus: {need.gpus} asked for, but this torch ({torch.__version__}) is built for CPUs; install "
            f"torch's CUDA build of the version in envs/trainer.txt into this environment, or set training.gpus: 0"
        )
    return [d["uuid"] for d in devices]


# --- one batch ---------------------------------------------------------------------------------------------------


def rehearse(job: Job, config: DraftModelConfig) -> dict[str, Any]:
    """Two real samples through the trainer's reader, packing, loss and backward pass, on the CPU.

    Raises UserError when a sample cannot be read, supervises nothing, or the loss is not finite.
    """
    mapping = VocabMapping.load(job.mapping)
    if (mapping.vocab_size, mapping.draft_vocab_size) != (config.vocab_size, config.draft_vocab_size):
        raise UserError(
            f"{job.mapping}: maps {mapping.vocab_size} tokens to {mapping.draft_vocab_size}, target and "
            f"draft.draft_vocab_size say {config.vocab_size} and {config.draft_vocab_size}; delete it and run again"
        )
    indices = shortest_that_supervise(job)
    reader = Documents(job.samples, config.num_aux_hidden_states, config.hidden_size)
    width = narrow_width(config)
    documents = [cut(reader.read(index), config, width) for index in indices]
    test = _trainer_of(job, narrow(config, width), mapping)
    batch, plan = reader.packed(Pack(indices, documents), test, torch.device("cpu"))
    loss, sums = test(batch, plan=plan)
    loss.backward()
    norms = [p.grad.norm() for p in test.model.parameters() if p.grad is not None]
    names = ", ".join(job.samples[index].path for index in indices)
    if not torch.isfinite(torch.stack([loss.detach(), *norms])).all():
        raise UserError(
            f"training: loss {loss.item():g} or a gradient of it is not finite on {names}; is the target's head whole? "
            "`python -m eagle3lib verify` reads the states"
        )
    return {
        "samples": [job.samples[index].path for index in indices],
        "tokens": batch.input_ids.numel(),
        "width": width,
        "counted": int(sums["counted"].sum()),
        "loss": loss.item(),
    }


def shortest_that_supervise(job: Job, how_many: int = 2) -> list[int]:
    """Indices of the shortest training samples that supervise something at every draft step."""
    wanted = job.training.ttt_steps + 1

    def replies(bounds: Sequence[int]) -> int:
        return max((end - start for start, end in zip(bounds[0::2], bounds[1::2], strict=True)), default=0)

    fit = [i for i, s in enumerate(job.samples) if s.split == "train" and replies(s.reply_bounds) >= wanted]
    if not fit:
        raise UserError(
            f"training.ttt_steps: no training sample has a reply of {wanted} tokens, so the last step learns nothing; "
            "lower it, or train on longer replies"
        )
    return sorted(fit, key=lambda i: job.samples[i].n_tokens)[:how_many]


def narrow_width(config: DraftModelConfig) -> int:
    """Columns of the hidden states that the rehearsal keeps: all of them where the target is small."""
    return min(config.hidden_size, max(64, NARROW_ELEMENTS // config.vocab_size // 64 * 64))


def narrow(config: DraftModelConfig, width: int) -> DraftModelConfig:
    """The same draft for states of `width` columns; head size, RoPE and vocabulary stay."""
    if width == config.hidden_size:
        return config
    mlp = min(config.intermediate_size, NARROW_MLP)
    return replace(config, hidden_size=width, intermediate_size=mlp, num_attention_heads=2, num_key_value_heads=1)


def cut(document: Batch, config: DraftModelConfig, width: int) -> Batch:
    """The first `width` columns of each state of a document."""
    aux = document.aux.unflatten(-1, (config.num_aux_hidden_states, config.hidden_size))[..., :width]
    return replace(document, aux=aux.flatten(-2), last=document.last[..., :width])


def _trainer_of(job: Job, config: DraftModelConfig, mapping: VocabMapping) -> TrainingTimeTest:
    """As the trainer makes it; with a random head where the target's would not fit."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.training.seed)
        model = DraftModel(config)
        if config.hidden_size == job.target.hidden_size:
            embedding, head = targets.load_embedding(job.target), targets.load_head(job.target)
        else:
            embedding, head = torch.randn(2, config.vocab_size, config.hidden_size) * config.hidden_size**-0.5
    model.init_from_target(embedding, head, mapping)
    settings = job.training
    dtype = getattr(torch, settings.compute_dtype)
    return TrainingTimeTest(model, head, mapping, settings.ttt_steps, settings.step_decay, dtype, settings.loss)
