"""Regeneration with a real engine on a random small target: resumed, cut to a budget, in prompt order."""

import itertools
import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from tiny import make_target, make_tokenizer, write_conversations

from eagle3lib import samples
from eagle3lib.chat import prompt_ids
from eagle3lib.config import DatasetConfig, RegenerateConfig, TargetConfig
from eagle3lib.engines.served import ServedEngine
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError
from eagle3lib.regeneration import answered_turns, regenerate, reply_key, temperature_of
from eagle3lib.targets import TargetInfo, identify, prepare

CFG = RegenerateConfig(max_new_tokens=12, batch_size=4)
WHO = ["fingerprint", "transformers", "float32"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return TransformersEngine(make_target(tmp_path_factory.mktemp("target"), layers=4))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = write_conversations(tmp_path_factory.mktemp("input") / "in.jsonl", 24)
    return list(samples.read([path]))


class Cut(TransformersEngine):
    """The same engine, ended in the middle: after `n` replies."""

    def __init__(self, engine, n):
        self.__dict__.update(engine.__dict__, n=n)

    def generate(self, *args, **kwargs):
        yield from itertools.islice(super().generate(*args, **kwargs), self.n)
        raise ConnectionError("power cut")


def run(folder, conversations, engine, cfg=CFG, budget=None, name="a.000", max_tokens=128, out="out.jsonl", who=WHO):
    opened = []
    counts = regenerate(
        iter(conversations), make_tokenizer(), lambda: opened.append(1) or engine, dataset(max_tokens), cfg, who,
        budget, folder / "store", folder / out, name,
    )  # fmt: skip
    rows = [json.loads(line) for line in (folder / out).read_text().splitlines()]
    return counts | {"opened": len(opened)}, rows


def dataset(max_tokens):
    return DatasetConfig(name="d", conversations=["in.jsonl"], max_tokens=max_tokens)


def stored(folder):
    return [line for path in sorted((folder / "store").glob("*.jsonl")) for line in path.read_bytes().splitlines()]


def test_replies_are_the_targets_own_in_prompt_order(tmp_path, conversations, engine):
    counts, rows = run(tmp_path, conversations, engine)
    prompts = [prompt_ids(make_tokenizer(), one.messages[:1]) for one in conversations]
    assert [row["prompt_ids"] for row in rows] == prompts
    assert [row["reply_ids"] for row in rows] == engine.greedy(prompts, 12)
    assert all((row["reply_ids"][-1] == 2) == (row["finish"] == "stop") for row in rows)
    assert [(r["file"], r["line"], r["sha256"]) for r in rows] == [(c.file, c.line, c.sha256) for c in conversations]
    assert all([m["role"] for m in row["messages"]] == ["user"] for row in rows)
    total = sum(len(row["reply_ids"]) for row in rows)
    assert counts == {"prompts": 24, "found": 0, "computed": 24, "reply_tokens": total, "opened": 1}
    replies = list(samples.read_replies([tmp_path / "out.jsonl"]))
    assert [reply.reply_ids for reply in replies] == [row["reply_ids"] for row in rows]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_resume_computes_only_what_is_missing(tmp_path, conversations, engine, temperature):
    cfg = CFG.model_copy(update={"temperature": temperature})
    _, whole = run(tmp_path / "whole", conversations, engine, cfg)
    with pytest.raises(ConnectionError):
        run(tmp_path, conversations, Cut(engine, 9), cfg)
    assert len(stored(tmp_path)) == 9
    assert not (tmp_path / "out.jsonl").exists()
    with open(tmp_path / "store" / "a.000.jsonl", "ab") as file:
        file.write(b'{"key": "torn", "reply_i')  # killed while writing
    counts, rows = run(tmp_path, conversations, engine, cfg)
    assert (counts["found"], counts["computed"]) == (9, 15)
    assert rows == whole
    assert len(stored(tmp_path)) == 25  # the torn line among them, ended
    counts, again = run(tmp_path, conversations, engine, cfg, name="b.000", out="again.jsonl")
    assert (counts["found"], counts["computed"], counts["opened"]) == (24, 0, 0)
    assert again == whole


def test_other_settings_and_targets_have_other_keys():
    ids = [1, 2, 3]
    assert reply_key(ids, CFG, WHO) == reply_key(ids, CFG.model_copy(update={"batch_size": 1, "seed": 3}), WHO)
    sampled = CFG.model_copy(update={"temperature": 1.0})
    keys = {
        reply_key(ids, CFG, WHO), reply_key([1, 2], CFG, WHO), reply_key(ids, CFG, ["other", *WHO[1:]]),
        reply_key(ids, CFG.model_copy(update={"max_new_tokens": 13}), WHO), reply_key(ids, sampled, WHO),
        reply_key(ids, sampled.model_copy(update={"seed": 1}), WHO),
        reply_key(ids, sampled.model_copy(update={"top_p": 0.5}), WHO),
    }  # fmt: skip
    assert len(keys) == 7


@pytest.mark.parametrize("budget", [1, 60, 130])
def test_budget_cuts_to_the_smallest_prefix(tmp_path, conversations, engine, budget):
    """The same cut whatever the batch size (so the order in which replies end), resumed or not."""
    _, whole = run(tmp_path / "whole", conversations, engine)
    sizes = list(itertools.accumulate(len(row["reply_ids"]) for row in whole))
    assert sizes[-1] > budget
    expected = whole[: next(i for i, size in enumerate(sizes) if size >= budget) + 1]
    for batch_size in (1, 4, 16):
        folder = tmp_path / str(batch_size)
        cfg = CFG.model_copy(update={"batch_size": batch_size})
        counts, rows = run(folder, conversations, engine, cfg, budget)
        assert rows == expected
        assert counts["reply_tokens"] >= budget
        assert len(stored(folder)) <= len(expected) + batch_size, "no more than a batch is computed in vain"
    with pytest.raises(ConnectionError):
        run(tmp_path / "cut", conversations, Cut(engine, len(expected) // 2), CFG, budget)
    assert run(tmp_path / "cut", conversations, engine, CFG, budget)[1] == expected
    assert run(tmp_path / "whole", conversations, engine, CFG, budget)[1] == expected  # more is stored than needed


def test_repeated_prompts_are_answered_once(tmp_path, conversations, engine):
    doubled = [conversations[0], *conversations[:3], conversations[1]]
    counts, rows = run(tmp_path, doubled, engine)
    assert (counts["computed"], counts["prompts"]) == (3, 5)
    assert rows[0]["reply_ids"] == rows[1]["reply_ids"]
    assert counts["reply_tokens"] == sum(len(rows[i]["reply_ids"]) for i in (0, 2, 3))


def test_what_cannot_be_answered_is_marked(tmp_path, conversations, engine):
    long = samples.Conversation([{"role": "user", "content": "long " * 100}], "in.jsonl", 98, "x")
    silent = samples.Conversation([{"role": "assistant", "content": "hello"}], "in.jsonl", 99, "y")
    counts, rows = run(tmp_path, [long, conversations[0], silent], engine)
    assert [row["finish"] for row in rows][::2] == ["too_long", "no_prompt"]
    assert rows[0]["reply_ids"] == rows[2]["reply_ids"] == []
    assert counts["computed"] == 1


def test_a_conversation_that_cannot_be_rendered_is_marked_and_no_template_stops(tmp_path, conversations, engine):
    broken = make_tokenizer()
    broken.chat_template = "{% if messages[0].content[0] == '1' %}{{ raise_exception('no') }}{% endif %}x"
    out = tmp_path / "o"
    regenerate(conversations[:3], broken, lambda: engine, dataset(128), CFG, WHO, None, tmp_path, out, "a")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["finish"] for row in rows] == ["length", "cannot_render", "length"]
    assert "TemplateError: no" in rows[1]["detail"]
    broken.chat_template = None
    with pytest.raises(UserError, match=r"in.jsonl:1: the target has no chat template"):
        regenerate(conversations, broken, lambda: engine, dataset(128), CFG, WHO, None, tmp_path, tmp_path / "o", "a")


# Temperatures, turns, servers


def test_a_mix_of_temperatures_is_each_prompts_own(tmp_path, conversations, engine):
    mix = CFG.model_copy(update={"temperature": [0.0, 1.0]})
    _, rows = run(tmp_path / "mix", conversations, engine, mix)
    greedy, hot = (
        run(tmp_path / str(t), conversations, engine, CFG.model_copy(update={"temperature": t}))[1] for t in (0.0, 1.0)
    )
    drawn = [temperature_of(row["prompt_ids"], mix) for row in rows]
    assert 4 < drawn.count(1.0) < 20
    for one, t, of_greedy, of_hot in zip(rows, drawn, greedy, hot, strict=True):
        assert one == (of_hot if t else of_greedy)
        assert reply_key(one["prompt_ids"], mix, WHO) == reply_key(
            one["prompt_ids"], CFG.model_copy(update={"temperature": t}), WHO
        ), "found again when the mix changes"


def turns(n: int, number: int = 0) -> samples.Conversation:
    said = [{"role": role, "content": f"{role} {number}.{i}"} for i in range(n) for role in ("user", "assistant")]
    return samples.Conversation([{"role": "system", "content": "be kind"}, *said], "in.jsonl", number + 1, "x")


ALL = CFG.model_copy(update={"turns": "all"})


class Talker:
    """Answers by a table of replies, and counts: what is tested is the history, which needs known replies."""

    def __init__(self, *replies):
        self.replies, self.asked = replies, []

    def generate(self, prompts, *_):
        tokenizer = make_tokenizer()
        for key, ids, _ in prompts:
            self.asked.append(tokenizer.decode(ids))
            text = self.replies[(self.asked[-1].count("<|im_start|>assistant") - 1) % len(self.replies)]
            ended = not text.endswith("...")
            yield key, tokenizer(text)["input_ids"] + ([2] if ended else []), "stop" if ended else "length"


def test_every_turn_is_answered_on_the_targets_own_history(tmp_path):
    talker = Talker("fine", "lazy dog", "over")
    counts, rows = run(tmp_path, [turns(3), turns(1, 1)], talker, ALL, max_tokens=512)
    tokenizer = make_tokenizer()
    whole = rows[0]["prompt_ids"] + rows[0]["reply_ids"]
    assert [m["content"] for m in rows[0]["messages"]] == [
        "be kind", "user 0.0", "fine", "user 0.1", "lazy dog", "user 0.2",
    ]  # fmt: skip
    spans = list(zip(rows[0]["reply_bounds"][::2], rows[0]["reply_bounds"][1::2], strict=True))
    assert [tokenizer.decode(whole[a:b]) for a, b in spans] == ["fine<|im_end|>", "lazy dog<|im_end|>"]
    assert tokenizer.decode(rows[0]["reply_ids"]) == "over<|im_end|>"
    assert "reply_bounds" not in rows[1] and tokenizer.decode(rows[1]["reply_ids"]) == "fine<|im_end|>"
    assert (counts["prompts"], counts["computed"]) == (2, 4)
    again = Talker()
    counts, same = run(tmp_path, [turns(3), turns(1, 1)], again, ALL, max_tokens=512, out="again.jsonl")
    assert same == rows and (counts["found"], counts["computed"], again.asked) == (4, 0, [])


def test_the_real_target_answers_every_turn(tmp_path, engine):
    cfg = ALL.model_copy(update={"max_new_tokens": 5})
    _, rows = run(tmp_path, [turns(2, i) for i in range(4)], engine, cfg, max_tokens=512)
    for row in rows:
        prompt = row["prompt_ids"]
        assert row["reply_ids"] == engine.greedy([prompt], 5)[0]
        first = engine.greedy([prompt_ids(make_tokenizer(), turns(1, row["line"] - 1).messages[:2])], 5)[0]
        if first[-1] == 2:
            assert row["messages"][2]["content"] == make_tokenizer().decode(first[:-1])
        else:
            assert len(row["messages"]) == 2, "a reply that was cut off is the last"


def test_a_turn_that_does_not_fit_or_was_cut_off_is_the_last(tmp_path):
    _, rows = run(tmp_path, [turns(3)], Talker("fine", "and so on..."), ALL, max_tokens=512)
    assert (rows[0]["finish"], rows[0]["messages"][-1]["content"]) == ("length", "user 0.1")
    _, rows = run(tmp_path / "short", [turns(3)], Talker("fine"), ALL, max_tokens=len(rows[0]["prompt_ids"]) + 11)
    assert (rows[0]["finish"], rows[0]["messages"][-1]["content"]) == ("stop", "user 0.0")
    _, rows = run(tmp_path / "none", [turns(3)], Talker("fine"), ALL, max_tokens=20)
    assert (rows[0]["finish"], rows[0]["reply_ids"]) == ("too_long", [])


def test_history_that_the_template_rewrites_does_not_supervise(tmp_path):
    """Thinking is stripped from earlier turns: their ids are no longer those that were generated."""
    stripping = make_tokenizer()
    stripping.chat_template = stripping.chat_template.replace(
        "m['content']", "(m['content'] if m.role != 'assistant' else m['content'].split('</think>')[-1])"
    )
    engine = Talker("<think>hm</think>fine", "lazy")
    regenerate(
        [turns(2)], stripping, lambda: engine, dataset(512), ALL, WHO, None, tmp_path, tmp_path / "out.jsonl", "a"
    )
    row = json.loads((tmp_path / "out.jsonl").read_text())
    assert "reply_bounds" not in row and "<think>" not in make_tokenizer().decode(row["prompt_ids"])
    assert make_tokenizer().decode(row["reply_ids"]) == "lazy<|im_end|>"


def test_tool_calls_stay_with_their_results():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    said = {role: {"role": role, "content": "x"} for role in ("system", "user", "assistant", "tool")}
    messages = [said["system"], said["user"], call, said["tool"], said["assistant"], said["user"]]
    assert answered_turns(messages) == [4, 6]
    assert answered_turns([said["user"], said["assistant"]] * 2) == [1, 3]
    assert answered_turns([said["user"], call, said["tool"]]) == [3]
    assert answered_turns([said["assistant"]]) == []


def test_budget_over_all_turns_cuts_to_the_smallest_prefix(tmp_path):
    conversations = [turns(2, i) for i in range(60)]
    _, whole = run(tmp_path / "whole", conversations, Talker("fine", "lazy dog"), ALL, max_tokens=512)
    each = len(make_tokenizer()("fine")["input_ids"]) + len(make_tokenizer()("lazy dog")["input_ids"]) + 2
    for batch_size in (1, 4):
        cfg = ALL.model_copy(update={"batch_size": batch_size})
        _, rows = run(
            tmp_path / str(batch_size), conversations, Talker("fine", "lazy dog"), cfg, 5 * each + 1, max_tokens=512
        )
        assert rows == whole[:6]


def test_other_inputs_than_chats(tmp_path, engine):
    text = samples.Conversation([], "in.jsonl", 1, "x", text="the quick brown")
    ids = samples.Conversation([], "in.jsonl", 2, "x", input_ids=[5, 6, 7, 8, 9], reply_bounds=[1, 2, 3, 5])
    image = samples.Conversation([], "in.jsonl", 3, "x", unfit=("media", "an image"))
    _, rows = run(tmp_path, [text, ids, image], engine)
    assert rows[0]["prompt_ids"] == make_tokenizer()("the quick brown")["input_ids"]
    assert rows[1]["prompt_ids"] == [5, 6, 7]
    assert [row["reply_ids"] for row in rows[:2]] == engine.greedy([row["prompt_ids"] for row in rows[:2]], 12)
    assert (rows[2]["finish"], rows[2]["detail"], rows[2]["reply_ids"]) == ("media", "an image", [])


@contextmanager
def served(engine, returns_ids=True, refuse=lambda ids, tries: None):
    """An OpenAI-compatible server around the real target. refuse: (prompt ids, how often asked) -> status, or None."""
    lock, tries = threading.Lock(), Counter()
    running, most = Counter(), Counter()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send(self, body, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def do_GET(self):
            self.send({"data": [{"id": "target"}]})

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            ids = tuple(body["prompt"])
            with lock:
                running["now"] += 1
                most["most"] = max(most["most"], running["now"])
                tries[ids] += 1
                status = refuse(ids, tries[ids])
                options = {
                    "temperature": body["temperature"],
                    "top_p": body["top_p"],
                    "eos_ids": body["stop_token_ids"],
                }
                ((_, reply, finish),) = engine.generate([(0, ids, body["seed"])], body["max_tokens"], **options)
                running["now"] -= 1
            if status:
                self.send({"error": "no"}, status)
                return
            text = make_tokenizer().decode(reply, skip_special_tokens=True)
            choice = {"text": text, "finish_reason": finish} | ({"token_ids": reply} if returns_ids else {})
            self.send({"choices": [choice]})

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}/v1", tries, most
    finally:
        http.shutdown()
        http.server_close()


@pytest.fixture(scope="module")
def target(tmp_path_factory, engine):
    folder = tmp_path_factory.mktemp("served")
    named = TargetConfig(name="t", model=str(make_target(folder / "model", layers=4)))
    prepare(named, identify(named).fingerprint, folder / "target.json", folder / "x", folder)
    return TargetInfo.read(folder / "target.json")


@pytest.mark.parametrize("temperature", [0.0, [0.0, 1.0]])
def test_a_server_gives_the_same_replies_as_the_target_in_process(tmp_path, conversations, engine, target, temperature):
    cfg = CFG.model_copy(update={"temperature": temperature})
    with served(engine) as (url, tries, most):
        _, rows = run(tmp_path, conversations, ServedEngine(url, target), cfg)
    assert most["most"] <= cfg.batch_size and sum(tries.values()) == len(conversations)
    expected = run(tmp_path / "own", conversations, engine, cfg)[1]
    assert rows == expected if temperature == 0.0 else len(rows) == len(expected)


def test_a_server_of_text_alone(tmp_path, conversations, engine, target):
    with served(engine, returns_ids=False) as (url, *_):
        _, rows = run(tmp_path, conversations[:4], ServedEngine(url, target))
    for row in rows:
        assert (row["reply_ids"][-1] == 2) == (row["finish"] == "stop")


def test_refused_conversations_are_listed_and_asked_again(tmp_path, conversations, engine, target):
    bad = prompt_ids(make_tokenizer(), conversations[2].messages[:1])

    def refuse(ids, tries):
        return 400 if list(ids) == bad else 503 if tries == 1 else None

    with served(engine, refuse=refuse) as (url, tries, _):
        served_engine = ServedEngine(url, target, pauses=(0, 0))
        _, rows = run(tmp_path, conversations[:4], served_engine)
        assert tries[tuple(bad)] == 1 and sorted(tries.values()) == [1, 2, 2, 2]
        assert rows[2]["finish"] == "error" and "answers 400" in rows[2]["detail"] and rows[2]["reply_ids"] == []
        assert [bool(row["reply_ids"]) for row in rows] == [True, True, False, True]
        (error,) = map(json.loads, (tmp_path / "store/errors/a.000.jsonl").read_text().splitlines())
        assert (error["file"], error["line"]) == (conversations[2].file, 3) and "answers 400" in error["error"]
        run(tmp_path, conversations[:4], served_engine, out="again.jsonl")
        assert tries[tuple(bad)] == 2 and sum(tries.values()) == 8, "only the refused one is asked again"
    with (
        served(engine, refuse=lambda *_: 500) as (url, *_),
        pytest.raises(UserError, match="refuses every prompt; .*500"),
    ):
        run(tmp_path / "all", conversations, ServedEngine(url, target, pauses=()))
    with pytest.raises(UserError, match="cannot be reached"):
        run(tmp_path, conversations[:6], served_engine)
