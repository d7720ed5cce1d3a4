"""An extraction killed at any moment, and again: nothing finished is lost, nothing wrong is taken for done."""

import random
import signal

import pytest

from chaos import kills, layout
from chaos.tally import Outcome
from chaos.world import Trial
from chaos.zygote import Fault

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]


@pytest.mark.parametrize("number", SIGNALS, ids=[s.name for s in SIGNALS])
def test_at_random_moments(zygote, world, tmp_path, times, number):
    """One trial in four is killed twice more before it may end; one in ten begins with an empty store."""
    many = times(200, 1) if number == signal.SIGKILL else times(25, 1)
    rng, outcome = random.Random(f"extraction {number}"), Outcome(f"extraction: {number.name} at a random moment")

    def begin(attempt):
        trial, seconds = Trial(zygote, world, tmp_path / f"{attempt}", outcome), world.seconds["extract"]
        if attempt % 10 == 0:
            return trial, seconds * 1.5
        layout.skip_probe(world.folder, trial.folder)
        return trial, seconds

    kills.at_random_moments(begin, many, number, rng)
    outcome.check()


def test_at_system_calls(need_shim, zygote, world, tmp_path, times):
    """Before a chosen write, fsync, rename, link or unlink, or in the middle of that write."""
    rng, outcome = random.Random("extraction calls"), Outcome("extraction: SIGKILL at a chosen system call")
    total = world.calls["extract"]
    for number in sorted(rng.sample(range(1, total + 1), times(100, 2))):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        layout.skip_probe(world.folder, trial.folder)
        kills.at_system_call(trial, number, total, rng)
    outcome.check()


def test_around_every_step_of_publishing(need_shim, zygote, world, tmp_path, times):
    """All calls but the many small writes of a zip, one after the other, from the first sample on."""
    outcome = Outcome("extraction: SIGKILL at each open, fsync, rename, link, unlink, mkdir in turn")
    for number in range(1, times(40, 1) + 1):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        kinds = ("open", "fsync", "rename", "link", "unlink", "mkdir")
        fault = Fault(str(trial.folder / "results"), number, "signal", signal.SIGKILL, kinds)
        assert trial.run(fault).code == -9
        trial.complete()
        trial.clear()
    outcome.check()
