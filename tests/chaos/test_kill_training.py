"""A training killed at any moment, and again: the weights are those of a training that nobody killed, to the bit."""

import json
import random
import shutil
import signal
import time

import psutil
import pytest

from chaos import kills, layout
from chaos.tally import Outcome

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


class Trial:
    """One training that is broken off, once or several times, and then runs to its end."""

    def __init__(self, zygote, world, folder, outcome, whole=None, **options):
        self.zygote, self.world, self.folder, self.outcome, self.options = zygote, world, folder, outcome, options
        self.whole = layout.draft_folder(whole or world.folder / "whole")
        outcome.trials += 1

    def run(self, fault=None, **how):
        ended = self.zygote.run("train", self.world.folder, self.folder, fault, **how, **self.options)
        self.outcome.kills += ended.killed
        assert ended.left == []
        return ended

    def complete(self):
        folder = layout.draft_folder(self.folder)
        record = folder / "training.json"
        finished = (folder / "model.safetensors").stat().st_ino if record.exists() else None
        assert self.run().code == 0, (self.folder / "stderr").read_text()
        self.outcome.kept += finished is not None
        self.outcome.lost += finished not in (None, (folder / "model.safetensors").stat().st_ino)
        for name in ("model.safetensors", "metrics.jsonl"):
            self.outcome.wrong += (folder / name).read_bytes() != (self.whole / name).read_bytes()
            assert (self.folder / "results/tiny/talk/training" / name).samefile(folder / name)
        self.outcome.wrong += without_time(record) != without_time(self.whole / "training.json")
        assert not list(self.folder.rglob("*.part"))
        assert not list((folder / "checkpoints").iterdir()), "a finished training needs no checkpoint"

    def clear(self):
        shutil.rmtree(self.folder)


def without_time(record):
    timed = ("seconds", "loader_wait", "tokens_per_second", "gemm_share", "peak_memory")
    return {name: value for name, value in json.loads(record.read_text()).items() if name not in timed}


@pytest.mark.parametrize("number", SIGNALS, ids=[s.name for s in SIGNALS])
def test_at_random_moments(zygote, world, tmp_path, times, number):
    many = times(50, 1) if number == signal.SIGKILL else times(15, 1)
    rng, outcome = random.Random(f"training {number}"), Outcome(f"training: {number.name} at a random moment")

    def begin(attempt):
        return Trial(zygote, world, tmp_path / f"{attempt}", outcome), world.seconds["train"]

    kills.at_random_moments(begin, many, number, rng)
    outcome.check()


def test_at_system_calls(need_shim, zygote, world, tmp_path, times):
    """Before a chosen call, or in the middle of that write."""
    rng, outcome = random.Random("training calls"), Outcome("training: SIGKILL at a chosen system call")
    total = world.calls["train"]
    # The last calls come every time: weights, record, the checkpoints' end, the links.
    numbers = rng.sample(range(1, total - 40), times(30, 0)) + rng.sample(range(total - 40, total + 1), times(40, 2))
    for number in numbers:
        kills.at_system_call(Trial(zygote, world, tmp_path / f"{number}", outcome), number, total, rng)
    outcome.check()


def processes_of(folder):
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        if process.info["status"] != psutil.STATUS_ZOMBIE and str(folder) in " ".join(process.info["cmdline"] or []):
            found.append(process)
    return found


def test_two_processes(zygote, world, tmp_path, times):
    """torchrun with two ranks; the next run begins while ranks of the killed one may still write their checkpoint."""
    rng, outcome = random.Random("two processes"), Outcome("training by two processes: SIGKILL at a random moment")
    many = times(6, 0)
    if not many:
        pytest.skip("a torchrun takes ten seconds to start: make chaos")
    whole = zygote.run("train", world.folder, tmp_path / "whole", processes=2)
    assert whole.code == 0
    for number in range(many):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome, tmp_path / "whole", processes=2)
        # The second half: before it, the ranks are being started.
        trial.run(after=rng.uniform(whole.seconds / 2, whole.seconds))
        trial.complete()
        limit = time.monotonic() + 120
        while processes_of(trial.folder):
            assert time.monotonic() < limit, processes_of(trial.folder)
            time.sleep(0.05)
    outcome.check()
