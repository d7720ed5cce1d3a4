"""Files that cannot be read, or not as what they say they are: how each is made, and what the user is told.

A message is written as it is but for `{path}`, the file's path; `…` stands for words of a library's own.
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

GOOD = b'{"prompt": "hi", "response": "yes"}\n'
MANY = b"".join(b'{"prompt": "question %d", "response": "answer %d"}\n' % (i, i * i) for i in range(2000))
AGAIN = "; fetch or copy the file again"


def parquet(rows: list[dict[str, Any]]) -> bytes:
    sink = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sink)
    return sink.getvalue()


def arrow(rows: list[dict[str, Any]]) -> bytes:
    sink, table = io.BytesIO(), pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


def zstd(data: bytes) -> bytes:
    return pyarrow.compress(data, "zstd", asbytes=True)


def array(*rows: Any) -> bytes:
    return json.dumps(rows).encode()


def damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


ROW = {"prompt": "hi", "response": "yes"}
ROWS = [{"prompt": f"question {i}", "response": f"answer {i * i}"} for i in range(500)]

# name of the file -> (its bytes, the message)
FILES: dict[str, tuple[bytes, str]] = {
    # text
    "empty.jsonl": (b"", "{path}: no conversation in it; give a file with at least one line"),
    "blank-lines.jsonl": (b"\n  \n\r\n", "{path}: no conversation in it; give a file with at least one line"),
    "latin-1.jsonl": (
        '{"prompt": "grün"}\n'.encode("latin-1"),
        "{path}:1: byte 15 is not UTF-8; save the file as UTF-8 JSONL",
    ),
    "utf-16.jsonl": (
        GOOD.decode().encode("utf-16"),
        "{path}:1: byte 1 is not UTF-8; save the file as UTF-8 JSONL",
    ),
    "cut-off.jsonl": (
        GOOD + GOOD[:20],
        "{path}:2: not JSON (Unterminated string starting at at column 18); write one JSON object a line",
    ),
    "two-on-a-line.jsonl": (
        GOOD.strip() + GOOD,
        "{path}:1: not JSON (Extra data at column 36); write one JSON object a line",
    ),
    "pretty-printed.json": (
        json.dumps(ROW, indent=2).encode(),
        "{path}:1: not JSON (Expecting property name enclosed in double quotes at column 2); write one JSON object a "
        "line",
    ),
    "zeros.jsonl": (bytes(64), "{path}:1: not JSON (Expecting value at column 1); write one JSON object a line"),
    "a-page.jsonl": (
        b"<!DOCTYPE html>\n<html>404</html>\n",
        "{path}:1: not JSON (Expecting value at column 1); write one JSON object a line",
    ),
    "git-lfs.jsonl": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n",
        "{path}:1: a Git LFS pointer, not the file itself; run `git lfs pull` in its folder",
    ),
    "csv.jsonl": (
        b"prompt,response\nhi,yes\n",
        "{path}:1: not JSON (Expecting value at column 1); write one JSON object a line",
    ),
    # JSON arrays
    "array-cut-off-in-first.json": (
        array(ROW)[:15],
        "{path}: breaks off before its first row ends; fetch or copy the file again",
    ),
    "array-of-texts.json": (array("hi", "yes"), "{path}:1: a JSON string, not an object; give an object a row"),
    "array-with-null.json": (array(ROW, None), "{path}:2: a JSON null, not an object; give an object a row"),
    "array-missing-comma.json": (
        b'[{"prompt": "a"} {"prompt": "b"}]',
        "{path}:2: not JSON (…); mend the array there, or write JSONL",
    ),
    "array-comment.json": (
        b'[{"prompt": "a"}, // one\n{"prompt": "b"}]',
        "{path}:2: not JSON (…); mend the array there, or write JSONL",
    ),
    "array-not-utf-8.json": (
        b'[{"prompt": "a"}, {"prompt": "gr\xfcn"}]',
        "{path}:2: not JSON (…); mend the array there, or write JSONL",
    ),
    "array-behind-array.json": (
        array(ROW) + array(ROW),
        "{path}:2: not JSON (…); mend the array there, or write JSONL",
    ),
    "empty-array.json": (b"[]", "{path}: no conversation in it; give a file with at least one line"),
    # compressed
    "cut-off.jsonl.gz": (gzip.compress(MANY)[:-2000], f"{{path}}: broken after row … (…){AGAIN}"),
    "empty.jsonl.gz": (b"", "{path}: no conversation in it; give a file with at least one line"),
    "not-gzip.jsonl.gz": (GOOD, f"{{path}}: broken after row 0 (Not a gzipped file (…)){AGAIN}"),
    "flipped.jsonl.gz": (damaged(gzip.compress(MANY), 10), f"{{path}}: broken after row … (…){AGAIN}"),
    "wrong-checksum.jsonl.gz": (
        damaged(gzip.compress(GOOD), len(gzip.compress(GOOD)) - 8),
        f"{{path}}: broken after row … (CRC check failed …){AGAIN}",
    ),
    "cut-off.jsonl.zst": (zstd(MANY)[:-500], f"{{path}}: broken after row … (…){AGAIN}"),
    "not-zstd.jsonl.zst": (GOOD, f"{{path}}: broken after row 0 (…){AGAIN}"),
    "cut-off.json.gz": (
        gzip.compress(b"[" + MANY.strip().replace(b"\n", b",") + b"]")[:-2000],
        f"{{path}}: broken after row … (…){AGAIN}",
    ),
    # Parquet and Arrow
    "not.parquet": (GOOD, f"{{path}}: not a Parquet file (…){AGAIN}"),
    "empty.parquet": (b"", f"{{path}}: not a Parquet file (…){AGAIN}"),
    "cut-off.parquet": (parquet(ROWS)[:-200], f"{{path}}: not a Parquet file (…){AGAIN}"),
    "flipped.parquet": (damaged(parquet(ROWS), 60), f"{{path}}: broken after row 0 (…){AGAIN}"),
    "no-rows.parquet": (
        parquet([]),
        "{path}: no conversation in it; give a file with at least one line",
    ),
    "wrong-columns.parquet": (
        parquet([{"question": "hi", "answer": "yes"}]),
        "{path}:1: found none (its keys: question, answer); a line needs exactly one of messages, conversations, "
        "prompt, instruction, input_ids, text",
    ),
    "wrong-type.parquet": (parquet([{"prompt": 3}]), "{path}:1: prompt: a JSON number, not a string; give text"),
    "null-in-second.parquet": (
        parquet([ROW, {"prompt": None, "response": "yes"}]),
        "{path}:2: found none (its keys: response); a line needs exactly one of messages, conversations, prompt, "
        "instruction, input_ids, text",
    ),
    "messages-as-text.parquet": (
        parquet([{"messages": json.dumps([{"role": "user", "content": "hi"}])}]),
        "{path}:1: messages: a JSON string, not a list; give a list of messages",
    ),
    "uneven-columns.parquet": (
        parquet([{"conversations": {"from": ["human", "gpt"], "value": ["hi"]}}]),
        "{path}:1: conversations: columns of different lengths; give a list of messages",
    ),
    "compressed.parquet.gz": (
        gzip.compress(parquet([ROW])),
        "{path}: Parquet and Arrow are compressed inside; unpack the file",
    ),
    "not.arrow": (GOOD, f"{{path}}: not an Arrow file (…){AGAIN}"),
    "cut-off.arrow": (arrow(ROWS)[:-6000], f"{{path}}: broken after row 0 (…){AGAIN}"),
    # layouts that are no chat
    "ids-as-text.jsonl": (
        b'{"input_ids": "1 2 3", "loss_mask": [0, 1, 1]}\n',
        "{path}:1: input_ids: not a list of token ids; give whole numbers",
    ),
    "ids-as-floats.jsonl": (
        b'{"input_ids": [1.0, 2.0], "loss_mask": [0, 1]}\n',
        "{path}:1: input_ids: not a list of token ids; give whole numbers",
    ),
    "no-mask.jsonl": (
        b'{"input_ids": [1, 2, 3]}\n',
        "{path}:1: loss_mask: not a list of 3 numbers that are 0 or 1; give 1 on the tokens of the replies",
    ),
    "short-mask.jsonl": (
        b'{"input_ids": [1, 2, 3], "loss_mask": [0, 1]}\n',
        "{path}:1: loss_mask: not a list of 3 numbers that are 0 or 1; give 1 on the tokens of the replies",
    ),
    "mask-of-two.jsonl": (
        b'{"input_ids": [1, 2, 3], "loss_mask": [0, 2, 2]}\n',
        "{path}:1: loss_mask: not a list of 3 numbers that are 0 or 1; give 1 on the tokens of the replies",
    ),
    "alpaca-list.jsonl": (
        b'{"instruction": ["do"], "output": "done"}\n',
        "{path}:1: instruction: a JSON array, not a string; give text",
    ),
    "alpaca-history.jsonl": (
        b'{"instruction": "go on", "history": ["a", "b"], "output": "c"}\n',
        "{path}:1: history[0]: not a pair of texts; give [instruction, output]",
    ),
    "blank-text.jsonl": (b'{"text": "  "}\n', "{path}:1: text: empty; remove the line"),
    "function-call.jsonl": (
        b'{"conversations": [{"from": "human", "value": "hi"}, {"from": "function_call", "value": "{add"}]}\n',
        "{path}:1: conversations[1].value: not JSON; mend it, or give it as it is instead of in a string",
    ),
    "tools-as-text.jsonl": (
        b'{"messages": [{"role": "user", "content": "hi"}], "tools": "add(a, b)"}\n',
        "{path}:1: tools: not JSON; mend it, or give it as it is instead of in a string",
    ),
}


def _folder(path: Path) -> None:
    path.mkdir()


def _splits(path: Path) -> None:
    path.mkdir()
    (path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')


def _lost_file(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')


def _broken_state(path: Path) -> None:
    path.mkdir()
    (path / "state.json").write_text('{"_data_fi')


def _dangling(path: Path) -> None:
    path.symlink_to("nowhere")


# entry -> (what is made there, the message; {path}: the entry's)
ENTRIES: dict[str, tuple[Callable[[Path], None] | None, str]] = {
    "gone.jsonl": (None, "{path}: no such file; check dataset.conversations"),
    "*.jsonl": (None, "{path}: the pattern matches no file; check dataset.conversations"),
    "[a-z/x.jsonl": (None, "{path}: the pattern matches no file; check dataset.conversations"),
    "folder": (_folder, "{path}: a folder, but no dataset that save_to_disk wrote; name its files, as {path}/*.jsonl"),
    "splits": (_splits, "{path}: several splits; name one: {path}/train, {path}/test"),
    "lost-file": (
        _lost_file,
        "{path}/data-00000-of-00001.arrow: no such file, but {path}/state.json names it; save the dataset again",
    ),
    "broken-state": (_broken_state, "{path}/state.json: broken; save the dataset again"),
    "dangling.jsonl": (_dangling, "{path}: no such file; check dataset.conversations"),
}
