"""The report's figures, as SVG files that are byte for byte the same for the same numbers.

Colours are Okabe and Ito's (safe for the colour blind). The metrics file is JSON
lines as training writes them: {"kind": "train" | "validation", "step", "loss", "accuracy": one value a draft step}.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator, StrMethodFormatter

from eagle3lib.errors import UserError
from eagle3lib.job import atomic_write

BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#767676"
STEP_COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#000000"]
PERCENT = FuncFormatter(lambda value, _: f"{100 * value:.3g}%")
UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
STYLE: Any = {
    "svg.hashsalt": "eagle3lib",
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
}

Path_ = str | os.PathLike


def read_metrics(path: Path_) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl; raises UserError with file:line for a broken one."""
    rows = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            row["kind"], row["step"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}:{number}: not a metrics line; delete it or train again") from None
        rows.append(row)
    return rows


def plot_training(metrics: Path_, out: Path_) -> None:
    """Loss and accuracy by draft step over the optimiser's steps; training thin, validation with dots."""
    rows = read_metrics(metrics)
    with matplotlib.rc_context(STYLE):
        figure = _figure(9.0, 3.6)
        loss, accuracy = figure.subplots(1, 2)
        _plot_loss(loss, rows)
        _plot_accuracy(accuracy, rows)
        _save(figure, out)


def _plot_loss(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    train, validation = _of_kind(rows, "train", "loss"), _of_kind(rows, "validation", "loss")
    steps, losses = [r["step"] for r in train], [r["loss"] for r in train]
    axes.plot(steps, losses, color=BLUE, alpha=0.25, linewidth=1)
    axes.plot(steps, _smooth(losses), color=BLUE, label="training (running mean)")
    if validation:
        steps, losses = [r["step"] for r in validation], [r["loss"] for r in validation]
        axes.plot(steps, losses, "o-", color=ORANGE, ms=4, label="validation")
    axes.set(title="Loss", xlabel="optimiser step", ylabel="loss (mean of counted tokens)")
    axes.set_xlim(left=0)
    _count(axes.xaxis)
    axes.legend()


def _plot_accuracy(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    """One colour a draft step: validation where there is any, else training."""
    shown = _of_kind(rows, "validation", "accuracy")
    kind, marker = ("validation", "o-") if shown else ("training", "-")
    shown = shown or _of_kind(rows, "train", "accuracy")
    steps = max((len(r["accuracy"]) for r in shown), default=0)
    for k in range(steps):
        rows_k = [r for r in shown if len(r["accuracy"]) > k and r["accuracy"][k] is not None]
        x, y = [r["step"] for r in rows_k], [r["accuracy"][k] for r in rows_k]
        # Not clipped: a dot at 0 is a whole dot.
        axes.plot(x, y, marker, color=STEP_COLOURS[k % len(STEP_COLOURS)], ms=4, label=str(k + 1), clip_on=False)
    axes.set(title=f"Accuracy by draft step ({kind})", xlabel="optimiser step", ylabel="right of supervised tokens")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.yaxis.set_major_formatter(PERCENT)
    _count(axes.xaxis)
    if steps:
        axes.legend(title="draft step", ncols=1 if steps < 5 else 2)


def plot_acceptance(result: Mapping[str, Any], predicted: Mapping[str, Any], out: Path_) -> None:
    """Acceptance rate by position: measured, as training predicts it, and of the n-gram baseline.

    result: `evaluation.measure_acceptance`; predicted: `summary.predicted`, which may know fewer positions.
    """
    told = {"validation": "held-out samples", "train": "its own samples"}[predicted["split"]]
    series = [
        ("draft model, measured", result, BLUE),
        (f"training's prediction on {told}", predicted, ORANGE),
        ("n-gram baseline, measured", result["ngram"], GREY),
    ]
    positions = len(result["acceptance_rate"])
    with matplotlib.rc_context(STYLE):
        figure = _figure(max(6.4, 1.8 * positions), 4.4)
        axes = figure.subplots()
        for i, (name, figures, colour) in enumerate(series):
            length = figures["acceptance_length"]
            label = f"{name}: acceptance length " + ("-" if length is None else f"{length:.2f}")
            rates = figures["acceptance_rate"][:positions]
            _bars(axes, rates, offset=(i - 1) * 0.28, width=0.26, colour=colour, label=label)
        axes.set(
            title="Acceptance rate by draft position",
            xlabel="position in the chain of drafts",
            ylabel="accepted / drafted",
            xticks=range(1, positions + 1),
        )
        axes.yaxis.set_major_formatter(PERCENT)
        axes.grid(axis="x", visible=False)
        axes.margins(y=0.12)
        figure.legend(loc="outside lower left")  # a bar may be high at any position
        _save(figure, out)


def _bars(axes: Axes, rates: Sequence[float | None], offset: float, width: float, colour: str, label: str) -> None:
    places = [k + 1 + offset for k in range(len(rates))]
    bars = axes.bar(places, [rate or 0.0 for rate in rates], width, color=colour, label=label)
    texts = ["-" if rate is None else f"{rate:.1%}" for rate in rates]
    axes.bar_label(bars, texts, padding=2, fontsize=8)


def plot_sample_lengths(lengths: Sequence[int], out: Path_) -> None:
    """Histogram of the samples' lengths in tokens, with the median marked."""
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.0, 3.4)
        axes, middle = figure.subplots(), ""
        if lengths:
            bins = min(40, max(lengths) - min(lengths) + 1)
            axes.hist(lengths, bins=bins, color=BLUE, edgecolor="white", linewidth=0.4)
            median = sorted(lengths)[len(lengths) // 2]
            axes.axvline(median, color=ORANGE, linestyle="--")
            middle = f", median {median:,} (dashed)"
        axes.set(
            title=f"Sample lengths: {len(lengths):,} samples, {sum(lengths):,} tokens{middle}",
            xlabel="length of a sample (tokens)",
            ylabel="samples",
        )
        _count(axes.xaxis)
        _count(axes.yaxis)
        axes.grid(axis="x", visible=False)
        _save(figure, out)


def plot_rejected(reasons: Mapping[str, int], out: Path_) -> None:
    """How many input lines were rejected, by reason, most frequent on top."""
    ordered = sorted(reasons.items(), key=lambda item: (item[1], item[0]))
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.0, 1.4 + 0.34 * max(len(ordered), 1))
        axes = figure.subplots()
        bars = axes.barh([reason for reason, _ in ordered], [count for _, count in ordered], color=BLUE, height=0.65)
        axes.bar_label(bars, [f"{count:,}" for _, count in ordered], padding=3, fontsize=9)
        axes.set(title=f"Rejected input lines: {sum(reasons.values()):,}", xlabel="lines" if ordered else "")
        _count(axes.xaxis)
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.12)
        if not ordered:
            axes.set(xticks=[], yticks=[])
            axes.text(0.5, 0.5, "none", transform=axes.transAxes, ha="center", va="center", color=GREY)
        _save(figure, out)


def plot_storage(storage: Mapping[str, Any], out: Path_) -> None:
    """Bytes of the hidden states, forecast and actual, beside the forecasts of other formats (`summary.storage`)."""
    name, actual, forecast = storage["storage_format"], storage["actual"], storage["forecast"]
    bars = [(f"{name}, forecast", forecast, ORANGE), (f"{name}, on disk", actual, BLUE)]
    bars += [(f"{other}, forecast", count, GREY) for other, count in storage["other_formats"].items()]
    factor, unit = _unit(max(count for _, count, _ in bars))
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.4, 1.1 + 0.36 * len(bars))
        axes = figure.subplots()
        labels = [label for label, _, _ in bars]
        drawn = axes.barh(labels, [n / factor for _, n, _ in bars], color=[c for _, _, c in bars], height=0.65)
        axes.bar_label(drawn, [f"{n / factor:,.4g} {unit}" for _, n, _ in bars], padding=3, fontsize=9)
        off = f"{abs(actual / forecast - 1):.2%} {'more' if actual > forecast else 'less'} than forecast"
        axes.set(title=f"Hidden states: {actual / factor:,.4g} {unit} on disk, {off}", xlabel=f"size ({unit})")
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.22)
        _save(figure, out)


def plot_throughput(stages: Mapping[str, Mapping[str, float]], out: Path_) -> None:
    """Hours that a million tokens of the samples take, by stage, with the tokens/s (`summary.throughput`)."""
    hours = [one["hours_per_million_tokens"] for one in stages.values()]
    texts = [
        f"{one['hours_per_million_tokens']:.3g} h ({one['tokens_per_second']:,.0f} tokens/s)" for one in stages.values()
    ]
    with matplotlib.rc_context(STYLE):
        figure = _figure(6.4, 1.2 + 0.4 * max(len(hours), 1))
        axes = figure.subplots()
        axes.bar_label(axes.barh(list(stages), hours, color=BLUE, height=0.6), texts, padding=3, fontsize=9)
        axes.set(
            title=f"A million tokens of samples take {sum(hours):.3g} hours" if hours else "Throughput: not on record",
            xlabel="hours per million tokens of the samples",
        )
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.margins(x=0.45)
        if not hours:
            axes.set(xticks=[], yticks=[], xlabel="")
        _save(figure, out)


def _unit(count: float) -> tuple[float, str]:
    """Factor and name of the decimal unit in which so many bytes are said best."""
    return next((f, name) for f, name in UNITS if count >= f or f == 1)


def _count(axis: Axis) -> None:
    """Whole numbers, few enough that long ones do not meet."""
    axis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    axis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _of_kind(rows: Sequence[Mapping[str, Any]], kind: str, key: str) -> list[Mapping[str, Any]]:
    return [row for row in rows if row["kind"] == kind and row.get(key) is not None]


def _smooth(values: Sequence[float]) -> list[float]:
    """Trailing mean over a twentieth of the run."""
    window = max(1, len(values) // 20)
    return [sum(values[max(0, i + 1 - window) : i + 1]) / min(window, i + 1) for i in range(len(values))]


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))


def _save(figure: Figure, out: Path_) -> None:
    """By the suffix: .svg without its date, or .png."""
    kind = Path(out).suffix.lstrip(".")
    with atomic_write(out) as file:
        figure.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else None)
