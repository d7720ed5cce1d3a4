"""Trackers: what each is told, that a missing one is refused beforehand, and that none changes a result."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
from test_training import SETTINGS, job_of, lines, run, world  # noqa: F401 - a fixture

from eagle3lib import lineage, preflight, trackers, training
from eagle3lib.errors import UserError
from eagle3lib.plan import NOT_SHAPING
from eagle3lib.training import Interrupted


class Recorder:
    """A module of a tracker: notes calls, hands out itself as the run."""

    def __init__(self, fails=()):
        self.calls, self.fails = [], fails
        self.info = SimpleNamespace(run_id="r1")

    def __getattr__(self, name):
        def call(*args, **named):
            self.calls.append((name, args, named))
            if name in self.fails:
                raise ConnectionError("no route to host")
            return self

        return call

    def named(self, name):
        return [(args, named) for called, args, named in self.calls if called == name]


@pytest.fixture
def modules(monkeypatch):
    found = {name: Recorder() for name in ("wandb", "trackio", "mlflow")}
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


ALL = SETTINGS.model_copy(update={"epochs": 1, "trackers": list(trackers.KINDS), "tracker_project": "p"})


def speeds(folder):
    return len((folder / "speed.jsonl").read_text().splitlines())


def test_all_are_told_the_same(world, tmp_path, modules):  # noqa: F811
    result = run(world, tmp_path, ALL)
    wandb, trackio, mlflow = modules.values()
    ((_, init),) = wandb.named("init")
    assert (init["project"], init["id"], init["name"], init["resume"]) == ("p", "d", "d", "allow")
    assert init["config"]["learning_rate"] == SETTINGS.learning_rate
    ((_, init),) = trackio.named("init")
    assert (init["project"], init["name"], init["resume"]) == ("p", "d", "allow")
    assert mlflow.named("set_experiment") == [(("p",), {})] and mlflow.named("start_run") == [((), {"run_name": "d"})]
    told = [(args[0], named["step"]) for args, named in wandb.named("log")]
    assert told == [(args[0], named["step"]) for args, named in trackio.named("log")]
    assert told == [(args[0], named["step"]) for args, named in mlflow.named("log_metrics")]
    assert len(told) == result["steps"] + 2 + speeds(tmp_path) == len(lines(tmp_path)) + speeds(tmp_path)
    scalars, step = told[-1]
    assert step == result["steps"]
    assert scalars["validation/loss"] == result["metrics"]["validation"]["loss"]
    assert (
        scalars["validation/accuracy_of_supervised/2"] == result["metrics"]["validation"]["accuracy_of_supervised"][2]
    )
    assert all(isinstance(number, int | float) for line, _ in told for number in line.values())
    assert wandb.calls[-1][0] == "finish" and trackio.calls[-1][0] == "finish" and mlflow.calls[-1][0] == "end_run"
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_training_that_goes_on_goes_on_in_its_run(world, tmp_path, modules):  # noqa: F811
    with pytest.raises(Interrupted):
        run(world, tmp_path, ALL, stop=lambda step: step == 2)
    run(world, tmp_path, ALL)
    assert modules["mlflow"].named("start_run") == [((), {"run_name": "d"}), ((), {"run_id": "r1"})]
    assert [named["id"] for _, named in modules["wandb"].named("init")] == ["d", "d"]


def test_none_changes_a_result(world, tmp_path, modules):  # noqa: F811
    """All, none, and some that fail on the way: the same weights; what fails is said once and left out."""
    weights = {
        run(world, tmp_path / "all", ALL)["weights_sha256"],
        run(world, tmp_path / "none", ALL.model_copy(update={"trackers": []}))["weights_sha256"],
    }
    assert not (tmp_path / "none" / "tensorboard").exists()
    modules["wandb"].fails, modules["mlflow"].fails = ["log"], ["set_experiment"]
    weights.add(run(world, tmp_path / "failing", ALL)["weights_sha256"])
    assert len(weights) == 1
    assert len(modules["wandb"].named("log")) == len(lines(tmp_path / "all")) + speeds(tmp_path / "all") + 1
    assert {"trackers", "tracker_project"} <= NOT_SHAPING["training"]
    assert "eagle3lib.trackers" in lineage.NOT_COMPUTING


def test_failure_is_said(world, tmp_path, modules, capsys):  # noqa: F811
    modules["trackio"].fails = ["log"]
    run(world, tmp_path, ALL)
    said = capsys.readouterr().out
    assert said.count("training.trackers: trackio is left out from here on (ConnectionError: no route to host)") == 1


@pytest.mark.parametrize("name", ["wandb", "trackio", "mlflow"])
def test_missing_package_is_refused_before_anything_starts(world, tmp_path, monkeypatch, name):  # noqa: F811
    monkeypatch.setitem(sys.modules, name, None)
    settings = SETTINGS.model_copy(update={"trackers": ["tensorboard", name]})
    says = rf"training\.trackers: {name} cannot be imported .*; install {name} into this environment, or take it out"
    with pytest.raises(UserError, match=says):
        run(world, tmp_path / "draft", settings)
    assert not (tmp_path / "draft").exists()
    with pytest.raises(UserError, match=says):
        preflight.check(job_of(world, tmp_path, settings), 3, {}, None)
    with pytest.raises(UserError, match=says):
        training.train(job_of(world, tmp_path / "draft", settings))


def test_what_is_not_asked_for_is_not_imported(world, tmp_path, monkeypatch):  # noqa: F811
    for name in ("wandb", "trackio", "mlflow"):
        monkeypatch.setitem(sys.modules, name, None)
    run(world, tmp_path, SETTINGS.model_copy(update={"epochs": 1}))
