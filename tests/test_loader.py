"""What one slow or bad file does to the others."""

from __future__ import annotations

import threading

import pytest
import torch
from test_training import H, world  # noqa: F401 - a fixture

from eagle3lib import loader
from eagle3lib.errors import UserError
from eagle3lib.loader import AHEAD, Documents, read_ahead, readers
from eagle3lib.training_time_test import Batch

SECONDS = 60  # a hang is a failure, not a wait


@pytest.fixture
def documents(world):  # noqa: F811
    return Documents(world[2], 3, H)


class Slow(Documents):
    """Reading one sample lasts until it is let go."""

    def __init__(self, samples, slow):
        super().__init__(samples, 3, H)
        self.slow, self.go, self.begun = slow, threading.Event(), []
        self.others = threading.Semaphore(0)

    def read(self, index, room=None):
        self.begun.append(index)
        if index == self.slow:
            assert self.go.wait(SECONDS)
        try:
            return super().read(index, room)
        finally:
            self.others.release()


def test_a_slow_file_holds_up_nothing_before_its_step(world):  # noqa: F811
    """Steps of two samples: those before the slow one's are there, and all that may be read ahead is read meanwhile."""
    slow = Slow(world[2], slow=5)  # of the third step
    steps = [[[i, i + 1]] for i in range(0, 16, 2)]
    with readers() as pool:
        ahead = read_ahead(slow, steps, pool)
        for step in steps[:2]:
            (pack,) = next(ahead)
            assert [pack.indices] == step
        threading.Timer(0, _let_go_once, [slow, 2 * (3 + AHEAD) - 1]).start()
        (pack,) = next(ahead)
        assert pack.indices == [4, 5] and set(slow.begun) >= set(range(2 * (3 + AHEAD)))
        assert [pack.indices for (pack,) in ahead] == [step[0] for step in steps[3:]]


def _let_go_once(slow, others):
    """Once so many others have been read: with the slow one waiting, they can be."""
    for _ in range(others):
        assert slow.others.acquire(timeout=SECONDS)
    slow.go.set()


def test_a_bad_file_is_named_and_the_others_threads_end(world, tmp_path):  # noqa: F811
    path = tmp_path / "bad.pt"
    path.write_bytes(b"not a sample")
    samples = [*world[2][:3], loader.Sample(str(path), 12, (3, 7), "train"), *world[2][3:]]
    with pytest.raises(UserError, match=r"bad\.pt: not a readable sample file"), readers() as pool:
        for _ in read_ahead(Documents(samples, 3, H), [[[i]] for i in range(8)], pool):
            pass
    assert not any(thread.is_alive() for thread in pool._threads)


def test_a_pack_is_read_to_its_place(documents):
    """The states of a pack lie in one piece, and are those that its documents have alone."""
    with readers() as pool:
        ((pack,),) = read_ahead(documents, [[[3, 0, 7]]], pool)
    joined = Batch.pack(pack.documents, (pack.room.aux, pack.room.last))
    again = Batch.pack([documents.read(i) for i in (3, 0, 7)])
    assert joined.aux.data_ptr() == pack.room.aux.data_ptr() and joined.lengths == again.lengths
    for name, value in vars(again).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(joined, name), value), name


def test_states_of_another_width_are_refused(world):  # noqa: F811
    with pytest.raises(UserError, match=f"4 states of {H} instead of 12 tokens and 4 states of 8"):
        Documents(world[2], 3, 8).read(0)
