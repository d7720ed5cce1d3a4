"""System calls that fail, one by one or from one on: needs no mount, only gcc."""

import errno
import os
import random

import pytest

from chaos import layout
from chaos.tally import Outcome
from chaos.test_kill_training import Trial as Training
from chaos.world import Trial
from chaos.zygote import Fault

TAKES_SPACE = ("open", "write", "fsync", "link", "mkdir")
CHANGES = (*TAKES_SPACE, "rename", "unlink", "truncate")
FAULTS = [
    (errno.ENOSPC, "fail_on", TAKES_SPACE),
    (errno.EDQUOT, "fail_on", TAKES_SPACE),
    (errno.EROFS, "fail_on", CHANGES),
    (errno.EIO, "fail_on", CHANGES),
    (errno.ESTALE, "fail_on", CHANGES),
    (errno.EIO, "fail_once", CHANGES),
]
IDS = [f"{errno.errorcode[number]}-{action}" for number, action, _ in FAULTS]


def check_message(trial, number):
    text = trial.message()
    assert os.strerror(number) in text or "read back differently" in text, text
    assert "\n" not in text


@pytest.mark.parametrize(("number", "action", "kinds"), FAULTS, ids=IDS)
def test_extraction(need_shim, zygote, world, tmp_path, times, number, action, kinds):
    name = f"{errno.errorcode[number]} {'once' if action == 'fail_once' else 'from a call on'}"
    rng, outcome = random.Random(name), Outcome(f"extraction: {name}")
    for at in sorted(rng.sample(range(1, int(world.calls["extract"] * 0.8)), times(20, 1))):
        trial = Trial(zygote, world, tmp_path / f"{at}", outcome)
        layout.skip_probe(world.folder, trial.folder)
        ended = trial.run(Fault(str(trial.folder / "results"), at, action, number, kinds))
        if ended.code:  # one failing call may be one that nothing depends on
            assert ended.code == 1
            check_message(trial, number)
        else:
            assert action == "fail_once"
        if "unlink" not in kinds:
            assert not list(trial.folder.rglob("*.part"))
        trial.complete()
        trial.clear()
    outcome.check()


@pytest.mark.parametrize(("number", "action", "kinds"), FAULTS, ids=IDS)
def test_training(need_shim, zygote, world, tmp_path, times, number, action, kinds):
    if not times(1, 0):
        pytest.skip("make chaos")
    name = f"{errno.errorcode[number]} {'once' if action == 'fail_once' else 'from a call on'}"
    rng, outcome = random.Random(name), Outcome(f"training: {name}")
    for at in sorted(rng.sample(range(1, int(world.calls["train"] * 0.8)), times(6, 0))):
        trial = Training(zygote, world, tmp_path / f"{at}", outcome)
        ended = trial.run(Fault(str(trial.folder / "results"), at, action, number, kinds))
        if ended.code:
            assert ended.code == 1
            errors = [line for line in (trial.folder / "stderr").read_text().splitlines() if line.startswith("error: ")]
            assert len(errors) == 1 and os.strerror(number) in errors[0], errors
        else:
            assert action == "fail_once"
        trial.complete()
        trial.clear()
    outcome.check()
