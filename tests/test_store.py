"""The store: what is published is whole, what is found is checked, what is bad is set aside."""

import errno
import json
import os
import shutil
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from eagle3lib import hidden_states, job
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey
from eagle3lib.lineage import file_sha256
from eagle3lib.store import Store, link

KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")
IDS = [5, 6, 7, 8, 9]
H = 8


def content(ids=IDS, key=KEY, states=None):
    states = states or [torch.randn(len(ids), H) for _ in range(4)]
    return hidden_states.pack_sample(key, ids, [1, 3, 3, 5], states, "5.19.0", "code")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store", KEY)
    store.prepare()
    return store


def reopened(store):
    return Store(store.folder.parent.parent, store.key)


def test_published_sample_reads_back_as_designed(store):
    states = [torch.randn(5, H) for _ in range(4)]
    record = store.publish(content(states=states))
    path = store.path(hidden_states.sample_id(IDS))
    sample = hidden_states.load_sample(path)
    assert sample["input_ids"].tolist() == IDS
    assert sample["loss_mask"].tolist() == [0, 1, 1, 1, 1]
    assert sample["reply_starts"].tolist() == [1, 3]
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(sample["hidden_states"], states, strict=True))
    assert sample["meta"]["last_is_post_norm"] is True
    assert sample["meta"]["aux_layer_ids"] == [2, 4, 5]
    assert (record["bytes"], record["sha256"]) == (path.stat().st_size, file_sha256(path))


def test_found_again_by_another_process(store):
    record = store.publish(content())
    assert reopened(store).find(record["sample_id"]) == record


def test_absent_sample_is_not_found(store):
    assert store.find("0" * 64) is None


def test_path_carries_no_more_than_identity(store):
    other_mask = hidden_states.pack_sample(KEY, IDS, [2, 5], [torch.randn(5, H) for _ in range(4)], "9.9", "other code")
    assert other_mask["meta"]["sample_id"] == content()["meta"]["sample_id"]


@pytest.mark.parametrize("field, value", [
    ("target_fingerprint", "x"), ("aux_layer_ids", (2, 4, 6)), ("engine", "sglang"), ("compute_dtype", "bfloat16"),
    ("storage_format", "fp8"), ("format_version", 2),
])  # fmt: skip
def test_every_part_of_the_identity_is_in_the_key(field, value):
    from dataclasses import replace

    assert replace(KEY, **{field: value}).short != KEY.short


@pytest.mark.parametrize("damage", ["truncate", "grow", "other_sample", "foreign_pickle", "other_key"])
def test_damaged_file_is_quarantined_with_its_reason(store, tmp_path, damage):
    record = store.publish(content())
    path = store.path(record["sample_id"])
    if damage == "truncate":
        os.truncate(path, record["bytes"] - 100)
    elif damage == "grow":
        path.write_bytes(path.read_bytes() + b"x")
    elif damage == "other_sample":
        other = store.publish(content(ids=[1, 2, 3, 4, 6]))
        path.write_bytes(store.path(other["sample_id"]).read_bytes())
    elif damage == "other_key":
        other = Store(tmp_path / "b", StateKey("fingerprint", (2, 4, 6), "transformers", "float32", "bf16"))
        other.prepare()
        found = other.publish(content(key=other.key))
        path.write_bytes(other.path(found["sample_id"]).read_bytes())
    else:
        path.write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    fresh = reopened(store)
    assert fresh.find(record["sample_id"]) is None
    assert not path.exists()
    folder = tmp_path / "store/quarantine" / KEY.short
    assert (folder / path.name).exists()
    reason = json.loads((folder / "reasons.jsonl").read_text())
    assert reason["file"] == path.name and reason["reason"]
    fresh.publish(content())
    assert fresh.find(record["sample_id"])


def test_file_without_its_manifest_line_is_hashed_again_not_made_again(store):
    record = store.publish(content())
    path = store.path(record["sample_id"])
    inode = path.stat().st_ino
    (path.parent / "manifest.jsonl").unlink()
    found = reopened(store).find(record["sample_id"])
    assert {**found, "written": 0} == {**record, "written": 0}
    assert path.stat().st_ino == inode
    assert reopened(store).record(record["sample_id"]) == found


def test_torn_manifest_line_is_passed_over(store):
    record = store.publish(content())
    manifest = store.path(record["sample_id"]).parent / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b'{"sample_id": "ab')
    assert reopened(store).find(record["sample_id"]) == record


@pytest.mark.parametrize("name", ["sample_id", "bytes", "sha256"])
def test_manifest_line_with_a_damaged_name_is_passed_over(store, name):
    record = store.publish(content())
    manifest = store.path(record["sample_id"]).parent / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace(f'"{name}"', f'"{name.upper()}"'))
    found = reopened(store).find(record["sample_id"])
    assert (found["bytes"], found["sha256"]) == (record["bytes"], record["sha256"]), "hashed again, not made again"


def test_failed_write_leaves_nothing(store, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError):
        store.publish(content())
    assert not list(store.folder.rglob("*.pt")) and not list(store.folder.rglob("*.part"))


def test_first_error_is_told_when_the_volume_is_read_only_by_then(store, monkeypatch):
    def fails(*_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, "Input/output error")))
    monkeypatch.setattr(Path, "unlink", fails)
    with pytest.raises(OSError, match="Input/output error"):
        store.publish(content())


def test_vanished_volume_is_not_replaced_by_a_folder(store):
    record = store.publish(content())
    shutil.rmtree(store.root)
    with pytest.raises(UserError, match="gone while it was in use"):
        reopened(store).publish(content())
    with pytest.raises(FileNotFoundError):
        link(store.path(record["sample_id"]), store.root / "dataset" / "0000.pt")
    assert not store.root.exists()


def test_failing_disk_is_told_not_what_torch_makes_of_it(store, monkeypatch):
    """Of one write that fails, torch's zip writer says "unexpected pos 6912 vs 6864"."""
    write, calls = job.HashingFile.write, []

    def fails_once(self, data):
        calls.append(data)
        if len(calls) == 9:
            monkeypatch.setattr(self, "file", FailingFile(self.file))
        return write(self, data)

    monkeypatch.setattr(job.HashingFile, "write", fails_once)
    with pytest.raises(OSError, match="Input/output error"):
        store.publish(content())
    assert not list(store.folder.rglob("*.part"))


class FailingFile:
    def __init__(self, file):
        self.file, self.failed = file, False

    def write(self, data):
        if self.failed:
            return self.file.write(data)
        self.failed = True
        raise OSError(errno.EIO, "Input/output error")

    def flush(self):
        self.file.flush()


def test_torn_line_of_a_full_disk_spoils_no_later_one(store):
    record = store.publish(content())
    manifest = store.path(record["sample_id"]).parent / "manifest.jsonl"
    manifest.write_bytes(manifest.read_bytes() + b'{"sample_id": "ab')
    again = reopened(store).publish(content())
    assert reopened(store).record(record["sample_id"]) == again


def test_jobs_side_by_side_mark_the_same_store(store):
    """Two shards of one key end at the same time."""
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: reopened(store).mark_synced(), range(60)))
    assert reopened(store).synced() > 0
    assert not list(store.folder.rglob("*.part"))


def test_part_of_a_dead_writer_is_removed_and_that_of_a_living_one_is_not(store):
    """Two datasets may have the same sample, and their jobs may run side by side."""
    sample = store.publish(content())["sample_id"]
    path, host = store.path(sample), socket.gethostname()
    names = [f"{sample}.{host}.{pid}.part" for pid in (os.getpid(), 999999999, os.getppid())]
    for name in [*names, f"{sample}.another.host.{os.getppid()}.part"]:
        (path.parent / name).write_bytes(b"half")
    store.remove_parts([sample])
    left = {part.name for part in path.parent.glob("*.part")}
    assert left == {names[2], f"{sample}.another.host.{os.getppid()}.part"}, "no pid is looked for on another host"
    for name in left:
        os.utime(path.parent / name, (1, 1))
    store.remove_parts([sample])
    assert [part.name for part in path.parent.glob("*.part")] == [names[2]], "it has not grown for an hour"


def test_flipped_bits_are_found_by_the_full_check_and_not_loaded(store):
    record = store.publish(content())
    path = store.path(record["sample_id"])
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    assert store.find(record["sample_id"], full=True) is None
    assert "sha256" in (store.root / "quarantine" / KEY.short / "reasons.jsonl").read_text()


def test_quarantine_unlinks_the_names_in_all_datasets(store):
    record = store.publish(content())
    names = [store.root.parent / f"t/{d}/{KEY.short}/hidden_states/00000/0000.pt" for d in "ab"]
    for name in names:
        link(store.path(record["sample_id"]), name)
    os.truncate(names[0], 10)
    assert store.find(record["sample_id"]) is None
    assert not any(name.exists() for name in names)


@pytest.mark.parametrize("fault", ["ids", "rows", "layers", "nan"])
def test_file_that_nobody_vouches_for_is_read_as_a_whole(store, fault):
    """Well-formed, of the right key, but wrong inside; its manifest line is lost."""
    made = content()
    if fault == "ids":
        made["input_ids"][2] = 77
    elif fault == "rows":
        made["hidden_states"][1] = made["hidden_states"][1][:4]
    elif fault == "layers":
        made["hidden_states"].pop()
    else:
        made["hidden_states"][0][0, 0] = float("nan")
    record = store.publish(made)
    (store.path(record["sample_id"]).parent / "manifest.jsonl").unlink()
    assert reopened(store).find(record["sample_id"]) is None


def test_records_are_those_of_present_files(store):
    records = [store.publish(content(ids=[1, 2, 3, 4, n])) for n in range(6, 12)]
    store.path(records[0]["sample_id"]).unlink()
    assert list(reopened(store).records()) == sorted(records[1:], key=lambda r: r["sample_id"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_states_that_are_not_finite_are_refused(value):
    states = [torch.randn(5, H) for _ in range(4)]
    states[1][2, 3] = value
    with pytest.raises(ValueError, match="layer 4 .*not finite"):
        content(states=states)


def test_wrong_number_of_rows_is_refused():
    states = [torch.randn(5, H) for _ in range(3)] + [torch.randn(4, H)]
    with pytest.raises(ValueError, match="layer last has 4 rows for 5 tokens"):
        content(states=states)


def test_a_view_of_a_batch_does_not_drag_the_batch_along(store):
    batch = torch.randn(4, 100, H)
    record = store.publish(content(states=[batch[i, :5] for i in range(4)]))
    assert record["bytes"] < 8000


@pytest.mark.parametrize("n_tokens", [16, 500, 4000])
def test_forecast_of_bytes_is_within_one_percent(store, n_tokens):
    ids = list(range(n_tokens))
    states = [torch.randn(n_tokens, 576) for _ in range(4)]
    record = store.publish(hidden_states.pack_sample(KEY, ids, [1, n_tokens], states, "v", "c"))
    assert hidden_states.sample_bytes(n_tokens, 576, 3) == pytest.approx(record["bytes"], rel=0.01)


def test_link_is_a_hard_link_and_can_be_made_twice(store, tmp_path):
    record = store.publish(content())
    source = store.path(record["sample_id"])
    destination = tmp_path / "shard" / "0000.pt"
    link(source, destination)
    link(source, destination)
    assert destination.samefile(source)
    destination.unlink()
    destination.write_text("stale")
    link(source, destination)
    assert destination.samefile(source)
    assert not list(tmp_path.rglob("*.part"))


def test_foreign_file_is_refused_without_running_it(tmp_path):
    class Evil:
        def __reduce__(self):
            return (os.system, (f"touch {tmp_path}/ran",))

    torch.save({"meta": Evil()}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="x.pt: not a readable sample file"):
        hidden_states.load_sample(tmp_path / "x.pt")
    assert not (tmp_path / "ran").exists()
