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


@pytest.fixture
def metrics(tmp_path):
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "train", "step": s, "loss": 5 / s, "accuracy": [0.3, 0.2]} for s in range(1, 30)]
    rows += [{"kind": "validation", "step": 29, "loss": 0.5, "accuracy": [0.3, None]}, {"kind": "epoch", "step": 29}]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def draw_all(folder, metrics):
    plots.plot_training(metrics, folder / "training.svg")
    plots.plot_acceptance(RESULT, folder / "acceptance.svg")
    plots.plot_sample_lengths([3, 5, 5, 9], folder / "lengths.svg")
    plots.plot_rejected({"duplicate": 4, "too long": 1}, folder / "rejected.svg")
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.svg"))}


def test_figures_are_svg_and_reproducible(tmp_path, metrics):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    first, second = draw_all(tmp_path / "a", metrics), draw_all(tmp_path / "b", metrics)
    assert list(first) == ["acceptance.svg", "lengths.svg", "rejected.svg", "training.svg"]
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
    assert (tmp_path / "training.svg").exists()


@pytest.mark.parametrize("bad", ["{", "[]", '{"kind": "train"}'])
def test_broken_metrics_line_is_named(tmp_path, bad):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "train", "step": 1}\n' + bad + "\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: "):
        plots.read_metrics(path)
