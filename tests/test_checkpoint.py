"""Checkpoints: round trip, damage of every kind, other settings, how many are kept."""

from __future__ import annotations

import pytest
import torch

from eagle3lib import checkpoint


def state(step):
    g = torch.Generator().manual_seed(step)
    optimizer = {"state": {0: {"exp_avg": torch.randn(50, generator=g)}}, "param_groups": [{"betas": (0.9, 0.95)}]}
    return {"model": {"w": torch.randn(300, generator=g)}, "optimizer": optimizer, "step": step}


def names(folder):
    return sorted(p.name for p in folder.iterdir())


def test_round_trip_and_two_are_kept(tmp_path):
    for step in (3, 7, 12):
        checkpoint.save(tmp_path, "a", step, state(step))
    assert names(tmp_path) == ["a.000000007.json", "a.000000007.pt", "a.000000012.json", "a.000000012.pt"]
    found = checkpoint.latest(tmp_path, "a")
    assert found["step"] == 12 and torch.equal(found["model"]["w"], state(12)["model"]["w"])
    assert found["optimizer"]["param_groups"] == [{"betas": (0.9, 0.95)}]
    checkpoint.clear(tmp_path, "a")
    assert names(tmp_path) == [] and checkpoint.latest(tmp_path, "a") is None


def flip_a_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "damage",
    [
        flip_a_byte,
        lambda p: p.write_bytes(p.read_bytes()[:-100]),
        lambda p: p.write_bytes(b""),
        lambda p: p.unlink(),
        lambda p: p.with_suffix(".json").unlink(),
        lambda p: p.with_suffix(".json").write_text('{"digest": "a"'),
        lambda p: p.with_suffix(".json").write_text("[]"),
    ],
    ids=["flipped", "truncated", "empty", "missing", "no record", "half a record", "strange record"],
)
def test_a_damaged_one_is_passed_over_for_the_one_before(tmp_path, damage):
    checkpoint.save(tmp_path, "a", 1, state(1))
    damage(checkpoint.save(tmp_path, "a", 2, state(2)))
    assert checkpoint.latest(tmp_path, "a")["step"] == 1
    checkpoint.save(tmp_path, "a", 2, state(2))  # training goes on and writes it again
    assert checkpoint.latest(tmp_path, "a")["step"] == 2


def test_flipped_bytes_would_be_loaded_by_torch_alone(tmp_path):
    """Why the sha256: without it the damage goes unnoticed."""
    path = checkpoint.save(tmp_path, "a", 2, {"w": torch.zeros(100_000)})
    flip_a_byte(path)
    assert torch.load(path, weights_only=True)["w"].any()


def test_other_settings_are_never_picked_up(tmp_path):
    checkpoint.save(tmp_path, "a", 5, state(5))
    assert checkpoint.latest(tmp_path, "b") is None
    checkpoint.save(tmp_path, "b", 5, state(3))
    assert checkpoint.latest(tmp_path, "b")["step"] == 3
    assert checkpoint.latest(tmp_path, "a")["step"] == 5
    checkpoint.clear(tmp_path, "b")
    assert checkpoint.latest(tmp_path, "a")["step"] == 5


def test_no_folder_yet(tmp_path):
    assert checkpoint.latest(tmp_path / "none", "a") is None


def test_what_a_kill_left_goes_with_the_next_checkpoint(tmp_path):
    leftovers = ["a.000000002.pt", "a.000000005.pt.part", "a.000000009.json.part"]
    for name in [*leftovers, "b.000000002.pt"]:
        (tmp_path / name).write_bytes(b"half")
    checkpoint.save(tmp_path, "a", 9, state(9))
    assert names(tmp_path) == ["a.000000009.json", "a.000000009.pt", "b.000000002.pt"]
    (tmp_path / leftovers[0]).write_bytes(b"half")
    checkpoint.clear(tmp_path, "a")
    assert names(tmp_path) == ["b.000000002.pt"], "another training's is not ours to delete"
