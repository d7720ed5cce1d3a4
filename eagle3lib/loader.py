"""Samples for the trainer: in packs without padding, read ahead, checked when a run first reads them.

A pack holds whole documents, at most `capacity` tokens. Its documents are read by threads while the steps before it
are computed, each to its place in the pack (hashing, checking, decoding fp8 and copying let go of the interpreter). A
slow file holds up one thread, and the steps once it takes longer than the `AHEAD` before its own; a bad one ends the
training with its name.
"""

from __future__ import annotations

import math
import os
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from eagle3lib.errors import UserError
from eagle3lib.hidden_states import content_fault, load_sample, unpack
from eagle3lib.lineage import file_sha256
from eagle3lib.store import set_aside
from eagle3lib.training_time_test import Batch, reply_index

if TYPE_CHECKING:
    from eagle3lib.training_time_test import Plan, TrainingTimeTest

WINDOW = 128  # samples that are packed among each other: small enough that packs differ from epoch to epoch
READERS = 4  # threads of one rank; more than a disk needs, fewer than would disturb a step
GOLDEN = 0.6180339887498949  # its multiples, modulo 1, are spread evenly however many there are
AHEAD = 2  # steps whose documents are read before they are needed: a slow file has that long


@dataclass(frozen=True)
class Sample:
    """Where a sample's states lie, which of its tokens supervise, and how often an epoch takes it."""

    path: str
    n_tokens: int
    reply_bounds: tuple[int, ...]
    split: str
    sha256: str | None = None
    weight: float = 1.0
    source: str = ""  # where it comes from: figures are kept by it


# --- packs -------------------------------------------------------------------------------------------------------


def first_fit_decreasing(indices: Sequence[int], lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs of at most `capacity` tokens: longest first, each into the first pack with room. Stable."""
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(indices, key=lambda i: -lengths[i]):
        place = next((p for p, free in enumerate(room) if free >= lengths[index]), None)
        if place is None:
            packs.append([])
            room.append(capacity)
            place = len(packs) - 1
        packs[place].append(index)
        room[place] -= lengths[index]
    return packs


def taken(samples: Sequence[Sample], indices: Sequence[int], epoch: int) -> list[int]:
    """`indices` as often as an epoch takes them: twice for weight 2, in every other epoch for 0.5.

    Each sample's copies are spread evenly over the epochs, and each epoch has its share of all: neighbours take turns.
    """
    copies = []
    for i in indices:
        weight, turn = samples[i].weight, i * GOLDEN % 1
        copies += [i] * (math.floor((epoch + 1) * weight + turn) - math.floor(epoch * weight + turn))
    return copies if any(samples[i].weight != 1 for i in indices) else list(indices)


def epoch_packs(indices: Sequence[int], lengths: Sequence[int], capacity: int, seed: str) -> list[list[int]]:
    """The packs of an epoch in their order; they do not depend on the number of ranks."""
    rng = random.Random(seed)
    order = list(indices)
    rng.shuffle(order)
    packs = []
    for start in range(0, len(order), WINDOW):
        packs += first_fit_decreasing(order[start : start + WINDOW], lengths, capacity)
    rng.shuffle(packs)
    return packs


# --- documents ---------------------------------------------------------------------------------------------------


class Documents:
    """Samples as documents on the CPU. The first read of a run is a full check; the target's tokens are kept."""

    def __init__(self, samples: Sequence[Sample], aux_states: int, hidden_size: int, pinned: bool = False):
        """pinned: packs are read into memory that a GPU can copy from while the CPU goes on."""
        self.samples, self.aux_states, self.hidden_size, self.pinned = samples, aux_states, hidden_size, pinned
        self.sources = sorted({sample.source for sample in samples})
        self.checked: set[int] = set()
        self.target_tokens: dict[int, Tensor] = {}  # int32, made once a sample

    def room(self, pack: Sequence[int]) -> Room:
        """For the states of these samples, one after the other."""
        tokens = sum(self.samples[i].n_tokens for i in pack)
        sizes = (self.aux_states * self.hidden_size, self.hidden_size)
        aux, last = (torch.empty(tokens, n, dtype=torch.bfloat16, pin_memory=self.pinned) for n in sizes)
        return Room(aux, last)

    def read(self, index: int, room: Room | None = None) -> Batch:
        """One document, its states in `room`. Raises UserError for a file that is lost or bad (then set aside)."""
        sample, room = self.samples[index], room or self.room([index])
        if not os.path.exists(sample.path):
            raise UserError(f"{sample.path}: lost; `snakemake extract` makes it anew, then run the same command again")
        if index not in self.checked and sample.sha256 and file_sha256(sample.path) != sample.sha256:
            raise _bad_sample(sample, "its sha256 differs from the manifest's")
        stored = load_sample(sample.path)
        states = stored["hidden_states"]
        found = (len(stored["input_ids"]), len(states), states[0].shape[-1] if states else 0)
        wanted = (sample.n_tokens, self.aux_states + 1, self.hidden_size)
        if found != wanted:
            told = "{} tokens and {} states of {}"
            raise _bad_sample(sample, f"{told.format(*found)} instead of {told.format(*wanted)}")
        if index not in self.checked and (fault := content_fault(stored)):
            raise _bad_sample(sample, fault)
        self.checked.add(index)
        room.fill(unpack(stored, sample.reply_bounds))
        replies, source = reply_index(sample.reply_bounds, sample.n_tokens), self.sources.index(sample.source)
        return Batch.document(stored["input_ids"].clone(), room.aux, room.last, replies, source=source)

    def packed(self, pack: Pack, test: TrainingTimeTest, device: torch.device) -> tuple[Batch, Plan]:
        """A pack as one batch and its plan, on the device. Each sample's argmax is taken alone: no other bits.

        The first time that a sample is read, its argmax is waited for.
        """
        ready = []
        for i, document in zip(pack.indices, pack.documents, strict=True):
            if i not in self.target_tokens:
                self.target_tokens[i] = test.target_tokens(document).to(torch.int32)
            ready.append(document.with_tokens(self.target_tokens[i].long()))
        batch = Batch.pack(ready, (pack.room.aux, pack.room.last) if pack.room else None)
        return batch.to(device), test.plan(batch).to(device)


@dataclass(frozen=True)
class Room:
    """bf16 states: aux [T, L*H], last [T, H]."""

    aux: Tensor
    last: Tensor

    def split(self, lengths: Sequence[int]) -> list[Room]:
        return [Room(*parts) for parts in zip(self.aux.split(lengths), self.last.split(lengths), strict=True)]

    def fill(self, states: Sequence[Tensor]) -> None:
        """L+1 states [T, H]."""
        for place, state in zip(self.aux.chunk(len(states) - 1, dim=-1), states[:-1], strict=True):
            place.copy_(state)
        self.last.copy_(states[-1])


@dataclass(frozen=True)
class Pack:
    """Samples read: their numbers, their documents, and the room that these share (None: each has its own)."""

    indices: list[int]
    documents: list[Batch]
    room: Room | None = None


def _bad_sample(sample: Sample, reason: str) -> UserError:
    """Set the file aside: the next run makes it anew, and the training goes on from its checkpoint."""
    remedy = "moved to quarantine" if set_aside(Path(sample.path), reason) else "delete it"
    return UserError(f"{sample.path}: {reason}; {remedy}, then run the same command again: it is made anew")


def read_ahead(
    documents: Documents, steps: Sequence[Sequence[list[int]]], readers: ThreadPoolExecutor
) -> Iterator[list[Pack]]:
    """The packs of each step, in order; those of the next `AHEAD` steps are being read meanwhile."""
    waiting: deque[list[Callable[[], Pack]]] = deque()
    to_come = iter(steps)
    for _ in steps:
        while len(waiting) <= AHEAD and (step := next(to_come, None)) is not None:
            waiting.append([_begin(documents, pack, readers) for pack in step])
        yield [finished() for finished in waiting.popleft()]


def _begin(documents: Documents, pack: list[int], readers: ThreadPoolExecutor) -> Callable[[], Pack]:
    """Have a pack read; what is returned waits for it."""
    room = documents.room(pack)
    places = room.split([documents.samples[i].n_tokens for i in pack])
    begun = [readers.submit(documents.read, i, place) for i, place in zip(pack, places, strict=True)]
    return lambda: Pack(pack, [document.result() for document in begun], room)


@contextmanager
def readers() -> Iterator[ThreadPoolExecutor]:
    """The threads that read; what they have not begun when the training ends is not read."""
    pool = ThreadPoolExecutor(READERS)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)
