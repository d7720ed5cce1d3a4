"""Drafts side by side: what their acceptance lengths may be in truth, and how sure it is that they differ.

The unit that is resampled is the question with all its turns: passes of one reply are no independent draws. Of
B resamples of the n questions, with replacement, each acceptance length is sum(passes + accepted) / sum(passes); an
interval is their central 95 % (percentile bootstrap, Efron 1979). Differences are paired: both drafts are taken over
the same resampled questions, those alone that count for both.

A *row* is what `bench` measures of one draft: draft, set, temperature, figures, and `replies`, a dict each with
question, turn, passes, accepted, degenerate.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle3lib import acceptance

RESAMPLES = 10_000
LEVEL = 0.95

Counts = dict[Any, tuple[int, int]]
"""question -> (passes, accepted drafts) over its replies that count."""


def degenerate(replies: Sequence[Mapping[str, Any]]) -> set[tuple[int, int]]:
    """(question, turn) of the replies that run in a loop."""
    return {(reply["question"], reply["turn"]) for reply in replies if reply["degenerate"]}


def counts(replies: Sequence[Mapping[str, Any]], left_out: set[tuple[int, int]] | None = None) -> Counts:
    """Per question, without the replies `left_out` (None: the degenerate ones)."""
    left_out = degenerate(replies) if left_out is None else left_out
    found: Counts = {}
    for reply in replies:
        if (reply["question"], reply["turn"]) not in left_out and reply["passes"]:
            passes, accepted = found.get(reply["question"], (0, 0))
            found[reply["question"]] = (passes + reply["passes"], accepted + reply["accepted"])
    return found


def interval(of: Counts, seed: int = 0, resamples: int = RESAMPLES) -> list[float] | None:
    """[low, high] of the acceptance length; None without a question."""
    if not of:
        return None
    return _central(_lengths(_weights(len(of), seed, resamples), list(of.values())))


def difference(a: Counts, b: Counts, seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Any]:
    """Acceptance length of `b` less that of `a` over the questions of both: questions, difference, low, high."""
    both = [question for question in a if question in b]
    if not both:
        return {"questions": 0, "difference": None, "low": None, "high": None}
    one, other = [a[question] for question in both], [b[question] for question in both]
    weights, whole = _weights(len(both), seed, resamples), np.ones((1, len(both)))
    low, high = _central(_lengths(weights, other) - _lengths(weights, one))
    found = float(_lengths(whole, other)[0] - _lengths(whole, one)[0])
    return {"questions": len(both), "difference": found, "low": low, "high": high}


def compare(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The paired difference of each draft to the first one, by set and temperature.

    measured: what `bench.measure` gave of each. A reply that is degenerate with either draft is left out for both.
    """
    first = {(row["set"], row["temperature"]): row for row in measured[0]["rows"]}
    found = []
    for row in (row for one in measured[1:] for row in one["rows"]):
        other = first.get((row["set"], row["temperature"]))
        if other is not None:
            names = {"draft": row["draft"], "less": other["draft"]}
            place = {name: row[name] for name in ("set", "temperature")}
            bad = degenerate(row["replies"]) | degenerate(other["replies"])
            found.append(names | place | difference(counts(other["replies"], bad), counts(row["replies"], bad)))
    return found


def named(one: Mapping[str, Any], name: str) -> dict[str, Any]:
    """What `bench.measure` gave, of a draft by another name."""
    parts = {part: [row | {"draft": name} for row in one[part]] for part in ("rows", "throughput")}
    return dict(one) | parts


def _weights(n: int, seed: int, resamples: int) -> np.ndarray:
    """How often each of n questions is drawn, [resamples, n]."""
    return np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=resamples)


def _lengths(weights: np.ndarray, values: Sequence[tuple[int, int]]) -> np.ndarray:
    """Acceptance length of each resample: weights [B, n], values n of (passes, accepted)."""
    passes, accepted = np.array(values, dtype=float).T
    return 1 + (weights @ accepted) / (weights @ passes)


def _central(values: np.ndarray) -> list[float]:
    return [float(x) for x in np.quantile(values, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])]


def with_intervals(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The rows without their replies, with `interval` of the acceptance length instead."""
    return [
        {key: value for key, value in row.items() if key != "replies"} | {"interval": interval(counts(row["replies"]))}
        for row in rows
    ]


def result(measured: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What `bench.measure` gave of each draft, the first one ours, as one: about, rows, differences, throughput."""
    rows = [row for one in measured for row in one["rows"]]
    return {
        "about": [one["about"] for one in measured],
        "rows": with_intervals(rows),
        "differences": compare(measured),
        "throughput": [row for one in measured for row in one["throughput"]],
        "level": LEVEL,
        "resamples": RESAMPLES,
    }


# --- tables ------------------------------------------------------------------------------------------


def head(about: Mapping[str, Any]) -> str:
    """What a table's rows have in common, in a line: the three numbers of SGLang's flags first."""
    named = ("draft_steps", "topk", "draft_tokens", "max_new_tokens", "draft_sampling", "target", "measured_by")
    return ", ".join(f"{name} {about[name]}" for name in named if about.get(name) is not None)


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line a row; acceptance length with its interval, beside it what other harnesses would say."""
    named = (
        "draft | set | T | acceptance length | rate by position | replies (degenerate) | specforge | sglang mean | vllm"
    )
    lines = [f"| {named} |", "| --- " * 9 + "|"]
    for row in rows:
        length, others = figure(row["acceptance_length"]), row.get("others") or {}
        between = row.get("interval")
        shown = f"{length} [{between[0]:.3f}, {between[1]:.3f}]" if between else length
        rates = " ".join(map(figure, row["acceptance_rate"]))
        replies = f"{row['replies_counted']} ({row['degenerate']})"
        cells = [row["draft"], row["set"], f"{row['temperature']:g}", shown, rates, replies]
        cells += [figure(others.get(name)) for name in ("specforge", "sglang_mean", "vllm")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def bucket_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line for each row and bucket of context."""
    lines = ["| draft | set | T | context | passes | acceptance length | rate by position |", "| --- " * 7 + "|"]
    for row in rows:
        for bucket in row["buckets"]:
            rates = " ".join(map(figure, bucket["acceptance_rate"]))
            cells = [row["draft"], row["set"], f"{row['temperature']:g}", bucket["context"], str(bucket["passes"])]
            lines.append(f"| {' | '.join([*cells, figure(bucket['acceptance_length']), rates])} |")
    return "\n".join(lines)


def difference_table(differences: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: a line a difference; "-" in place of figures where no question counts for both."""
    lines = ["| draft | less | set | T | questions | difference | 95 % |", "| --- " * 7 + "|"]
    for one in differences:
        between = "-" if one["low"] is None else f"[{one['low']:+.3f}, {one['high']:+.3f}]"
        found = "-" if one["difference"] is None else f"{one['difference']:+.3f}"
        cells = [one["draft"], one["less"], one["set"], f"{one['temperature']:g}", str(one["questions"])]
        lines.append(f"| {' | '.join([*cells, found, between])} |")
    return "\n".join(lines)


def throughput_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: tokens/s by replies at once."""
    lines = ["| draft | at once | replies | tokens/s | without the draft | ratio |", "| --- " * 6 + "|"]
    for row in rows:
        without = row["tokens_per_second_without"]
        ratio = "-" if not without else f"{row['tokens_per_second'] / without:.2f}"
        plain = "-" if without is None else f"{without:.1f}"
        cells = [row["draft"], str(row["batch"]), str(row["replies"]), f"{row['tokens_per_second']:.1f}", plain, ratio]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def figure(value: float | None) -> str:
    """A figure may be missing: all replies degenerate, a position never drafted, nothing held out."""
    return "-" if value is None else f"{value:.3f}"


def describe(measured: Sequence[Mapping[str, Any]]) -> str:
    """The tables of one draft or several: acceptance, by context, differences to the first, tokens a second."""
    rows = [row for one in measured for row in one["rows"]]
    speeds = [row for one in measured for row in one["throughput"]]
    heads = [head(one["about"]) for one in measured]
    drafts = [next((row["draft"] for row in one["rows"]), "") for one in measured]
    common = len(set(heads)) == 1
    parts = [heads[0]] if common else [f"{name}: {text}" for name, text in zip(drafts, heads, strict=True)]
    parts += ["", table(with_intervals(rows)), ""]
    parts += [acceptance.FORMULA, acceptance.DEGENERATE_RULE, OTHERS_ABOUT, ""]
    parts += ["By context, in tokens before the pass:", "", bucket_table(rows)]
    if differences := compare(measured):
        parts += ["", "Paired differences of the acceptance length:", "", difference_table(differences)]
    if speeds:
        parts += ["", "Tokens/s, prefill included:", "", throughput_table(speeds)]
    return "\n".join(parts) + "\n"


OTHERS_ABOUT = (
    "specforge: reply tokens / passes (its bench_eagle3); sglang mean: mean of that over replies (SGLang's "
    "spec_accept_length, specforge.benchmarks.sglang); vllm: 1 + accepted / passes; these three over all replies"
)
