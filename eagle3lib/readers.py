"""Rows of a file, one at a time and in constant memory, each with its number and a sha256.

| file                            | a row is               | its number    | its sha256                      |
| JSONL (any other name, too)     | an object a line       | line, from 1  | of the line without line break  |
| JSON array (begins with `[`)    | an object of the array | row, from 1   | of the row as canonical JSON    |
| .parquet, .arrow (both formats) | a row                  | row, from 1   | of the row as canonical JSON    |

JSONL and JSON may be gzipped (.gz) or zstandard-compressed (.zst). Blank lines are skipped, but counted. Values that
are null in Parquet and Arrow are as good as absent there, for these know no absent key, and are left out.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from eagle3lib.errors import UserError, one_line
from eagle3lib.messages import kind

BATCH = 128  # rows of Parquet that are Python objects at a time
BLOCK = 1 << 20  # bytes read at a time
UNPACKED = 1 << 16  # bytes unpacked at a time: what stands in them is not read when the packed ones break off
COMPRESSED = (".gz", ".zst")
BOM = b"\xef\xbb\xbf"

Opener = Callable[[str], IO[bytes]]


@dataclass(frozen=True)
class Row:
    """One row of a file. number: its line, or its place among the rows, from 1."""

    value: dict[str, Any]
    number: int
    sha256: str


class Fault(Exception):
    """What is wrong with a row, and the remedy; who reads adds where."""


def open_local(path: str) -> IO[bytes]:
    return open(path, "rb", buffering=BLOCK)


def rows(path: str | Path, opener: Opener = open_local) -> Iterator[Row]:
    """The rows of a file in their order; `opener` opens files that are not local ones.

    A JSON array that breaks off is read up to the break, with a warning on stderr that says where. Raises UserError
    for a file that cannot be read, at the first row that is broken, and for one that is no object.
    """
    name = str(path)
    try:
        with closing(opener(name)) as file:
            yield from _rows_of(name, file)
    except OSError as error:  # EOFError is none: a gzip stream without an end is told by `_text_rows`
        raise UserError(
            f"{name}: cannot be read ({error.strerror or one_line(error, 200)}); check its rights"
        ) from None


def canonical_sha256(value: Any) -> str:
    """sha256 (hex) of a row that has no line of its own."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _rows_of(name: str, file: IO[bytes]) -> Iterator[Row]:
    suffixes = Path(name).suffixes[-2:]
    if any(suffix in (".parquet", ".arrow", ".feather") for suffix in suffixes):
        if suffixes[-1] in COMPRESSED:
            raise UserError(f"{name}: Parquet and Arrow are compressed inside; unpack the file")
        return _tabular_rows(name, _parquet(name, file) if suffixes[-1] == ".parquet" else _arrow(name, file))
    return _text_rows(name, file)


# --- JSON --------------------------------------------------------------------------------------------


def _text_rows(name: str, file: IO[bytes]) -> Iterator[Row]:
    number = 0
    try:
        text = _uncompressed(name, file)
        of_file = _array_rows if _begins_with_bracket(text) else _json_lines
        for row in of_file(name, text):
            number = row.number
            yield row
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(
            f"{name}: broken after row {number} ({one_line(error, 200)}); fetch or copy the file again"
        ) from None
    except OSError as error:
        if error.errno is not None or Path(name).suffix != ".zst":
            raise
        raise UserError(
            f"{name}: broken after row {number} ({one_line(error, 200)}); fetch or copy the file again"
        ) from None


def _uncompressed(name: str, file: IO[bytes]) -> Any:
    suffix = Path(name).suffix
    if suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=file), UNPACKED)  # type: ignore[arg-type]
    if suffix == ".zst":
        import pyarrow

        return io.BufferedReader(pyarrow.CompressedInputStream(pyarrow.PythonFile(file), "zstd"), UNPACKED)
    return file if hasattr(file, "peek") else io.BufferedReader(file, BLOCK)  # type: ignore[arg-type]


def _begins_with_bracket(text: Any) -> bool:
    """Looked at, not read."""
    return text.peek(64)[:64].removeprefix(BOM).lstrip().startswith(b"[")


def _json_lines(name: str, text: Any) -> Iterator[Row]:
    for number, text_line in enumerate(text, start=1):
        if not text_line.strip():
            continue
        line = text_line.rstrip(b"\r\n")
        try:
            yield Row(_json_object(line, number), number, hashlib.sha256(line).hexdigest())
        except Fault as fault:
            raise UserError(f"{name}:{number}: {fault}") from None


def _json_object(line: bytes, number: int) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise Fault(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8 JSONL") from None
    if number == 1 and text.startswith("version https://git-lfs"):
        raise Fault("a Git LFS pointer, not the file itself; run `git lfs pull` in its folder")
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise Fault(f"not JSON ({error.msg} at column {error.colno}); write one JSON object a line") from None
    except RecursionError:
        raise Fault("JSON nested too deeply; write one flat JSON object a line") from None
    if not isinstance(value, dict):
        raise Fault(f"a JSON {kind(value)}, not an object; write one JSON object a line (JSONL, or a JSON array)")
    return value


class _Counted:
    """A stream that knows how many bytes were read of it, and whether it has ended."""

    def __init__(self, stream: Any):
        self.stream, self.count, self.at_end = stream, 0, False

    def read(self, size: int = -1) -> bytes:
        data = self.stream.read(size)
        self.count += len(data)
        self.at_end |= not data and size != 0
        return data


def _array_rows(name: str, text: Any) -> Iterator[Row]:
    import ijson

    if text.peek(3)[:3] == BOM:
        text.read(3)
    counted, number = _Counted(text), 0
    try:
        for number, value in enumerate(ijson.items(counted, "item", use_float=True), start=1):
            if not isinstance(value, dict):
                raise UserError(f"{name}:{number}: a JSON {kind(value)}, not an object; give an object a row")
            try:
                sha256 = canonical_sha256(value)
            except RecursionError:
                raise UserError(f"{name}:{number}: JSON nested too deeply; give a flat object a row") from None
            yield Row(value, number, sha256)
    except ijson.JSONError as error:
        if not counted.at_end:
            raise UserError(
                f"{name}:{number + 1}: not JSON ({one_line(error, 200)}); mend the array there, or write JSONL"
            ) from None
        if not number:
            raise UserError(f"{name}: breaks off before its first row ends; fetch or copy the file again") from None
        print(
            f"warning: {name}: the JSON array breaks off in row {number + 1}, at byte {counted.count:,}; the "
            f"{number:,} rows before are read",
            file=sys.stderr,
        )


# --- tables ------------------------------------------------------------------------------------------


def _tabular_rows(name: str, batches: Iterator[Any]) -> Iterator[Row]:
    import pyarrow

    number = 0
    try:
        for batch in batches:
            for value in batch.to_pylist():
                number += 1
                row = {key: one for key, one in value.items() if one is not None}
                yield Row(row, number, canonical_sha256(row))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{name}: broken after row {number} ({one_line(error, 200)}); fetch or copy the file again"
        ) from None


def _parquet(name: str, file: IO[bytes]) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.ParquetFile(file, buffer_size=BLOCK, pre_buffer=False)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{name}: not a Parquet file ({one_line(error, 200)}); fetch or copy the file again") from None
    yield from table.iter_batches(BATCH, use_threads=False)


def _arrow(name: str, file: IO[bytes]) -> Iterator[Any]:
    """Record batches of Arrow's stream format (which `save_to_disk` writes) or of its file format."""
    import pyarrow
    import pyarrow.ipc

    try:
        if file.read(6) == b"ARROW1":
            of_file = pyarrow.ipc.open_file(file)
            batches = (of_file.get_batch(i) for i in range(of_file.num_record_batches))
        else:
            file.seek(0)
            batches = iter(pyarrow.ipc.open_stream(file))
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{name}: not an Arrow file ({one_line(error, 200)}); fetch or copy the file again") from None
    for batch in batches:
        yield from (batch.slice(start, BATCH) for start in range(0, batch.num_rows, BATCH))


def saved_dataset(folder: Path) -> list[Path]:
    """The Arrow files of a folder that `datasets.save_to_disk` wrote, in order. UserError for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text("utf-8")).get("splits", [])
        raise UserError(f"{folder}: several splits; name one: {', '.join(str(folder / split) for split in splits)}")
    try:
        state = json.loads((folder / "state.json").read_text("utf-8"))
        files = [folder / one["filename"] for one in state["_data_files"]]
    except FileNotFoundError:
        raise UserError(
            f"{folder}: a folder, but no dataset that save_to_disk wrote; name its files, as {folder}/*.jsonl"
        ) from None
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{folder / 'state.json'}: broken; save the dataset again") from None
    for file in files:
        if not file.is_file():
            raise UserError(f"{file}: no such file, but {folder / 'state.json'} names it; save the dataset again")
    return files
