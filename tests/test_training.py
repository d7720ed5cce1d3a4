"""Training on a tiny target: order, schedule, exact resume, several processes, and what is refused."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import safetensors.torch
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from eagle3lib import checkpoint, speed, training
from eagle3lib.config import DraftConfig, TrainingConfig
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey, pack_sample
from eagle3lib.loader import Pack, Sample, epoch_packs, first_fit_decreasing
from eagle3lib.targets import TargetInfo
from eagle3lib.training import Deferred, Interrupted, Job, Ranks, StopOnSignal, Trainer, learning_rate
from eagle3lib.training_time_test import SUMS, Batch, TrainingTimeTest
from eagle3lib.vocab_mapping import VocabMapping

V, VD, H = 60, 40, 16
CPU = torch.device("cpu")
DRAFT = DraftConfig(draft_vocab_size=VD)
SETTINGS = TrainingConfig(ttt_steps=3, epochs=3, batch_tokens=64, learning_rate=3e-3, warmup_fraction=0.1)


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """A target's head and embedding, and 24 samples whose states tell the next tokens."""
    folder = tmp_path_factory.mktemp("world")
    g = torch.Generator().manual_seed(0)
    embedding = torch.randn(V, H, generator=g)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding * 3,
        "model.norm.weight": torch.ones(H),
    }
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    target = TargetInfo(
        path=str(folder),
        fingerprint="f",
        model_type="llama",
        num_hidden_layers=8,
        hidden_size=H,
        vocab_size=V,
        intermediate_size=24,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        hidden_act="silu",
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_ids=[0],
    )
    samples = [make_sample(folder, embedding, number) for number in range(24)]
    mapping = folder / "mapping" / "map.safetensors"
    VocabMapping.from_target_ids(torch.arange(VD), V).save(mapping)
    return folder, target, samples, str(mapping)


def make_sample(folder: Path, embedding: torch.Tensor, number: int) -> Sample:
    g = torch.Generator().manual_seed(number)
    tokens = 12 + (number * 5) % 21
    ids = (torch.randint(0, V, (1,), generator=g) + 7 * torch.arange(tokens)) % V  # each token tells the next one
    last = embedding[ids.roll(-1)]
    states = [torch.randn(tokens, H, generator=g) * 0.1 + last, torch.randn(tokens, H, generator=g), last, last]
    bounds = (3, 7, 7, tokens - 1)
    key = StateKey("f", (2, 4, 5), "transformers", "float32", "bf16")
    path = folder / f"{number}.pt"
    torch.save(pack_sample(key, ids.tolist(), bounds, states, "1", "c"), path)
    return Sample(str(path), tokens, bounds, "validation" if number % 6 == 5 else "train")


def weights(folder):
    return safetensors.torch.load_file(folder / "model.safetensors")


def lines(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def run(world, folder, settings=SETTINGS, digest="d", stop=None):
    return training.train(job_of(world, folder, settings, digest), stop)


def job_of(world, folder, settings=SETTINGS, digest="d", samples=None):
    _, target, all_samples, mapping = world
    return Job(samples or all_samples, target, DRAFT, settings, mapping, str(folder), digest)


# --- order and schedule ------------------------------------------------------------------------------------------


def test_first_fit_decreasing():
    lengths = [5, 9, 3, 4, 6, 1]
    assert first_fit_decreasing(range(6), lengths, 10) == [[1, 5], [4, 3], [0, 2]]


def test_epochs_hold_every_sample_once_in_other_packs():
    rng = random.Random(0)
    lengths = [rng.randint(8, 200) for _ in range(700)]
    epochs = [epoch_packs(range(700), lengths, 512, f"1/{e}") for e in (0, 1)]
    for packs in epochs:
        assert sorted(i for pack in packs for i in pack) == list(range(700))
        assert all(sum(lengths[i] for i in pack) <= 512 for pack in packs)
        assert sum(lengths) / (512 * len(packs)) > 0.93
    assert set(map(frozenset, epochs[0])).isdisjoint(map(frozenset, epochs[1]))
    assert epochs[0] == epoch_packs(range(700), lengths, 512, "1/0")


def test_learning_rate():
    settings = TrainingConfig(learning_rate=1.0, warmup_fraction=0.1)
    assert [learning_rate(settings, p) for p in (0.0, 0.05, 0.1)] == pytest.approx([0.0, 0.5, 1.0])
    assert learning_rate(settings, 0.55) == pytest.approx(0.5)
    assert learning_rate(settings, 1.0) == pytest.approx(0.0)


def test_signals_are_noted_and_handlers_restored():
    before = signal.getsignal(signal.SIGTERM)
    with StopOnSignal() as stop:
        assert not stop(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop(1)
    assert signal.getsignal(signal.SIGTERM) is before


# --- the whole of it ---------------------------------------------------------------------------------------------


def test_it_learns_and_leaves_what_it_says(world, tmp_path):
    result = run(world, tmp_path, SETTINGS.model_copy(update={"epochs": 12, "learning_rate": 1e-2}))
    written = lines(tmp_path)
    validations = [line for line in written if line["kind"] == "validation"]
    assert validations[-1]["loss"] < 0.75 * validations[0]["loss"]
    assert validations[-1]["acceptance_length"] > validations[0]["acceptance_length"]
    assert "alpha_of_counted" in validations[-1]
    assert result == json.loads((tmp_path / "training.json").read_text())
    assert result["metrics"]["validation"]["loss"] == validations[-1]["loss"]
    steps = [line["step"] for line in written if line["kind"] == "train"]
    assert steps == list(range(1, result["steps"] + 1))
    assert [line["epoch"] for line in validations] == list(range(12))
    assert result["tokens"] == 12 * sum(s.n_tokens for s in world[2] if s.split == "train")
    model = DraftModel(DraftModelConfig.from_dict(result["draft_model"]))
    assert set(weights(tmp_path)) == set(model.trainable())
    model.load_state_dict(weights(tmp_path), strict=False)
    assert list((tmp_path / "tensorboard").iterdir()) and not list((tmp_path / "checkpoints").iterdir())


def test_resume_is_exact(world, tmp_path):
    """Stopped in the middle of an epoch, at its end and after it: the same bits as without a stop, and the same log."""
    whole = run(world, tmp_path / "whole")
    per_epoch = whole["steps"] // 3
    for step in (2, per_epoch, per_epoch + 1):
        with pytest.raises(Interrupted) as stopped:
            run(world, tmp_path / "parts", stop=lambda done, step=step: done == step)
        assert stopped.value.code == 130 and not (tmp_path / "parts" / "training.json").exists()
        with open(tmp_path / "parts" / "metrics.jsonl", "a") as file:  # what a crash after the checkpoint leaves
            file.write('{"kind": "train", "step": 99')
    resumed = run(world, tmp_path / "parts")
    assert resumed["weights_sha256"] == whole["weights_sha256"]
    assert resumed["metrics"] == whole["metrics"]
    assert lines(tmp_path / "parts") == lines(tmp_path / "whole")


def test_a_finished_training_is_returned_and_other_settings_train_anew(world, tmp_path):
    first = run(world, tmp_path)
    inode = (tmp_path / "model.safetensors").stat().st_ino
    assert run(world, tmp_path) == first
    assert (tmp_path / "model.safetensors").stat().st_ino == inode
    other = run(world, tmp_path, SETTINGS.model_copy(update={"seed": 1}), digest="e")
    assert other["weights_sha256"] != first["weights_sha256"]
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    again = run(world, tmp_path, SETTINGS.model_copy(update={"seed": 1}), digest="e")
    assert again["weights_sha256"] == other["weights_sha256"]


def test_killed_between_its_record_and_its_end_leaves_no_checkpoint(world, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "clear", lambda *_: None)
        first = run(world, tmp_path)
    assert list((tmp_path / "checkpoints").iterdir())
    assert run(world, tmp_path) == first
    assert not list((tmp_path / "checkpoints").iterdir())


def test_vanished_volume_is_not_replaced_by_a_folder(world, tmp_path):
    folder = tmp_path / "draft"
    with pytest.raises(UserError, match="draft: gone while it was in use"):
        run(world, folder, stop=lambda step: step == 2 and bool(folder.rename(tmp_path / "elsewhere")))
    assert not folder.exists()


def test_checkpoint_of_other_settings_is_not_resumed(world, tmp_path):
    with pytest.raises(Interrupted):
        run(world, tmp_path, stop=lambda step: step == 3)
    asked = []
    run(world, tmp_path, digest="other", stop=lambda step: asked.append(step) or False)
    assert asked[0] == 1


def test_two_processes_equal_one_that_accumulates(world, tmp_path):
    """Under torchrun with gloo each of two ranks takes one pack of a step; alone, one process takes both.

    The two are stopped by SIGTERM on the way and go on; no process is left. The last step of an epoch has one
    pack only: a rank without one joins.
    """
    samples = world[2]
    settings = SETTINGS.model_copy(update={"processes": 2, "epochs": 25})
    few = [s for s in samples if s.split == "train"][:12] + [s for s in samples if s.split == "validation"]
    assert len(epoch_packs(range(12), [s.n_tokens for s in few], settings.batch_tokens, "0/0")) == 5
    alone = training.train(job_of(world, tmp_path / "alone", settings, samples=few))
    two = tmp_path / "two"
    job = job_of(world, two, settings, samples=few)
    job.write(tmp_path / "job.json")
    assert Job.read(tmp_path / "job.json") == job
    before = psutil.Process().children(recursive=True)  # other tests' servers, kept for the session
    with pytest.raises(Interrupted), terminated_when(two / "metrics.jsonl"):
        training.launch(tmp_path / "job.json", settings)
    assert len(list((two / "checkpoints").glob("*.json"))) >= 1 and not (two / "training.json").exists()
    assert not set(psutil.Process().children(recursive=True)) - set(before)
    together = training.launch(tmp_path / "job.json", settings)
    assert (alone["processes"], together["processes"]) == (1, 2)
    assert together["steps"] == alone["steps"] == 25 * 3
    ours, theirs = weights(two), weights(tmp_path / "alone")
    for name, value in theirs.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5, msg=name)
    for one, other in zip(lines(two), lines(tmp_path / "alone"), strict=True):
        assert one["supervised"] == other["supervised"]
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-4)


def test_a_bad_file_of_one_rank_ends_all(world, tmp_path):
    """Named; the other rank, which waits for that rank's gradients, ends too."""
    bad = tmp_path / "bad.pt"
    bad.write_bytes(Path(world[2][0].path).read_bytes()[:-1])
    settings = SETTINGS.model_copy(update={"processes": 2})
    samples = [replace(world[2][0], path=str(bad), sha256="0" * 64) if i == 3 else s for i, s in enumerate(world[2])]
    samples[3] = replace(samples[3], split="train")
    job_of(world, tmp_path / "draft", settings, samples=samples).write(tmp_path / "job.json")
    before = psutil.Process().children(recursive=True)
    with pytest.raises(UserError, match=r"bad\.pt: its sha256 differs from the manifest's"):
        training.launch(tmp_path / "job.json", settings)
    assert not set(psutil.Process().children(recursive=True)) - set(before)


@contextmanager
def terminated_when(path):
    """SIGTERM to this process once `path` exists."""

    def watch():
        while not path.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield


# --- a step ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"recompute": True}, {"compute_dtype": "bfloat16", "loss": "lk"}], ids=str)
def test_a_step_waits_for_no_device(world, tmp_path, settings):
    """With tensors that have no values, so that whoever looks at one is found: what is planned stays on the host.

    Forward, backward, clipping, optimiser and what is reported of it.
    """
    trainer = Trainer(job_of(world, tmp_path, SETTINGS.model_copy(update=settings)), *alone())
    read = trainer.documents.packed(Pack([0, 1], [trainer.documents.read(i) for i in (0, 1)]), trainer.test, CPU)
    weights = trainer.test.step_weights(read[1].counted)
    with FakeTensorMode():
        batch, plan = (without_values(part) for part in read)
        plan = replace(plan, view=without_values(plan.view))
        take_values_away(trainer)
        weights = without_values(weights)
        for _ in range(2):
            figures = trainer._update([(batch, plan)], weights, 1e-3)
        assert figures.shape == (len(SUMS) * SETTINGS.ttt_steps + 1,)
        with pytest.raises(DataDependentOutputException):  # it can tell
            figures[0].item()


def alone():
    return Ranks.join(SETTINGS), lambda step: False


def without_values(value):
    """A tensor, or those of a dataclass."""
    if isinstance(value, torch.Tensor):
        return torch.empty(value.shape, dtype=value.dtype)
    tensors = {name: one for name, one in vars(value).items() if isinstance(one, torch.Tensor)}
    return replace(value, **{name: without_values(one) for name, one in tensors.items()})


def take_values_away(trainer):
    model, test = trainer.model, trainer.test
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(without_values(p), requires_grad=p.requires_grad))
    model._inv_freq, test.draft_rows = without_values(model._inv_freq), without_values(test.draft_rows)
    trainer.optimizer = torch.optim.AdamW(model.trainable().values(), fused=True)
    trainer.epoch_sums = trainer._no_sums()


def test_figures_are_read_a_step_later():
    heard = []
    deferred = Deferred(lambda figures, name: heard.append((name, figures.item())))
    deferred.put(torch.tensor(1.0), "first")
    assert heard == []
    deferred.put(torch.tensor(2.0), "second")
    assert heard == [("first", 1.0)]
    deferred.flush()
    deferred.flush()
    assert heard == [("first", 1.0), ("second", 2.0)]


def test_a_gradient_that_is_not_finite_changes_nothing_and_ends_it(world, tmp_path):
    """Weights and moments are those of the step before, though the step is only read a step later."""
    trainer = Trainer(job_of(world, tmp_path), *alone())
    read = [trainer.documents.packed(Pack([0], [trainer.documents.read(0)]), trainer.test, CPU)]
    weights = trainer.test.step_weights(read[0][1].counted)
    trainer._update(read, weights, 1e-3)
    before = [p.detach().clone() for p in trainer.spread.parameters.values()]
    moments = [m.clone() for one in trainer.optimizer.state.values() for m in one.values()]
    figures = trainer._update(read, weights * float("inf"), 1e-3)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.spread.parameters.values(), strict=True))
    after = [m for one in trainer.optimizer.state.values() for m in one.values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    with pytest.raises(UserError, match="training: step 2: the gradient is not finite; lower training.learning_rate"):
        trainer._report(figures, {"step": 2}, 1)


# --- figures -----------------------------------------------------------------------------------------------------


def test_figures_by_source(world, tmp_path):
    """Two files: what is told of each adds up to what is told of all."""
    samples = [replace(s, source=("chat.jsonl", "code.jsonl")[i % 4 == 1]) for i, s in enumerate(world[2])]
    result = training.train(job_of(world, tmp_path, samples=samples))
    for split in ("train", "validation"):
        figures = result["metrics"][split]
        by_source = figures["by_source"]
        assert set(by_source) == {"chat.jsonl", "code.jsonl"}
        slots = [by_source[name]["supervised"][0] for name in by_source]
        right = [by_source[name]["accuracy_of_supervised"][0] * n for name, n in zip(by_source, slots, strict=True)]
        assert sum(slots) == figures["supervised"][0] and min(slots) > 0
        assert sum(right) == pytest.approx(figures["accuracy_of_supervised"][0] * sum(slots))
    plain = training.train(job_of(world, tmp_path / "plain"))
    assert "by_source" not in plain["metrics"]["validation"]
    assert plain["weights_sha256"] == result["weights_sha256"]


def test_speed_is_told_beside_the_metrics(world, tmp_path):
    result = run(world, tmp_path)
    assert 0 < result["gemm_share"] < 1 and result["tokens_per_second"] > 0 and result["peak_memory"] > 2**26
    told = [json.loads(line) for line in (tmp_path / "speed.jsonl").read_text().splitlines()]
    assert [line["step"] for line in told][-1] == result["steps"] and len(told) >= SETTINGS.epochs
    assert all(0 < line["gemm_share"] < 1 and 0 <= line["loader_wait"] < 1 for line in told)


def test_floor_is_what_a_step_multiplies():
    """By torch's own counter of the draft's products, every token supervised and known, less what the floor leaves out.

    The projections' half that reads the embedding is made once a token instead of once a step, and the attention of the
    slot's own keys is no product.
    """
    config = DraftModelConfig(
        hidden_size=H, intermediate_size=24, num_attention_heads=2, num_key_value_heads=1, head_dim=8, vocab_size=V,
        draft_vocab_size=V, rms_norm_eps=1e-5, max_position_embeddings=64,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model, tokens, steps = DraftModel(config), 30, 3
    test = TrainingTimeTest(model, torch.randn(V, H), VocabMapping.from_target_ids(torch.arange(V), V), steps, 0.8)
    document = Batch.document(
        torch.arange(tokens), torch.randn(tokens, 3 * H), torch.randn(tokens, H), torch.zeros(tokens).long()
    )
    batch = test.with_target_tokens(document)
    _, sums = test(batch)
    slots = sums["supervised"].tolist()
    assert slots == sums["counted"].tolist() == [28, 27, 26]
    with FlopCounterMode(display=False) as counter:
        test(batch)[0].backward()
    by_kernel = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in by_kernel.items() if op in (torch.ops.aten.mm, torch.ops.aten.addmm))
    assert products == pytest.approx(speed.floor_flop(config, tokens, slots, slots), rel=0.25)


# --- bad input ---------------------------------------------------------------------------------------------------


def changed(world, tmp_path, **values):
    samples = world[2]
    bad = Sample(**{**vars(samples[0]), **values})
    return training.train(job_of(world, tmp_path, samples=[bad, *samples[1:]]))


def test_samples_that_do_not_fit_are_refused(world, tmp_path):
    with pytest.raises(UserError, match=r"0\.pt: 12 tokens and 4 states of 16 instead of 13 tokens and 4 states of 16"):
        changed(world, tmp_path, n_tokens=13)
    with pytest.raises(UserError, match=r"training\.batch_tokens: 64 cannot hold"):
        changed(world, tmp_path, n_tokens=65)
    with pytest.raises(UserError, match=r"0\.pt: its sha256 differs"):
        changed(world, tmp_path, sha256="0" * 64)
    stored = torch.load(world[2][0].path)
    stored["hidden_states"][1][4, 2] = float("nan")
    torch.save(stored, tmp_path / "nan.pt")
    with pytest.raises(UserError, match=r"nan\.pt: layer . holds values that are not finite"):
        changed(world, tmp_path, path=str(tmp_path / "nan.pt"))
    with pytest.raises(UserError, match="no sample is in the split 'train'"):
        held_out = [s for s in world[2] if s.split == "validation"]
        training.train(job_of(world, tmp_path, samples=held_out))
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match=r"training\.gpus: 1 asked for"):
            run(world, tmp_path, SETTINGS.model_copy(update={"gpus": 1}))
