"""Acceptance figures of speculative decoding, as pure counting on token ids.

One verification pass of the target emits the drafts it agrees with and one token
of its own, the bonus. The pass over the prompt, which gives the reply's first
token, verifies nothing and is not counted. In the pass that ends a reply (end of
turn or the limit of tokens) the last token takes the bonus's place; drafts from
there on count neither as drafted nor as accepted. So a reply of n tokens always has
n = 1 + sum over its passes of (1 + accepted).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

FORMULA = (
    "acceptance_length = (passes + accepted drafts) / passes: tokens per verification pass of the target, "
    "bonus token included, pooled over replies, the prompt's own pass not counted"
)
RATE_FORMULA = "acceptance_rate[k] = passes that accepted draft k / passes in which draft k was drafted"
DEGENERATE_N = 4
DEGENERATE_BELOW = 0.75
DEGENERATE_RULE = (
    f"degenerate: distinct {DEGENERATE_N}-grams / all {DEGENERATE_N}-grams of the reply < {DEGENERATE_BELOW}"
)

Drafter = Callable[[Sequence[int], int], list[int]]
"""(ids so far, most tokens wanted) -> proposed next tokens."""


@dataclass(frozen=True)
class Pass:
    """One verification pass: how many tokens were drafted and how many of them the target accepted."""

    drafted: int
    accepted: int


def judge(drafts: Sequence[int], wanted: Sequence[int], room: int, stop_ids: Sequence[int]) -> tuple[list[int], Pass]:
    """Greedy verification of one chain of drafts.

    `wanted` is the target's own choice at each place, one more than there are drafts;
    `room` is how many tokens the reply may still grow by (>= 1). Returns the emitted
    tokens (accepted drafts and the bonus, cut at a stop token or at `room`) and the Pass.
    """
    accepted = 0
    while accepted < len(drafts) and drafts[accepted] == wanted[accepted]:
        accepted += 1
    return cut(wanted[: accepted + 1], len(drafts), room, stop_ids)


def cut(emitted: Sequence[int], drafted: int, room: int, stop_ids: Sequence[int]) -> tuple[list[int], Pass]:
    """What is left of a pass (accepted drafts and the bonus) at the first stop token or `room`, and its Pass."""
    kept = list(emitted)[:room]
    stop = next((i for i, token in enumerate(kept) if token in stop_ids), None)
    if stop is not None:
        kept = kept[: stop + 1]
    if stop is not None or len(kept) == room:
        return kept, Pass(drafted=len(kept) - 1, accepted=len(kept) - 1)
    return kept, Pass(drafted=drafted, accepted=len(kept) - 1)


def until_end(passes: Sequence[Pass], reply: Sequence[int], limit: int, stop_ids: Sequence[int]) -> list[Pass]:
    """The passes in which a reply was still under way, each counted whole: as vLLM and SGLang count.

    They count all drafts of the pass in which a reply ends, also those behind its end. To know what becomes of them,
    `passes` and `reply` are those of a decoding that went on past `limit` tokens and past stop tokens.
    """
    kept, done = [], 1
    for one in passes:
        if done >= limit or not set(stop_ids).isdisjoint(reply[:done]):
            break
        kept.append(one)
        done += 1 + one.accepted
    return kept


def histogram(passes: int, accepted: Sequence[int]) -> list[int]:
    """How many passes accepted k drafts, k = 0..K, of an engine that counts passes and accepted drafts by position."""
    reached = [passes, *accepted, 0]
    return [a - b for a, b in itertools.pairwise(reached)]


def of_histogram(histogram: Sequence[int], draft_steps: int) -> list[Pass]:
    """The passes of a reply, in no order, of an engine that tells how many of them accepted k drafts."""
    return [Pass(draft_steps, k) for k, n in enumerate(histogram) for _ in range(n)]


class OtherOutput(ValueError):
    """Two greedy replies to one prompt differ where the target was not undecided."""


def parted_at(reply: Sequence[int], reference: Sequence[int], gaps: Sequence[float], tie_gap: float) -> int | None:
    """None when the replies are equal, else the index of the near tie at which they part.

    gaps: the lead of the target's best logit over its second at each token of either of the two; below `tie_gap` it is
    a near tie. Raises OtherOutput when the first difference is none.
    """
    if list(reply) == list(reference):
        return None
    common = min(len(reply), len(reference))
    first = next((i for i in range(common) if reply[i] != reference[i]), common)
    if first < common and gaps[first] < tie_gap:
        return first
    found, wanted = (ids[first] if first < len(ids) else "its end" for ids in (reply, reference))
    gap = f"{gaps[first]:.3g}" if first < len(gaps) else "-"
    raise OtherOutput(
        f"gave {found} at reply token {first} instead of {wanted} (logit gap {gap}, near ties end at {tie_gap:g})"
    )


def replay(prompt: Sequence[int], reply: Sequence[int], draft_steps: int, drafter: Drafter) -> list[Pass]:
    """The passes that `drafter` would have had on a greedy reply that is already known.

    Greedy speculative decoding cannot change the reply, so this equals running it.
    """
    passes, done = [], 1
    while done < len(reply):
        room = len(reply) - done
        drafts = drafter([*prompt, *reply[:done]], min(draft_steps, room - 1))
        emitted, one = judge(drafts, reply[done : done + len(drafts) + 1], room, ())
        passes.append(one)
        done += len(emitted)
    return passes


def acceptance_length(accepted: Sequence[int]) -> float | None:
    """Mean of (1 + accepted drafts) over the passes (`FORMULA`); None when there was no pass."""
    return (len(accepted) + sum(accepted)) / len(accepted) if accepted else None


def count_by_position(passes: Sequence[Pass], draft_steps: int) -> tuple[list[int], list[int]]:
    """How many passes drafted, and how many accepted, the draft at each of the K positions."""
    drafted = [sum(one.drafted > k for one in passes) for k in range(draft_steps)]
    accepted = [sum(one.accepted > k for one in passes) for k in range(draft_steps)]
    return drafted, accepted


def summarize(passes: Sequence[Pass], draft_steps: int) -> dict[str, Any]:
    """All figures over the given passes, plain values; a figure without a denominator is None.

    Keys: acceptance_length, acceptance_rate [K], drafted [K], accepted [K], passes,
    tokens (emitted by these passes).
    """
    drafted, accepted = count_by_position(passes, draft_steps)
    return {
        "acceptance_length": acceptance_length([one.accepted for one in passes]),
        "acceptance_rate": [a / d if d else None for a, d in zip(accepted, drafted, strict=True)],
        "drafted": drafted,
        "accepted": accepted,
        "passes": len(passes),
        "tokens": len(passes) + sum(one.accepted for one in passes),
    }


BUCKETS = ((0, 2048, "0-2k"), (2048, 8192, "2-8k"), (8192, 32768, "8-32k"), (32768, None, "over 32k"))


def by_context(passes: Sequence[tuple[int, Pass]], draft_steps: int) -> list[dict[str, Any]]:
    """`summarize` of (tokens before the pass, Pass) by bucket of context, with the bucket's name as `context`."""
    found = []
    for low, high, name in BUCKETS:
        inside = [one for context, one in passes if low <= context and (high is None or context < high)]
        if inside:
            found.append({"context": name, **summarize(inside, draft_steps)})
    return found


def contexts(prompt_tokens: int, reply_tokens: int, passes: Sequence[Pass], ordered: bool) -> list[tuple[int, Pass]]:
    """Each pass with the tokens before it; of passes in no order, with those before the middle of the reply."""
    if not ordered:
        return [(prompt_tokens + reply_tokens // 2, one) for one in passes]
    found, done = [], prompt_tokens + 1
    for one in passes:
        found.append((done, one))
        done += 1 + one.accepted
    return found


def as_others(replies: Sequence[tuple[int, int, int]]) -> dict[str, float | None]:
    """The acceptance length as other harnesses compute it, of (tokens, passes, accepted) of each reply, all replies.

    SpecForge (benchmarks/bench_eagle3.py): tokens / passes, pooled. SGLang's `spec_accept_length` is that of a reply;
    its mean is what `specforge.benchmarks.sglang` prints. Both count the token of the prompt's own pass, so they
    exceed ours by replies / passes. vLLM (`vllm bench serve`): 1 + accepted / passes, ours but for the degenerate
    replies.
    """
    verified = [(tokens, passes, accepted) for tokens, passes, accepted in replies if passes]
    total = sum(passes for _, passes, _ in verified)
    if not total:
        return dict.fromkeys(OTHERS)
    pooled = sum(tokens for tokens, _, _ in replies) / total
    mean = sum(tokens / passes for tokens, passes, _ in verified) / len(verified)
    return dict(zip(OTHERS, (pooled, mean, 1 + sum(accepted for _, _, accepted in verified) / total), strict=True))


OTHERS = ("specforge", "sglang_mean", "vllm")


def distinct_share(ids: Sequence[int], n: int = DEGENERATE_N) -> float:
    """Distinct n-grams / all n-grams; 1.0 when the sequence is too short to hold two."""
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def is_degenerate(ids: Sequence[int], n: int = DEGENERATE_N, below: float = DEGENERATE_BELOW) -> bool:
    """Does a reply run in a loop? Any drafter does well on a loop, so such replies say nothing (`DEGENERATE_RULE`)."""
    return distinct_share(ids, n) < below


class NgramDrafter:
    """The baseline without a model (prompt lookup): what followed the last time this was said?

    Finds the longest suffix of the ids, up to `max_n` tokens, that occurred before
    (the latest occurrence wins) and proposes the tokens that followed it there.
    """

    def __init__(self, max_n: int = 4):
        self.max_n = max_n

    def __call__(self, ids: Sequence[int], k: int) -> list[int]:
        best, follows = 0, len(ids)
        for end in range(len(ids) - 1, 0, -1):
            length = self._common_suffix(ids, end)
            if length > best:
                best, follows = length, end
                if best == self.max_n:
                    break
        return list(ids[follows : follows + k])

    def _common_suffix(self, ids: Sequence[int], end: int) -> int:
        length = 0
        while length < min(self.max_n, end) and ids[end - 1 - length] == ids[len(ids) - 1 - length]:
            length += 1
        return length
