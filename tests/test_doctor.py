"""The doctor's answers, each on what is really there: files, locks, limits, and GPUs by the stand-in for NVML."""

import json
import re
import subprocess

import pytest
import torch
from safetensors.torch import save_file
from workflow import tiny_workspace

from eagle3lib import doctor
from eagle3lib.config import StorageConfig, TargetConfig
from eagle3lib.disk import Disk
from eagle3lib.errors import UserError

TENSORS = {"a": torch.ones(3, 4), "b": torch.zeros(5)}


@pytest.fixture
def model(tmp_path):
    """A model folder of two files and their index."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    for name, tensor in TENSORS.items():
        save_file({name: tensor}, folder / f"{name}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"{name}.safetensors" for name in TENSORS}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def truncated(folder):
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def longer(folder):
    with open(folder / "a.safetensors", "ab") as file:
        file.write(b"x")


def emptied(folder):
    (folder / "b.safetensors").write_bytes(b"")


def pointer(folder):
    (folder / "b.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 20\n")


def other_tensor(folder):
    save_file({"c": torch.zeros(5)}, folder / "b.safetensors")


@pytest.mark.parametrize(
    ("damage", "faults"),
    [
        (lambda folder: None, []),
        (truncated, [r"a.safetensors has (\d+) of (\d+) bytes"]),
        (longer, [r"a.safetensors has (\d+) of (\d+) bytes"]),
        (lambda folder: (folder / "b.safetensors").unlink(), ["b.safetensors is missing"]),
        (emptied, ["b.safetensors has no readable header"]),
        (pointer, ["b.safetensors is no safetensors file .*"]),
        (other_tensor, [r"b.safetensors lacks 1 tensors of the index \(b\)"]),
        (lambda folder: (folder / "config.json").unlink(), ["config.json is missing"]),
        (lambda folder: (folder / "model.safetensors.index.json").write_text("[]"), [".*index.json is no index"]),
        (lambda folder: [path.unlink() for path in folder.glob("*.safetensors*")], ["no weights .*"]),
    ],
    ids=["whole", "truncated", "longer", "missing", "empty", "git-lfs", "other tensor", "config", "index", "nothing"],
)
def test_weights_that_are_not_whole(model, damage, faults):
    damage(model)
    found = doctor.weight_faults(model)
    assert len(found) == len(faults) and all(re.fullmatch(*pair) for pair in zip(faults, found, strict=True)), found
    line = doctor.weights(TargetConfig(name="t", model=str(model)))
    assert line.status == ("fail" if faults else "ok")
    assert bool(line.remedy) == bool(faults)


def test_a_hub_model_that_is_not_here(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    line = doctor.weights(TargetConfig(name="t", model="no-such-org/no-such-model"))
    assert (line.status, "hf download no-such-org/no-such-model" in line.remedy) == ("warn", True)


def test_versions_that_are_not_the_tested_ones(tmp_path):
    lock = tmp_path / "lock.txt"
    lock.write_text(f"# made by hand\ntorch=={torch.__version__.split('+')[0]}\n")
    assert doctor.packages(lock).status == "ok"
    lock.write_text("torch==0.0.1\nno-such-package==1.0\n")
    line = doctor.packages(lock)
    assert line.status == "warn" and "torch" in line.text and "no-such-package absent, not 1.0" in line.text


def test_a_volume_that_is_fit(tmp_path):
    for check in (doctor.hard_links, doctor.locks):
        assert check(tmp_path).status == "ok"
    assert re.search(r"write [\d,]+ MB/s with fsync, read [\d,]+ MB/s, \d+ MiB", doctor.throughput(tmp_path).text)


def test_a_volume_that_is_not(tmp_path):
    for check in (doctor.hard_links, doctor.locks, doctor.throughput):
        line = doctor.answered(check, tmp_path / "gone")
        assert line.status == "fail" and "gone" in line.text and line.remedy


def test_where_free_space_comes_from(tmp_path):
    line = doctor.free_space(Disk(tmp_path, StorageConfig(free_command="echo 4096", reserve_bytes=1)))
    assert line.status == "ok" and line.text.startswith("4,096 B by storage.free_command (echo 4096)")
    assert doctor.free_space(Disk(tmp_path, StorageConfig(reserve_bytes=2**60))).status == "fail"
    line = doctor.answered(doctor.free_space, Disk(tmp_path, StorageConfig(free_command="false")))
    assert (line.status, line.name) == ("fail", "free space") and "storage.free_command" in line.text


def test_limits(tmp_path):
    assert doctor.open_files(1024).status == "warn" and "ulimit -n 4096" in doctor.open_files(1024).remedy
    assert doctor.open_files(-1).status == doctor.open_files(65536).status == "ok"
    assert doctor.shared_memory(tmp_path / "none").status == "warn"


def test_a_unit_that_nobody_knows_starts_at_no_boot():
    assert not doctor.starts_at_boot("no-such-unit.service")


@pytest.fixture
def workspace(tmp_path, nvml, monkeypatch):
    for name in ("NVML_STUB", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, nvml.environment[name])
    return tiny_workspace(tmp_path / "workspace", 3, 4)


def answers(workspace, *arguments):
    done = workspace.ask("doctor", *arguments)
    assert not done.stderr, done.stderr
    lines = [re.split(r"  +", line, maxsplit=2) for line in done.stdout.splitlines()]
    return done.returncode, {name: (status, text) for status, name, text in lines}


def test_a_machine_that_is_fit(workspace, nvml):
    """Before anything has run; no file of a measurement is left behind."""
    nvml.say([{}], driver=9)
    code, lines = answers(workspace)
    assert code == 0, lines
    assert lines["driver"][1] == "not available: Driver Not Loaded; this configuration needs no GPU"
    assert set(lines) == {
        "driver", "torch", "packages", "target", "hard links", "locks", "throughput", "free space",
        "states to come", "open files", "shared memory",
    }  # fmt: skip
    assert not list(workspace.run_folder.glob("results/.doctor-*"))


def test_a_machine_whose_gpus_are_not(workspace, nvml):
    workspace.set("training.gpus", 3)
    stranger = subprocess.Popen(["sleep", "600"])
    try:
        nvml.say([{}, {"used": 9000, "processes": [(stranger.pid, 9000)]}, {"rc": 15}])
        code, lines = answers(workspace)
    finally:
        stranger.kill()
        stranger.wait()
    assert code == 1
    assert lines["driver"] == (
        "fail", "999.99, 2 of 3 GPUs usable, 3 needed; mend those named below, or lower training.gpus"
    )  # fmt: skip
    assert lines["GPU 0"] == ("ok", "free, Stub GPU")
    assert lines["GPU 1"][0] == "warn" and f"pid {stranger.pid} (sleep 600; user" in lines["GPU 1"][1]
    assert lines["GPU 2"][0] == "warn" and "lost: GPU is lost; `dmesg | grep Xid`" in lines["GPU 2"][1]
    if not torch.backends.cuda.is_built():
        assert lines["torch"][0] == "fail"


def test_a_configuration_that_is_wrong(workspace):
    workspace.set("training.learnig_rate", 1)
    done = workspace.ask("doctor")
    assert done.returncode == 1 and "did you mean 'learning_rate'?" in done.stderr


def test_users_errors_are_lines(tmp_path):
    def refuses(_):
        raise UserError("a reason; a remedy")

    assert doctor.answered(refuses, tmp_path) == doctor.Line("fail", "refuses", "a reason; a remedy")
