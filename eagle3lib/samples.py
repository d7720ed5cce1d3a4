"""Readers of the input: JSONL, one conversation a line, streamed.

Three kinds of line, told apart by their keys:
    {"messages": [{"role": "user", "content": "..."}, ...]}         OpenAI; content may be a list of text parts
    {"conversations": [{"from": "human", "value": "..."}, ...]}     ShareGPT
    {"prompt": "...", "response": "..."}                            response optional
and a fourth, written by `regenerate_replies` and read by `read_replies`:
    {"messages", "prompt_ids", "reply_ids", "finish", "file", "line", "sha256"}

Every fault is a UserError `file:line: what; remedy`. Lines are counted from 1; a line's
sha256 is that of its bytes without the line break. Blank lines are skipped.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib.errors import UserError

ROLES = ("system", "user", "assistant")
SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
}
NOT_SUPPORTED = ("tool_calls", "function_call", "reasoning_content")


@dataclass(frozen=True)
class Conversation:
    """Messages as {"role", "content"} of plain strings, and the input line they come from."""

    messages: list[dict[str, str]]
    file: str
    line: int
    sha256: str


@dataclass(frozen=True)
class Reply:
    """A prompt and the target's own reply to it, as the token ids that the engine saw and made."""

    messages: list[dict[str, str]]
    prompt_ids: list[int]
    reply_ids: list[int]
    finish: str
    file: str
    line: int
    sha256: str


def expand(entries: Iterable[str | Path]) -> list[Path]:
    """Files of a list of paths and globs: entries in their order, each glob's files sorted, none twice.

    Raises UserError for a file that is not there and a glob that matches nothing.
    """
    paths: dict[Path, None] = {}
    for entry in map(str, entries):
        found = matches(entry) if is_glob(entry) else [Path(entry)]
        if not found:
            raise UserError(f"{entry}: the pattern matches no file; check dataset.conversations")
        for path in found:
            if not path.is_file():
                raise UserError(f"{path}: no such file; check dataset.conversations")
            paths[path] = None
    return list(paths)


def is_glob(entry: str) -> bool:
    """Is it a pattern? A file whose own name holds `[` or `*` is not."""
    return glob.has_magic(entry) and not Path(entry).exists()


def matches(pattern: str) -> list[Path]:
    """The files of a pattern (`**` reaches into folders), sorted."""
    return [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]


def read(entries: Sequence[str | Path], limit: int | None = None) -> Iterator[Conversation]:
    """The conversations of files and globs, at most `limit`; UserError at a malformed line or when there is none."""
    return _read(expand(entries), limit, _conversation)


def read_replies(entries: Sequence[str | Path]) -> Iterator[Reply]:
    """The regenerated replies of files and globs; UserError at a malformed line or when there is none."""
    return _read(expand(entries), None, _reply)


def prompt_messages(messages: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """What there is to answer: the messages up to the last user turn; empty when there is none."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return list(messages[: users[-1] + 1]) if users else []


def prompt_id(messages: Sequence[dict[str, str]]) -> str:
    """Identity of a prompt by its content: sha256 of the canonical JSON of its messages."""
    canonical = json.dumps(list(messages), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class _Fault(Exception):
    """What is wrong with a line; `_read` adds where."""


def _read(paths: list[Path], limit: int | None, parse: Callable[[dict, str, int, str], Any]) -> Iterator[Any]:
    count = 0
    for path in paths:
        for number, line in _lines(path):
            if limit is not None and count >= limit:
                return
            try:
                yield parse(_json_object(line, number), str(path), number, hashlib.sha256(line).hexdigest())
            except _Fault as fault:
                raise UserError(f"{path}:{number}: {fault}") from None
            count += 1
    if not count:
        raise UserError(f"{', '.join(map(str, paths))}: no conversation in it; give a file with at least one line")


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line.rstrip(b"\r\n")
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its rights") from None


def _json_object(line: bytes, number: int) -> dict[str, Any]:
    try:
        text = line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise _Fault(f"byte {error.start + 1} is not UTF-8; save the file as UTF-8 JSONL") from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise _Fault(f"not JSON ({error.msg} at column {error.colno}); write one JSON object a line") from None
    except RecursionError:
        raise _Fault("JSON nested too deeply; write one flat JSON object a line") from None
    if not isinstance(value, dict):
        raise _Fault(f"a JSON {_kind(value)}, not an object; write one JSON object a line (JSONL, not a JSON array)")
    return value


def _conversation(row: dict[str, Any], file: str, line: int, sha256: str) -> Conversation:
    kinds = {"messages": _openai, "conversations": _sharegpt, "prompt": _prompt}
    present = [key for key in kinds if key in row]
    if len(present) != 1:
        found = f"both {present[0]} and {present[1]}" if present else f"none (its keys: {', '.join(row) or 'none'})"
        raise _Fault(f"found {found}; a line needs exactly one of messages, conversations, prompt")
    messages = kinds[present[0]](row)
    if not messages:
        raise _Fault(f"{present[0]}: empty; give at least one message")
    for index, message in enumerate(messages):
        if message["role"] == "system" and index:
            raise _Fault(f"{present[0]}[{index}]: a system message must be the first; move it")
    return Conversation(messages, file, line, sha256)


def _openai(row: dict[str, Any]) -> list[dict[str, str]]:
    messages = []
    for where, item in _items(row, "messages"):
        role = _string(item, "role", where)
        if role not in ROLES:
            raise _Fault(f"{where}.role: {role!r} is not known; use one of {', '.join(ROLES)}")
        for key in NOT_SUPPORTED:
            if item.get(key):
                raise _Fault(f"{where}.{key}: not supported; write it into content as the target would say it")
        messages.append({"role": role, "content": _content(item, where)})
    return messages


def _content(item: dict[str, Any], where: str) -> str:
    """A string, or a list of {"type": "text", "text": ...} parts, joined as they are."""
    parts = item.get("content")
    if not isinstance(parts, list):
        return _string(item, "content", where)
    texts = []
    for i, part in enumerate(parts):
        here = f"{where}.content[{i}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            raise _Fault(f"{here}: not a text part; only {{'type': 'text', 'text': ...}} is supported")
        texts.append(_string(part, "text", here))
    return "".join(texts)


def _sharegpt(row: dict[str, Any]) -> list[dict[str, str]]:
    messages = []
    for where, item in _items(row, "conversations"):
        speaker = _string(item, "from", where)
        if speaker not in SHAREGPT_ROLES:
            raise _Fault(f"{where}.from: {speaker!r} is not known; use one of {', '.join(SHAREGPT_ROLES)}")
        messages.append({"role": SHAREGPT_ROLES[speaker], "content": _string(item, "value", where)})
    return messages


def _prompt(row: dict[str, Any]) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": _string(row, "prompt", "")}]
    if not messages[0]["content"].strip():
        raise _Fault("prompt: empty; remove the line")
    if row.get("response") is not None:
        messages.append({"role": "assistant", "content": _string(row, "response", "")})
    return messages


def _items(row: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    if not isinstance(row[key], list):
        raise _Fault(f"{key}: a JSON {_kind(row[key])}, not a list; give a list of messages")
    for index, item in enumerate(row[key]):
        if not isinstance(item, dict):
            raise _Fault(f"{key}[{index}]: a JSON {_kind(item)}, not an object; give an object a message")
        yield f"{key}[{index}]", item


def _string(item: dict[str, Any], key: str, where: str) -> str:
    path = f"{where}.{key}" if where else key
    if key not in item:
        raise _Fault(f"{path}: missing; add it")
    value = item[key]
    if not isinstance(value, str):
        raise _Fault(f"{path}: a JSON {_kind(value)}, not a string; give text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise _Fault(f"{path}: holds half of a surrogate pair (\\ud800...), not text; mend the escape") from None
    return value


def _reply(row: dict[str, Any], _file: str, _line: int, _sha256: str) -> Reply:
    for key in ("prompt_ids", "reply_ids"):
        ids = row.get(key)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise _Fault(f"{key}: not a list of token ids; make the file again (regenerate_replies)")
    for key, kind in (("messages", list), ("finish", str), ("file", str), ("line", int), ("sha256", str)):
        if not isinstance(row.get(key), kind):
            raise _Fault(f"{key}: missing or not a {kind.__name__}; make the file again (regenerate_replies)")
    return Reply(**{key: row[key] for key in Reply.__dataclass_fields__})


def _kind(value: Any) -> str:
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null")
