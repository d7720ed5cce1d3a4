"""Early stopping: which epoch is kept, when it ends, and that a resumed training decides alike."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from test_training import SETTINGS, job_of, lines, run, weights, world  # noqa: F401 - a fixture

from eagle3lib import training
from eagle3lib.early_stopping import Best
from eagle3lib.errors import UserError
from eagle3lib.training import Interrupted, Trainer


def offered(patience, lengths):
    """(the best epoch, epochs that were trained)."""
    best = Best(patience)
    for epoch, length in enumerate(lengths):
        if best.ends(epoch):
            return best.state["epoch"], epoch
        best.offer(epoch, {"validation": {"acceptance_length": length}}, lambda e=epoch: {"w": torch.tensor(float(e))})
        assert best.state["weights"]["w"] == best.state["epoch"]
    return best.state["epoch"], len(lengths)


def test_ends_when_patience_does():
    assert offered(1, [1.1, 1.2, 1.15, 1.3]) == (1, 3)
    assert offered(2, [1.1, 1.2, 1.15, 1.3]) == (3, 4)
    assert offered(2, [1.2, 1.2, 1.2, 1.3]) == (0, 3)  # the first of equal ones
    assert offered(9, [1.1, 1.2, 1.1]) == (1, 3)


def test_best_by_a_source_and_without_an_end():
    best = Best(None, "code.jsonl")
    for epoch, lengths in enumerate([(1.5, 1.1), (1.2, 1.3), (1.6, 1.2)]):
        figures = {"acceptance_length": lengths[0], "by_source": {"code.jsonl": {"acceptance_length": lengths[1]}}}
        best.offer(epoch, {"validation": figures}, dict)
    assert best.state["epoch"] == 1 and not best.ends(99)


def test_without_patience_nothing_is_kept():
    best = Best(None)
    best.offer(0, {}, lambda: pytest.fail("weights are not asked for"))
    assert best.state == {} and not best.ends(99)


@pytest.fixture
def scripted(monkeypatch):
    """Validation figures whose acceptance length is as told, by epoch; all else is real."""
    lengths = [1.1, 1.4, 1.2, 1.3, 1.5, 1.0]
    real = Trainer._finish_epoch

    def finish_epoch(self):
        with monkeypatch.context() as patch:
            summarise = training.summarise
            figures = {"acceptance_length": lengths[self.epoch]}
            patch.setattr(training, "summarise", lambda *args: summarise(*args) | figures)
            real(self)

    monkeypatch.setattr(Trainer, "_finish_epoch", finish_epoch)


STOPPING = SETTINGS.model_copy(update={"epochs": 6, "early_stopping_epochs": 2, "learning_rate": 1e-2})


def test_the_draft_is_the_best_epochs(world, tmp_path, scripted):  # noqa: F811
    """Ends after the fourth epoch; what is left is the weights and figures that the second had."""
    result = run(world, tmp_path / "stopped", STOPPING)
    assert (result["epochs"], result["from_epoch"]) == (4, 1)
    assert result == json.loads((tmp_path / "stopped" / "training.json").read_text())
    validations = [line for line in lines(tmp_path / "stopped") if line["kind"] == "validation"]
    assert len(validations) == 4
    assert result["metrics"]["validation"]["loss"] == validations[1]["loss"]
    per_epoch = result["steps"] // 4
    kept = {}

    def stop(step):
        if step == 2 * per_epoch + 1:  # the checkpoint of the end of the second epoch is the best's
            (path,) = (tmp_path / "whole" / "checkpoints").glob(f"*{2 * per_epoch:09d}.pt")
            kept.update(torch.load(path)["model"])
        return False

    whole = run(world, tmp_path / "whole", STOPPING.model_copy(update={"early_stopping_epochs": None}), stop=stop)
    assert (whole["epochs"], whole["from_epoch"]) == (6, 5)
    stopped = weights(tmp_path / "stopped")
    assert all(torch.equal(stopped[name], tensor) for name, tensor in kept.items())
    assert not all(torch.equal(stopped[name], tensor) for name, tensor in weights(tmp_path / "whole").items())


def test_resume_is_exact(world, tmp_path, scripted):  # noqa: F811
    whole = run(world, tmp_path / "whole", STOPPING)
    per_epoch = whole["steps"] // 4
    for step in (per_epoch, 3 * per_epoch, 3 * per_epoch + 1):
        with pytest.raises(Interrupted):
            run(world, tmp_path / "parts", STOPPING, stop=lambda done, step=step: done == step)
    parts = run(world, tmp_path / "parts", STOPPING)
    for key in ("weights_sha256", "metrics", "epochs", "from_epoch", "steps", "tokens"):
        assert parts[key] == whole[key], key
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_the_draft_is_the_best_of_all_epochs(world, tmp_path, scripted):  # noqa: F811
    """Without early stopping: all epochs are trained, the fifth is the best."""
    settings = STOPPING.model_copy(update={"early_stopping_epochs": None, "best_by": "validation"})
    result = run(world, tmp_path, settings)
    assert (result["epochs"], result["from_epoch"]) == (6, 4)


def test_a_source_of_no_held_out_sample_is_refused(world, tmp_path):  # noqa: F811
    samples = [replace(s, source="a.jsonl" if s.split == "validation" else "b.jsonl") for s in world[2]]
    settings = STOPPING.model_copy(update={"best_by": "b.jsonl"})
    with pytest.raises(
        UserError, match=r"training\.best_by: no held-out sample is of 'b\.jsonl'; known here: .* a\.jsonl"
    ):
        training.train(job_of(world, tmp_path, settings, samples=samples))
    assert training.train(job_of(world, tmp_path, STOPPING.model_copy(update={"best_by": "a.jsonl"}), samples=samples))


def test_nothing_held_out_is_refused(world, tmp_path):  # noqa: F811
    only_train = [sample for sample in world[2] if sample.split == "train"]
    with pytest.raises(UserError, match=r"training\.early_stopping_epochs: no sample is held out"):
        training.train(job_of(world, tmp_path, STOPPING, samples=only_train))
