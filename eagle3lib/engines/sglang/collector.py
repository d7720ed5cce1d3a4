"""In the server's scheduler: the rows of a request, pass by pass, into shared memory; whole samples to the writer.

The forward loop starts copies, nothing else: on a GPU on a stream of their own, on a CPU in a thread. What would hold
its interpreter lock (hashing, checksums, writing, fsync) is done by a process beside it, writer.py.
"""

from __future__ import annotations

import json
import mmap
import os
import queue
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import IO, Any

import torch

from eagle3lib.engines.sglang.requests import Request, Served

PASSES = 2  # so many may wait for their copies: their rows stay in the target's memory so long


class Arena:
    """A piece of shared memory that samples wait in. Anonymous (memfd): /dev/shm may be tiny, in a container."""

    ALIGNMENT = 64

    def __init__(self, size: int):
        self.size = size
        self.descriptor = os.memfd_create("eagle3lib-states")
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)
        self.used: dict[int, int] = {}  # offset -> bytes

    def take(self, n_bytes: int) -> int | None:
        """The offset of so many free bytes; None: there is no room now."""
        start, n_bytes = 0, -(-n_bytes // self.ALIGNMENT) * self.ALIGNMENT
        for offset, length in sorted(self.used.items()):
            if offset - start >= n_bytes:
                break
            start = offset + length
        if start + n_bytes > self.size:
            return None
        self.used[start] = n_bytes
        return start

    def give(self, offset: int) -> None:
        del self.used[offset]


@dataclass
class _Sample:
    """Where the rows of one request are gathered."""

    request: Request
    offset: int
    ids: torch.Tensor  # [T] int64
    states: list[torch.Tensor]  # L + 1 times [T, H]
    rows: int = 0


class Collector:
    """Gathers the rows of all requests of ours. `batch` is called by the forward loop after each prefill pass.

    served: what the states are of; dtype: that of the target's pass. `buffer_bytes` of shared memory bound what waits
    for the disk: when they are full the forward loop waits.
    """

    def __init__(self, served: Served, hidden_size: int, dtype: torch.dtype, buffer_bytes: int, device: torch.device):
        self.served, self.hidden_size, self.dtype = served, hidden_size, dtype
        self.n_states = len(served.aux_layer_ids) + 1
        self.arena = Arena(buffer_bytes)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        if self.stream:
            _pin(self.arena)
        self.samples: dict[str, _Sample] = {}  # by rid
        self.failed: set[str] = set()  # rids that have been answered with a fault
        self.writing = 0
        self.changed = threading.Condition()
        self.outbox: queue.Queue[tuple[Callable[[], None], list[dict]]] = queue.Queue(PASSES)
        self.broken: Exception | None = None
        self.inbox, self.freed = _start_writer(self.arena)
        self.writer_ended = False
        threading.Thread(target=self._hand_over, daemon=True).start()
        threading.Thread(target=self._take_back, daemon=True).start()

    # --- the forward loop ----------------------------------------------------------------------------

    def batch(
        self,
        rids: Sequence[str],
        lengths: Sequence[int],
        prefixes: Sequence[int],
        input_ids: torch.Tensor,
        aux: torch.Tensor,
        last: torch.Tensor,
    ) -> None:
        """One prefill pass: request i brings `lengths[i]` rows after the `prefixes[i]` that are in the cache.

        input_ids [N], aux [N, L*H] (ascending layers), last [N, H] (post-norm); N is the sum of `lengths`.
        """
        if self.broken:
            raise RuntimeError("eagle3lib: samples cannot be handed to the writer; see above") from self.broken
        pairs, whole, start = [], [], 0
        for rid, length, prefix in zip(rids, lengths, prefixes, strict=True):
            rows = slice(start, start + length)
            start += length
            request = Request.of(rid)
            if request and (sample := self._sample(rid, request, prefix, rids)):
                pairs += self._places(sample, input_ids[rows], aux[rows], last[rows])
                if sample.rows >= request.n_tokens:
                    whole.append(self.samples.pop(rid))
        if pairs:
            self.outbox.put((self._copy(pairs), [self._message(sample) for sample in whole]))

    def _sample(self, rid: str, request: Request, prefix: int, rids: Sequence[str]) -> _Sample | None:
        """The sample that a pass goes on with; a new one for its first pass (again, after it was set back)."""
        sample = self.samples.get(rid)
        if sample and prefix == sample.rows:
            return sample
        if sample:
            self._drop(rid)
        if prefix:
            fault = f"its pass begins at token {prefix}, {sample.rows if sample else 0} were seen: is a cache on?"
            self._fail(rid, request, fault)
            return None
        offset = self._room(8 * request.n_tokens + self._state_bytes(request), rids)
        if offset is None:
            fault = f"{request.n_tokens} tokens do not fit into the {self.arena.size} bytes of shared memory"
            self._fail(rid, request, fault)
            return None
        self.failed.discard(rid)
        ids, states = views(
            self.arena.memory, offset, self.n_states, request.n_tokens, self.hidden_size, self._dtype(request)
        )
        self.samples[rid] = _Sample(request, offset, ids, states)
        return self.samples[rid]

    def _dtype(self, request: Request) -> torch.dtype:
        return self.dtype if request.storage_format is None else torch.bfloat16

    def _state_bytes(self, request: Request) -> int:
        return self.n_states * request.n_tokens * self.hidden_size * self._dtype(request).itemsize

    def _room(self, n_bytes: int, rids: Sequence[str]) -> int | None:
        """Wait for room. None when nothing that is being written can make any."""
        with self.changed:
            while (offset := self.arena.take(n_bytes)) is None:
                # What no pass goes on with was given up by its client.
                for rid in [rid for rid in self.samples if rid not in rids]:
                    self._drop(rid)
                if not self.writing:
                    return self.arena.take(n_bytes)
                if self.writer_ended:
                    raise RuntimeError("eagle3lib: the writer has ended; see above")
                self.changed.wait()
            return offset

    def _drop(self, rid: str) -> None:
        with self.changed:
            self.arena.give(self.samples.pop(rid).offset)

    def _places(
        self, sample: _Sample, ids: torch.Tensor, aux: torch.Tensor, last: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Where the rows of a pass belong: (destination, source)."""
        rows = slice(sample.rows, sample.rows + len(ids))
        sample.rows += len(ids)
        sources = [ids, *aux.chunk(self.n_states - 1, dim=1), last]
        return [(to[rows], source) for to, source in zip([sample.ids, *sample.states], sources, strict=True)]

    def _copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], None]:
        """Start to copy; what is returned sees it through to the end: on a CPU it is the copying."""

        def all_of_them() -> None:
            for destination, source in pairs:
                destination.copy_(source, non_blocking=True)

        if self.stream is None:
            return all_of_them
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            all_of_them()
        for _, source in pairs:
            source.record_stream(self.stream)
        return self.stream.record_event().synchronize

    def _message(self, sample: _Sample) -> dict[str, Any]:
        """What the writer is told of a whole sample."""
        with self.changed:
            self.writing += 1
        about: dict[str, Any] = {"offset": sample.offset, "n_states": self.n_states, "hidden_size": self.hidden_size}
        about |= {"dtype": str(self._dtype(sample.request)).removeprefix("torch."), "fault": None}
        return {**about, "request": asdict(sample.request), "served": asdict(self.served)}

    def _fail(self, rid: str, request: Request, fault: str) -> None:
        """Tell the client, once."""
        if rid not in self.failed:
            self.failed.add(rid)
            message = {"fault": fault, "request": asdict(request), "served": asdict(self.served)}
            self.outbox.put((lambda: None, [message]))

    # --- threads beside it ---------------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Whole samples to the writer, once their rows have arrived."""
        while True:
            arrive, messages = self.outbox.get()
            if self.broken:
                continue  # the forward loop must not wait for room here: it has to hear of it
            try:
                arrive()
                for message in messages:
                    self.inbox.write(json.dumps(message) + "\n")
                self.inbox.flush()
            except Exception as error:
                traceback.print_exc()
                self.broken = error

    def _take_back(self) -> None:
        """Free what the writer is done with."""
        for line in self.freed:
            with self.changed:
                self.arena.give(int(line))
                self.writing -= 1
                self.changed.notify_all()
        with self.changed:  # it ends with us; before that it has died
            self.writer_ended = True
            self.changed.notify_all()


def views(
    memory: mmap.mmap, offset: int, n_states: int, n_tokens: int, hidden_size: int, dtype: torch.dtype
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The ids [T] (int64) and the states, `n_states` times [T, H], that lie at `offset`; each a storage of its own."""
    ids = torch.frombuffer(memory, dtype=torch.int64, count=n_tokens, offset=offset)
    count = n_tokens * hidden_size
    starts = [offset + 8 * n_tokens + i * count * dtype.itemsize for i in range(n_states)]
    states = [torch.frombuffer(memory, dtype=dtype, count=count, offset=start) for start in starts]
    return ids, [state.view(n_tokens, hidden_size) for state in states]


def _pin(arena: Arena) -> None:
    """Copies to pageable memory would not be asynchronous."""
    address = torch.frombuffer(arena.memory, dtype=torch.uint8).data_ptr()
    error = torch.cuda.cudart().cudaHostRegister(address, arena.size, 0)
    if int(error):
        raise RuntimeError(f"eagle3lib: {arena.size} bytes of shared memory cannot be pinned (CUDA error {error})")


def _start_writer(arena: Arena) -> tuple[IO[str], IO[str]]:
    """Its stdin and stdout. It makes itself a child of nobody here: SGLang kills all its children when it ends."""
    os.set_inheritable(arena.descriptor, True)
    command = [sys.executable, "-m", "eagle3lib.engines.sglang.writer", str(arena.descriptor), str(arena.size)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    writer = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[arena.descriptor], env=environment
    )
    if writer.wait():
        raise RuntimeError("eagle3lib: the writer cannot be started; see above")
    assert writer.stdin and writer.stdout
    return writer.stdin, writer.stdout
