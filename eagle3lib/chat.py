"""Messages to token ids, and which of them the model itself says.

A conversation is rendered to text by the chat template and tokenised once, without
further special tokens (a template writes its own). Where the replies lie in it comes from
the template's `{% generation %}` blocks if it has them; otherwise from prefixes:

    text of messages[:i] with the generation prompt   ->  reply i begins
    text of messages[:i+1]                            ->  reply i ends

and both must be prefixes of the whole text, which is checked, never assumed. A reply is
given as token positions [start, end): it includes the end-of-turn token, and not the
newline that the template writes behind it (no model generates that).

Departures from transformers' `return_assistant_tokens_mask`: adjacent replies stay apart,
templates without blocks work, and a token across a boundary is an error.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3lib.errors import UserError

Message = dict[str, str]
Span = tuple[int, int]


class UnalignedReply(UserError):
    """This one conversation has a reply that does not begin or end between two tokens; others may be fine."""


@dataclass(frozen=True)
class Rendered:
    """Token ids [T] and the replies in them as [start, end) token positions, ascending, not overlapping."""

    input_ids: list[int]
    reply_bounds: list[Span]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    template: str | Path | None = None,
    train_on: Literal["all", "last"] = "all",
) -> Rendered:
    """A whole conversation as token ids, with its replies.

    `template` is a Jinja file, None the tokenizer's own template. With `train_on="last"`
    only the last reply is given (and only it must be found in the text).
    Raises UserError when the template cannot render, or hides where message i lies;
    UnalignedReply when a token crosses the boundary of message i.
    """
    chat = _Template(tokenizer, template)
    if chat.marks_replies:
        text, spans = chat.render_marked(messages)
    else:
        text = chat.render(messages)
        spans = _spans_from_prefixes(chat, messages, text, train_on)
    if train_on == "last":
        spans = spans[-1:]
    tokens = _Tokens(tokenizer, text)
    return Rendered(tokens.ids, [tokens.reply(index, span) for index, span in spans])


def prompt_ids(tokenizer: Any, messages: Sequence[Message], template: str | Path | None = None) -> list[int]:
    """Token ids [T] of the messages with the generation prompt behind them: what an engine continues."""
    return _encode(tokenizer, _Template(tokenizer, template).render(messages, add_generation_prompt=True))


def append_reply(prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Rendered:
    """A prompt and the reply that an engine generated to it: its ids as they are, never text again."""
    start, end = len(prompt_ids), len(prompt_ids) + len(reply_ids)
    return Rendered([*prompt_ids, *reply_ids], [(start, end)])


class _Template:
    """A chat template and the errors it can make."""

    def __init__(self, tokenizer: Any, path: str | Path | None):
        self.tokenizer = tokenizer
        self.name = "the target's chat template" if path is None else f"chat template {path}"
        self.text = self._own() if path is None else self._read(Path(path))
        self.marks_replies = re.search(r"\{%-?\s*generation\s*-?%\}", self.text) is not None

    def _own(self) -> str:
        try:
            return self.tokenizer.get_chat_template()
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"the target has no chat template ({_one_line(error)}); set dataset.chat_template"
            ) from None

    def _read(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"dataset.chat_template: cannot read {path} ({_one_line(error)})") from None

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        return self._render(messages, add_generation_prompt, marked=False)[0][0]

    def render_marked(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, Span]]]:
        """The text, and for each reply its message index and character span, from the generation blocks."""
        texts, blocks = self._render(messages, add_generation_prompt=False, marked=True)
        replies = _reply_indices(messages)
        if len(blocks[0]) != len(replies):
            raise UserError(
                f"{self.name}: {len(blocks[0])} generation blocks for {len(replies)} replies "
                f"(messages {replies}); put one {{% generation %}} block around each reply"
            )
        return texts[0], list(zip(replies, map(tuple, blocks[0]), strict=True))

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool, marked: bool) -> tuple[list, list]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            rendered: Any = render_jinja_template(  # annotated as str, returns (texts, spans of the blocks)
                conversations=[list(messages)],
                chat_template=self.text,
                add_generation_prompt=add_generation_prompt,
                return_assistant_tokens_mask=marked,
                **self.tokenizer.special_tokens_map,
            )
            return rendered
        except Exception as error:  # a template is a program: it may raise anything
            raise UserError(
                f"{self.name} cannot render this conversation ({type(error).__name__}: {_one_line(error)}); "
                "change the conversation, or set dataset.chat_template"
            ) from None


def _spans_from_prefixes(
    chat: _Template, messages: Sequence[Message], text: str, train_on: str
) -> list[tuple[int, Span]]:
    """Message index and character span in `text` of each reply, proven by prefixes that `text` begins with."""
    indices = _reply_indices(messages)
    spans = []
    for index in indices[-1:] if train_on == "last" else indices:
        if index == 0:
            raise UnalignedReply("message 0 is a reply with no prompt before it; begin with a user message")
        prompt = chat.render(messages[:index], add_generation_prompt=True)
        upto = chat.render(messages[: index + 1])
        if not (text.startswith(upto) and upto.startswith(prompt)):
            raise UserError(
                f"{chat.name} writes message {index} differently when more follows it (it may strip thinking, or "
                "close the last turn in another way), so its reply cannot be told apart; use dataset.train_on: last, "
                "regenerate the replies, or a template with {% generation %} blocks"
            )
        bare = chat.render(messages[:index])
        reply = str(messages[index]["content"]).strip()
        if prompt == bare and not upto[len(prompt) :].lstrip().startswith(reply):
            raise UserError(
                f"{chat.name} ignores add_generation_prompt, so the header of message {index} would count as reply; "
                "set dataset.chat_template to a template with a generation prompt or {% generation %} blocks"
            )
        spans.append((index, (len(prompt), len(upto))))
    return spans


def _reply_indices(messages: Sequence[Message]) -> list[int]:
    return [i for i, message in enumerate(messages) if message["role"] == "assistant"]


class _Tokens:
    """A text tokenised once, and its character positions as token positions."""

    def __init__(self, tokenizer: Any, text: str):
        self.tokenizer, self.text = tokenizer, text
        self.starts: list[int] | None = None
        if getattr(tokenizer, "is_fast", False):
            encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
            self.ids = list(encoding["input_ids"])
            self.starts = [start for start, _ in encoding["offset_mapping"]]
            self.ends = [end for _, end in encoding["offset_mapping"]]
        else:
            self.ids = _encode(tokenizer, text)

    def reply(self, index: int, span: Span) -> Span:
        """Token span of the reply of message `index`, without whitespace behind its end-of-turn token."""
        start = self._boundary(span[0], f"message {index}: its beginning")
        end = self._boundary(span[1], f"message {index}: its end")
        special = set(self.tokenizer.all_special_ids)
        last = end
        while last > start and self.ids[last - 1] not in special and not self._decode(last - 1).strip():
            last -= 1
        if last > start and self.ids[last - 1] in special:
            return start, last
        if end < len(self.ids) and self.ids[end] == self.tokenizer.eos_token_id:
            return start, end + 1  # a generation block that leaves the end-of-turn token out
        return start, end

    def _decode(self, position: int) -> str:
        return self.tokenizer.decode([self.ids[position]])

    def _boundary(self, char: int, what: str) -> int:
        """The token that begins at `char`; UnalignedReply when a token lies across it.

        Offsets decide when the tokens on both sides touch at `char`. They need not: byte-level
        tokenizers trim spaces off their offsets, and slow ones have none. Then the text up to
        `char`, tokenised alone, must give the same first tokens.
        """
        if char in (0, len(self.text)):
            return 0 if char == 0 else len(self.ids)
        if self.starts is not None:
            token = bisect.bisect_left(self.starts, char)
            touching = token < len(self.ids) and self.starts[token] == char and token and self.ends[token - 1] == char
            if touching:
                return token
        head = _encode(self.tokenizer, self.text[:char])
        if self.ids[: len(head)] != head:
            around = self.text[max(0, char - 8) : char + 8]
            raise UnalignedReply(f"{what} lies inside of a token (near {around!r}); change the text there")
        return len(head)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
