"""A shard's job: right values, only what is missing, the same manifest whatever was missing."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch
from tiny import make_target
from transformers import AutoModelForCausalLM

from eagle3lib import extraction, hidden_states, ledger, overview, targets
from eagle3lib.config import EngineConfig, StorageConfig
from eagle3lib.engines import open_engine
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey
from eagle3lib.lineage import file_sha256
from eagle3lib.store import Store

KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")
ROOMY = StorageConfig(reserve_bytes=0)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def shard(tmp_path):
    generator = torch.Generator().manual_seed(0)
    lines = []
    for length in (12, 30, 7, 30):
        ids = torch.randint(3, 300, (length,), generator=generator).tolist()
        lines.append(
            {"sample_id": hidden_states.sample_id(ids), "input_ids": ids, "reply_bounds": [4, length], "origin": {}}
        )
    path = tmp_path / "00000.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Counting:
    """A real engine; remembers what it was asked."""

    def __init__(self, folder):
        self.folder, self.asked, self.opened = folder, [], 0

    def __call__(self):
        self.opened += 1
        engine = open_engine(EngineConfig(), self.folder)
        extract = engine.extract
        engine.extract = lambda ids, layers: self.asked.extend(map(tuple, ids)) or extract(ids, layers)
        engine.probe = lambda layers: {"layers": layers}  # its own tests are in test_engine.py
        return engine


def run(shard, target, engine=None, storage=ROOMY):
    root = shard.parent
    outputs = [root / "out" / f"{slot:04d}.pt" for slot in range(4)]
    manifest = root / "out" / "manifest.json"
    engine = engine or Counting(target)
    store = Store(root / "store", KEY)
    info = targets.load_info(target)
    counts = extraction.extract_shard(shard, outputs, manifest, store, engine, "code", info, storage, "t/d")
    return outputs, manifest, engine, counts


def test_states_are_those_of_transformers(shard, target):
    outputs, *_ = run(shard, target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    for output, line in zip(outputs, shard.read_text().splitlines(), strict=True):
        row = json.loads(line)
        sample = hidden_states.load_sample(output)
        assert sample["input_ids"].tolist() == row["input_ids"]
        with torch.inference_mode():
            expected = model.model(torch.tensor([row["input_ids"]]), output_hidden_states=True)
        wanted = [expected.hidden_states[k][0] for k in KEY.aux_layer_ids] + [expected.last_hidden_state[0]]
        for state, reference in zip(sample["hidden_states"], wanted, strict=True):
            torch.testing.assert_close(state.float(), reference, rtol=2**-7, atol=1e-4)


def test_second_run_opens_no_engine_and_changes_nothing(shard, target):
    outputs, manifest, _, counts = run(shard, target)
    assert counts == {"found": 0, "converted": 0, "computed": 4}
    before = [(p.stat().st_ino, file_sha256(p)) for p in outputs], manifest.read_bytes()
    for output in outputs:
        output.unlink()
    _, _, engine, counts = run(shard, target)
    assert (engine.opened, counts) == (0, {"found": 4, "converted": 0, "computed": 0})
    assert ([(p.stat().st_ino, file_sha256(p)) for p in outputs], manifest.read_bytes()) == before


def test_only_the_missing_samples_are_computed(shard, target):
    outputs, manifest, _, _ = run(shard, target)
    before = manifest.read_bytes()
    kept = outputs[0].stat().st_ino
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    store = Store(shard.parent / "store", KEY)
    for slot in (1, 3):
        store.path(rows[slot]["sample_id"]).unlink()
        outputs[slot].unlink()
    _, _, engine, counts = run(shard, target)
    assert counts == {"found": 2, "converted": 0, "computed": 2}
    assert sorted(engine.asked) == sorted(tuple(rows[slot]["input_ids"]) for slot in (1, 3))
    assert outputs[0].stat().st_ino == kept
    assert manifest.read_bytes() == before


def test_killed_in_the_middle_keeps_what_was_finished(shard, target, monkeypatch):
    monkeypatch.setattr(extraction, "TOKENS_IN_FLIGHT", 1)
    publish, done = Store.publish, []

    def dies_at_the_third(self, content):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(content["meta"]["sample_id"])
        return publish(self, content)

    monkeypatch.setattr(Store, "publish", dies_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        run(shard, target)
    monkeypatch.undo()
    _, _, engine, counts = run(shard, target)
    assert counts == {"found": 2, "converted": 0, "computed": 2}
    assert not {hidden_states.sample_id(ids) for ids in engine.asked} & set(done)


def test_orphan_that_still_writes_is_waited_for(shard, target):
    """A second job of the same shard starts while the first is at work: nothing is computed twice."""
    script = f"""
import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})
from pathlib import Path
from test_extraction import run
_, _, engine, counts = run(Path({str(shard)!r}), {str(target)!r})
print(counts["computed"])
"""
    jobs = [subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    computed = [int(job.communicate(timeout=120)[0].splitlines()[-1]) for job in jobs]
    assert sorted(computed) == [0, 4]


def test_leftover_part_files_are_removed(shard, target):
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    store = Store(shard.parent / "store", KEY)
    part = store.path(rows[0]["sample_id"]).with_name(f"{rows[0]['sample_id']}.host.1.part")
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half")
    os.utime(part, (1, 1))  # of another host, and long ago
    run(shard, target)
    assert not list(shard.parent.rglob("*.part"))


def test_no_disk_is_refused_before_the_first_byte(shard, target):
    with pytest.raises(UserError, match=r"no disk: [\d,]+ bytes .* free less storage.reserve_bytes"):
        run(shard, target, storage=StorageConfig(reserve_bytes=2**60))
    assert not list(shard.parent.rglob("*.pt"))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda line: line[:40], "00000.jsonl:2: not a sample"),
        (
            lambda line: line.replace('"input_ids": [', '"input_ids": [9, '),
            "00000.jsonl:2: .*do not match its sample_id",
        ),
        (lambda line: "", "00000.jsonl: 3 samples, 4 expected"),
    ],
)
def test_broken_shard_is_named(shard, target, edit, message):
    lines = shard.read_text().splitlines()
    lines[1] = edit(lines[1])
    shard.write_text("".join(f"{line}\n" for line in lines if line))
    with pytest.raises(UserError, match=message):
        run(shard, target)


def table():
    rows = [("00000", 0, "a", 5), ("00000", 1, "b", 7), ("tail_1", 0, "c", 9)]
    frame = pd.DataFrame(rows, columns=["shard", "slot", "sample_id", "n_tokens"])
    return frame.assign(n_supervised=3, split=["train", "validation", "train"])


def manifests(folder, change=None):
    shards = {"00000": [("a", 5), ("b", 7)], "tail_1": [("c", 9)]}
    paths = {}
    for shard, samples in shards.items():
        rows = [
            {"slot": slot, "n_tokens": n, "sample_id": s, "bytes": 100 * n, "sha256": s * 64}
            for slot, (s, n) in enumerate(samples)
        ]
        if change and shard == "00000":
            rows[1] |= change
        paths[shard] = folder / shard / "manifest.json"
        paths[shard].parent.mkdir()
        paths[shard].write_text(json.dumps({"key": "k", "samples": rows}))
    return paths


def test_index_comes_from_manifests_alone(tmp_path):
    lengths, frame = extraction.index(manifests(tmp_path), table())
    assert lengths == {"00000/0000.pt": 5, "00000/0001.pt": 7, "tail_1/0000.pt": 9}
    assert frame["bytes"].tolist() == [500, 700, 900]
    assert not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("change", [{"sample_id": "z"}, {"n_tokens": 8}])
def test_index_refuses_a_manifest_of_other_samples(tmp_path, change):
    with pytest.raises(UserError, match=r"00000/manifest.json: slot 1 is not the sample"):
        extraction.index(manifests(tmp_path, change), table())


def test_one_sample_without_usable_states_costs_no_other(shard, target, monkeypatch):
    pack = hidden_states.pack_sample

    def fails_for_seven(key, ids, *rest):
        if len(ids) == 7:
            raise ValueError("layer 2 holds values that are not finite")
        return pack(key, ids, *rest)

    monkeypatch.setattr(hidden_states, "pack_sample", fails_for_seven)
    with pytest.raises(UserError, match=r"1 samples have no usable states; the others are kept\. .*layer 2"):
        run(shard, target)
    monkeypatch.undo()
    assert run(shard, target)[3] == {"found": 3, "converted": 0, "computed": 1}


def test_work_is_put_down_with_its_tokens(shard, target):
    run(shard, target)
    (entry,) = ledger.read(shard.parent / "store")
    assert (entry.kind, entry.name, entry.samples, entry.tokens) == ("states", "t/d", 4, 79)
    assert entry.shaping == KEY.values() and entry.end >= entry.start
    run(shard, target)
    assert len(ledger.read(shard.parent / "store")) == 1, "what was only linked is no work"


def test_plan_counts_what_is_there_and_what_is_to_come(shard, target):
    run(shard, target)
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    columns = {"sample_id": [r["sample_id"] for r in rows], "n_tokens": [len(r["input_ids"]) for r in rows]}
    samples = pd.DataFrame(columns | {"reply_bounds": [r["reply_bounds"] for r in rows]})
    store = Store(shard.parent / "store", KEY)
    forecast, now = overview.storage_plan(samples, store, 32, ROOMY)
    written = sum(record["bytes"] for record in store.records())
    assert forecast["bytes_all"] == pytest.approx(written, rel=0.1)  # such small files; see test_store.py
    assert (now["bytes_to_come"], now["samples_to_come"], now["bytes_stored"]) == (0, 0, written)
    other = Store(store.root, replace(KEY, aux_layer_ids=(1, 2, 3)))
    _, now = overview.storage_plan(samples, other, 32, ROOMY)
    assert (now["bytes_to_come"], now["bytes_other_keys"]) == (forecast["bytes_all"], written)


def test_damaged_record_of_the_probe_is_made_again(shard, target):
    run(shard, target)
    (record,) = shard.parent.rglob("probe-*.json")
    whole = record.read_text()
    record.write_text("")
    next(shard.parent.glob("store/hidden_states/*/*/*.pt")).unlink()
    assert run(shard, target)[3]["computed"] == 1 and record.read_text() == whole
