"""The target answers the prompts itself, so that the draft learns from what it will be asked to guess.

Every finished reply goes to a store at once (one line, fsynced), under a key made of all that decides it;
a job run again computes only what no store file holds. The output lists the prompts in their order, cut to
the fewest whose replies reach the token budget: the same whatever the order in which replies ended.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from eagle3lib import chat
from eagle3lib.config import DatasetConfig, RegenerateConfig
from eagle3lib.engines import Prompt as EnginePrompt
from eagle3lib.engines import Speaker
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import pairs
from eagle3lib.job import Progress, append_line, atomic_write, file_lock, read_lines
from eagle3lib.messages import Message, Unfit
from eagle3lib.samples import Conversation, prompt_messages

# Reply ids (compact: there may be millions) and how the reply ended.
Outcome = tuple[array, str]
ERROR = "error: "  # begins how a reply ended that a server refused; what it said follows
BLOCK = 8  # times cfg.batch_size: conversations of several turns that are under way together


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: messages as token ids; key and seed by content.

    reply_bounds: its own earlier replies among the ids, [s0, e0, s1, e1, …]. unfit: (reason, detail), if it cannot be
    asked.
    """

    messages: list[Message]
    ids: list[int]
    origin: Conversation
    key: str
    temperature: float = 0.0
    reply_bounds: tuple[int, ...] = ()
    unfit: tuple[str, str] | None = None

    @property
    def seed(self) -> int:
        return int(self.key[:15], 16)


def regenerate(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    open_engine: Callable[[], Speaker],
    dataset: DatasetConfig,
    cfg: RegenerateConfig,
    identity: Sequence[str],
    budget_tokens: int | None,
    store_folder: str | Path,
    out_file: str | Path,
    store_name: str,
    count: Callable[[int, int], None] = lambda replies, tokens: None,
) -> dict[str, int]:
    """Write the replies to `conversations` to `out_file`; returns {"prompts", "found", "computed", "reply_tokens"}.

    Replies are looked up in all `*.jsonl` of `store_folder` and new ones appended to `{store_name}.jsonl` there
    (one writer a name). `identity` says who answers: target fingerprint, engine, compute dtype. `open_engine` is
    called only when something must be computed, and conversations are read only as far as needed. A prompt that
    leaves no room for cfg.max_new_tokens in dataset.max_tokens gets no reply (finish "too_long"), nor does a
    conversation without a user message ("no_prompt"), one that is unfit, and one that a server refused ("error", in
    errors/{store_name}.jsonl too): sharding rejects them. `budget_tokens`: stop at so many
    reply tokens; a prompt that repeats an earlier one adds none. With cfg.turns "all" every turn is answered, and a
    conversation is one row of the output. Raises UserError with file and line when the
    template cannot render. `count` is told of each reply that was computed: (1, its tokens).
    """
    # An orphan of a killed run may still be answering: wait, and find its replies.
    with file_lock(Path(store_folder) / f"{store_name}.lock"):
        store = _Store(Path(store_folder), store_name)
        return _regenerate(
            conversations, tokenizer, open_engine, dataset, cfg, identity, budget_tokens, store, out_file, count
        )


def _regenerate(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    open_engine: Callable[[], Speaker],
    dataset: DatasetConfig,
    cfg: RegenerateConfig,
    identity: Sequence[str],
    budget_tokens: int | None,
    store: _Store,
    out_file: str | Path,
    count: Callable[[int, int], None],
) -> dict[str, int]:
    ask = _Asker(tokenizer, dataset, cfg, identity)
    room = dataset.max_tokens - cfg.max_new_tokens
    engine = functools.cache(open_engine)
    if cfg.turns == "last":
        plan = _Plan(map(ask.last_turn, conversations), store.replies, budget_tokens, room, cfg.max_new_tokens)
        computed = _compute(plan, store, engine(), cfg, count) if plan.wanting() else 0
        chosen = [(prompt, plan.outcome(prompt)) for prompt in plan.chosen()]
        tokens = sum(map(plan.new_tokens, range(len(chosen))))
        found = len(plan.replies) - computed
    else:
        chosen, computed, found, tokens = [], 0, 0, 0
        for block in _blocks(conversations, BLOCK * cfg.batch_size):
            dialogues = [_Dialogue(one, ask) for one in block]
            while asked := [dialogue for dialogue in dialogues if dialogue.prompt]:
                prompts = iter([dialogue.prompt for dialogue in asked if dialogue.prompt])
                plan = _Plan(prompts, store.replies, None, room, cfg.max_new_tokens)
                new = _compute(plan, store, engine(), cfg, count) if plan.wanting() else 0
                computed, found = computed + new, found + len(plan.replies) - new
                for dialogue, prompt in zip(asked, plan.chosen(), strict=True):
                    dialogue.take(plan.outcome(prompt))
            for dialogue in dialogues:
                assert dialogue.result is not None
                chosen.append(dialogue.result)
                tokens += dialogue.tokens
                if budget_tokens is not None and tokens >= budget_tokens:
                    break
            else:
                continue
            break
    _write(chosen, Path(out_file))
    return {"prompts": len(chosen), "found": found, "computed": computed, "reply_tokens": tokens}


def _blocks(conversations: Iterable[Conversation], size: int) -> Iterator[list[Conversation]]:
    source = iter(conversations)
    while block := list(itertools.islice(source, size)):
        yield block


@dataclass(frozen=True)
class _Asker:
    """Conversations as prompts."""

    tokenizer: Any
    dataset: DatasetConfig
    cfg: RegenerateConfig
    identity: Sequence[str]

    def last_turn(self, one: Conversation) -> Prompt:
        """The whole of a conversation up to its last user turn (of text: all of it; of token ids: up to the reply)."""
        return self.prompt(one, prompt_messages(one.messages))

    def prompt(self, one: Conversation, messages: list[Message], reply_bounds: tuple[int, ...] = ()) -> Prompt:
        unfit, ids = one.unfit, list[int]()
        try:
            ids = [] if unfit else self._ids(one, messages)
        except Unfit as error:
            unfit = (error.reason, str(error))
        except UserError as error:
            raise UserError(f"{one.file}:{one.line}: {error}") from None
        temperature = temperature_of(ids, self.cfg)
        key = reply_key(ids, self.cfg, self.identity)
        return Prompt(messages or one.messages, ids, one, key, temperature, reply_bounds, unfit)

    def _ids(self, one: Conversation, messages: list[Message]) -> list[int]:
        if one.text is not None:
            return list(self.tokenizer(one.text)["input_ids"])
        if one.input_ids is not None:
            return one.input_ids[: one.reply_bounds[-2]] if one.reply_bounds else one.input_ids
        template, options = self.dataset.chat_template, self.dataset.chat_template_options
        ask = functools.partial(chat.prompt_ids, self.tokenizer, template=template, tools=one.tools, options=options)
        return ask(messages) if messages else []


class _Dialogue:
    """A conversation whose every turn the target answers, on the history of its own replies.

    What users say, and the results of tools, are the recorded ones; a recorded reply that calls tools stays with its
    results, for other calls would have had others. A turn that was cut off, or that no further one fits behind, is
    the last. An earlier reply supervises if its token ids stand unchanged in the last prompt: a template that strips
    thinking from history, say, changes them.
    """

    def __init__(self, one: Conversation, ask: _Asker):
        self.one, self.ask = one, ask
        self.said = list(one.messages)
        self.turns = answered_turns(one.messages)
        self.tokens = 0
        self.result: tuple[Prompt, Outcome] | None = None
        first = self._history() if self.turns else prompt_messages(one.messages)
        self.prompt: Prompt | None = ask.prompt(one, first)

    def _history(self) -> list[Message]:
        return self.said[: self.turns[0]]

    def take(self, outcome: Outcome) -> None:
        """The reply to `prompt`: it goes into the history, and the next turn is asked."""
        assert self.prompt is not None
        prompt, (reply, finish) = self.prompt, outcome
        self.prompt = None
        if self.result and not len(reply):  # the turn before was the last that fits
            return
        self.result = prompt, outcome
        self.tokens += len(reply)
        place, *later = self.turns or [len(self.said)]
        if finish != "stop" or not later:
            return
        text = self.ask.tokenizer.decode(list(reply[:-1]))  # less the end-of-turn token
        self.said[place : place + 1] = [{"role": "assistant", "content": text}]
        self.turns = later
        following = self.ask.prompt(self.one, self._history())
        if following.unfit:
            return
        so_far = [*prompt.ids, *reply]
        same_so_far = (a == b for a, b in zip(so_far, following.ids, strict=False))
        kept = len(list(itertools.takewhile(bool, same_so_far)))
        bounds = [*pairs(prompt.reply_bounds), (len(prompt.ids), len(so_far))]
        same = tuple(place for start, end in bounds if end <= kept for place in (start, end))
        self.prompt = replace(following, reply_bounds=same)


def answered_turns(messages: Sequence[Message]) -> list[int]:
    """Where the target speaks: places of the replies that are made anew, or of one that is missing at the end."""
    places = []
    for place in range(1, len(messages) + 1):
        recorded = messages[place] if place < len(messages) else None
        follows = messages[place - 1]["role"] in ("user", "tool")
        if follows and (recorded is None or (recorded["role"] == "assistant" and not recorded.get("tool_calls"))):
            places.append(place)
    return places


def temperature_of(prompt_ids: Sequence[int], cfg: RegenerateConfig) -> float:
    """Of a mix each prompt has one, drawn by its content."""
    if isinstance(cfg.temperature, float):
        return cfg.temperature
    drawn = hashlib.sha256(f"{cfg.seed}:{list(prompt_ids)}".encode()).digest()
    return cfg.temperature[int.from_bytes(drawn[:8], "big") % len(cfg.temperature)]


def reply_key(prompt_ids: Sequence[int], cfg: RegenerateConfig, identity: Sequence[str]) -> str:
    """sha256 (hex) over the prompt's ids, who answers and the settings that shape the reply."""
    settings: dict[str, Any] = {"max_new_tokens": cfg.max_new_tokens}
    temperature = temperature_of(prompt_ids, cfg)
    if temperature > 0:  # greedy replies do not depend on the rest
        settings |= {"temperature": temperature, "top_p": cfg.top_p, "seed": cfg.seed}
    parts = [list(identity), settings, list(prompt_ids)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compute(
    plan: _Plan, store: _Store, engine: Speaker, cfg: RegenerateConfig, count: Callable[[int, int], None]
) -> int:
    """Answer what the plan asks for; how many replies that were."""
    progress = Progress(plan.budget, "tokens", "regenerate")
    progress.update(plan.tokens)
    computed = 0
    temperature = cfg.temperature if isinstance(cfg.temperature, float) else plan.temperature
    for key, ids, finish in engine.generate(plan, cfg.max_new_tokens, temperature, cfg.top_p, cfg.batch_size):
        plan.add(key, (array("i", ids), finish))
        if finish.startswith(ERROR):
            store.append_error(key, plan.origin(key), finish.removeprefix(ERROR))
        else:
            store.append(key, ids, finish)
        computed += 1
        count(1, len(ids))
        progress.update(len(ids), replies=len(plan.replies))
        if plan.enough():
            break  # what still runs lies behind the cut
    return computed


def _write(chosen: Iterable[tuple[Prompt, Outcome]], out_file: Path) -> None:
    with atomic_write(out_file) as file:
        for prompt, (reply_ids, finish) in chosen:
            row: dict[str, Any] = {"messages": prompt.messages, "prompt_ids": prompt.ids}
            row |= {"reply_ids": list(reply_ids), "finish": finish}
            row |= {"file": prompt.origin.file, "line": prompt.origin.line, "sha256": prompt.origin.sha256}
            if prompt.reply_bounds:
                row["reply_bounds"] = list(prompt.reply_bounds)
            if finish.startswith(ERROR):
                row |= {"finish": "error", "detail": finish.removeprefix(ERROR)}
            elif prompt.unfit:
                row["detail"] = prompt.unfit[1]
            file.write(json.dumps(row, ensure_ascii=False).encode() + b"\n")


class _Plan(Iterator[EnginePrompt]):
    """Which prompt is to be answered next, and when there are enough replies.

    An iterator that may have a prompt later after it had none: while the running replies are expected to
    reach the budget, no further prompt is started (it would be cut off), and it is if they fall short. This
    decides only what is computed, never what is chosen.
    """

    def __init__(
        self,
        prompts: Iterator[Prompt],
        stored: dict[str, Outcome],
        budget: int | None,
        max_prompt_tokens: int,
        max_new_tokens: int,
    ):
        self.source, self.stored = prompts, stored
        self.budget, self.max_prompt_tokens = budget, max_prompt_tokens
        self.guess = max_new_tokens / 2  # tokens of a reply, before any has ended
        self.prompts: list[Prompt] = []  # read so far
        self.by_key: dict[str, Prompt] = {}
        self.is_first: list[bool] = []  # or does it repeat an earlier one?
        self.position = 0  # all before are answered, running, or need no answer
        self.scanned, self.scanned_tokens = 0, 0  # all before are answered
        self.running: set[str] = set()
        self.replies: dict[str, Outcome] = {}
        self.tokens = 0  # of self.replies
        self.at_end = False
        self._advance()

    def __next__(self) -> EnginePrompt:
        if not self.wanting():
            raise StopIteration
        prompt = self.prompts[self.position]
        self.running.add(prompt.key)
        self.position += 1
        self._advance()
        return prompt.key, prompt.ids, prompt.seed

    def _advance(self) -> None:
        """Move on to the next prompt that must be computed, taking in what is stored."""
        while not self.enough() and self._read():
            prompt = self.prompts[self.position]
            if self._is_open(self.position) and prompt.key not in self.running:
                if prompt.key not in self.stored:
                    return
                self._take(prompt.key, self.stored[prompt.key])
            self.position += 1

    def _read(self) -> bool:
        """Is there a prompt at `position`?"""
        if self.position == len(self.prompts):
            prompt = next(self.source, None)
            if prompt is None:
                self.at_end = True
                return False
            self.prompts.append(prompt)
            self.is_first.append(prompt.key not in self.by_key)
            self.by_key.setdefault(prompt.key, prompt)
        return True

    def _is_open(self, i: int) -> bool:
        return self.prompts[i].key not in self.replies and self._answerable(self.prompts[i])

    def _answerable(self, prompt: Prompt) -> bool:
        return not prompt.unfit and 0 < len(prompt.ids) <= self.max_prompt_tokens

    def _take(self, key: str, outcome: Outcome) -> None:
        self.replies[key] = outcome
        self.tokens += len(outcome[0])

    def temperature(self, key: str) -> float:
        return self.by_key[key].temperature

    def origin(self, key: str) -> Conversation:
        return self.by_key[key].origin

    def add(self, key: str, outcome: Outcome) -> None:
        """A running reply has ended."""
        self.running.discard(key)
        self._take(key, outcome)
        self.guess = self.tokens / len(self.replies)

    def wanting(self) -> bool:
        """Is another prompt to be started?"""
        if self.at_end or self.enough():
            return False
        return self.budget is None or self.tokens + len(self.running) * self.guess < self.budget

    def enough(self) -> bool:
        """Do the prompts that are answered without a gap from the first on reach the budget?"""
        while self.scanned < len(self.prompts) and not self._is_open(self.scanned):
            if self.budget is not None and self.scanned_tokens >= self.budget:
                break
            self.scanned_tokens += self.new_tokens(self.scanned)
            self.scanned += 1
        return self.budget is not None and self.scanned_tokens >= self.budget

    def new_tokens(self, i: int) -> int:
        """Reply tokens that prompt i adds: none when it repeats an earlier one."""
        return len(self.outcome(self.prompts[i])[0]) if self.is_first[i] else 0

    def outcome(self, prompt: Prompt) -> Outcome:
        """Reply ids and finish of a prompt."""
        if prompt.unfit or not prompt.ids:
            return array("i"), prompt.unfit[0] if prompt.unfit else "no_prompt"
        return self.replies[prompt.key] if self._answerable(prompt) else (array("i"), "too_long")

    def chosen(self) -> list[Prompt]:
        """The fewest first prompts whose replies reach the budget; all of them when they do not."""
        self.enough()
        return self.prompts[: self.scanned]


class _Store:
    """Finished replies, {"key", "reply_ids", "finish"} a line: read from a folder of JSONL, appended to one file."""

    def __init__(self, folder: Path, name: str):
        self.path = folder / f"{name}.jsonl"
        self.replies: dict[str, Outcome] = {}
        for path in sorted(folder.glob("*.jsonl")):
            for row in read_lines(path):
                with suppress(KeyError, TypeError):
                    self.replies[row["key"]] = (array("i", row["reply_ids"]), row["finish"])

    def append(self, key: str, reply_ids: list[int], finish: str) -> None:
        """Keep a reply: on the disk when this returns."""
        append_line(self.path, {"key": key, "reply_ids": reply_ids, "finish": finish})

    def append_error(self, key: str, origin: Conversation, said: str) -> None:
        """Note a conversation that was refused; another run asks again."""
        about = {"key": key, "file": origin.file, "line": origin.line, "error": said, "time": time.time()}
        errors = self.path.parent / "errors"
        errors.mkdir(exist_ok=True)
        append_line(errors / self.path.name, about)
