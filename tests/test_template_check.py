"""`python -m eagle3lib template`: what is supervised of standard conversations, or why not."""

from __future__ import annotations

import sys

import pytest
from tiny import CHATML, make_target

from eagle3lib import __main__ as command
from eagle3lib.template_check import CONVERSATIONS


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"), layers=1)


def said(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["eagle3lib", "template", *map(str, arguments)])
    assert command.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(CONVERSATIONS)
    return {name: line[18:].strip() for name, line in zip(CONVERSATIONS, lines, strict=True)}


def test_a_line_a_conversation(target, monkeypatch, capsys):
    lines = said(monkeypatch, capsys, target)
    turn = "<|im_start|>user⏎{}<|im_end|>⏎<|im_start|>assistant⏎⟦{}<|im_end|>⟧⏎"
    assert lines["single"] == turn.format("hi", "yes no")
    assert lines["multi"] == turn.format("hi", "yes") + turn.format("why", "no")
    assert lines["tools"].startswith("refused: the target's chat template does not write 'sky' of message 2")


def test_settings_are_passed_on(target, monkeypatch, capsys, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% if word == 3 %}three{% endif %}" + CHATML)
    options = ["--template", path, "--train-on", "last", "--without-reasoning", "--option", "word=3"]
    lines = said(monkeypatch, capsys, target, *options)
    assert lines["multi"].count("⟦") == 1 and lines["multi"].endswith("⟦no<|im_end|>⟧⏎")
    assert lines["single"].startswith("three<|im_start|>")
    assert "<think>⏎hm well⟦⏎</think>⏎⏎yes<|im_end|>⟧" in lines["thinking inline"]
