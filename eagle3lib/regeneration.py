"""The target answers the prompts itself, so that the draft learns from what it will be asked to guess.

Every finished reply goes to a store at once (one line, fsynced), under a key made of all that decides it;
a job run again computes only what no store file holds. The output lists the prompts in their order, cut to
the fewest whose replies reach the token budget: the same whatever the order in which replies ended.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib import chat
from eagle3lib.config import DatasetConfig, RegenerateConfig
from eagle3lib.engines import Engine
from eagle3lib.engines import Prompt as EnginePrompt
from eagle3lib.errors import UserError
from eagle3lib.job import Progress, append_line, atomic_write, file_lock, read_lines
from eagle3lib.samples import Conversation, prompt_messages

# Reply ids (compact: there may be millions) and how the reply ended.
Outcome = tuple[array, str]


@dataclass(frozen=True)
class Prompt:
    """What the target is asked: the messages up to the last user turn, as token ids; key and seed by content."""

    messages: list[dict[str, str]]
    ids: list[int]
    origin: Conversation
    key: str

    @property
    def seed(self) -> int:
        return int(self.key[:15], 16)


def regenerate(
    conversations: Iterable[Conversation],
    tokenizer: Any,
    open_engine: Callable[[], Engine],
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
    conversation without a user message ("no_prompt"): sharding rejects both. `budget_tokens`: stop at so many
    reply tokens; a prompt that repeats an earlier one adds none. Raises UserError with file and line when the
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
    open_engine: Callable[[], Engine],
    dataset: DatasetConfig,
    cfg: RegenerateConfig,
    identity: Sequence[str],
    budget_tokens: int | None,
    store: _Store,
    out_file: str | Path,
    count: Callable[[int, int], None],
) -> dict[str, int]:
    prompts = (_prompt(one, tokenizer, dataset, cfg, identity) for one in conversations)
    plan = _Plan(prompts, store.replies, budget_tokens, dataset.max_tokens - cfg.max_new_tokens, cfg.max_new_tokens)
    computed = _compute(plan, store, open_engine(), cfg, count) if plan.wanting() else 0
    chosen = plan.chosen()
    _write(chosen, plan, Path(out_file))
    tokens = sum(map(plan.new_tokens, range(len(chosen))))
    return {"prompts": len(chosen), "found": len(plan.replies) - computed, "computed": computed, "reply_tokens": tokens}


def _prompt(
    one: Conversation, tokenizer: Any, dataset: DatasetConfig, cfg: RegenerateConfig, identity: Sequence[str]
) -> Prompt:
    messages = prompt_messages(one.messages)
    try:
        ids = chat.prompt_ids(tokenizer, messages, dataset.chat_template, options=dataset.chat_template_options) if messages else []
    except UserError as error:
        raise UserError(f"{one.file}:{one.line}: {error}") from None
    return Prompt(messages or one.messages, ids, one, reply_key(ids, cfg, identity))


def reply_key(prompt_ids: Sequence[int], cfg: RegenerateConfig, identity: Sequence[str]) -> str:
    """sha256 (hex) over the prompt's ids, who answers and the settings that shape the reply."""
    settings: dict[str, Any] = {"max_new_tokens": cfg.max_new_tokens}
    if cfg.temperature > 0:  # greedy replies do not depend on the rest
        settings |= {"temperature": cfg.temperature, "top_p": cfg.top_p, "seed": cfg.seed}
    parts = [list(identity), settings, list(prompt_ids)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _compute(
    plan: _Plan, store: _Store, engine: Engine, cfg: RegenerateConfig, count: Callable[[int, int], None]
) -> int:
    """Answer what the plan asks for; how many replies that were."""
    progress = Progress(plan.budget, "tokens", "regenerate")
    progress.update(plan.tokens)
    computed = 0
    for key, ids, finish in engine.generate(plan, cfg.max_new_tokens, cfg.temperature, cfg.top_p, cfg.batch_size):
        store.append(key, ids, finish)
        plan.add(key, (array("i", ids), finish))
        computed += 1
        count(1, len(ids))
        progress.update(len(ids), replies=len(plan.replies))
        if plan.enough():
            break  # what still runs lies behind the cut
    return computed


def _write(chosen: list[Prompt], plan: _Plan, out_file: Path) -> None:
    with atomic_write(out_file) as file:
        for prompt in chosen:
            reply_ids, finish = plan.outcome(prompt)
            row: dict[str, Any] = {"messages": prompt.messages, "prompt_ids": prompt.ids}
            row |= {"reply_ids": list(reply_ids), "finish": finish}
            row |= {"file": prompt.origin.file, "line": prompt.origin.line, "sha256": prompt.origin.sha256}
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
        self.is_first: list[bool] = []  # or does it repeat an earlier one?
        self.seen: set[str] = set()
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
            self.is_first.append(prompt.key not in self.seen)
            self.seen.add(prompt.key)
        return True

    def _is_open(self, i: int) -> bool:
        return self.prompts[i].key not in self.replies and self._answerable(self.prompts[i])

    def _answerable(self, prompt: Prompt) -> bool:
        return 0 < len(prompt.ids) <= self.max_prompt_tokens

    def _take(self, key: str, outcome: Outcome) -> None:
        self.replies[key] = outcome
        self.tokens += len(outcome[0])

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
        if not prompt.ids:
            return array("i"), "no_prompt"
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
