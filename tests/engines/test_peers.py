"""Datasets of ours in the loaders of speculators 0.9.0 and SpecForge 0.2.0, and a table that `datasets` wrote in ours.

Needs `make venv-peers`.
"""

import json
import os
import subprocess
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import make_target

from eagle3lib import dataset_export, in_place
from eagle3lib.config import ImportedConfig
from eagle3lib.hidden_states import StateKey, load_sample, pack_sample, sample_id
from eagle3lib.targets import load_info, norm_factor

PYTHON = Path(".venv-peers/bin/python").absolute()
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="no .venv-peers; `make venv-peers`")
KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")
ROWS = 5

SPECULATORS = """
import sys, torch
from speculators.train.data import ArrowDataset
folder, out, target = sys.argv[1:]
train, held_out = (ArrowDataset(512, folder, on_missing="raise", train_ratio=0.8, split=s) for s in ("train", "val"))
from transformers import AutoModelForCausalLM
norm = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).model.norm
rows = [{k: v for k, v in one.items()} for part in (train, held_out) for one in (part[i] for i in range(len(part)))]
for row in rows:
    row["normed"] = norm(row["verifier_last_hidden_states"].float()).detach()
torch.save({"rows": rows, "sizes": [len(train), len(held_out)], "lengths": list(train.approx_lengths)}, out)
"""

SPECFORGE = """
import sys, torch
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from specforge.runtime.data_plane.feature_store import load_feature_file
folder, out, _ = sys.argv[1:]
refs = OfflineManifestReader(folder, validate_files=True).read()
from specforge.data.preprocessing import OfflineEagle3Dataset, list_local_files
dataset = OfflineEagle3Dataset(list_local_files(folder), max_len=512)
torch.save({"rows": [dataset[i] for i in range(len(dataset))], "tokens": [ref.num_tokens for ref in refs],
            "files": [ref.feature_store_uri for ref in refs]}, out)
"""

TABLE = """
import json, sys
from datasets import Dataset
rows = json.loads(open(sys.argv[1]).read())
Dataset.from_list(rows).save_to_disk(sys.argv[2])
"""


@pytest.fixture
def dataset(tmp_path):
    """results/t/d/{key} with ROWS samples, the third held out; the target with a norm of its own."""
    from transformers import LlamaForCausalLM

    folder = make_target(tmp_path / "target")
    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(32, generator=torch.Generator().manual_seed(3)) * 2 + 0.2)
    model.save_pretrained(folder)
    target, generator = load_info(folder, "fingerprint"), torch.Generator().manual_seed(1)
    states = tmp_path / "results/t/d" / KEY.short
    rows = []
    for number in range(ROWS):
        ids = torch.randint(5, 320, (10 + number,), generator=generator).tolist()
        aux = [torch.randn(len(ids), 32, generator=generator) * 3 for _ in range(3)]
        raw = torch.randn(len(ids), 32, generator=generator) * 5
        last = in_place.rms_norm(raw, norm_factor(target), target.rms_norm_eps)
        path = states / "hidden_states/00000" / f"{number:04d}.pt"
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(pack_sample(KEY, ids, [3, 6, 8, len(ids)], [*aux, last], "5", "code"), path)
        split = "validation" if number == 2 else "train"
        rows.append((sample_id(ids), f"00000/{path.name}", len(ids), [3, 6, 8, len(ids)], split))
    columns = ["sample_id", "path", "n_tokens", "reply_bounds", "split"]
    pd.DataFrame(rows, columns=columns).to_parquet(states / "hidden_states.parquet")
    (states / "data_config.json").write_text(json.dumps({"storage_format": "bf16"}))
    return states, target


def theirs(script: str, *arguments) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    command = [str(PYTHON), "-c", script, *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def expected(states: Path) -> list[dict]:
    """The samples in the order of the export: those to train on, then those held out."""
    order = [0, 1, 3, 4, 2]
    return [load_sample(states / f"hidden_states/00000/{number:04d}.pt") for number in order]


def test_speculators_reads_what_we_export(dataset, tmp_path):
    states, target = dataset
    counts = dataset_export.export(states, target, tmp_path / "out", "speculators", 2)
    assert counts == {"samples": ROWS, "train": 4, "validation": 1}
    theirs(SPECULATORS, tmp_path / "out", tmp_path / "read.pt", target.path)
    read = torch.load(tmp_path / "read.pt", weights_only=False)
    assert read["sizes"] == [4, 1] and read["lengths"] == [10, 11, 13, 14]
    for row, ours in zip(read["rows"], expected(states), strict=True):
        *aux, last = ours["hidden_states"]
        assert torch.equal(row["input_ids"], ours["input_ids"]) and torch.equal(row["loss_mask"], ours["loss_mask"])
        assert torch.equal(row["hidden_states"], torch.cat(aux, -1))
        # What its trainer compares with: the target's own norm on top, in its own arithmetic.
        assert (row["normed"] - last.float()).norm() < 0.01 * last.float().norm()


def test_specforge_reads_what_we_export(dataset, tmp_path):
    states, target = dataset
    dataset_export.export(states, target, tmp_path / "out", "specforge", 2)
    theirs(SPECFORGE, tmp_path / "out", tmp_path / "read.pt", target.path)
    read = torch.load(tmp_path / "read.pt", weights_only=False)
    assert read["tokens"] == [10, 11, 13, 14, 12]
    for row, ours in zip(read["rows"], expected(states), strict=True):
        *aux, last = ours["hidden_states"]
        assert torch.equal(row["input_ids"][0], ours["input_ids"])
        assert torch.equal(row["hidden_state"][0], torch.cat(aux, -1)) and torch.equal(row["target"][0], last)
        assert torch.equal(row["loss_mask"][0, :-1], ours["loss_mask"][:-1])  # it takes the last token's away


def test_table_of_datasets_is_read(dataset, tmp_path):
    """As speculators' data preparation saves it."""
    states, target = dataset
    dataset_export.export(states, target, tmp_path / "out", "speculators", 1)
    samples = expected(states)
    rows = [
        {"input_ids": s["input_ids"].tolist(), "loss_mask": s["loss_mask"].tolist(), "seq_len": len(s["input_ids"])}
        for s in samples
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    for path in (tmp_path / "out").iterdir():
        if path.is_file():
            path.unlink()
    theirs(TABLE, tmp_path / "rows.json", tmp_path / "table")
    for path in (tmp_path / "table").iterdir():
        path.rename(tmp_path / "out" / path.name)
    imported = ImportedConfig(format="speculators", folder=str(tmp_path / "out"))
    counts = in_place.scan(imported, 3, tmp_path / "progress", tmp_path / "lines", 2)
    assert (counts["files"], counts["bad"]) == (ROWS, 0)
    for line, ours in zip(in_place.imported_lines(tmp_path / "lines"), samples, strict=True):
        assert line["input_ids"] == ours["input_ids"].tolist()
        assert line["reply_bounds"] == [3, 6, 8, len(line["input_ids"])]
