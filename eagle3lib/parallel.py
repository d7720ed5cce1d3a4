"""How weights, gradients and optimiser lie on the ranks of one training: whole on each (DDP), or in shares (FSDP2).

Either way a step's gradient is the *sum* over the ranks of gradients that are weighted by the counted tokens of all
ranks together, so how batches are dealt to ranks changes nothing but the order of a sum. A rank may have several
batches of a step or none: it adds its gradients up, and takes part in the one exchange of the step with its last
batch, or with nothing.

FSDP2 shares the whole draft as one unit: a draft is one layer, all of which each of its steps needs, so its weights
are gathered once an optimiser step, before the first batch, and its gradients scattered after the last. Between
steps a rank holds 1/world of weights, gradients and moments. Embedding and target's head, frozen, are on every rank.

Checkpoints hold whole tensors: any number of ranks, of either kind, reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from eagle3lib.training_time_test import Batch, Plan, TrainingTimeTest

KINDS = ("ddp", "fsdp2")
WHOLE, SHARED = 16, 8  # bytes of a parameter in fp32: weight, gradient, two moments; with FSDP2 the first two at work
ROOM = 0.5  # of a GPU: what weights and optimiser may take where activations need the rest


def choose(asked: str, parameters: int, memory: int | None) -> str:
    """`training.parallel`: what auto stands for. memory: bytes of the smallest GPU; None: on CPUs.

    DDP for drafts that fit, that is whose weights, gradients and moments take at most half of a GPU; FSDP2 otherwise.
    """
    if asked != "auto":
        return asked
    return "fsdp2" if memory is not None and WHOLE * parameters > ROOM * memory else "ddp"


def bytes_each(kind: str, parameters: int, world: int) -> int:
    """What weights, gradients and moments take on each rank at most, in bytes."""
    if kind == "ddp" or world == 1:
        return WHOLE * parameters
    return SHARED * parameters + -(-WHOLE * parameters // world)


class Spread:
    """This rank's part of a `TrainingTimeTest`: the base is a process alone."""

    shared = False  # does `weights` need all ranks?

    def __init__(self, test: TrainingTimeTest):
        self.test = test
        self.module: nn.Module = test

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """What is trained, by the names of `DraftModel.trainable`: this rank's shares of it."""
        return self.test.model.trainable()

    def backward(self, batches: Iterable[tuple[Batch, Plan]], step_weights: Tensor) -> list[dict[str, Tensor]]:
        """Forward and backward on this rank's batches of a step; their sums. Afterwards `.grad` is that of all ranks.

        step_weights: those of all ranks' batches together (`TrainingTimeTest.step_weights`).
        """
        found = []
        todo: list[tuple[Batch | None, Plan | None]] = [*batches] or [(None, None)]
        for number, (batch, plan) in enumerate(todo, 1):
            with self._exchanging(number == len(todo)):
                loss, sums = self.module(batch, step_weights, plan)
                loss.backward()
            found.append(sums)
        return found

    def clip(self, most: float) -> Tensor:
        """Scale the gradients down to this norm; the norm before, of all ranks' shares, on the device."""
        parameters = list(self.parameters.values())
        norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
        return norm

    @contextmanager
    def evaluating(self) -> Iterator[TrainingTimeTest]:
        """The test, with whole weights on each rank and without gradients: ranks may call it as often as they like."""
        with torch.no_grad():
            yield self.test

    def weights(self) -> dict[str, Tensor]:
        """Whole copies on the CPU. All ranks must ask."""
        return {name: whole(p.detach()) for name, p in self.parameters.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """The inverse of `weights`. All ranks must be given the same."""
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(share(weights[name], p))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Its `state_dict` in whole copies on the CPU. All ranks must ask."""
        state = optimizer.state_dict()
        of = {index: {key: whole(value) for key, value in one.items()} for index, one in state["state"].items()}
        return {**state, "state": of}

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """The inverse of `optimizer_state`: moments have their parameter's shape and are shared like it."""
        of = {}
        for index, p in enumerate(self.parameters.values()):
            one = state["state"].get(index, {})
            of[index] = {key: share(value, p) if value.shape == p.shape else value for key, value in one.items()}
        optimizer.load_state_dict({**state, "state": of})

    def _exchanging(self, last: bool) -> Any:
        """The context of a batch: gradients go to the others with the last one of a step."""
        return nullcontext()


class Replicated(Spread):
    """DDP: all of it on every rank; gradients are summed in buckets while the backward pass goes on."""

    def __init__(self, test: TrainingTimeTest):
        super().__init__(test)
        # The frozen embedding is mapped from a file: nothing is sent around at the start but by `Trainer`.
        self.module = DistributedDataParallel(test, init_sync=False, gradient_as_bucket_view=True)
        self.module.register_comm_hook(None, _sum)

    def _exchanging(self, last: bool) -> Any:
        return nullcontext() if last else self.module.no_sync()  # type: ignore[operator]


def _sum(group, bucket):  # DDP looks at annotations, and ours are strings
    """DDP would divide by the number of ranks; ours are weighted already."""
    work = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


class Shared(Spread):
    """FSDP2: a share of it on every rank."""

    shared = True

    def __init__(self, test: TrainingTimeTest, device: torch.device):
        from torch.distributed.fsdp import fully_shard

        super().__init__(test)
        mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
        frozen = {p for p in test.parameters() if not p.requires_grad}
        self.sharded = fully_shard(test, mesh=mesh, reshard_after_forward=False, ignored_params=frozen)
        self.sharded.set_gradient_divide_factor(1.0)
        self.sharded.set_force_sum_reduction_for_comms(True)

    @contextmanager
    def evaluating(self) -> Iterator[TrainingTimeTest]:
        self.sharded.unshard()
        try:
            with super().evaluating() as test:
                yield test
        finally:
            self.sharded.reshard()

    @contextmanager
    def _exchanging(self, last: bool) -> Iterator[None]:
        # Weights stay gathered and gradients whole until the last batch: ranks with fewer batches meet the others once.
        self.sharded.set_requires_gradient_sync(last)
        self.sharded.set_reshard_after_backward(last)
        self.sharded.set_is_last_backward(last)
        yield


def spread(test: TrainingTimeTest, world: int, kind: str, device: torch.device) -> Spread:
    """By `KINDS`; one process has nothing to spread."""
    if world == 1:
        return Spread(test)
    return Replicated(test) if kind == "ddp" else Shared(test, device)


def whole(tensor: Tensor) -> Tensor:
    """A copy on the CPU; of a shared one all ranks must ask."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def share(tensor: Tensor, like: Tensor) -> Tensor:
    """This rank's share of a whole tensor, laid out as `like`. Nothing is sent."""
    tensor = tensor.to(like.device)
    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements, src_data_rank=None)
