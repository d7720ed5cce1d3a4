"""Conversations out of files of any common layout, streamed, each with its file and line (or row).

A row's layout is told by its keys, or by the `format` of its source:

    messages   {"messages": [{"role", "content"}, …]} of OpenAI's API, with tool_calls, tool results, reasoning_content;
               beside it {"tools"}
    sharegpt   {"conversations": [{"from": "human" | "gpt" | "system" | "tool" | …, "value"}, …]}
    prompt     {"prompt", "response"}, response optional
    alpaca     {"instruction", "input", "output"}, the last two optional; beside it {"system", "history"}
    tokens     {"input_ids", "loss_mask"}: tokenised elsewhere, 1 on the tokens of the replies
    text       {"text"}: raw text, all of it to be continued

and one more, written by `regenerate_replies` and read by `read_replies`:
    {"messages", "prompt_ids", "reply_ids", "finish", "file", "line", "sha256"}

A malformed row is a UserError `file:line: what; remedy`. A row that is in order and yet of no use here (it holds an
image, say) is a conversation with a reason in `unfit`: whoever reads it lists it as rejected. `readers` says which
files there are, and what counts as line and sha256.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from eagle3lib import readers
from eagle3lib.errors import UserError
from eagle3lib.messages import Malformed, Media, Message, check, check_tools, kind, text_of
from eagle3lib.readers import Fault

SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function_call": "assistant",
}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # keys beside the messages
# The order in which keys decide: of the first three one alone may be there, the others may stand beside it.
KEYS = {
    "messages": "messages",
    "sharegpt": "conversations",
    "prompt": "prompt",
    "alpaca": "instruction",
    "tokens": "input_ids",
    "text": "text",
}
ALONE = ("messages", "sharegpt", "prompt")


@dataclass(frozen=True)
class Source:
    """An entry of dataset.conversations: its files in order, and how they are read."""

    name: str
    files: tuple[Path, ...]
    format: str | None = None
    limit: int | None = None
    weight: float = 1.0


@dataclass(frozen=True)
class Conversation:
    """What is said, and the input line it comes from.

    messages: as `messages.check` gives them. tools: what may be called, as OpenAI's API takes it. Raw text, and token
    ids with the bounds [s0, e0, s1, e1, …] of the replies among them, come instead of messages. unfit: (reason, detail)
    of a conversation that is to be rejected.
    """

    messages: list[Message]
    file: str
    line: int
    sha256: str
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    input_ids: list[int] | None = None
    reply_bounds: list[int] | None = None
    unfit: tuple[str, str] | None = None


@dataclass(frozen=True)
class Reply:
    """A prompt and the target's own reply to it, as the token ids that the engine saw and made.

    finish: "stop" or "length"; or, with no reply, why there is none, and `detail` says more. reply_bounds: the target's
    earlier replies among prompt_ids, [s0, e0, s1, e1, …].
    """

    messages: list[Message]
    prompt_ids: list[int]
    reply_ids: list[int]
    finish: str
    file: str
    line: int
    sha256: str
    detail: str = ""
    reply_bounds: Sequence[int] = ()


def expand(entries: Iterable[str | Path]) -> list[Path]:
    """Files of a list of paths, globs and saved datasets: entries in their order, each glob's files sorted, none twice.

    Raises UserError for a file that is not there and a glob that matches nothing.
    """
    paths: dict[Path, None] = {}
    for entry in map(str, entries):
        found = matches(entry) if is_glob(entry) else [Path(entry)]
        if not found:
            raise UserError(f"{entry}: the pattern matches no file; check dataset.conversations")
        for path in found:
            if path.is_dir():
                paths |= dict.fromkeys(readers.saved_dataset(path))
            elif path.is_file():
                paths[path] = None
            else:
                raise UserError(f"{path}: no such file; check dataset.conversations")
    return list(paths)


def is_glob(entry: str) -> bool:
    """Is it a pattern? A file whose own name holds `[` or `*` is not."""
    return glob.has_magic(entry) and not Path(entry).exists()


def matches(pattern: str) -> list[Path]:
    """The files of a pattern (`**` reaches into folders), sorted."""
    return [path for path in map(Path, sorted(glob.glob(pattern, recursive=True))) if path.is_file()]


def as_sources(entries: Sequence[str | Path | Source]) -> list[Source]:
    """Paths and globs beside sources: each a source of its own."""
    return [one if isinstance(one, Source) else Source(str(one), tuple(expand([one]))) for one in entries]


def read(entries: Sequence[str | Path | Source], limit: int | None = None) -> Iterator[Conversation]:
    """The conversations of sources, files and globs in their order, at most `limit`, each file once.

    UserError at a malformed line or when there is none.
    """
    return _read(as_sources(entries), limit, _conversation)


def read_replies(entries: Sequence[str | Path]) -> Iterator[Reply]:
    """The regenerated replies of files and globs; UserError at a malformed line or when there is none."""
    return _read(as_sources(entries), None, _reply)


def fit(conversations: Iterable[Conversation]) -> Iterator[Conversation]:
    """Those that can be used; UserError for another, where there is no list of rejected ones."""
    for one in conversations:
        if one.unfit:
            raise UserError(f"{one.file}:{one.line}: {one.unfit[0]}: {one.unfit[1]}; remove the line")
        yield one


def words(one: Conversation | Reply) -> str:
    """All that is said, as one text; empty for token ids."""
    if isinstance(one, Conversation) and one.text is not None:
        return one.text
    return "\n".join(m[key] for m in one.messages for key in ("reasoning_content", "content") if m.get(key))


def prompt_messages(messages: Sequence[Message]) -> list[Message]:
    """What there is to answer: the messages up to the last user turn; empty when there is none."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    return list(messages[: users[-1] + 1]) if users else []


def prompt_id(messages: Sequence[Message]) -> str:
    """Identity of a prompt by its content: sha256 of the canonical JSON of its messages."""
    canonical = json.dumps(list(messages), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _read(
    sources: list[Source], limit: int | None, parse: Callable[[readers.Row, str, str | None], Any]
) -> Iterator[Any]:
    count, seen = 0, set[Path]()
    for source in sources:
        new = [path for path in source.files if path not in seen]
        seen.update(new)
        rows = ((path, row) for path in new for row in readers.rows(path))
        for path, row in islice(rows, source.limit):
            if limit is not None and count >= limit:
                return
            try:
                yield parse(row, str(path), source.format)
            except Fault as fault:
                raise UserError(f"{path}:{row.number}: {fault}") from None
            count += 1
    if not count:
        names = ", ".join(str(path) for source in sources for path in source.files)
        raise UserError(f"{names}: no conversation in it; give a file with at least one line")


# --- layouts -----------------------------------------------------------------------------------------


def _conversation(row: readers.Row, file: str, form: str | None) -> Conversation:
    form = form or _format_of(row.value)
    key = KEYS[form]
    if key not in row.value:
        raise Fault(f"{key}: missing, and the source's format is {form}; correct it (its keys: {_keys(row.value)})")
    one = Conversation([], file, row.number, row.sha256)
    if form == "tokens":
        return _tokens(row.value, one)
    if form == "text":
        return replace(one, text=_not_blank(row.value, "text"))
    try:
        messages = check(_MESSAGES[form](row.value), key)
        tools = check_tools(_from_json(row.value.get("tools"), "tools"))
    except Media as media:
        return replace(one, unfit=(media.reason, str(media)))
    except Malformed as fault:
        raise Fault(str(fault)) from None
    if beside := [name for name in MEDIA if row.value.get(name)]:
        return replace(one, messages=messages, unfit=(Media.reason, f"{beside[0]}: only text is learned from"))
    return replace(one, messages=messages, tools=tools)


def _format_of(row: dict[str, Any]) -> str:
    alone = [form for form in ALONE if KEYS[form] in row]
    present = alone or [form for form in KEYS if KEYS[form] in row]
    if len(alone) > 1:
        raise Fault(
            f"found both {KEYS[alone[0]]} and {KEYS[alone[1]]}; a line needs exactly one of "
            f"{', '.join(KEYS[form] for form in ALONE)}, or name the source's format"
        )
    if not present:
        raise Fault(f"found none (its keys: {_keys(row)}); a line needs exactly one of {', '.join(KEYS.values())}")
    return present[0]


def _openai(row: dict[str, Any]) -> list[Message]:
    return list(_items(row, "messages"))


def _sharegpt(row: dict[str, Any]) -> list[Message]:
    messages = []
    for index, item in enumerate(_items(row, "conversations")):
        where = f"conversations[{index}]"
        if not isinstance(item, dict):
            raise Fault(f"{where}: a JSON {kind(item)}, not an object; give an object a message")
        speaker = _string(item, "from", where)
        if speaker not in SHAREGPT_ROLES:
            raise Fault(f"{where}.from: {speaker!r} is not known; use one of {', '.join(SHAREGPT_ROLES)}")
        said = _string(item, "value", where)
        if speaker == "function_call":
            call = _from_json(said, f"{where}.value")
            messages.append({"role": "assistant", "tool_calls": call if isinstance(call, list) else [call]})
        else:
            messages.append({"role": SHAREGPT_ROLES[speaker], "content": said})
    return messages


def _prompt(row: dict[str, Any]) -> list[Message]:
    return _exchange(_not_blank(row, "prompt"), row, "response")


def _alpaca(row: dict[str, Any]) -> list[Message]:
    asked = _not_blank(row, "instruction")
    if row.get("input"):
        asked = f"{asked}\n\n{_string(row, 'input', '')}"
    messages = [{"role": "system", "content": _string(row, "system", "")}] if row.get("system") else []
    for i, pair in enumerate(row.get("history") or []):
        if not isinstance(pair, list) or len(pair) != 2:
            raise Fault(f"history[{i}]: not a pair of texts; give [instruction, output]")
        turn = dict(zip(("user", "assistant"), pair, strict=True))
        messages += [{"role": role, "content": _string(turn, role, f"history[{i}]")} for role in turn]
    return messages + _exchange(asked, row, "output")


def _exchange(asked: str, row: dict[str, Any], key: str) -> list[Message]:
    """A question, and the answer under `key` where there is one."""
    messages = [{"role": "user", "content": asked}]
    if row.get(key) is not None:
        messages.append({"role": "assistant", "content": _string(row, key, "")})
    return messages


_MESSAGES: dict[str, Callable[[dict[str, Any]], list[Message]]] = {
    "messages": _openai,
    "sharegpt": _sharegpt,
    "prompt": _prompt,
    "alpaca": _alpaca,
}


def _tokens(row: dict[str, Any], one: Conversation) -> Conversation:
    ids, mask = row["input_ids"], row.get("loss_mask")
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise Fault("input_ids: not a list of token ids; give whole numbers")
    if not isinstance(mask, list) or len(mask) != len(ids) or not all(one in (0, 1) for one in mask):
        raise Fault(f"loss_mask: not a list of {len(ids)} numbers that are 0 or 1; give 1 on the tokens of the replies")
    bounds, start = [], 0
    for supervised, run in groupby(mask):
        end = start + len(list(run))
        bounds += [start, end] if supervised else []
        start = end
    return replace(one, input_ids=ids, reply_bounds=bounds)


def _items(row: dict[str, Any], key: str) -> list[Any]:
    items = row[key]
    if isinstance(items, dict) and items and all(isinstance(column, list) for column in items.values()):
        items = _from_columns(items, key)  # how `datasets` keeps a list of objects in Parquet
    if not isinstance(items, list):
        raise Fault(f"{key}: a JSON {kind(items)}, not a list; give a list of messages")
    return items


def _from_json(value: Any, where: str) -> Any:
    """A value that may be written as JSON in a string: Parquet has no better place for objects of many shapes."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value or "null")
    except (ValueError, RecursionError):
        raise Fault(f"{where}: not JSON; mend it, or give it as it is instead of in a string") from None


def _from_columns(columns: dict[str, list[Any]], key: str) -> list[dict[str, Any]]:
    if len({len(column) for column in columns.values()}) > 1:
        raise Fault(f"{key}: columns of different lengths; give a list of messages")
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _not_blank(row: dict[str, Any], key: str) -> str:
    text = _string(row, key, "")
    if not text.strip():
        raise Fault(f"{key}: empty; remove the line")
    return text


def _string(item: dict[str, Any], key: str, where: str) -> str:
    path = f"{where}.{key}" if where else key
    if key not in item:
        raise Fault(f"{path}: missing; add it")
    try:
        return text_of(item[key], path)
    except Malformed as fault:
        raise Fault(str(fault)) from None


def _keys(row: dict[str, Any]) -> str:
    return ", ".join(row) or "none"


def _reply(row: readers.Row, _file: str, _form: str | None) -> Reply:
    values = row.value
    for key in ("prompt_ids", "reply_ids"):
        ids = values.get(key)
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise Fault(f"{key}: not a list of token ids; make the file again (regenerate_replies)")
    for key, type_ in (("messages", list), ("finish", str), ("file", str), ("line", int), ("sha256", str)):
        if not isinstance(values.get(key), type_):
            raise Fault(f"{key}: missing or not a {type_.__name__}; make the file again (regenerate_replies)")
    return Reply(**{key: values[key] for key in Reply.__dataclass_fields__ if key in values})
