"""Two ways to kill a job, an extraction's or a training's trial: at random moments, and at a chosen system call."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from typing import Any

from chaos.zygote import Fault


def at_random_moments(begin: Callable[[int], tuple[Any, float]], many: int, number: int, rng: random.Random) -> None:
    """Trials, until `many` signals have hit; `begin` gives each, and over how many seconds its moments are drawn.

    One trial in four is hit twice more before it may end.
    """
    hits = attempts = 0
    while hits < many:
        attempts += 1
        assert attempts < 5 * many + 20, "most runs end before their kill: is the machine so uneven?"
        trial, seconds = begin(attempts)
        for _ in range(3 if attempts % 4 == 0 else 1):
            hits += trial.run(after=rng.uniform(0, seconds), number=number).code != 0
        trial.complete()
        trial.clear()


def at_system_call(trial: Any, number: int, total: int, rng: random.Random) -> None:
    """One trial killed at its call `number`; one in three once more, on the way of the mended run."""
    fault = Fault(str(trial.folder / "results"), number, "signal", signal.SIGKILL)
    assert trial.run(fault).code == -9
    if number % 3 == 0:
        trial.run(Fault(fault.folder, rng.randrange(1, total), "signal", signal.SIGKILL))
    trial.complete()
    trial.clear()
