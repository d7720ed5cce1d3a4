"""How long are the drafts that the target accepts? Measured by real speculative decoding, not by a proxy.

The target runs in the engine's session; the draft is read back from its exported folder.
The slots of the draft: slot j takes the target's aux states of position j and the token
x_{j+1}, and has position j. So once the target has read x_0..x_{n-2} and x_{n-1} is its own
next token, slots 0..n-2 are verified; the last one proposes x_n, and each further draft
reads the draft's own hidden state and the token drafted before it.

Shape letters: T tokens, H hidden, V vocabulary, L aux layers, K draft steps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from eagle3lib import acceptance, export, rejection, targets
from eagle3lib.acceptance import Pass
from eagle3lib.config import AcceptanceConfig
from eagle3lib.draft_model import DraftCache, DraftModel
from eagle3lib.engines.probe import TIE_GAP
from eagle3lib.errors import UserError
from eagle3lib.job import Progress
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping

BATCH = 16  # replies at once


@dataclass
class Decoded:
    """A reply made by speculative decoding: its ids, the target's top-2 logit gap at each, and what each pass saw.

    Sampled ones have no gaps. ordered: are the passes in their order (some servers count them only)?
    """

    reply: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    passes: list[Pass] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)
    ordered: bool = True


class Greedy:
    """How a reply's tokens are chosen at temperature 0, by the draft and by the target."""

    def draft(self, logits: Tensor) -> int:
        """logits [Vd] -> the index of the next draft."""
        return int(logits.argmax())

    def judge(
        self, drafts: Sequence[int], logits: Tensor, room: int, stop_ids: Sequence[int]
    ) -> tuple[list[int], list[float], Pass]:
        """The target's logits [K+1, V] at the K drafts -> emitted tokens, the gap at each, the Pass."""
        wanted, gaps = _greedy(logits)
        emitted, one = acceptance.judge(drafts, wanted, room, stop_ids)
        return emitted, gaps[: len(emitted)], one


class Sampled:
    """As Greedy, at a temperature: speculative sampling (`rejection`), with random numbers of the reply's own.

    The draft is sampled at the same temperature, or chosen greedily.
    """

    def __init__(self, mapping: VocabMapping, temperature: float, seed: int, draft_sampling: str = "sampled"):
        self.mapping, self.temperature, self.draft_sampling = mapping, temperature, draft_sampling
        self.random = torch.Generator().manual_seed(seed)
        self.q: list[Tensor] = []  # [V] each: what the drafts under way were drawn from

    def draft(self, logits: Tensor) -> int:
        if self.draft_sampling == "greedy":
            index = int(logits.argmax())
            weights = torch.zeros_like(logits, dtype=torch.float32)
            weights[index] = 1
        else:
            weights = torch.softmax(logits.float() / self.temperature, -1)
            index = rejection.draw(weights, self._uniform())
        over_target = weights.new_zeros(self.mapping.vocab_size)
        over_target[self.mapping.target_ids.to(weights.device)] = weights
        self.q.append(over_target)
        return index

    def judge(
        self, drafts: Sequence[int], logits: Tensor, room: int, stop_ids: Sequence[int]
    ) -> tuple[list[int], list[float], Pass]:
        p = torch.softmax(logits.float() / self.temperature, -1)
        q, self.q = [one.to(p.device) for one in self.q], []
        emitted, one = rejection.judge(drafts, q, p, room, stop_ids, self._uniform)
        return emitted, [], one

    def _uniform(self) -> float:
        return float(torch.rand((), generator=self.random, dtype=torch.float64))


Chooser = Greedy | Sampled


class ChainDrafter:
    """The draft model over one reply: a chain of drafts from the verified slots."""

    def __init__(self, draft: DraftModel, mapping: VocabMapping, chooser: Chooser | None = None):
        self.draft, self.mapping, self.chooser = draft, mapping, chooser or Greedy()
        self.cache = DraftCache()

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], aux: Tensor, k: int) -> list[int]:
        """Take in the newly verified slots, then draft.

        tokens: for each new slot j its token x_{j+1}; aux [new slots, L*H]: its states g_j.
        Returns k >= 1 target ids. The cache keeps the verified slots only.
        """
        fused = self.draft.fuse(aux.to(self.draft.fc.weight.device))[None]
        hidden = self.draft.decode(self._ids(tokens), fused, self.cache)[:, -1:]
        verified = self.cache.length
        drafts = [self._next(hidden)]
        while len(drafts) < k:
            hidden = self.draft.decode(self._ids(drafts[-1:]), hidden, self.cache)
            drafts.append(self._next(hidden))
        self.cache.truncate(verified)
        return drafts

    def _ids(self, tokens: Sequence[int]) -> Tensor:
        return torch.tensor([list(tokens)], device=self.draft.fc.weight.device)

    def _next(self, hidden: Tensor) -> int:
        index = self.chooser.draft(self.draft.logits(hidden[0, -1]))
        return int(self.mapping.to_target(torch.tensor(index)))


class Speculation:
    """One reply under way: which rows the target reads next, and what follows from its answer.

    The target's session holds all tokens but the newest; after each pass it is cut back to
    that (`take` says to which length), so that nothing of a refused draft stays.
    """

    def __init__(
        self,
        number: int,
        drafter: ChainDrafter,
        prompt: Sequence[int],
        cfg: AcceptanceConfig,
        stop_ids: Sequence[int],
    ):
        self.number, self.drafter, self.cfg, self.stop_ids = number, drafter, cfg, stop_ids
        self.ids, self.decoded = list(prompt), Decoded()
        self.aux = torch.empty(0)  # [new slots, L*H]: verified states that the draft has not seen
        self.drafts: list[int] = []

    @property
    def ended(self) -> bool:
        reply = self.decoded.reply
        return bool(reply) and (reply[-1] in self.stop_ids or len(reply) == self.cfg.max_new_tokens)

    def rows(self) -> list[int]:
        """What the target reads next: the prompt, then the newest token with the drafts behind it."""
        if not self.decoded.reply:
            return self.ids
        k = min(self.cfg.draft_steps, self.cfg.max_new_tokens - len(self.decoded.reply) - 1)
        # The new slots are the last ones; the token of each is the one after its position.
        self.drafts = self.drafter.propose(self.ids[-len(self.aux) :], self.aux, k) if k else []
        return [self.ids[-1], *self.drafts]

    def take(self, logits: Tensor, aux: Tensor) -> int:
        """The target's logits [n, V] and states [n, L*H] of those n rows -> positions that its session keeps."""
        room = self.cfg.max_new_tokens - len(self.decoded.reply)
        if not self.decoded.reply:
            emitted, gaps, _ = self.drafter.chooser.judge([], logits[-1:], room, self.stop_ids)
            self.aux = aux
        else:
            emitted, gaps, one = self.drafter.chooser.judge(self.drafts, logits, room, self.stop_ids)
            self.aux = aux[: len(emitted)]
            self.decoded.passes.append(one)
            self.decoded.drafts.append(self.drafts)
        self.ids += emitted
        self.decoded.reply += emitted
        self.decoded.gaps += gaps
        return len(self.ids) - 1


class Sessions:
    """Several sequences of an engine that takes one at a time; an engine that batches them offers `sessions` itself."""

    def __init__(self, engine: Any, n: int, aux_layer_ids: Sequence[int]):
        self.sessions = [engine.session(aux_layer_ids) for _ in range(n)]

    def forward(self, rows: Mapping[int, Sequence[int]]) -> dict[int, tuple[Tensor, Tensor]]:
        """Append rows to the sequences of these numbers: their logits [n, V] and aux states [n, L*H]."""
        return {slot: self.sessions[slot].forward(ids)[:2] for slot, ids in rows.items()}

    def crop(self, slot: int, length: int) -> None:
        self.sessions[slot].crop(length)


@torch.inference_mode()
def speculate(sessions: Any, speculations: Iterable[Speculation], slots: int) -> Iterator[Speculation]:
    """Run replies, `slots` at once, one pass of the target for the next rows of all; yields each as it ends.

    `sessions` (as `Sessions`) holds one sequence a slot; a slot is refilled as soon as its reply has ended.
    """
    waiting, running = iter(speculations), dict[int, Speculation]()
    while True:
        for slot in set(range(slots)) - running.keys():
            one = next(waiting, None)
            if one is None:
                break
            sessions.crop(slot, 0)
            ((logits, aux),) = sessions.forward({slot: one.rows()}).values()  # alone: its logits take the most memory
            sessions.crop(slot, one.take(logits, aux))
            running[slot] = one
        if not running:
            return
        if not (ended := [slot for slot, one in running.items() if one.ended]):
            answers = sessions.forward({slot: one.rows() for slot, one in running.items()})
            for slot, (logits, aux) in answers.items():
                sessions.crop(slot, running[slot].take(logits, aux))
        yield from (running.pop(slot) for slot in ended)


def _greedy(logits: Tensor) -> tuple[list[int], list[float]]:
    """logits [T, V] -> the best id of each row and its lead over the second."""
    best = logits.float().topk(2, dim=-1)
    return logits.argmax(-1).tolist(), (best.values[:, 0] - best.values[:, 1]).tolist()


def measure_acceptance(
    folder: str | os.PathLike,
    target: TargetInfo,
    engine: Any,
    prompts: Sequence[Sequence[int]],
    cfg: AcceptanceConfig,
    tie_gap: float | None = None,
) -> dict[str, Any]:
    """Acceptance of an exported draft on prompts (token ids, generation prompt included), as plain values.

    The reply to each prompt must equal the target's own greedy reply (`engine.greedy`), token by
    token; where it does not, the target's top-2 logit gap at the first difference must be below
    `tie_gap` (None: `TIE_GAP` of the engine's dtype), which is counted in `near_ties`. Otherwise,
    and for a draft that does not fit the target, UserError.

    Main figures are over replies that are not degenerate; `acceptance_length_all` is over all, and
    `ngram` holds the same figures for the n-gram baseline on the same replies.

    A server that decodes with the draft itself (engine "sglang" on GPUs) is not asked for the target's own replies
    (`identical` is None: another load of the target), and counts the pass that ends a reply whole.
    """
    if not hasattr(engine, "sessions"):
        return _measure_served(folder, target, engine, prompts, cfg)
    draft, mapping, values = _load_draft(folder, target, engine)
    prompts = _checked_prompts(list(prompts)[: cfg.max_prompts], target, cfg)
    tie_gap = TIE_GAP[engine.dtype] if tie_gap is None else tie_gap
    references = engine.greedy(prompts, cfg.max_new_tokens)
    records, progress = [], Progress(len(prompts), "replies", "measure_acceptance")
    for one in _replies(engine, draft, mapping, values[export.LAYER_IDS], prompts, cfg, target.eos_token_ids):
        tie_at = compare_with_reference(one.number, one.decoded, references[one.number], tie_gap)
        records.append(Record(one.number, prompts[one.number], one.decoded, tie_at, cfg.draft_steps))
        progress.update(1, acceptance_length=_pooled(records) or 0.0)
    records.sort(key=lambda record: record.number)
    return _result(records, cfg, tie_gap) | {"lineage": values["eagle3lib"]["lineage"]}


def _measure_served(
    folder: str | os.PathLike, target: TargetInfo, engine: Any, prompts: Sequence[Sequence[int]], cfg: AcceptanceConfig
) -> dict[str, Any]:
    prompts = _checked_prompts(list(prompts)[: cfg.max_prompts], target, cfg)
    records, progress = [], Progress(len(prompts), "replies", "measure_acceptance")
    for number, decoded in Served(engine, cfg).decode(prompts):
        records.append(Record(number, prompts[number], decoded, None, cfg.draft_steps))
        progress.update(1, acceptance_length=_pooled(records) or 0.0)
    records.sort(key=lambda record: record.number)
    lineage = export.read_export(folder)[2]["eagle3lib"]["lineage"]
    return _result(records, cfg, TIE_GAP[engine.dtype]) | {"identical": None, "near_ties": None, "lineage": lineage}


def passes_as_engines_count(
    folder: str | os.PathLike,
    target: TargetInfo,
    engine: Any,
    prompts: Sequence[Sequence[int]],
    cfg: AcceptanceConfig,
) -> list[list[Pass]]:
    """The passes of each prompt's reply, in the order of the prompts, as vLLM and SGLang count them.

    That is `acceptance.until_end`: what an engine's own counters must show for the same draft, prompts and limit.
    """
    draft, mapping, values = _load_draft(folder, target, engine)
    further = cfg.model_copy(update={"max_new_tokens": cfg.max_new_tokens + cfg.draft_steps + 1})
    prompts = _checked_prompts(list(prompts), target, further)
    passes: list[list[Pass]] = [[] for _ in prompts]
    for one in _replies(engine, draft, mapping, values[export.LAYER_IDS], prompts, further, stop_ids=()):
        seen = one.decoded
        passes[one.number] = acceptance.until_end(seen.passes, seen.reply, cfg.max_new_tokens, target.eos_token_ids)
    return passes


def _load_draft(
    folder: str | os.PathLike, target: TargetInfo, engine: Any
) -> tuple[DraftModel, VocabMapping, dict[str, Any]]:
    """`export.load_exported` where the engine computes, after `export.check_export`."""
    export.check_export(folder, target)
    draft, mapping, values = export.load_exported(folder, targets.load_embedding(target), getattr(torch, engine.dtype))
    return draft.to(getattr(engine, "device", "cpu")), mapping, values


def _replies(
    engine: Any,
    draft: DraftModel,
    mapping: VocabMapping,
    aux_layer_ids: Sequence[int],
    prompts: Sequence[Sequence[int]],
    cfg: AcceptanceConfig,
    stop_ids: Sequence[int],
    chooser: Callable[[int], Chooser] = lambda number: Greedy(),
    at_once: int = BATCH,
) -> Iterator[Speculation]:
    """All replies, `at_once` running, in the order in which they end. chooser: of the prompt with that number."""
    slots = min(at_once, len(prompts))
    if not slots:
        return
    open_sessions = getattr(engine, "sessions", None) or partial(Sessions, engine)
    work = (
        Speculation(number, ChainDrafter(draft, mapping, chooser(number)), prompt, cfg, stop_ids)
        for number, prompt in enumerate(prompts)
    )
    yield from speculate(open_sessions(slots, aux_layer_ids), work, slots)


def compare_with_reference(number: int, decoded: Decoded, reference: Sequence[int], tie_gap: float) -> int | None:
    """None when the reply is the target's own, else the index of the near tie at which they part.

    Raises UserError when the first difference is no near tie.
    """
    try:
        return acceptance.parted_at(decoded.reply, reference, decoded.gaps, tie_gap)
    except acceptance.OtherOutput as other:
        raise UserError(
            f"acceptance: prompt {number}: speculative decoding {other}, the target's own greedy reply; the engine's "
            "session and its batched generation disagree: use engine.compute_dtype float32, or report it"
        ) from None


def _checked_prompts(prompts: list[Sequence[int]], target: TargetInfo, cfg: AcceptanceConfig) -> list[list[int]]:
    if not prompts:
        raise UserError("config: acceptance.prompts: there are none; name a file with at least one prompt")
    for number, prompt in enumerate(prompts):
        where = f"config: acceptance.prompts: prompt {number}"
        if not prompt or not 0 <= min(prompt) <= max(prompt) < target.vocab_size:
            raise UserError(f"{where}: empty, or token ids outside of 0..{target.vocab_size - 1}; mend or remove it")
        if len(prompt) + cfg.max_new_tokens > target.max_position_embeddings:
            raise UserError(
                f"{where}: {len(prompt)} tokens and acceptance.max_new_tokens {cfg.max_new_tokens} exceed the target's "
                f"{target.max_position_embeddings} positions; shorten it or lower acceptance.max_new_tokens"
            )
    return [list(prompt) for prompt in prompts]


# --- decoders: who runs target and draft -------------------------------------------------------------


class Decoder(Protocol):
    """Replies with a draft and without it, for prompts (token ids) at a temperature, `at_once` running.

    about: plain values for a table's head; draft_steps, topk, draft_tokens (a pass verifies so many), measured_by.
    """

    about: dict[str, Any]

    def decode(
        self, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int
    ) -> Iterator[tuple[int, Decoded]]:
        """(number of the prompt, its reply) in the order in which they end."""
        ...

    def plain(
        self, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int
    ) -> Iterator[tuple[int, list[int]]] | None:
        """The target's own replies; None where there is nobody to ask."""
        ...


class InProcess:
    """The target in an engine of ours, the draft beside it."""

    def __init__(
        self,
        engine: Any,
        draft: DraftModel,
        mapping: VocabMapping,
        aux_layer_ids: Sequence[int],
        cfg: AcceptanceConfig,
        stop_ids: Sequence[int],
    ):
        self.engine, self.draft, self.mapping, self.aux_layer_ids = engine, draft, mapping, list(aux_layer_ids)
        self.cfg, self.stop_ids = cfg, list(stop_ids)
        self.about = chain_of(cfg.draft_steps) | {
            "measured_by": f"eagle3lib in process, {engine.name} {engine.version}, {engine.dtype}",
            "draft_sampling": cfg.draft_sampling,
        }

    def decode(
        self, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int = BATCH
    ) -> Iterator[tuple[int, Decoded]]:
        def chooser(number: int) -> Chooser:
            if temperature == 0:
                return Greedy()
            return Sampled(self.mapping, temperature, seeds[number], self.cfg.draft_sampling)

        work = (self.engine, self.draft, self.mapping, self.aux_layer_ids, prompts, self.cfg, self.stop_ids)
        for one in _replies(*work, chooser, at_once):
            yield one.number, one.decoded

    def plain(
        self, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int = BATCH
    ) -> Iterator[tuple[int, list[int]]]:
        numbered = ((i, ids, seed) for i, (ids, seed) in enumerate(zip(prompts, seeds, strict=True)))
        options = {"temperature": temperature, "batch_size": at_once, "eos_ids": self.stop_ids}
        for number, reply, _ in self.engine.generate(numbered, self.cfg.max_new_tokens, **options):
            yield number, list(reply)


class Served:
    """A SGLang server of ours that decodes with the draft: drafted greedily, passes counted without their order."""

    def __init__(self, engine: Any, cfg: AcceptanceConfig):
        self.engine, self.cfg = engine, cfg
        self.about = chain_of(cfg.draft_steps) | {
            "measured_by": f"SGLang {engine.version}, {engine.dtype}",
            "draft_sampling": "greedy",
        }

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
        at_once: int | None = None,
    ) -> Iterator[tuple[int, Decoded]]:
        options = {"temperature": temperature, "seeds": seeds, "at_once": at_once}
        for number, reply, histogram in self.engine.decode_with_draft(prompts, self.cfg.max_new_tokens, **options):
            passes = acceptance.of_histogram(histogram, self.cfg.draft_steps)
            yield number, Decoded(reply, passes=passes, ordered=False)

    def plain(self, *_: Any, **__: Any) -> None:
        return None


def chain_of(draft_steps: int) -> dict[str, int]:
    """The three numbers that SGLang's flags have, of a chain: one candidate a step, all verified with the bonus."""
    return {"draft_steps": draft_steps, "topk": 1, "draft_tokens": draft_steps + 1}


# --- figures -----------------------------------------------------------------------------------------


@dataclass
class Record:
    """One prompt's decoding and what the baseline would have done on the same reply."""

    number: int
    prompt: list[int]
    decoded: Decoded
    tie_at: int | None
    draft_steps: int

    def __post_init__(self) -> None:
        reply = self.decoded.reply
        self.degenerate = acceptance.is_degenerate(reply)
        self.ngram = acceptance.replay(self.prompt, reply, self.draft_steps, acceptance.NgramDrafter())

    def plain(self) -> dict[str, Any]:
        """For the report: a line a prompt."""
        passes = self.decoded.passes
        return {
            "prompt": self.number,
            "prompt_tokens": len(self.prompt),
            "reply_tokens": len(self.decoded.reply),
            "passes": len(passes),
            "accepted": sum(one.accepted for one in passes),
            "acceptance_length": acceptance.acceptance_length([one.accepted for one in passes]),
            "ngram_acceptance_length": acceptance.acceptance_length([one.accepted for one in self.ngram]),
            "degenerate": self.degenerate,
            "distinct_share": acceptance.distinct_share(self.decoded.reply),
            "near_tie_at": self.tie_at,
            "reply": self.decoded.reply,
        }


def _pooled(records: Iterable[Record], all_of_them: bool = False, ngram: bool = False) -> float | None:
    """Acceptance length over the records that count."""
    counting = [r for r in records if all_of_them or not r.degenerate]
    passes = [one for r in counting for one in (r.ngram if ngram else r.decoded.passes)]
    return acceptance.acceptance_length([one.accepted for one in passes])


def _result(records: Sequence[Record], cfg: AcceptanceConfig, tie_gap: float) -> dict[str, Any]:
    sound = [r for r in records if not r.degenerate]
    ours = acceptance.summarize([one for r in sound for one in r.decoded.passes], cfg.draft_steps)
    ngram = acceptance.summarize([one for r in sound for one in r.ngram], cfg.draft_steps)
    return {
        **ours,
        "acceptance_length_all": _pooled(records, all_of_them=True),
        "ngram_acceptance_length": ngram["acceptance_length"],
        "ngram": ngram | {"acceptance_length_all": _pooled(records, all_of_them=True, ngram=True)},
        "prompts": len(records),
        "degenerate": len(records) - len(sound),
        "identical": sum(r.tie_at is None for r in records),
        "near_ties": sum(r.tie_at is not None for r in records),
        "tie_gap": tie_gap,
        "draft_steps": cfg.draft_steps,
        "max_new_tokens": cfg.max_new_tokens,
        "formula": acceptance.FORMULA,
        "rate_formula": acceptance.RATE_FORMULA,
        "degenerate_rule": acceptance.DEGENERATE_RULE,
        "per_prompt": [r.plain() for r in records],
    }


def describe(result: dict[str, Any]) -> str:
    """The figures with their formulas, for a terminal."""

    def line(name: str, figures: dict[str, Any]) -> str:
        length, rates = figures["acceptance_length"], figures["acceptance_rate"]
        shown = " ".join("-" if rate is None else f"{rate:.3f}" for rate in rates)
        length = "-" if length is None else f"{length:.3f}"
        return f"{name:<16}acceptance_length {length}  acceptance_rate {shown}"

    return "\n".join(
        [
            line("draft", result),
            line("n-gram baseline", result["ngram"]),
            f"over {result['passes']} passes, {result['tokens']} tokens, "
            f"{result['prompts'] - result['degenerate']} of {result['prompts']} replies "
            f"({result['degenerate']} degenerate ones left out); "
            f"{result['near_ties']} parted from the target's own at a near tie",
            *(result[key] for key in ("formula", "rate_formula", "degenerate_rule")),
        ]
    )
