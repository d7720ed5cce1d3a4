"""Sources through the real workflow: fetched, weighted, of other kinds than JSONL; a change reruns what it must."""

import json

import pandas
import pyarrow
import pyarrow.parquet
from tiny import write_conversations
from workflow import tiny_workspace


def test_sources_of_every_origin(tmp_path):
    workspace = tiny_workspace(tmp_path / "w", samples=5, shard_size=4)
    inputs = workspace.folder / "inputs"
    (inputs / "bucket").mkdir()
    write_conversations(inputs / "bucket" / "a.jsonl", 3, words=9)
    rows = [{"instruction": f"count to {n}", "output": "one two three four"} for n in range(4)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), inputs / "more.parquet")
    (inputs / "chat.jsonl").write_text(json.dumps({"prompt": "0: look", "images": ["a.png"]}) + "\n")
    spec = f"file://{inputs / 'bucket'}/*.jsonl"
    workspace.set(
        "dataset.conversations",
        ["../inputs/talk.jsonl", {"path": spec, "weight": 2}, "../inputs/more.parquet", "../inputs/chat.jsonl"],
    )
    workspace.snakemake("samples")
    table = pandas.read_parquet(workspace.result("tiny/talk/samples.parquet"))
    assert len(table) == 12 and sorted(table["weight"]) == [1.0] * 9 + [2.0] * 3
    mixture = json.loads(workspace.result("tiny/talk/mixture.json").read_text())
    assert [one["samples"] for one in mixture["sources"]] == [5, 3, 4, 0]
    (fetched,) = mixture["sources"][1]["fetched"]
    assert fetched["spec"] == spec and fetched["rows"] == 3 and len(fetched["revision"]) == 40
    traced = workspace.ask("trace", "../inputs/more.parquet:2").stdout
    assert "../inputs/more.parquet:2 (unchanged since)" in traced
    assert "media" in workspace.ask("trace", "../inputs/chat.jsonl:1").stdout
    assert "count to 1" in workspace.ask("show", table["sample_id"][9]).stdout
    assert not workspace.planned("samples")
    (inputs / "bucket" / "a.jsonl").unlink()
    workspace.set("dataset.seed", 1)
    assert workspace.planned("samples") == {"shard_samples": 1, "samples": 1}, "what was fetched stays"
    workspace.set("dataset.seed", 0)
    workspace.set("dataset.conversations", ["../inputs/talk.jsonl", {"path": spec, "weight": 3}])
    assert workspace.planned("samples") == {"shard_samples": 1, "samples": 1}
