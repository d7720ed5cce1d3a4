"""`acceptance.sets`: question sets answered turn by turn with a draft, and the same for other drafts beside it.

A turn's prompt holds the target's own replies to the turns before. Degenerate replies are counted and left out of the
figures, as everywhere; `others` are over all replies, because other harnesses leave none out.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3lib import acceptance, chat, comparison, diagnosis, question_sets, targets
from eagle3lib.config import AcceptanceConfig, TargetConfig
from eagle3lib.consumers import openai
from eagle3lib.errors import UserError
from eagle3lib.evaluation import BATCH, Decoded, Decoder, InProcess, Served
from eagle3lib.job import Progress, write_json
from eagle3lib.lineage import digest, file_sha256
from eagle3lib.question_sets import Message, Question
from eagle3lib.targets import TargetInfo

Sets = Mapping[str, Sequence[Question]]


@dataclass(frozen=True)
class Speaker:
    """What turns messages into token ids of the target and back."""

    tokenizer: Any
    target: TargetInfo
    template: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        return chat.prompt_ids(self.tokenizer, messages, self.template, options=self.options)

    def text(self, ids: Sequence[int]) -> str:
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)


def read_sets(cfg: AcceptanceConfig, folder: str | os.PathLike) -> dict[str, list[Question]]:
    """The questions by the set's label, at most `max_prompts` a set; packages lie fetched under `folder`."""
    entries = question_sets.parse(cfg.sets)
    return {one.label: question_sets.read(one.name, one.files(Path(folder)), cfg.max_prompts) for one in entries}


def measure(decoder: Decoder, speaker: Speaker, sets: Sets, cfg: AcceptanceConfig, name: str) -> dict[str, Any]:
    """All sets at all temperatures, then the batches: {"about", "rows", "throughput"}, plain values.

    name: of the draft, in tables. A row has `acceptance.summarize`'s keys over the replies that are not degenerate,
    `acceptance_length_all`, `buckets` (`acceptance.by_context`), `others` (`acceptance.as_others`), `replies` (a dict
    each), how many were `degenerate`, and how many questions had a turn `too_long` for the target's positions, which
    ends them there.
    """
    rows = [
        {"draft": name, "set": label, "temperature": temperature, **_row(answers, too_long, decoder.about)}
        for label, questions in sets.items()
        for temperature in cfg.temperatures
        for answers, too_long in [_answer(decoder, speaker, label, questions, cfg, temperature)]
    ]
    about = decoder.about | {"max_new_tokens": cfg.max_new_tokens, "target": speaker.target.fingerprint}
    first = next(iter(sets.values()), [])
    speeds = [{"draft": name, **one} for one in _throughput(decoder, speaker, first, cfg)]
    return {"about": about, "rows": rows, "throughput": speeds}


# --- sets --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """A reply to one turn of a question."""

    question: int
    turn: int
    prompt_tokens: int
    decoded: Decoded


def _answer(
    decoder: Decoder, speaker: Speaker, label: str, questions: Sequence[Question], cfg: AcceptanceConfig, at: float
) -> tuple[list[Answer], int]:
    """All turns of a set, the first ones of all questions at once, then the second ones, …"""
    said: dict[int, list[Message]] = {number: [] for number in range(len(questions))}
    answers: list[Answer] = []
    too_long = 0
    progress = Progress(sum(map(len, questions)), "replies", f"{label} at {at:g}")
    for turn in range(max(map(len, questions))):
        prompts: dict[int, list[int]] = {}
        for number in [n for n in said if turn < len(questions[n])]:
            said[number] += questions[number][turn]
            ids = speaker.prompt(said[number])
            if len(ids) + cfg.max_new_tokens > speaker.target.max_position_embeddings:
                del said[number]  # the turns after it would be longer still
                too_long += 1
            else:
                prompts[number] = ids
        asked = list(prompts)
        seeds = [_seed(cfg.seed, label, at, number, turn) for number in asked]
        for place, decoded in decoder.decode(list(prompts.values()), at, seeds, BATCH):
            number = asked[place]
            answers.append(Answer(number, turn, len(prompts[number]), decoded))
            said[number].append({"role": "assistant", "content": speaker.text(decoded.reply)})
            progress.update(1)
    return sorted(answers, key=lambda a: (a.question, a.turn)), too_long


def _seed(*of: Any) -> int:
    return int(digest(list(of), 15), 16)


def _row(answers: Sequence[Answer], too_long: int, about: Mapping[str, Any]) -> dict[str, Any]:
    steps = about["draft_steps"]
    replies = [_plain(answer) for answer in answers]
    sound = [answer for answer, reply in zip(answers, replies, strict=True) if not reply["degenerate"]]
    placed = [
        one
        for a in sound
        for one in acceptance.contexts(a.prompt_tokens, len(a.decoded.reply), a.decoded.passes, a.decoded.ordered)
    ]
    return {
        **acceptance.summarize([one for _, one in placed], steps),
        "acceptance_length_all": acceptance.acceptance_length(
            [one.accepted for answer in answers for one in answer.decoded.passes]
        ),
        "buckets": acceptance.by_context(placed, steps),
        "others": acceptance.as_others([(r["reply_tokens"], r["passes"], r["accepted"]) for r in replies]),
        "questions": len({answer.question for answer in answers}),
        "replies_counted": len(sound),
        "degenerate": len(answers) - len(sound),
        "too_long": too_long,
        "replies": replies,
    }


def _plain(answer: Answer) -> dict[str, Any]:
    reply, passes = answer.decoded.reply, answer.decoded.passes
    return {
        "question": answer.question,
        "turn": answer.turn,
        "prompt_tokens": answer.prompt_tokens,
        "reply_tokens": len(reply),
        "passes": len(passes),
        "accepted": sum(one.accepted for one in passes),
        "degenerate": acceptance.is_degenerate(reply),
    }


# --- tokens a second ---------------------------------------------------------------------------------


def _throughput(
    decoder: Decoder, speaker: Speaker, questions: Sequence[Question], cfg: AcceptanceConfig
) -> Iterator[dict[str, Any]]:
    """Reply tokens by wall seconds, prefill included, at the first temperature: the same first turns at each batch."""
    if not cfg.batches:
        return
    first = [speaker.prompt(question[0]) for question in questions]
    room = speaker.target.max_position_embeddings - cfg.max_new_tokens
    prompts = [ids for ids in first if len(ids) <= room][: max(cfg.batches)]
    seeds, temperature = [_seed(cfg.seed, n) for n in range(len(prompts))], cfg.temperatures[0]
    for batch in cfg.batches:
        work = (prompts, temperature, seeds, batch)
        drafted = _rate(len(one.reply) for _, one in decoder.decode(*work))
        plain = decoder.plain(*work)
        without = None if plain is None else _rate(len(ids) for _, ids in plain)
        yield {
            "batch": batch,
            "replies": len(prompts),
            "tokens_per_second": drafted,
            "tokens_per_second_without": without,
        }


def _rate(lengths: Iterator[int]) -> float:
    """Sum of lengths by the seconds that their making takes: they are made as they are asked for."""
    start = time.perf_counter()
    return sum(lengths) / (time.perf_counter() - start)


# --- drafts of whatever origin -----------------------------------------------------------------------


def find_draft(entry: str) -> Path:
    """The folder of an entry of `acceptance.drafts`: itself, or of a hub id whose files are here or can be had."""
    if Path(entry).is_dir():
        return Path(entry)
    if not targets.is_hub_id(entry):
        raise UserError(f"acceptance.drafts: {entry}: no such folder and no hub id; make it, or correct the path")
    found = targets.hub_snapshot(TargetConfig(name="draft", model=entry))
    if found is None:
        raise UserError(
            f"acceptance.drafts: {entry}: its files are not here; `hf download {entry}` (with HF_HUB_OFFLINE unset) "
            "fetches them"
        )
    return found


def in_process(
    folder: str | os.PathLike, target: TargetInfo, engine: Any, cfg: AcceptanceConfig, say: Callable[[str], Any] = print
) -> InProcess:
    """Any EAGLE-3 draft of this target (`foreign.read_draft`, whose notes are said) beside a loaded engine."""
    draft, mapping, layers, notes = diagnosis.load_draft(folder, target, getattr(torch, engine.dtype))
    for note in notes:
        say(f"{folder}: note: {note}")
    device = getattr(engine, "device", "cpu")
    return InProcess(engine, draft.to(device), mapping, layers, cfg, target.eos_token_ids)


def decoder_of(folder: str | os.PathLike, target: TargetInfo, engine: Any, cfg: AcceptanceConfig) -> Decoder:
    """Of a draft's folder. engine: holds the target, or is a SGLang server with this draft."""
    if not hasattr(engine, "sessions"):
        return Served(engine, cfg)
    return in_process(folder, target, engine, cfg)


def measure_all(
    entries: Sequence[str],
    speaker: Speaker,
    sets: Sets,
    cfg: AcceptanceConfig,
    open_engine: Callable[[Path], Any],
    store: Path,
    measured_by: Any,
    key: str = "",
    without: str | None = None,
) -> Iterator[dict[str, Any]]:
    """`measure` of each entry of `acceptance.drafts`, one after another: the target is loaded once for all of them.

    A folder's result is kept in `store` under the digest of all that shapes it, with `measured_by` (code, versions:
    plain values); a server's is not.
    open_engine: holds the target; where it is a server that serves one draft it is asked for anew, and closed.
    key, without: of `openai.Server`.
    """
    loaded: Any = None
    for entry in entries:
        if openai.is_url(entry):
            server = openai.Server(entry, speaker.target, cfg, speaker.tokenizer, key, without)
            yield measure(server, speaker, sets, cfg, entry)
            continue
        folder = find_draft(entry)
        identity = identity_of(folder, speaker, sets, cfg, measured_by)
        kept = store / f"{identity}.json"
        if not kept.exists():
            engine = loaded or open_engine(folder)
            loaded = engine if hasattr(engine, "sessions") else None
            write_json(kept, measure(decoder_of(folder, speaker.target, engine, cfg), speaker, sets, cfg, entry))
            if loaded is None:
                engine.close()
        yield comparison.named(json.loads(kept.read_text()), entry)


def identity_of(folder: Path, speaker: Speaker, sets: Sets, cfg: AcceptanceConfig, measured_by: Any) -> str:
    """Digest of all that shapes a draft's figures: its files, the target, the questions, settings, who measures."""
    template = speaker.template and file_sha256(speaker.template)
    settings = cfg.model_dump(mode="json", exclude={"prompts", "sets", "drafts"})
    draft = [(path.name, file_sha256(path)) for path in targets.model_files(folder)]
    options = [dict(speaker.options)] if speaker.options else []
    return digest([draft, speaker.target.fingerprint, dict(sets), template, settings, measured_by, *options], 32)
