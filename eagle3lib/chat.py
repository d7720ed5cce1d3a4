"""Messages to token ids, and which of them the model itself says.

A conversation is rendered to text by the chat template and tokenised once, without
further special tokens (a template writes its own). Where reply i lies in it is proven by
prefixes, for any template:

    text of messages[:i] with the generation prompt   ->  reply i begins
    text of messages[:i+1]                            ->  reply i ends

and both must be prefixes of the whole text, which is checked, never assumed. A template
with `{% generation %}` blocks says itself where replies lie; what the proof finds then
limits a block: a header inside of it is not supervised, an end-of-turn token behind it is.
A reply is given as token positions [start, end): it includes the end-of-turn token, and
not the newline that the template writes behind it (no model generates that).

Departures from transformers' `return_assistant_tokens_mask`: adjacent replies stay apart,
templates without blocks work, a token across a boundary is an error, and so is a control
token written out in a message. A template that asks for the date gets `DATE`, so that the
ids are the same tomorrow.
"""

from __future__ import annotations

import bisect
import functools
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from eagle3lib.errors import UserError, one_line
from eagle3lib.messages import Message, Unfit, check, check_tools, reasoning_and_answer, texts

Span = tuple[int, int]

DATE = datetime(2026, 1, 1)
THINKING_MARK = re.compile(r"[<\[◁][^\s>]*think", re.IGNORECASE)


class UnalignedReply(Unfit):
    """This one conversation has a reply that does not begin or end between two tokens; others may be fine."""

    reason = "unaligned_reply"


class CannotRender(Unfit):
    """The template raised an error of its own for this conversation."""

    reason = "cannot_render"


class ControlToken(Unfit):
    """A message holds a control token as text: it would be read as one, and end a turn, say."""

    reason = "control_token"


class Dropped(Unfit):
    """The template does not write what a reply says: it knows no calls of tools, say."""

    reason = "dropped"


class HiddenReply(UserError):
    """The template writes a reply differently than the model does, so it is not where the prefixes say."""


@dataclass(frozen=True)
class Rendered:
    """Token ids [T] and the replies in them as [start, end) token positions, ascending, not overlapping."""

    input_ids: list[int]
    reply_bounds: list[Span]


@dataclass(frozen=True)
class Reply:
    """The characters [start, end) of a text that message `index` is; supervised from `learn_from` on."""

    index: int
    start: int
    end: int
    learn_from: int


@dataclass(frozen=True)
class Marked:
    """A conversation's text, and the replies in it that are learned from."""

    text: str
    replies: list[Reply]


def render(
    tokenizer: Any,
    messages: Sequence[Message],
    template: str | Path | None = None,
    train_on: Literal["all", "last"] = "all",
    *,
    reasoning: bool = True,
    tools: Sequence[Mapping] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Rendered:
    """A whole conversation as token ids, with its replies.

    `template` is a Jinja file, None the tokenizer's own template; `options` are further variables of it
    (`enable_thinking`, say), `tools` the functions that the conversation offers. With `train_on="last"` only the
    last reply is given (and only it must be found in the text). Without `reasoning` a reply counts from the first
    token behind its thinking.

    Raises Unfit (its `reason` is one word) when this conversation cannot be a sample: malformed messages, a control
    token in one, a token across a reply's boundary, a template that refuses it. Raises HiddenReply when the template
    hides where message i lies, another UserError when the template cannot be used at all.
    """
    return tokenize(tokenizer, mark(tokenizer, messages, template, train_on, reasoning, tools, options))


def mark(
    tokenizer: Any,
    messages: Sequence[Message],
    template: str | Path | None = None,
    train_on: Literal["all", "last"] = "all",
    reasoning: bool = True,
    tools: Sequence[Mapping] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Marked:
    """The first half of `render`: the text and the characters of the replies; same arguments and errors."""
    chat = _template(tokenizer, template, options)
    messages = check(messages)
    chat.refuse_control_tokens(messages)
    one = _Conversation(chat, messages, check_tools(tools))
    indices = one.replies[-1:] if train_on == "last" else one.replies
    return Marked(one.text, [one.reply(index, reasoning) for index in indices])


def tokenize(tokenizer: Any, marked: Marked) -> Rendered:
    """The second half of `render`: token ids, and token positions of the replies."""
    (rendered,) = tokenize_all(tokenizer, [marked])
    if isinstance(rendered, UserError):
        raise rendered
    return rendered


def tokenize_all(tokenizer: Any, marked: Sequence[Marked]) -> list[Rendered | UserError]:
    """`tokenize` of each, with what it would raise; a fast tokenizer takes them on all cores at once."""
    if not marked:
        return []
    encoding = tokenizer([one.text for one in marked], add_special_tokens=False)
    fast = encoding.encodings or [None] * len(marked)
    return [
        _of_tokens(tokenizer, one, list(ids), offsets)
        for one, ids, offsets in zip(marked, encoding["input_ids"], fast, strict=True)
    ]


def _of_tokens(tokenizer: Any, marked: Marked, ids: list[int], encoding: Any) -> Rendered | UserError:
    try:
        tokens = _Tokens(tokenizer, marked.text, ids, encoding)
        spans = [tokens.reply(reply) for reply in marked.replies]
    except UserError as error:
        return error
    return Rendered(tokens.ids, [(start, end) for start, end in spans if start < end])


def prompt_ids(
    tokenizer: Any,
    messages: Sequence[Message],
    template: str | Path | None = None,
    *,
    tools: Sequence[Mapping] | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids [T] of the messages with the generation prompt behind them: what an engine continues."""
    chat = _template(tokenizer, template, options)
    return _encode(tokenizer, chat.render(check(messages), check_tools(tools), add_generation_prompt=True))


def pieces(tokenizer: Any, input_ids: Sequence[int], bounds: Iterable[Span]) -> Iterator[tuple[str, bool]]:
    """The text of token ids, cut at its replies: (text, is it a reply?). `bounds`: as in `Rendered`."""

    def text(start: int, end: int) -> str:
        return tokenizer.decode(list(input_ids[start:end]), clean_up_tokenization_spaces=False)

    place = 0
    for start, end in bounds:
        if place < start:
            yield text(place, start), False
        yield text(start, end), True
        place = end
    if place < len(input_ids):
        yield text(place, len(input_ids)), False


def append_reply(prompt_ids: Sequence[int], reply_ids: Sequence[int]) -> Rendered:
    """A prompt and the reply that an engine generated to it: its ids as they are, never text again."""
    start, end = len(prompt_ids), len(prompt_ids) + len(reply_ids)
    return Rendered([*prompt_ids, *reply_ids], [(start, end)])


def _template(tokenizer: Any, path: str | Path | None, options: Mapping[str, Any] | None) -> _Template:
    """The tokenizer's own template, or that of a file."""
    if path is not None:
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"dataset.chat_template: cannot read {path} ({one_line(error, 200)})") from None
        return _cached_template(tokenizer, f"chat template {path}", text, json.dumps(options or {}))
    try:
        text = tokenizer.get_chat_template()
    except (ValueError, AttributeError) as error:
        raise UserError(
            f"the target has no chat template ({one_line(error, 200)}); set dataset.chat_template"
        ) from None
    return _cached_template(tokenizer, "the target's chat template", text, json.dumps(options or {}))


@functools.lru_cache(maxsize=8)  # what is known of one serves for a whole dataset
def _cached_template(tokenizer: Any, name: str, text: str, options: str) -> _Template:
    return _Template(tokenizer, name, text, json.loads(options))


class _Template:
    """A chat template with its options and tokenizer, and the errors it can make."""

    def __init__(self, tokenizer: Any, name: str, text: str, options: dict[str, Any]):
        self.tokenizer, self.name, self.text = tokenizer, name, text
        self.variables = {**tokenizer.special_tokens_map, "strftime_now": DATE.strftime, **options}
        self.marks_replies = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None

    def render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None, add_generation_prompt: bool = False
    ) -> str:
        return self._render(messages, tools, add_generation_prompt, marked=False)[0][0]

    def render_marked(self, messages: Sequence[Message], tools: Sequence[dict] | None) -> tuple[str, list[Span]]:
        """The text, and the character spans of its generation blocks."""
        rendered, blocks = self._render(messages, tools, add_generation_prompt=False, marked=True)
        return rendered[0], [(start, end) for start, end in blocks[0]]

    def _render(
        self, messages: Sequence[Message], tools: Sequence[dict] | None, add_generation_prompt: bool, marked: bool
    ) -> tuple[list, list]:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template

        refusals: list[Exception] = []
        for form in _forms(messages):
            try:
                rendered: Any = render_jinja_template(  # annotated as str, returns (texts, spans of the blocks)
                    conversations=[form],
                    tools=tools,
                    chat_template=self.text,
                    add_generation_prompt=add_generation_prompt,
                    return_assistant_tokens_mask=marked,
                    **self.variables,
                )
                return rendered
            except TemplateSyntaxError as error:
                raise UserError(
                    f"{self.name} cannot render anything (TemplateSyntaxError, line {error.lineno}: "
                    f"{one_line(error, 200)}); mend it, or set dataset.chat_template"
                ) from None
            except Exception as error:  # a template is a program: it may raise anything
                refusals.append(error)
                if not isinstance(error, TypeError):
                    break
        raise CannotRender(
            f"{self.name} cannot render this conversation ({type(refusals[0]).__name__}: "
            f"{one_line(refusals[0], 200)}); change the conversation, or set dataset.chat_template"
        )

    def closing(self, text: str) -> str:
        """The control token that ends `text`, or nothing."""
        return max((token for token in self.control_tokens if text.endswith(token)), key=len, default="")

    def trim(self, text: str) -> str:
        """`text` without the blanks behind an end-of-turn token."""
        body = text.rstrip()
        return body if body.endswith(self.control_tokens) else text

    @functools.cached_property
    def control_tokens(self) -> tuple[str, ...]:
        """The tokens that are no text: the tokenizer turns what looks like one into one."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        special = {str(token) for token in added if token.special} | set(self.tokenizer.all_special_tokens)
        return tuple(sorted(special - {""}))

    @functools.cached_property
    def turn_tokens(self) -> tuple[str, ...]:
        """The added tokens, special or not, that the template writes around what is said in a turn."""
        turns = [{"role": role, "content": "0"} for role in ("user", "assistant")]
        try:
            text = self.render(turns, None)
        except CannotRender:
            return ()
        added = map(str, getattr(self.tokenizer, "added_tokens_decoder", {}).values())
        return tuple(sorted(token for token in added if token in text and not token[0].isalnum() and token.strip()))

    @functools.cached_property
    def forbidden(self) -> dict[bool, re.Pattern]:
        """What text may not hold, by "is it a reply?": a model writes tokens of tool calls, say, not of turns."""
        ends = {getattr(self.tokenizer, f"{name}_token", None) for name in ("bos", "eos", "pad")}
        of_turns = {*self.turn_tokens, *(token for token in ends if token)}
        return {
            True: _any_of(token for token in of_turns if not THINKING_MARK.match(token)),
            False: _any_of(token for token in {*of_turns, *self.control_tokens} if not THINKING_MARK.match(token)),
        }

    def refuse_control_tokens(self, messages: Sequence[Message]) -> None:
        """ControlToken where a message's text holds what the tokenizer would read as one."""
        for index, message in enumerate(messages):
            for key, text in texts(message):
                if found := self.forbidden[message["role"] == "assistant"].search(text):
                    raise ControlToken(
                        f"message {index}: its {key} holds the control token {found.group()!r}, which would be read "
                        "as one; take it out"
                    )


class _Conversation:
    """Checked messages, their text under a template, and where the replies lie in it."""

    def __init__(self, chat: _Template, messages: list[Message], tools: list[dict] | None):
        self.chat, self.messages, self.tools = chat, messages, tools
        self.replies = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        self.blocks: dict[int, Span] = {}
        if not chat.marks_replies:
            self.text = chat.render(messages, tools)
            return
        self.text, blocks = chat.render_marked(messages, tools)
        if len(blocks) != len(self.replies):
            raise UserError(
                f"{chat.name}: {len(blocks)} generation blocks for {len(self.replies)} replies "
                f"(messages {self.replies}); put one {{% generation %}} block around each reply"
            )
        self.blocks = dict(zip(self.replies, blocks, strict=True))

    def reply(self, index: int, reasoning: bool) -> Reply:
        """Where message `index` lies."""
        start, end = self._limited(index) if self.blocks else self._proven(index)
        return Reply(index, start, end, start if reasoning else self._behind_reasoning(index, start, end))

    def _prompt(self, index: int, add_generation_prompt: bool) -> str:
        """The text of what precedes message `index`."""
        return self.chat.render(self.messages[:index], self.tools, add_generation_prompt)

    def _proven(self, index: int) -> Span:
        """The characters of reply `index`, as the prefixes say; HiddenReply when they do not add up to the text."""
        if index == 0:
            raise UnalignedReply("message 0 is a reply with no prompt before it; begin with a user message")
        prompt, bare = self._prompt(index, True), self._prompt(index, False)
        is_last = index + 1 == len(self.messages)
        upto = self.text if is_last else self.chat.render(self.messages[: index + 1], self.tools)
        if not upto.startswith(prompt):
            shared = prompt[: _shared(prompt, bare)]
            what = f"message {index} without the generation prompt before it"
            if not upto.startswith(shared):
                what = f"what stands before message {index} differently once it is there"
            raise HiddenReply(
                f"{self.chat.name} writes {what} ({_parting(prompt, upto)}), so it is not what the model would say; "
                "regenerate the replies, or set dataset.chat_template_options or dataset.chat_template"
            )
        if prompt == bare:
            self._refuse_header(index, prompt)
        self._refuse_dropped(index, upto[len(prompt) :])
        body = self.chat.trim(upto)
        if self.text.startswith(upto):
            end = len(body) if not is_last else self._end_of_turn(body)
            return len(prompt), max(len(prompt), end)
        # History may end a turn with another token than the model does: all before it can be the same.
        cut = len(body) - len(self.chat.closing(body))
        same = len(prompt) < cut < len(body) and self.text.startswith(body[:cut])
        if same and self.text.startswith(self.chat.control_tokens, cut):
            return len(prompt), max(len(prompt), len(self.chat.trim(body[:cut])))
        what = f"message {index}" if self.text.startswith(prompt) else f"what stands before message {index}"
        remedy = "remove what follows" if index == self.replies[-1] else "use dataset.train_on: last"
        raise HiddenReply(
            f"{self.chat.name} writes {what} differently when more follows it ({_parting(upto, self.text)}), so its "
            f"reply cannot be told apart; {remedy}, regenerate the replies, or set dataset.chat_template to one that "
            "keeps it as it was or has {% generation %} blocks"
        )

    def _end_of_turn(self, body: str) -> int:
        """The end of the last reply in `body`: before a second control token that would not be there in history.

        Some templates (Phi's) close the whole conversation behind the token that ends the turn; nobody generates that.
        """
        head = self.chat.trim(body.removesuffix(self.chat.closing(body)))
        if head == body or not self.chat.closing(head):
            return len(body)
        try:
            continued = self.chat.render([*self.messages, {"role": "user", "content": "0"}], self.tools)
        except CannotRender:
            return len(body)
        return len(head) if continued.startswith(head) and not continued.startswith(body) else len(body)

    def _refuse_header(self, index: int, prompt: str) -> None:
        """Where the generation prompt is empty (after Mistral's [/INST], say), a reply must begin at once."""
        before = self.messages[:index]
        two = [self.chat.render([*before, {"role": "assistant", "content": text}], self.tools) for text in "01"]
        a, b = (text[len(prompt) :] for text in two)
        if a[: _shared(a, b)].strip():
            raise HiddenReply(
                f"{self.chat.name} ignores add_generation_prompt, so the header of message {index} would count as "
                "reply; set dataset.chat_template to a template with a generation prompt or {% generation %} blocks"
            )

    def _refuse_dropped(self, index: int, text: str) -> None:
        """What a reply says and calls must be in its text. (Its thinking need not: not all templates know any.)"""
        message = self.messages[index]
        _, answer = reasoning_and_answer(message)
        called = [call["function"]["name"] for call in message.get("tool_calls", ())]
        if missing := next((piece for piece in (answer, *called) if piece not in text), None):
            raise Dropped(
                f"{self.chat.name} does not write {missing[:40]!r} of message {index}; "
                "set dataset.chat_template to one that does"
            )

    def _limited(self, index: int) -> Span:
        """The generation block of reply `index`, limited by what can be proven of it."""
        start, end = self.blocks[index]
        try:
            first, last = self._proven(index)
        except (HiddenReply, CannotRender, UnalignedReply):  # the block alone tells
            return self._block_alone(index)
        if end <= first or start >= last:
            raise UserError(
                f"{self.chat.name}: the generation block of message {index} holds {self.text[start:end][:40]!r}, which "
                "is not what the model writes; put it around the reply"
            )
        closing = self.chat.closing(self.text[first:last])
        return max(start, first), last if self.text[end:last] == closing else min(end, last)

    def _block_alone(self, index: int) -> Span:
        start, end = self.blocks[index]
        if index:
            header = self._prompt(index, True).removeprefix(self._prompt(index, False))
            start += len(header) if self.text.startswith(header, start, end) else 0
        end = start + len(self.chat.trim(self.text[start:end]))
        eos = self.chat.tokenizer.eos_token
        return start, end + len(eos) if eos and self.text.startswith(eos, end) else end

    def _behind_reasoning(self, index: int, start: int, end: int) -> int:
        """Where the thinking of a reply ends; `start` when the text has none of it."""
        reasoning, answer = reasoning_and_answer(self.messages[index])
        position = self.text.find(reasoning, start, end) if reasoning else -1
        if position < 0:
            return start
        position += len(reasoning)
        return position if self.text.find(answer, position, end) >= 0 else start


class _Tokens:
    """A text tokenised once, and its character positions as token positions."""

    def __init__(self, tokenizer: Any, text: str, ids: list[int], encoding: Any):
        """encoding: of a fast tokenizer, which knows each token's characters."""
        self.tokenizer, self.text, self.ids, self.encoding = tokenizer, text, ids, encoding
        bos = getattr(tokenizer, "bos_token_id", None)
        if bos is not None and self.ids[:2] == [bos, bos]:
            raise UserError(
                f"the text begins with {tokenizer.bos_token!r} twice; set dataset.chat_template to one that writes it "
                "once"
            )

    def reply(self, reply: Reply) -> Span:
        """The tokens of a reply that are learned from."""
        what = f"message {reply.index}: its"
        start, end = self._boundary(reply.start, f"{what} beginning"), self._boundary(reply.end, f"{what} end")
        return (start if reply.learn_from == reply.start else self._first_behind(reply.learn_from)), end

    def _boundary(self, char: int, what: str) -> int:
        """The token that begins at `char`; UnalignedReply when a token lies across it.

        Offsets decide when the tokens on both sides touch at `char`. They need not: byte-level
        tokenizers trim spaces off their offsets, and slow ones have none. Then the text up to
        `char`, tokenised alone, must give the same first tokens, or these decode to it.
        """
        if char in (0, len(self.text)):
            return 0 if char == 0 else len(self.ids)
        if self.encoding is not None:
            token = self._first_from(char)
            if 0 < token < len(self.ids) and self._chars(token)[0] == char == self._chars(token - 1)[1]:
                return token
        head = _encode(self.tokenizer, self.text[:char])
        if self.ids[: len(head)] == head:
            return len(head)
        token = self._decoded_to(char)
        if self._decode(token) == self.text[:char]:
            return token
        around = self.text[max(0, char - 8) : char + 8]
        raise UnalignedReply(f"{what} lies inside of a token (near {around!r}); change the text there")

    def _first_behind(self, char: int) -> int:
        """The first token that holds nothing of the text up to `char`, before which is no blank."""
        if self.encoding is not None:
            return self._first_from(char)
        token = self._decoded_to(char)
        for count in range(token, min(token + 4, len(self.ids)) + 1):  # a character can be several tokens
            if self._decode(count).startswith(self.text[:char]):
                return count
        around = self.text[max(0, char - 8) : char]
        raise UnalignedReply(
            f"its thinking ends in no token that the tokenizer decodes ({around!r}); mend the text there"
        )

    def _chars(self, token: int) -> Span:
        return self.encoding.token_to_chars(token)  # asked for one by one: a list of all costs more than the ids

    def _first_from(self, char: int) -> int:
        """The first token that begins at `char` or behind it."""
        return bisect.bisect_left(range(len(self.ids)), char, key=lambda token: self._chars(token)[0])

    def _decoded_to(self, char: int) -> int:
        """How many first tokens it takes to write `char` characters."""
        return bisect.bisect_left(range(len(self.ids)), char, key=lambda count: len(self._decode(count)))

    def _decode(self, count: int) -> str:
        return self.tokenizer.decode(
            self.ids[:count],
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
            spaces_between_special_tokens=False,
        )


def _forms(messages: Sequence[Message]) -> list[list[Message]]:
    """The messages, and the same with arguments as text: most templates want an object, as servers give them, others
    the JSON text of the API."""
    forms = [list(messages)]
    if any("tool_calls" in message for message in messages):
        forms.append([_with_arguments_as_text(message) for message in messages])
    return forms


def _with_arguments_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append(call | {"function": call["function"] | {"arguments": arguments}})
    return message | {"tool_calls": calls}


def _parting(before: str, after: str) -> str:
    """Where two texts part, in words."""
    at = _shared(before, after)
    was, now = (text[max(0, at - 12) : at + 24] for text in (before, after))
    return f"{was!r} becomes {now!r}"


def _shared(a: str, b: str) -> int:
    """How many characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _any_of(tokens: Iterable[str]) -> re.Pattern:
    """A pattern that finds the longest of `tokens`; nothing when there are none."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or r"(?!)")


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
