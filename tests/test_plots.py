"""The figures say what the numbers say, and come out the same byte for byte."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from eagle3lib import plots
from eagle3lib.errors import UserError

RESULT = {
    "acceptance_length": 1.74,
    "acceptance_rate": [0.48, 0.22, None],
    "ngram": {"acceptance_length": None, "acceptance_rate": [0.12, None, None]},
}
PREDICTED = {"split": "validation", "acceptance_length": 2.1, "acceptance_rate": [0.6, 0.3]}
STORAGE = {"storage_format": "bf16", "forecast": 2000, "actual": 1990, "other_formats": {"fp8": 1000}}
SPEED = {"training": {"tokens_per_second": 900.0, "hours_per_million_tokens": 1.5}}


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "train", "step": s, "loss": 5 / s, "accuracy": [0.3, 0.2]} for s in range(1, 30)]
    rows += [{"kind": "validation", "step": 29, "loss": 0.5, "accuracy": [0.3, None]}, {"kind": "epoch", "step": 29}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def draw_all(folder, metrics):
    plots.plot_training(metrics, folder / "training.svg")
    plots.plot_acceptance(RESULT, PREDICTED, folder / "acceptance.svg")
    plots.plot_sample_lengths([3, 5, 5, 9], folder / "lengths.svg")
    plots.plot_rejected({"duplicate": 4, "too long": 1}, folder / "rejected.svg")
    plots.plot_storage(STORAGE, folder / "storage.svg")
    plots.plot_throughput(SPEED, folder / "throughput.svg")
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.svg"))}


def test_figures_are_svg_and_reproducible(tmp_path, metrics):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = draw_all(tmp_path / "a", metrics), draw_all(tmp_path / "b", metrics)
    assert list(first) == [
        "acceptance.svg",
        "lengths.svg",
        "rejected.svg",
        "storage.svg",
        "throughput.svg",
        "training.svg",
    ]
    assert first == second
    for name, content in first.items():
        assert ElementTree.fromstring(content).tag.endswith("svg"), name
        assert b"<dc:date>" not in content, name


def test_other_numbers_give_another_figure(tmp_path):
    plots.plot_rejected({"duplicate": 4}, tmp_path / "a.svg")
    plots.plot_rejected({"duplicate": 5}, tmp_path / "b.svg")
    assert (tmp_path / "a.svg").read_bytes() != (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("lengths", [[], [7], [7, 7]])
def test_few_samples(tmp_path, lengths):
    plots.plot_sample_lengths(lengths, tmp_path / "lengths.svg")
    assert (tmp_path / "lengths.svg").stat().st_size > 1000


def test_nothing_rejected_and_nothing_measured(tmp_path):
    plots.plot_rejected({}, tmp_path / "rejected.svg")
    (tmp_path / "metrics.jsonl").write_text("")
    plots.plot_training(tmp_path / "metrics.jsonl", tmp_path / "training.svg")
    plots.plot_throughput({}, tmp_path / "throughput.svg")
    nothing = {"split": "train", "acceptance_length": None, "acceptance_rate": []}
    plots.plot_acceptance(RESULT, nothing, tmp_path / "acceptance.svg")
    for name in ("training", "throughput", "acceptance"):
        assert (tmp_path / f"{name}.svg").exists()


@pytest.mark.parametrize("bad", ["{", "[]", '{"kind": "train"}'])
def test_broken_metrics_line_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n' + bad + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        plots.read_metrics(path)


def drawn(monkeypatch):
    """The axes of the figures that are drawn from now on."""
    found = []
    monkeypatch.setattr(plots, "_save", lambda figure, out: found.extend(figure.axes))
    return found


def test_bars_are_the_numbers(monkeypatch):
    axes = drawn(monkeypatch)
    plots.plot_acceptance(RESULT, PREDICTED, "-")
    plots.plot_storage(STORAGE, "-")
    plots.plot_throughput(SPEED, "-")
    acceptance, storage, throughput = axes
    heights = [[bar.get_height() for bar in bars] for bars in acceptance.containers]
    assert heights == [[0.48, 0.22, 0.0], [0.6, 0.3], [0.12, 0.0, 0.0]]
    assert [bar.get_width() for bar in storage.containers[0]] == [2.0, 1.99, 1.0]
    assert storage.get_title("left") == "Hidden states: 1.99 kB on disk, 0.50% less than forecast"
    assert [bar.get_width() for bar in throughput.containers[0]] == [1.5]
    assert throughput.get_title("left") == "A million tokens of samples take 1.5 hours"
    for one in axes:
        assert one.get_xlabel(), "every axis of numbers is named"
