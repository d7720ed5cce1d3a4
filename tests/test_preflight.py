"""A training that cannot start is refused before the GPUs are freed for it, and the key is named."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from test_training import DRAFT, SETTINGS, VD, H, V, job_of, world  # noqa: F401

from eagle3lib import preflight, training
from eagle3lib.config import DraftConfig, StorageConfig
from eagle3lib.disk import Disk
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey, pack_sample
from eagle3lib.lineage import file_sha256
from eagle3lib.loader import Sample
from eagle3lib.training import Job
from eagle3lib.vocab_mapping import VocabMapping

NO_GPUS = {"nvml": "not available: Driver Not Loaded", "driver": None, "devices": [], "mask": None, "leases": []}
KIMI = {
    "hidden_size": 7168, "vocab_size": 163840, "intermediate_size": 18432, "num_attention_heads": 64,
    "num_key_value_heads": 64, "head_dim": 112, "num_hidden_layers": 61,
}  # fmt: skip


def device(index=0, state="free", total_mib=96000, capability=(9, 0)):
    about = {"index": index, "uuid": f"GPU-{index}", "name": "Stub GPU", "capability": list(capability)}
    return {**about, "used_mib": 1, "total_mib": total_mib, "mig": False, "processes": [], "state": state}


def seen(*devices):
    return {"nvml": "ok", "driver": "999.99", "devices": list(devices), "mask": None, "leases": []}


def check(job, machine=NO_GPUS, storage=StorageConfig(reserve_bytes=0)):  # noqa: B008 - frozen
    Path(job.folder).mkdir(parents=True, exist_ok=True)
    return preflight.check(job, 3, machine, Disk(Path(job.folder), storage))


@pytest.fixture
def job(world, tmp_path):  # noqa: F811
    return job_of(world, tmp_path / "draft")


def with_settings(job, **settings):
    return replace(job, training=job.training.model_copy(update=settings))


def test_a_training_that_can_start_is_recorded(job):
    record = check(job)
    model = DraftModel(DraftModelConfig.from_target(job.target, DRAFT, 3))
    trainable = sum(p.numel() for p in model.trainable().values())
    assert record["parameters"] == trainable
    assert record["bytes_each"] == 16 * trainable + 4 * (V * H + V * H + VD * H)
    assert record["longest_sample"] == max(s.n_tokens for s in job.samples)
    rehearsal = record["rehearsal"]
    assert rehearsal["width"] == H and rehearsal["counted"] > 0 and rehearsal["loss"] > 0
    assert rehearsal["tokens"] == sum(s.n_tokens for s in job.samples if s.path in rehearsal["samples"])
    assert json.loads(json.dumps(record)) == record


def test_bytes_of_checkpoints_are_those_that_a_training_writes(job):
    parameters = check(job)["parameters"]
    with pytest.raises(training.Interrupted):
        training.train(job, stop=lambda step: step == 2)
    (written,) = Path(job.folder).glob("checkpoints/*.pt")
    assert 12 * parameters < written.stat().st_size < 12 * parameters + 30_000  # the zip's own overhead
    assert check(job)["bytes_checkpoints"] == 3 * 12 * parameters + 4 * parameters


def test_the_best_epoch_has_its_bytes_in_each_checkpoint(job):
    job = with_settings(job, early_stopping_epochs=1)
    record = check(job)
    assert record["bytes_checkpoints"] == 3 * 16 * record["parameters"] + 4 * record["parameters"]


# --- what is refused ---------------------------------------------------------------------------------------------


def test_a_sample_that_no_batch_holds(job):
    with pytest.raises(UserError, match="training.batch_tokens: 16 cannot hold .* of 17 tokens; raise it"):
        check(with_settings(job, batch_tokens=16))


def test_replies_that_are_too_short_for_the_steps(job):
    with pytest.raises(UserError, match="training.ttt_steps: no training sample has a reply of 41 tokens"):
        check(with_settings(job, ttt_steps=40))


def test_a_mapping_of_another_vocabulary(job):
    wrong = replace(job, draft=DraftConfig(draft_vocab_size=VD - 1))
    with pytest.raises(UserError, match=f"maps {V} tokens to {VD}, target and draft.draft_vocab_size say {V} and 39"):
        check(wrong)


def test_a_damaged_sample(job, tmp_path):
    shortest = preflight.shortest_that_supervise(job)[0]
    bad = tmp_path / "bad.pt"
    content = bytearray(Path(job.samples[shortest].path).read_bytes())
    content[len(content) // 2] ^= 1
    bad.write_bytes(content)
    samples = list(job.samples)
    samples[shortest] = replace(samples[shortest], path=str(bad), sha256=file_sha256(samples[shortest].path))
    with pytest.raises(UserError, match="bad.pt: its sha256 differs from the manifest's"):
        check(replace(job, samples=samples))


def test_a_target_whose_head_is_not_whole(job, tmp_path):
    path = Path(job.target.path) / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in safetensors.torch.load_file(path).items()}
    tensors["lm_head.weight"][7] = float("nan")
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors")
    broken = replace(job, target=replace(job.target, path=str(tmp_path)))
    with pytest.raises(UserError, match="training: loss nan or a gradient of it is not finite.*target's head"):
        check(broken)


def test_a_disk_that_is_too_small_for_the_checkpoints(job):
    """Those that are there already take no room again."""
    full = StorageConfig(free_command="echo 0", reserve_bytes=0)
    coming = check(job)["bytes_checkpoints"]
    with pytest.raises(UserError, match=f"no disk: {coming:,} bytes to be written next, 0 free"):
        check(job, storage=full)
    there = Path(job.folder) / "checkpoints" / f"{job.digest}.000000001.pt"
    there.parent.mkdir()
    there.write_bytes(bytes(coming))
    check(job, storage=full)


@pytest.mark.parametrize(
    ("machine", "message"),
    [
        (NO_GPUS, "training.gpus: 2 GPUs needed, but NVML is not available: Driver Not Loaded.*set training.gpus: 0"),
        (seen(device()), "training.gpus: 1 of 1 GPUs are free, 2 needed"),
        (seen(device(), device(1, "masked")), "training.gpus: 1 of 1 GPUs are free, 2 needed"),
        (seen(device(), device(1, "split")), "GPU 1: split into parts"),
        (seen(device(), device(1, total_mib=0)), "weights, gradients and optimiser take .* GPU 1 has 0 B; lower draft"),
        (seen(device(), device(1, capability=(7, 5))), "training.compute_dtype: GPU 1 .Stub GPU. has no bfloat16"),
    ],
    ids=["no driver", "too few", "masked", "split", "too small", "no bfloat16"],
)
def test_gpus_that_cannot_do_it(job, machine, message):
    with pytest.raises(UserError, match=message):
        check(with_settings(job, gpus=2, compute_dtype="bfloat16"), machine)


def test_gpus_that_are_held_by_others_are_no_obstacle_yet(job):
    """The engine still runs; `release_gpus` is there to free them."""
    machine = seen(device(0, "ours"), device(1, "foreign"))
    usable = with_settings(job, gpus=2).training
    if torch.backends.cuda.is_built():
        assert preflight.check_gpus(usable, machine, 1) == ["GPU-0", "GPU-1"]
    else:
        with pytest.raises(UserError, match="training.gpus: 2 asked for, but this torch .* is built for CPUs"):
            preflight.check_gpus(usable, machine, 1)


# --- wide targets ------------------------------------------------------------------------------------------------

IN_LITTLE_MEMORY = """
import json, resource, sys
from pathlib import Path
from eagle3lib import preflight
from eagle3lib.config import StorageConfig
from eagle3lib.disk import Disk
from eagle3lib.training import Job
job = Job.read(sys.argv[1])
seen = {"nvml": "absent", "devices": []}
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
record = preflight.check(job, 3, seen, Disk(Path(job.folder), StorageConfig(reserve_bytes=0)))
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
print(json.dumps({"grown": grown * 1024, **record}))
"""


def test_the_headline_case_is_rehearsed_in_little_memory(job, tmp_path):
    """Kimi-K2.5's sizes: the draft as a whole on paper, one of its samples through a narrow one; no weights."""
    target = replace(job.target, path="/no/such/folder", **KIMI)
    g = torch.Generator().manual_seed(0)
    key = StateKey("f", (2, 30, 58), "sglang", "bfloat16", "bf16")
    states = [torch.randn(96, 7168, generator=g) for _ in range(4)]
    ids = torch.randint(0, KIMI["vocab_size"], (96,), generator=g)
    torch.save(pack_sample(key, ids.tolist(), (16, 95), states, "1", "c"), tmp_path / "wide.pt")
    mapping = tmp_path / "mapping.safetensors"
    VocabMapping.from_target_ids(torch.arange(32000), KIMI["vocab_size"]).save(mapping)
    sample = Sample(str(tmp_path / "wide.pt"), 96, (16, 95), "train")
    settings = SETTINGS.model_copy(update={"compute_dtype": "bfloat16", "ttt_steps": 4, "batch_tokens": 8192})
    draft = DraftConfig(intermediate_size=12288)
    wide = Job([sample], target, draft, settings, str(mapping), str(tmp_path), "d")
    wide.write(tmp_path / "job.json")
    command = [sys.executable, "-c", IN_LITTLE_MEMORY, tmp_path / "job.json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    attention, h = 64 * 112, 7168
    projections = 3 * 2 * h * attention + attention * h + 3 * h * 12288
    assert record["parameters"] == 3 * h * h + projections + 32000 * h + 4 * h
    assert record["rehearsal"]["width"] == 192 and record["rehearsal"]["counted"] > 0
    assert record["grown"] < 1.5 * 2**30
    assert record["bytes_each"] > 20 * 2**30
