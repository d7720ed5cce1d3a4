"""Change X: exactly these rules run again, and exactly these samples are computed anew (design.md section 3)."""

import json
import os
import re
import shutil
from collections import Counter
from dataclasses import asdict, replace

import pandas as pd
import pytest
from safetensors.torch import load_file, save_file
from tiny import make_target
from workflow import ROOT, TINY_SAMPLES, TINY_SHARD, TRAINING, Workspace, job_counts

from eagle3lib.targets import load_info

N, K = TINY_SAMPLES, TINY_SHARD
EXTRACT = ["extract_hidden_states", "extract_tail_2", "extract_tail_1"]
ALL_EXTRACTION = {
    "plan_storage": 1,
    "adopt_hidden_states": 1,
    "extract_hidden_states": 1,
    "extract_tail_2": 1,
    "extract_tail_1": 1,
}
# A new key is a new folder: everything below it is made there.
NEW_KEY = {**ALL_EXTRACTION, "index_hidden_states": 1, "build_vocab_mapping": 1, **TRAINING}


def edit(path, old, new):
    text = path.read_text()
    assert old in text, f"{old!r} is not in {path}"
    path.write_text(text.replace(old, new, 1))


def test_finished_run_has_everything(finished):
    assert len(finished.states()) == N
    assert finished.computed() == N
    summary = json.loads(finished.result("summary.json").read_text())["runs"][0]
    assert summary["samples"] == N
    assert summary["acceptance_length"] is None or summary["acceptance_length"] >= 1
    assert len(json.loads(finished.result("*/*/*/sample_lengths.json").read_text())) == N
    assert json.loads(finished.result("*/*/*/*/gpu_release.json").read_text())["nvml"]
    assert json.loads(finished.result("*/*/*/*/preflight.json").read_text())["rehearsal"]["loss"] > 0
    assert not list(finished.run_folder.rglob("*.part"))


def test_second_run_has_nothing_to_do(workspace):
    """In a copy, that is after a move of all files to another path."""
    done = workspace.snakemake()
    assert "Nothing to be done" in done.stdout + done.stderr


# What is changed -> the rules of a dry run. A checkpoint that runs again hides what follows it.
def comment_in_a_module(w):
    path = w.code / "eagle3lib/training_time_test.py"
    path.write_text(f"# a comment\n{path.read_text()}\n\n# another one\n")


def docstring_of_a_module(w):
    edit(w.code / "eagle3lib/extraction.py", '"""One shard', '"""A shard')


def message_of_a_script(w):
    edit(w.code / "scripts/train_draft_model.py", '"""', '"""Well now. ')


def touch_everything(w):
    for path in w.run_folder.rglob("results/**/*"):
        os.utime(path)
    for path in (w.folder / "inputs").rglob("*"):
        os.utime(path)


def code_of_training(w):
    path = w.code / "eagle3lib/training_time_test.py"
    edit(path, "step_decay ** torch.arange(steps", "(step_decay + 0) ** torch.arange(steps")


def code_of_extraction(w):
    edit(w.code / "eagle3lib/extraction.py", "TOKENS_IN_FLIGHT = 8192", "TOKENS_IN_FLIGHT = 8191")


def code_of_a_figure(w):
    edit(w.code / "eagle3lib/plots.py", '"lines.linewidth": 1.6', '"lines.linewidth": 1.5')


def code_of_a_page(w):
    edit(w.code / "eagle3lib/tables.py", "font: 15px", "font: 14px")


def target_weights(w):
    path = w.folder / "inputs/target/model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] *= 1.01
    save_file(tensors, path, metadata={"format": "pt"})


def ask_a_set(w):
    """Two questions of two turns."""
    rows = [{"turns": ["the quick fox", "and then?"]}, {"turns": ["a lazy dog", "an hour"]}]
    (w.folder / "inputs/questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    w.set("acceptance.sets", ["own:../inputs/questions.jsonl"])


CHANGES = [
    (comment_in_a_module, {}),
    (docstring_of_a_module, {}),
    (message_of_a_script, {}),
    (touch_everything, {}),
    (lambda w: w.set("engine.batch_tokens", 512), {}),
    (lambda w: w.set("training.checkpoint_minutes", 1), {}),
    (lambda w: w.set("storage.limit_bytes", 10**12), {}),
    (lambda w: w.set("training.learning_rate", 2e-4), TRAINING),
    (lambda w: w.set("training.ttt_steps", 3), TRAINING),
    (code_of_training, TRAINING),
    (code_of_a_figure, {"plot_results": 1, "summarize": 1}),
    (code_of_a_page, {"plot_results": 1, "summarize": 1}),
    (lambda w: w.set("acceptance.draft_steps", 3), {"measure_acceptance": 1, "plot_results": 1, "summarize": 1}),
    (ask_a_set, {"measure_acceptance": 1, "plot_results": 1, "summarize": 1}),
    (lambda w: w.set("hidden_states.aux_layer_ids", [1, 3, 6]), NEW_KEY),
    (lambda w: w.set("dataset.shard_size", 5), {"shard_samples": 1}),
    (lambda w: w.set("dataset.seed", 1), {"shard_samples": 1}),
]
IDS = [
    "a comment", "a docstring", "a script's docstring", "touch of all files", "batch size of the engine",
    "checkpoint interval", "storage limit", "learning rate", "ttt_steps", "code of the trainer",
    "a figure", "a page", "draft_steps", "a question set", "aux layer ids", "K", "seed of the split",
]  # fmt: skip


@pytest.mark.parametrize(("change", "expected"), CHANGES, ids=IDS)
def test_what_runs_again(workspace, change, expected):
    change(workspace)
    planned = workspace.planned()
    if "shard_samples" in expected:
        assert planned["shard_samples"] == 1 and "prepare_target" not in planned
    else:
        assert planned == Counter(expected)


def run_extract(workspace):
    workspace.clear_logs()
    workspace.snakemake("extract")
    return workspace.computed()


def test_deleted_link_is_linked_again(workspace):
    state = workspace.states()["00000/0002.pt"]
    inode = state.stat().st_ino
    state.unlink()
    planned = workspace.planned()
    assert planned["extract_hidden_states"] == 1
    assert run_extract(workspace) == 0
    assert state.stat().st_ino == inode


def test_drafts_are_compared_on_the_same_questions(workspace):
    """The draft with itself under another path, then one more: only the comparison runs for that."""
    export = workspace.result("tiny/talk/*/draft/export")
    shutil.copytree(export, workspace.folder / "inputs/other")
    ask_a_set(workspace)
    workspace.set("acceptance.temperatures", [0.0, 1.0])
    workspace.set("acceptance.drafts", ["../inputs/other"])
    workspace.snakemake()
    folder = export.parent
    measured = json.loads((folder / "acceptance.json").read_text())["bench"]
    assert [(row["temperature"], len(row["replies"])) for row in measured["rows"]] == [(0.0, 4), (1.0, 4)]
    comparison = json.loads((folder / "comparison.json").read_text())
    assert [(row["draft"], row["set"]) for row in comparison["rows"]][::2] == [
        ("draft", "own:questions"), ("../inputs/other", "own:questions"),
    ]  # fmt: skip
    assert {one["difference"] for one in comparison["differences"]} <= {0.0, None}
    assert "| ../inputs/other | draft | own:questions | 0 |" in (folder / "comparison.md").read_text()
    assert "| draft | own:questions | 1 |" in workspace.result("summary.md").read_text()
    summary = json.loads(workspace.result("summary.json").read_text())["runs"][0]
    assert [row["set"] for row in summary["bench"]["rows"]] == ["own:questions"] * 2
    again = workspace.snakemake()
    assert "Nothing to be done" in again.stdout + again.stderr
    workspace.set("acceptance.drafts", ["../inputs/other", str(export.relative_to(workspace.run_folder))])
    assert workspace.planned() == Counter({"compare_drafts": 1})
    target = workspace.folder / "inputs/target"
    arguments = ["--sets", "own:../inputs/questions.jsonl", "--max-new-tokens", "8", "--draft-steps", "2"]
    done = workspace.ask("bench", str(target), "../inputs/other", *arguments, "--out", "bench.json")
    assert done.returncode == 0, done.stderr
    assert "draft_steps 2, topk 1, draft_tokens 3" in done.stdout
    asked = json.loads((workspace.run_folder / "bench.json").read_text())["measured"][0]["rows"][0]
    assert asked["replies"] == measured["rows"][0]["replies"]


def test_lost_shard_file_is_named_with_the_remedy(workspace):
    path = workspace.result("tiny/talk/shards/00000.jsonl")
    path.unlink()
    workspace.states()["00000/0002.pt"].unlink()
    done = workspace.snakemake("--dry-run", check=False)
    assert done.returncode
    assert "shards/00000.jsonl: lost; delete results/tiny/talk/samples.parquet" in done.stdout + done.stderr


def test_wrong_config_is_one_line_with_the_key(workspace):
    workspace.set("training.learnig_rate", 1e-4)
    done = workspace.snakemake(check=False)
    message = done.stdout + done.stderr
    assert done.returncode and "config: training.learnig_rate: unknown key; did you mean 'learning_rate'?" in message
    assert len(workspace.states()) == N


def test_missing_conversations_are_named(workspace):
    workspace.set("dataset.conversations", ["no/such.jsonl"])
    done = workspace.snakemake(check=False)
    assert done.returncode and "no/such.jsonl: no such file; check dataset.conversations" in done.stdout + done.stderr


def test_fewer_gpus_than_asked_for_stops(workspace):
    workspace.set("training.gpus", 8)
    workspace.result("tiny/talk/*/draft/training/training.json").unlink()
    done = workspace.snakemake("train", "--resources", "gpu=4", check=False)
    assert done.returncode and "training.gpus: 8 GPUs wanted, 4 granted" in done.stdout + done.stderr


def test_no_gpu_is_freed_for_a_training_that_cannot_start(workspace, nvml, monkeypatch):
    for name in ("NVML_STUB", "LD_LIBRARY_PATH"):
        monkeypatch.setenv(name, nvml.environment[name])
    nvml.say([{}])
    workspace.clear_logs()
    workspace.set("training.gpus", 2)
    workspace.set("training.learning_rate", 3e-4)
    done = workspace.snakemake("--resources", "gpu=2", check=False)
    assert done.returncode and "training.gpus: 1 of 1 GPUs are free, 2 needed" in done.stdout + done.stderr
    assert not (workspace.run_folder / "logs/release_gpus").exists()


def test_a_draft_goes_on_from_another(workspace):
    """By its content: a moved draft trains nothing anew, an edited one does; other aux layers are refused unplanned."""
    export = workspace.result("tiny/talk/*/draft/export")
    shutil.copytree(export, workspace.folder / "initial")
    workspace.set("draft", {"name": "warm", "initial": "../initial"})
    workspace.snakemake("train")
    warm = workspace.result("tiny/talk/*/warm/training/training.json")
    assert json.loads(warm.read_text())["initial"]
    maps = [load_file(f.parent / "vocab_mapping.safetensors")["t2d"] for f in (export, warm.parent)]
    assert maps[0].equal(maps[1])
    assert workspace.planned("train") == {}
    (workspace.folder / "initial").rename(workspace.folder / "moved")
    workspace.set("draft.initial", "../moved")
    assert workspace.planned("train") == {}
    tensors = load_file(workspace.folder / "moved/model.safetensors")
    save_file({**tensors, "norm.weight": tensors["norm.weight"] * 2}, workspace.folder / "moved/model.safetensors")
    assert set(workspace.planned("train")) >= {"build_vocab_mapping", "train_draft_model"}
    workspace.set("hidden_states.aux_layer_ids", [1, 4, 5])
    done = workspace.snakemake("--dry-run", check=False)
    assert "draft.initial: it was trained on the aux layers [2, 4, 5], the states are of [1, 4, 5]" in done.stdout


def test_plan_of_the_headline_case_without_its_weights(tmp_path):

    workspace = Workspace(tmp_path, {})
    shutil.copy(ROOT / "config/kimi-k2.5.yaml", tmp_path / "config.yaml")
    planned = workspace.planned()
    assert planned["shard_samples"] == 1 and planned["prepare_target"] == 1
    assert not workspace.states()


def test_plan_of_the_headline_case_in_full(tmp_path):
    """37,312 samples that are sharded already: the dry run lists every missing one of them."""
    workspace = Workspace(tmp_path, {})
    shutil.copy(ROOT / "config/kimi-k2.5.yaml", tmp_path / "config.yaml")
    workspace.set("regenerate", {"enabled": False})
    workspace.set("dataset.conversations", ["conversations.jsonl"])
    results = workspace.run_folder / "results"
    dataset = results / "kimi-k2.5/conversations"
    (dataset / "shards").mkdir(parents=True)
    (results / "targets/kimi-k2.5").mkdir(parents=True)
    target = replace(load_info(make_target(tmp_path / "target")), hidden_size=7168)
    shards = {f"{number:05d}": {"sha256": "0", "n_samples": 64, "n_tokens": 150_000} for number in range(583)}
    rows = [(f"{shard}{slot}", shard, slot, "train", 2353, [1, 2353]) for shard in shards for slot in range(64)]
    columns = ["sample_id", "shard", "slot", "split", "n_tokens", "reply_bounds"]
    contents = {
        workspace.run_folder / "conversations.jsonl": "",
        results / "targets/kimi-k2.5/target.json": json.dumps(asdict(target)),
        **{dataset / f"shards/{shard}.jsonl": "" for shard in shards},
        dataset / "rejected.jsonl": "",
        dataset / "mixture.json": "{}",
        dataset / "shards.json": json.dumps(shards),
    }
    for path, text in contents.items():
        path.write_text(text)
    pd.DataFrame(rows, columns=columns).to_parquet(dataset / "samples.parquet")
    done = workspace.snakemake("--dry-run")
    planned = job_counts(done.stdout + done.stderr)
    assert planned["extract_hidden_states"] == 583 and "shard_samples" not in planned
    assert planned["train_draft_model"] == planned["measure_acceptance"] == planned["plan_storage"] == 1
    assert "hidden_states/00582/0063.pt" in done.stdout + done.stderr
    assert "shards 00000 to 00582: all 37,312 missing" in done.stderr
    assert re.search(r"to compute: 37,312 samples, 87,795,136 tokens, .* \(4\.5. TiB\), no rate", done.stderr)
