"""What a chat template is given: messages of the OpenAI kind, checked and put into one form.

    {"role": "system" | "developer" | "user" | "assistant" | "tool", "content": text}
    of an assistant also   "tool_calls": [{"id", "type", "function": {"name", "arguments": {...}}}]
                           "reasoning_content": text, under "reasoning" and "thinking" too, as templates differ
    of a tool also         "tool_call_id", "name"

Content in parts is joined (a template without parts would write a Python list into the text), arguments in JSON
become objects (what servers hand to a template), the older `function_call` and role `function` become calls and
results of tools. Keys that no template knows are left out.

Every fault is a `Malformed` with the path of the value, what it is and the remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eagle3lib.errors import UserError

Message = dict[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
FIRST_ONLY = ("system", "developer")
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
END_OF_THINKING = "</think>"
MEDIA = ("image", "audio", "video", "file")


class Unfit(UserError):
    """This one conversation cannot be a sample; others may. `reason` is one word for counting."""

    reason = "unfit"


class Malformed(Unfit):
    """A value that messages cannot have."""

    reason = "malformed"


class Media(Malformed):
    """A part that is no text."""

    reason = "media"


def check(messages: Any, where: str = "messages") -> list[Message]:
    """The messages in one form (above); Malformed at the first fault. `where` begins the paths in its text."""
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Malformed(f"{where}: a JSON {kind(messages)}, not a list; give a list of messages")
    if not messages:
        raise Malformed(f"{where}: empty; give at least one message")
    checked: list[Message] = []
    for index, item in enumerate(messages):
        here = f"{where}[{index}]"
        if not isinstance(item, Mapping):
            raise Malformed(f"{here}: a JSON {kind(item)}, not an object; give an object a message")
        checked.append(_message(item, here))
        _follows(checked, here)
    return checked


def check_tools(tools: Any, where: str = "tools") -> list[dict[str, Any]] | None:
    """The functions that a conversation offers, each as {"type": "function", "function": {...}}; None without any."""
    if tools is None or tools == []:
        return None
    if not isinstance(tools, Sequence) or isinstance(tools, str):
        raise Malformed(f"{where}: a JSON {kind(tools)}, not a list; give a list of functions")
    return [_tool(tool, f"{where}[{index}]") for index, tool in enumerate(tools)]


def reasoning_and_answer(message: Message) -> tuple[str, str]:
    """What a reply thinks and what it says, without blanks around; the thinking may stand in its content."""
    reasoning, answer = message.get(REASONING_KEYS[0]) or "", message["content"]
    if not reasoning and END_OF_THINKING in answer:
        reasoning, _, answer = answer.partition(END_OF_THINKING)
        reasoning = reasoning.strip().removeprefix("<think>")
    return reasoning.strip(), answer.strip()


def texts(message: Message) -> Iterator[tuple[str, str]]:
    """Each text that a template may write of a message, with its key."""
    for key in ("content", REASONING_KEYS[0], "name"):
        if message.get(key):
            yield key, message[key]
    for index, call in enumerate(message.get("tool_calls", ())):
        yield f"tool_calls[{index}]", json.dumps(call, ensure_ascii=False)


def _message(item: Mapping, here: str) -> Message:
    role = text_of(item.get("role"), f"{here}.role") if "role" in item else _missing(f"{here}.role")
    role = "tool" if role == "function" else role
    if role not in ROLES:
        raise Malformed(f"{here}.role: {role!r} is not known; use one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": ""}
    calls = _tool_calls(item, here)
    if role != "assistant" and calls:
        raise Malformed(f"{here}.tool_calls: on a message of role {role}; only an assistant calls tools")
    if calls:
        message["tool_calls"] = calls
    if not calls or item.get("content") is not None:
        message["content"] = _content(item, here)
    if reasoning := _reasoning(item, here):
        if role != "assistant":
            raise Malformed(f"{here}.reasoning_content: on a message of role {role}; only an assistant reasons")
        message |= dict.fromkeys(REASONING_KEYS, reasoning)
    for key in ("name", "tool_call_id"):
        if item.get(key) is not None:
            message[key] = text_of(item[key], f"{here}.{key}")
    return message


def _follows(messages: Sequence[Message], here: str) -> None:
    """May the last message stand where it stands?"""
    *before, last = messages
    if last["role"] in FIRST_ONLY and before:
        raise Malformed(f"{here}: a {last['role']} message must be the first; move it")
    if last["role"] != "tool":
        return
    caller = next((m for m in reversed(before) if m["role"] != "tool"), None)
    if caller is None or caller["role"] != "assistant":
        raise Malformed(f"{here}: a tool's result without a call before it; add the assistant's call or remove it")
    calls = caller.get("tool_calls")
    if calls is None:  # the call may stand in its content, as the target writes it
        return
    results = [m for m in before[before.index(caller) :] if m["role"] == "tool"]
    if len(results) >= len(calls):
        raise Malformed(f"{here}: result {len(results) + 1} of {len(calls)} tool calls; remove it or add its call")
    known = [call["id"] for call in calls if "id" in call]
    if "tool_call_id" in last and known and last["tool_call_id"] not in known:
        raise Malformed(
            f"{here}.tool_call_id: {last['tool_call_id']!r} is none of the calls before it ({known}); mend it"
        )


def _content(item: Mapping, here: str) -> str:
    """A string, or text parts joined as they are."""
    if "content" not in item:
        _missing(f"{here}.content")
    parts = item["content"]
    if not isinstance(parts, list):
        return text_of(parts, f"{here}.content")
    return "".join(_part(part, f"{here}.content[{i}]") for i, part in enumerate(parts))


def _part(part: Any, here: str) -> str:
    if not isinstance(part, Mapping):
        raise Malformed(f"{here}: a JSON {kind(part)}, not an object; give {{'type': 'text', 'text': ...}}")
    type_ = part.get("type")
    if isinstance(type_, str) and any(name in type_ for name in MEDIA):
        raise Media(f"{here}: {type_!r} is no text; a draft learns from text only, remove the conversation")
    if type_ != "text":
        raise Malformed(f"{here}: type {type_!r} is not known; only {{'type': 'text', 'text': ...}} is")
    return text_of(part["text"], f"{here}.text") if "text" in part else _missing(f"{here}.text")


def _reasoning(item: Mapping, here: str) -> str:
    given = {key: item[key] for key in REASONING_KEYS if item.get(key) is not None}
    found = {text_of(value, f"{here}.{key}") for key, value in given.items()} - {""}
    if len(found) > 1:
        raise Malformed(f"{here}: {' and '.join(given)} differ; keep one of them")
    return next(iter(found), "")


def _tool_calls(item: Mapping, here: str) -> list[dict[str, Any]]:
    calls, here = item.get("tool_calls"), f"{here}.tool_calls"
    if calls is None and item.get("function_call") is not None:
        calls = [item["function_call"]]
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise Malformed(f"{here}: a JSON {kind(calls)}, not a list; give a list of calls")
    return [_tool_call(call, f"{here}[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Any, here: str) -> dict[str, Any]:
    if not isinstance(call, Mapping):
        raise Malformed(f"{here}: a JSON {kind(call)}, not an object; give {{'function': {{'name', 'arguments'}}}}")
    function = call.get("function", call)
    if not isinstance(function, Mapping):
        raise Malformed(f"{here}.function: a JSON {kind(function)}, not an object; give its name and arguments")
    name = (
        text_of(function["name"], f"{here}.function.name") if "name" in function else _missing(f"{here}.function.name")
    )
    if not name:
        raise Malformed(f"{here}.function.name: empty; name the function")
    checked: dict[str, Any] = {"type": "function"}
    if call.get("id") is not None:
        checked["id"] = text_of(call["id"], f"{here}.id")
    return checked | {"function": {"name": name, "arguments": _arguments(function.get("arguments"), here)}}


def _arguments(value: Any, here: str) -> dict[str, Any]:
    here = f"{here}.function.arguments"
    try:
        arguments = json.loads(value or "{}") if isinstance(value, str) else value
        if arguments is None:
            return {}
        if isinstance(arguments, Mapping):
            json.dumps(arguments, ensure_ascii=False, allow_nan=False).encode()
            return dict(arguments)
    except RecursionError:
        raise Malformed(f"{here}: nested too deeply; simplify it") from None
    except UnicodeEncodeError:
        raise Malformed(f"{here}: holds half of a surrogate pair (\\ud800...), not text; mend the escape") from None
    except (ValueError, TypeError) as error:
        raise Malformed(f"{here}: not JSON ({error}); give an object, or an object written as JSON") from None
    raise Malformed(f"{here}: a JSON {kind(arguments)}, not an object; give the arguments by name")


def _tool(tool: Any, here: str) -> dict[str, Any]:
    if not isinstance(tool, Mapping):
        raise Malformed(f"{here}: a JSON {kind(tool)}, not an object; give {{'type': 'function', 'function': ...}}")
    function = tool.get("function", tool)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise Malformed(f"{here}: a tool without function.name; give its name, description and parameters")
    try:
        json.dumps(function, ensure_ascii=False, allow_nan=False).encode()
    except (RecursionError, ValueError, TypeError):
        raise Malformed(f"{here}: holds what JSON cannot; give its name, description and parameters") from None
    return {"type": "function", "function": dict(function)}


def _missing(path: str) -> Any:
    raise Malformed(f"{path}: missing; add it")


def text_of(value: Any, path: str) -> str:
    """A value that must be text; Malformed where it is none."""
    if not isinstance(value, str):
        raise Malformed(f"{path}: a JSON {kind(value)}, not a string; give text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Malformed(f"{path}: holds half of a surrogate pair (\\ud800...), not text; mend the escape") from None
    return value


def kind(value: Any) -> str:
    """JSON's name for what a value is."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", int: "number", float: "number"}
    return names.get(type(value), "null" if value is None else type(value).__name__)
