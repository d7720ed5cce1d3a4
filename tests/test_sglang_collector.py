"""The plugin's own path without a server: passes -> collector -> writer process -> files, and the answers."""

import itertools
import random

import pytest
import torch

from eagle3lib.engines.sglang.client import _Answers
from eagle3lib.engines.sglang.collector import Arena, Collector
from eagle3lib.engines.sglang.requests import Request, Served
from eagle3lib.hidden_states import StateKey, content_fault, load_sample, missing_rows, unpack

HIDDEN, AUX = 16, [2, 4, 5]
SERVED = Served("f" * 64, AUX, "float32", "0.5.23")


@pytest.fixture(scope="module")
def answers():
    answers = _Answers()
    yield answers
    answers.close()


def make_collector(buffer_bytes=2**22):
    return Collector(SERVED, HIDDEN, torch.float32, buffer_bytes, torch.device("cpu"))


@pytest.fixture(scope="module")
def collector():
    return make_collector()


class Sample:
    """A request with its true values."""

    def __init__(self, answers, folder, n, storage_format=None, **more):
        generator = torch.Generator().manual_seed(n)
        self.ids = torch.randint(0, 999, (n,), generator=generator)
        self.aux = torch.randn(n, len(AUX) * HIDDEN, generator=generator)
        self.last = torch.randn(n, HIDDEN, generator=generator)
        host, port = answers.address
        token = random.randbytes(8).hex()
        self.part = folder / f"{token}.part"
        fields = {"reply_bounds": [], "last_rows": [], "code": "code", **more}
        self.request = Request(str(self.part), n, storage_format, host=host, port=port, token=token, **fields)
        self.future = answers.expect(token)

    def answer(self):
        return self.future.result(timeout=60)

    @property
    def states(self):
        return [*self.aux.split(HIDDEN, dim=1), self.last]


def run_pass(collector, *pieces):
    """One prefill pass of (sample, first row, rows)."""
    ids, aux, last = (
        torch.cat([getattr(s, name)[start : start + n] for s, start, n in pieces]) for name in ("ids", "aux", "last")
    )
    rids = [s.request.rid for s, _, _ in pieces]
    collector.batch(rids, [n for *_, n in pieces], [start for _, start, _ in pieces], ids, aux, last)


def test_chunks_and_batches_come_back_as_they_were(collector, answers, tmp_path):
    a, b, c = (Sample(answers, tmp_path, n) for n in (10, 3, 7))
    run_pass(collector, (a, 0, 6))
    run_pass(collector, (a, 6, 4), (b, 0, 3), (c, 0, 1))
    run_pass(collector, (c, 1, 6))
    for sample in (a, b, c):
        answer = sample.answer()
        stored = torch.load(sample.part, weights_only=True)
        assert stored["input_ids"].tolist() == sample.ids.tolist()
        assert all(torch.equal(x, y) for x, y in zip(stored["states"], sample.states, strict=True))
        assert answer["bytes"] == sample.part.stat().st_size
        assert answer["served"]["aux_layer_ids"] == AUX
    assert not collector.samples and not collector.arena.used


def test_requests_of_others_are_passed_over(collector, answers, tmp_path):
    a = Sample(answers, tmp_path, 5)
    stranger = torch.zeros(4, HIDDEN)
    ids = torch.cat([torch.zeros(4, dtype=torch.int64), a.ids])
    aux, last = torch.cat([stranger.repeat(1, 3), a.aux]), torch.cat([stranger, a.last])
    collector.batch(["HEALTH_CHECK_1", a.request.rid], [4, 5], [0, 0], ids, aux, last)
    assert a.answer()["bytes"]
    assert torch.load(a.part, weights_only=True)["input_ids"].tolist() == a.ids.tolist()


@pytest.mark.parametrize("storage_format", ["bf16", "fp8", "bf16-trimmed", "fp8-trimmed"])
def test_sample_files_are_those_of_the_store(collector, answers, tmp_path, storage_format):
    a = Sample(answers, tmp_path, 12, storage_format, reply_bounds=[3, 9], last_rows=[0])
    run_pass(collector, (a, 0, 12))
    answer = a.answer()
    stored = load_sample(a.part)
    key = StateKey("f" * 64, tuple(AUX), "sglang", "float32", storage_format)
    assert {name: stored["meta"][name] for name in key.values()} == key.values()
    assert content_fault(stored) is None and not missing_rows(stored, [3, 9])
    assert (stored["meta"]["engine_version"], stored["meta"]["code"]) == ("0.5.23", "code")
    limit = 0.04 if storage_format.startswith("fp8") else 0.004
    for mine, true in zip(unpack(stored)[:-1], a.states, strict=False):
        assert (mine.float() - true).norm() / true.norm() < limit
    assert answer["bytes"] < 4 * 12 * HIDDEN * 2 + 8000  # no view of the shared memory dragged along


def test_sample_that_was_set_back_starts_again(collector, answers, tmp_path):
    """SGLang retracts a request when its cache is full and computes it again, from the first token."""
    a = Sample(answers, tmp_path, 9)
    run_pass(collector, (a, 0, 5))
    run_pass(collector, (a, 0, 6))
    run_pass(collector, (a, 6, 3))
    assert a.answer()["bytes"]
    assert all(map(torch.equal, torch.load(a.part, weights_only=True)["states"], a.states))
    assert not collector.arena.used


def test_cached_prefix_is_refused(collector, answers, tmp_path):
    a = Sample(answers, tmp_path, 9)
    run_pass(collector, (a, 4, 5))
    assert "begins at token 4, 0 were seen: is a cache on?" in a.answer()["fault"]
    assert not a.part.exists() and not collector.arena.used


def test_values_that_are_not_finite_are_refused(collector, answers, tmp_path):
    a = Sample(answers, tmp_path, 6, "bf16")
    a.last[3, 2] = float("inf")
    run_pass(collector, (a, 0, 6))
    assert a.answer() == {"fault": "layer last holds values that are not finite", "unusable": True,
                          "served": {**vars(SERVED)}}  # fmt: skip


def test_error_of_the_disk_is_told_and_the_next_is_written(collector, answers, tmp_path):
    a, b = Sample(answers, tmp_path / "absent", 6), Sample(answers, tmp_path, 6)
    run_pass(collector, (a, 0, 6), (b, 0, 6))
    assert (a.answer()["errno"], a.answer()["fault"]) == (2, "No such file or directory")
    assert b.answer()["bytes"]


def test_forward_loop_waits_when_the_memory_is_full(answers, tmp_path):
    """Forty samples through memory for three: each is written, whole."""
    n = 200
    collector = make_collector(3 * (n * 8 + 4 * n * HIDDEN * 4 + 128))
    samples = [Sample(answers, tmp_path, n) for _ in range(40)]
    for sample in samples:
        run_pass(collector, (sample, 0, n))
        assert len(collector.arena.used) <= 3
    for sample in samples:
        sample.answer()
        assert all(map(torch.equal, torch.load(sample.part, weights_only=True)["states"], sample.states))


def test_sample_larger_than_the_memory_is_refused(answers, tmp_path):
    collector = make_collector(1000)
    a = Sample(answers, tmp_path, 50)
    run_pass(collector, (a, 0, 50))
    assert "50 tokens do not fit into the 1000 bytes" in a.answer()["fault"]


def test_abandoned_sample_makes_room(answers, tmp_path):
    """A client that has ended leaves half a sample behind."""
    collector = make_collector(2 * (100 * 8 + 4 * 100 * HIDDEN * 4 + 128))
    abandoned, b, c = (Sample(answers, tmp_path, 100) for _ in range(3))
    run_pass(collector, (abandoned, 0, 50))
    run_pass(collector, (b, 0, 60), (c, 0, 40))
    run_pass(collector, (b, 60, 40), (c, 40, 60))
    assert b.answer()["bytes"] and c.answer()["bytes"]


def test_arena_gives_each_its_own_bytes():
    arena, random_ = Arena(2**16), random.Random(0)
    for _ in range(2000):
        if arena.used and random_.random() < 0.5:
            arena.give(random_.choice(list(arena.used)))
        else:
            arena.take(random_.randrange(1, 4000))
        spans = sorted((start, start + n) for start, n in arena.used.items())
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert not spans or spans[-1][1] <= arena.size
