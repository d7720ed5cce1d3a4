"""Whole workflows on what others have made: a dataset of another tool, in place, and the store of another project."""

import json
import os
import shutil

import pandas as pd
import torch
from workflow import TINY_SAMPLES

from eagle3lib.hidden_states import load_sample


def test_exported_dataset_is_imported_in_place_and_trained_on(workspace, form="speculators"):
    states = workspace.result("tiny/talk/*/hidden_states").parent
    exported = workspace.ask(
        "export-dataset", str(states.relative_to(workspace.run_folder)), "../theirs", "--format", form
    )
    assert exported.returncode == 0 and f"{TINY_SAMPLES} samples in ../theirs" in exported.stdout, exported.stderr
    theirs = {p: p.stat() for p in (workspace.folder / "theirs").rglob("*") if p.is_file()}
    own = {load_sample(path)["meta"]["sample_id"]: path for path in workspace.states().values()}
    bad = next(p for p in sorted(theirs) if p.suffix in (".ckpt", ".safetensors"))
    os.truncate(bad, 1000)
    workspace.clear_logs()
    values = workspace.config
    values["dataset"] = {**values["dataset"], "name": "theirs", "imported": {"format": form, "folder": "../theirs"}}
    del values["dataset"]["conversations"]
    workspace.config = {**values, "regenerate": {}}
    workspace.snakemake()
    rejected = json.loads(workspace.result("tiny/theirs/rejected.jsonl").read_text())
    assert rejected["reason"] == "bad_file" and rejected["file"].endswith(bad.name)
    table = pd.read_parquet(workspace.result("tiny/theirs/*/hidden_states.parquet"))
    assert len(table) == TINY_SAMPLES - 1 and table["bytes"].max() < 12_000
    folder = workspace.result("tiny/theirs/*/hidden_states")
    for sample, path in zip(table["sample_id"], table["path"], strict=True):
        here, there = load_sample(folder / path), load_sample(own[sample])
        for a, b in zip(here["hidden_states"], there["hidden_states"], strict=True):
            assert (a.float() - b.float()).norm() <= 0.01 * b.float().norm()
        assert torch.equal(here["loss_mask"], there["loss_mask"])
    probe = json.loads(
        next(workspace.run_folder.glob(f"results/store/hidden_states/*/probe-imported-{form}.json")).read_text()
    )
    # The random target's final norm has weights of 1: what is exported as from before it reads as from after it, too.
    assert max(probe["compared"].values()) < 0.05
    assert set(probe["compared"]) == {"2", "4", "5", "last"}
    summary = json.loads(workspace.result("summary.json").read_text())["runs"][0]
    assert summary["samples"] == TINY_SAMPLES - 1 and summary["dataset"] == "theirs"
    assert all(
        (p.stat().st_mtime_ns, p.stat().st_ino) == (s.st_mtime_ns, s.st_ino) for p, s in theirs.items() if p != bad
    )
    assert not workspace.planned()
    traced = workspace.ask("trace", f"{table['file'][0]}:0").stdout
    assert "unchanged since" in traced and f"imported from {form}" in traced


def test_second_project_takes_the_states_of_the_first(workspace):
    theirs = workspace.folder / "first"
    (workspace.run_folder / "results").rename(theirs)
    shutil.rmtree(workspace.run_folder / ".snakemake")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_nlink) for p in theirs.glob("store/hidden_states/*/*/*")}
    workspace.set("storage.shared_stores", ["../first/store"])
    workspace.clear_logs()
    workspace.snakemake("extract")
    assert workspace.computed() == 0 and len(workspace.states()) == TINY_SAMPLES
    assert all(path.is_symlink() for path in workspace.states().values())
    assert "nothing missing" in workspace.ask("missing").stdout
    assert not workspace.planned("extract")
    damaged = next(workspace.run_folder.glob("results/store/hidden_states/*/*/*.pt")).resolve()
    data = bytearray(damaged.read_bytes())
    data[len(data) // 2] ^= 1
    damaged.write_bytes(data)
    assert "1 bad" in workspace.ask("verify").stdout
    workspace.clear_logs()
    workspace.snakemake("extract")
    assert workspace.computed() == 1 and damaged.read_bytes() == bytes(data)
    assert {p.name for p in theirs.glob("store/hidden_states/*/*/*.pt")} == {
        p.name for p in before if p.suffix == ".pt"
    }
    assert not list(theirs.glob("store/quarantine/*/*.pt"))
    (theirs / "store").rename(theirs / "away")
    done = workspace.snakemake("extract", check=False)
    assert "storage.shared_stores: ../first/store has no hidden_states/" in done.stdout + done.stderr
    workspace.set("storage.shared_stores", [])
    workspace.clear_logs()
    workspace.snakemake("extract")
    assert workspace.computed() == TINY_SAMPLES - 1 and workspace.ask("verify").returncode == 0
