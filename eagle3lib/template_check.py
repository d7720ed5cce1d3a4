"""What a chat template makes of standard conversations: what would be supervised, or why it is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from eagle3lib import chat
from eagle3lib.errors import UserError

HI, WHY = ({"role": "user", "content": text} for text in ("hi", "why"))
YES, NO = ({"role": "assistant", "content": text} for text in ("yes", "no"))
BRIEF = {"role": "system", "content": "brief"}
BLUE = {"role": "tool", "tool_call_id": "functions.sky:0", "name": "sky", "content": "blue"}
PLACE = {"type": "object", "properties": {"at": {"type": "string"}}}
SKY = [{"type": "function", "function": {"name": "sky", "description": "its colour", "parameters": PLACE}}]
CALL = {  # its id as Kimi's templates want it, which write no other name
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "functions.sky:0", "type": "function", "function": {"name": "sky", "arguments": '{"at": "Oslo"}'}}
    ],
}
CONVERSATIONS: dict[str, dict[str, Any]] = {
    "single": {"messages": [HI, {"role": "assistant", "content": "yes no"}]},
    "system": {"messages": [BRIEF, HI, YES]},
    "multi": {"messages": [HI, YES, WHY, NO]},
    "multi with system": {"messages": [BRIEF, HI, YES, WHY, NO]},
    "tools": {"messages": [BRIEF, HI, CALL, BLUE, YES], "tools": SKY},
    "thinking": {"messages": [HI, YES | {"reasoning_content": "hm well"}]},
    "thinking inline": {"messages": [HI, YES | {"content": "<think>\nhm well\n</think>\n\nyes"}]},
    "thinking twice": {
        "messages": [HI, YES | {"reasoning_content": "hm"}, WHY, NO | {"reasoning_content": "well"}],
    },
    "thinking and tools": {
        "messages": [BRIEF, HI, CALL | {"reasoning_content": "hm"}, BLUE, YES | {"reasoning_content": "well"}],
        "tools": SKY,
    },
}


def describe(
    tokenizer: Any,
    template: str | Path | None,
    train_on: Literal["all", "last"],
    reasoning: bool,
    options: Mapping[str, Any],
) -> Iterator[str]:
    """A line a conversation: its text with what is supervised in ⟦ ⟧, or what `chat.render` says of it."""
    for name, one in CONVERSATIONS.items():
        try:
            rendered = chat.render(
                tokenizer, one["messages"], template, train_on,
                reasoning=reasoning, tools=one.get("tools"), options=options,
            )  # fmt: skip
        except UserError as error:
            yield f"{name:<18}  refused: {error}"
        else:
            yield f"{name:<18}  {_bracketed(tokenizer, rendered)}"


def _bracketed(tokenizer: Any, rendered: chat.Rendered) -> str:
    """The text of the ids, line breaks as ⏎; what is supervised between brackets."""
    pieces = chat.pieces(tokenizer, rendered.input_ids, rendered.reply_bounds)
    return "".join(f"⟦{text}⟧" if supervised else text for text, supervised in pieces).replace("\n", "⏎")
