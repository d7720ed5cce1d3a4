"""Every kind of file gives the same rows, streamed; every layout its messages; sources their limits."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from eagle3lib import readers, samples, sources
from eagle3lib.config import DatasetConfig
from eagle3lib.errors import UserError

ROWS = [
    {"messages": [{"role": "user", "content": f"question {i} äöü \u2028"}, {"role": "assistant", "content": "yes"}]}
    for i in range(300)
]
LINES = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ROWS).encode()


NUMBERS = [b'{"prompt": "%d"}\n' % (i * 7919**5 % 10**18) for i in range(20_000)]


def arrow_stream(rows) -> bytes:
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return sink.getvalue().to_pybytes()


def arrow_file(rows) -> bytes:
    sink, table = pyarrow.BufferOutputStream(), pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return sink.getvalue().to_pybytes()


def parquet(rows) -> bytes:
    sink = pyarrow.BufferOutputStream()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink, row_group_size=90)
    return sink.getvalue().to_pybytes()


def zstd(data: bytes) -> bytes:
    """Two frames, as `cat` makes of two files."""
    half = data.index(b"\n", len(data) // 2) + 1
    return b"".join(pyarrow.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


KINDS = {
    "a.jsonl": LINES,
    "a.txt": LINES,
    "a.json": json.dumps(ROWS, indent=1).encode(),
    "bom.json": b"\xef\xbb\xbf \n" + json.dumps(ROWS, ensure_ascii=False).encode(),
    "a.jsonl.gz": gzip.compress(LINES[:5000]) + gzip.compress(LINES[5000:]),
    "a.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "a.jsonl.zst": zstd(LINES),
    "a.parquet": parquet(ROWS),
    "stream.arrow": arrow_stream(ROWS),
    "file.arrow": arrow_file(ROWS),
}


@pytest.mark.parametrize("name", KINDS)
def test_every_kind_of_file_gives_the_same_rows(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(KINDS[name])
    read = list(readers.rows(path))
    assert [row.value for row in read] == ROWS
    assert [row.number for row in read] == list(range(1, 301))
    assert len({row.sha256 for row in read}) == 300
    if "jsonl" not in name and "txt" not in name:
        assert [row.sha256 for row in read] == [readers.canonical_sha256(row) for row in ROWS]


def test_a_folder_of_save_to_disk(tmp_path):
    folder = tmp_path / "saved"
    folder.mkdir()
    for number, part in enumerate((ROWS[:100], ROWS[100:])):
        (folder / f"data-{number:05d}-of-00002.arrow").write_bytes(arrow_stream(part))
    names = [{"filename": f"data-{number:05d}-of-00002.arrow"} for number in (1, 0)]
    (folder / "state.json").write_text(json.dumps({"_data_files": names}))
    read = list(samples.read([folder]))
    assert [one.messages[0]["content"] for one in read[:200]] == [r["messages"][0]["content"] for r in ROWS[100:]]
    assert (read[0].file, read[0].line, read[-1].line) == (str(folder / "data-00001-of-00002.arrow"), 1, 100)


def test_save_to_disk_as_datasets_writes_it(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved", num_shards=3)
    assert [one.messages for one in samples.read([tmp_path / "saved"])] == [
        one.messages for one in samples.read([write(tmp_path / "a.jsonl", *ROWS)])
    ]


def test_reading_streams(tmp_path):
    """What stands behind the broken place is not needed for what stands before it."""
    for name, content in {
        "a.jsonl.gz": gzip.compress(b"".join(NUMBERS))[:-3000],
        "a.jsonl.zst": pyarrow.compress(b"".join(NUMBERS), "zstd", asbytes=True)[:-3000],
        "a.json": b"[" + b",".join([*NUMBERS[:15_000], b"{1}", *NUMBERS]) + b"]",
    }.items():
        path = tmp_path / name
        path.write_bytes(content)
        read = readers.rows(path)
        assert [next(read).value["prompt"] for _ in range(3000)] == [json.loads(n)["prompt"] for n in NUMBERS[:3000]]
        with pytest.raises(UserError, match=f"{name}:?.*(broken after row|not JSON)"):
            list(read)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_an_array_that_breaks_off_is_read_up_to_the_break(tmp_path, capsys, suffix):
    whole = json.dumps(ROWS).encode()
    cut = whole[: whole.index(b"question 200") + 5]
    path = tmp_path / f"dump.json{suffix}"
    path.write_bytes(gzip.compress(cut) if suffix else cut)
    assert [row.value for row in readers.rows(path)] == ROWS[:200]
    said = capsys.readouterr().err
    assert said == (
        f"warning: {path}: the JSON array breaks off in row 201, at byte {len(cut):,}; the 200 rows before are read\n"
    )


# Layouts


def write(path: Path, *rows) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def one(tmp_path, row) -> samples.Conversation:
    return next(samples.read([write(tmp_path / "a.jsonl", row)]))


def said(conversation) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in conversation.messages]


def test_alpaca(tmp_path):
    row = {"instruction": "Add.", "input": "1 2", "output": "3", "text": "all of it again"}
    assert said(one(tmp_path, row)) == [("user", "Add.\n\n1 2"), ("assistant", "3")]
    row = {"instruction": "And 4?", "input": "", "output": "7", "system": "Be short.", "history": [["1+2?", "3"]]}
    turns = [("system", "Be short."), ("user", "1+2?"), ("assistant", "3"), ("user", "And 4?"), ("assistant", "7")]
    assert said(one(tmp_path, row)) == turns
    assert said(one(tmp_path, {"instruction": "Add."})) == [("user", "Add.")]


CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_tools_of_openai(tmp_path):
    as_text = CALL | {"function": {"name": "add", "arguments": '{"a": 1}'}}
    messages = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [as_text], "reasoning_content": "I need add."},
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2"},
    ]
    for tools in ([TOOL], json.dumps([TOOL])):
        read = one(tmp_path, {"messages": messages, "tools": tools})
        assert read.messages[1]["tool_calls"] == [CALL] and read.messages[1]["content"] == ""
        assert read.messages[1]["reasoning_content"] == "I need add."
        assert read.messages[2]["tool_call_id"] == "c1" and read.tools == [TOOL]


def test_tools_of_sharegpt(tmp_path):
    row = {
        "conversations": [
            {"from": "human", "value": "1+1?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
            {"from": "observation", "value": "2"},
            {"from": "gpt", "value": "2"},
        ]
    }
    read = one(tmp_path, row)
    assert [m["role"] for m in read.messages] == ["user", "assistant", "tool", "assistant"]
    assert read.messages[1]["tool_calls"] == [{"type": "function", "function": CALL["function"]}]


def test_parquet_of_datasets(tmp_path):
    """Lists of objects as columns, and null for each key that another row has."""
    path = tmp_path / "a.parquet"
    columns = {"from": ["human", "gpt"], "value": ["hi", "yes"]}
    path.write_bytes(parquet([{"conversations": columns, "prompt": None}, {"conversations": None, "prompt": "hi"}]))
    first, second = samples.read([path])
    assert said(first) == [("user", "hi"), ("assistant", "yes")] and said(second) == [("user", "hi")]
    rows = [{"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [CALL]}]}]
    path.write_bytes(parquet(rows))
    assert next(samples.read([path])).messages[0] == {"role": "user", "content": "hi"}


def test_text_and_tokens(tmp_path):
    assert one(tmp_path, {"text": "Once upon a time"}).text == "Once upon a time"
    read = one(tmp_path, {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 1, 0, 1]})
    assert (read.input_ids, read.reply_bounds) == ([5, 6, 7, 8, 9], [1, 3, 4, 5])


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "input_audio"}]}]},
        {"conversations": [{"from": "human", "value": "<image>\nWhat?"}], "image": "a.png"},
        {"prompt": "What?", "images": ["a.png"]},
    ],
)
def test_rows_with_images_are_unfit_and_reading_goes_on(tmp_path, row):
    path = write(tmp_path / "a.jsonl", row, {"prompt": "good"})
    first, second = samples.read([path])
    assert first.unfit and first.unfit[0] == "media" and second.unfit is None
    with pytest.raises(UserError, match=r"a.jsonl:1: media: .*; remove the line"):
        list(samples.fit(samples.read([path])))


def test_what_stands_beside_is_no_second_layout(tmp_path):
    assert said(one(tmp_path, {"prompt": "hi", "text": "hi there", "image": None, "images": []})) == [("user", "hi")]


# Sources


def dataset(*conversations) -> DatasetConfig:
    return DatasetConfig(name="d", conversations=list(conversations))


def test_sources_in_order_each_with_its_limit_and_format(tmp_path):
    for name in "abc":
        write(tmp_path / f"{name}.jsonl", *({"prompt": f"{name}{i}", "instruction": f"do {name}{i}"} for i in range(4)))
    entries = [
        {"path": str(tmp_path / "b.jsonl"), "limit": 3, "format": "alpaca", "weight": 2},
        str(tmp_path / "*.jsonl"),
    ]
    found = sources.of(dataset(*entries).conversations, tmp_path)
    assert [(len(s.files), s.limit, s.format, s.weight) for s in found] == [(1, 3, "alpaca", 2.0), (2, None, None, 1.0)]
    asked = [c.messages[0]["content"] for c in samples.read(found)]
    assert asked == ["do b0", "do b1", "do b2", *(f"a{i}" for i in range(4)), *(f"c{i}" for i in range(4))]
    assert len(list(samples.read(found, limit=5))) == 5


def test_a_plain_path_is_written_as_it_was():
    values = dataset("a.jsonl", {"path": "b.jsonl"}, {"path": "c.jsonl", "weight": 0.5}).model_dump(mode="json")
    assert values["conversations"] == ["a.jsonl", "b.jsonl", {"path": "c.jsonl", "weight": 0.5}]
    assert DatasetConfig(**values) == dataset("a.jsonl", "b.jsonl", {"path": "c.jsonl", "weight": 0.5})
