"""Two ranks, whole or in shares, against one process on the same global batches; a rank may have none of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import TwoRanks
from test_training import SETTINGS, job_of, lines, weights, world  # noqa: F401 - a fixture

from eagle3lib import parallel, training
from eagle3lib.errors import UserError
from eagle3lib.loader import Pack
from eagle3lib.training import Interrupted, Ranks, Trainer

KINDS = parallel.KINDS
TWO = SETTINGS.model_copy(update={"processes": 2})
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}  # sums in another order, over some dozen steps


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    ranks = TwoRanks(tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


def trained(job, stop_at=None):
    """In a rank: the result; None when it was stopped."""
    try:
        return training.train(job, lambda step: step == stop_at)
    except Interrupted:
        return None


def of_kind(job, kind):
    return replace(job, training=job.training.model_copy(update={"parallel": kind}))


def at(job, folder):
    return replace(job, folder=str(folder))


def assert_alike(folder, other):
    folder, other = Path(folder), Path(other)
    ours, theirs = weights(folder), weights(other)
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, **TOLERANCE, msg=name)
    for one, two in zip(lines(folder), lines(other), strict=True):
        assert one["supervised"] == two["supervised"] and one["kind"] == two["kind"]
        assert one["loss"] == pytest.approx(two["loss"], rel=1e-4)


# --- the rule ----------------------------------------------------------------------------------------------------


def test_auto_is_ddp_where_it_fits():
    gib = 2**30
    assert parallel.choose("auto", 10**9, None) == "ddp"
    assert parallel.choose("auto", 10**9, 80 * gib) == "ddp"  # 14.9 GiB of weights, gradients, moments
    assert parallel.choose("auto", 10**9, 24 * gib) == "fsdp2"
    assert parallel.choose("ddp", 10**9, 24 * gib) == "ddp" and parallel.choose("fsdp2", 1, None) == "fsdp2"


def test_bytes_on_each_rank():
    assert parallel.bytes_each("ddp", 100, 8) == parallel.bytes_each("fsdp2", 100, 1) == 1600
    assert parallel.bytes_each("fsdp2", 100, 8) == 800 + 200


# --- two ranks are one -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def uneven(world, tmp_path_factory):  # noqa: F811
    """A job whose epochs have an odd number of packs (the last step has one), and samples that supervise nothing."""
    train = [s for s in world[2] if s.split == "train"][:12]
    train = [replace(s, reply_bounds=()) if i % 5 == 0 else s for i, s in enumerate(train)]
    samples = train + [s for s in world[2] if s.split == "validation"]
    job = job_of(world, tmp_path_factory.mktemp("alone"), TWO, samples=samples)
    assert len(training.epoch_packs(range(12), [s.n_tokens for s in train], TWO.batch_tokens, "0/0")) % 2
    return job, training.train(job)


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_equal_one(two, uneven, tmp_path, kind):
    job, alone = uneven
    results = two(trained, at(of_kind(job, kind), tmp_path))
    assert [r["processes"] for r in results] == [2, 2] and alone["processes"] == 1
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["steps"] == alone["steps"]
    assert_alike(tmp_path, job.folder)


@pytest.mark.parametrize("kind", KINDS)
def test_resume_is_exact_and_reads_the_others_checkpoints(two, uneven, tmp_path, kind):
    """To the bit with two ranks, however often stopped; one process and the other kind go on from what they left."""
    job, _ = uneven
    ours = of_kind(job, kind)
    (whole, _), other = two(trained, at(ours, tmp_path / "whole")), KINDS[1 - KINDS.index(kind)]
    for step in (2, 4):
        assert two(trained, at(ours, tmp_path / "parts"), step) == [None, None]
    for folder in ("alone", "other"):
        copy_of(tmp_path / "parts", tmp_path / folder)
    parts, _ = two(trained, at(ours, tmp_path / "parts"))
    assert parts["weights_sha256"] == whole["weights_sha256"] and parts["metrics"] == whole["metrics"]
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")
    trained(at(job, tmp_path / "alone"))
    assert_alike(tmp_path / "alone", tmp_path / "whole")
    two(trained, at(of_kind(job, other), tmp_path / "other"))
    assert_alike(tmp_path / "other", tmp_path / "whole")


def copy_of(folder, to):
    for path in folder.rglob("*"):
        if path.is_file():
            (to / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (to / path.relative_to(folder)).write_bytes(path.read_bytes())


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_go_on_with_what_one_left(two, uneven, tmp_path, kind):
    job, _ = uneven
    assert trained(at(job, tmp_path), stop_at=3) is None
    two(trained, at(of_kind(job, kind), tmp_path))
    assert_alike(tmp_path, job.folder)


@pytest.mark.parametrize("kind", KINDS)
def test_several_packs_on_a_rank(two, world, tmp_path, kind):  # noqa: F811
    """Three packs a step on two ranks: one of them adds up two; in the last step of an epoch it may have none."""
    settings = TWO.model_copy(update={"processes": 3, "parallel": kind, "epochs": 2})
    alone = job_of(world, tmp_path / "alone", settings)
    training.train(alone)
    two(trained, at(alone, tmp_path / "two"))
    assert_alike(tmp_path / "two", tmp_path / "alone")


def test_the_best_epochs_weights_are_whole(two, uneven, tmp_path):
    """Kept while the shares go on being trained."""
    job = of_kind(uneven[0], "fsdp2")
    job = replace(job, training=job.training.model_copy(update={"best_by": "validation", "learning_rate": 0.1}))
    two(trained, at(job, tmp_path / "two"))
    training.train(at(job, tmp_path / "alone"))
    records = [json.loads((tmp_path / name / "training.json").read_text()) for name in ("two", "alone")]
    assert records[0]["from_epoch"] == records[1]["from_epoch"]
    assert {n: t.shape for n, t in weights(tmp_path / "two").items()} == {
        n: t.shape for n, t in weights(tmp_path / "alone").items()
    }


# --- what lies where ---------------------------------------------------------------------------------------------


def layout(job):
    """In a rank: bytes of weights and of moments here and in all, their dtypes, and the gradient's norm."""
    trainer = Trainer(job, Ranks.join(job.training), lambda step: False)
    read = [trainer.documents.packed(pack, trainer.test, trainer.ranks.device) for pack in packs(trainer)]
    counted = trainer.ranks.sum(sum(plan.counted for _, plan in read))
    figures = trainer._update(read, trainer.test.step_weights(counted), 1e-3)
    parameters = list(trainer.spread.parameters.values())
    moments = [m for one in trainer.optimizer.state.values() for name, m in one.items() if name != "step"]
    local = [sum(getattr(t, "_local_tensor", t).numel() for t in tensors) for tensors in (parameters, moments)]
    dtypes = {t.dtype for t in [*parameters, *moments]}
    return local, sum(p.numel() for p in parameters), dtypes, figures[-1].item()


def packs(trainer):
    mine = [[0, 1], [2, 3]][trainer.ranks.rank]
    return [Pack(mine, [trainer.documents.read(i) for i in mine])]


def test_shares_and_masters(two, world, tmp_path):  # noqa: F811
    """bf16 compute: weights and moments are fp32; with FSDP2 each rank holds about half of both."""
    settings = TWO.model_copy(update={"compute_dtype": "bfloat16"})
    found = {k: two(layout, job_of(world, tmp_path, settings.model_copy(update={"parallel": k}))) for k in KINDS}
    for of_rank in zip(*found.values(), strict=True):
        (whole, of_moments), parameters, dtypes, norm = of_rank[0]
        assert (whole, of_moments) == (parameters, 2 * parameters)
        (share, of_moments), _, other_dtypes, other_norm = of_rank[1]
        assert of_moments == 2 * share and 0.4 < share / parameters < 0.6
        assert dtypes == other_dtypes == {torch.float32}
        assert other_norm == pytest.approx(norm, rel=1e-5)


def test_ranks_that_see_different_checkpoints_do_not_go_on(world, tmp_path, monkeypatch):  # noqa: F811
    job = job_of(world, tmp_path, TWO)
    trained(job, stop_at=2)
    monkeypatch.setattr(Ranks, "same", lambda ranks, tensor: tensor.fill_(7) if tensor.ndim == 0 else None)
    monkeypatch.setattr(parallel, "KINDS", ["ddp"] * 8)
    with pytest.raises(UserError, match="rank 0 finds the checkpoint of step 2 in .*, rank 0 that of step 7"):
        training.train(job)
