"""Question sets through our own decoder and through servers that speak SGLang's and vLLM's dialect."""

from __future__ import annotations

import json
import threading
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

import pytest
import torch
from test_evaluation import (
    AUX,
    EOS,
    PROMPTS,
    V,
    export_counting_draft,
    export_random_draft,
    export_trained_draft,
    make_counting_target,
    make_random_target,
    settings,
)

from eagle3lib import acceptance, bench, comparison, evaluation
from eagle3lib.acceptance import Pass
from eagle3lib.consumers import openai
from eagle3lib.errors import UserError


class Letters:
    """A tokenizer of 32 characters; a message is its text, no more."""

    chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    special_tokens_map: ClassVar[dict] = {}

    def get_chat_template(self):
        return self.chat_template

    def __call__(self, text, add_special_tokens=False):
        return {"input_ids": [ord(c) - 64 for c in text]}

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(64 + i) for i in ids if i != EOS)


def user(*ids):
    return [{"role": "user", "content": Letters().decode(ids)}]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """The models are so small that two threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def counting(tmp_path_factory):
    folder = tmp_path_factory.mktemp("counting")
    info, engine = make_counting_target(folder / "target")
    export_counting_draft(folder / "draft", info)
    export_counting_draft(folder / "short", info, chain=False)
    return info, engine, folder


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("random")
    info, engine = make_random_target(folder / "target")
    export_trained_draft(folder / "draft", info, engine)
    return info, engine, folder / "draft"


def cfg(**changes):
    return settings(sets=["mt-bench"], max_new_tokens=6, **changes)


# --- in process --------------------------------------------------------------------------------------


def test_a_second_turn_reads_the_targets_own_first_reply(counting):
    info, engine, folder = counting
    decoder = bench.in_process(folder / "draft", info, engine, cfg())
    measured = bench.measure(decoder, bench.Speaker(Letters(), info), {"two": [[user(1), user(3, 9)]]}, cfg(), "ours")
    (row,) = measured["rows"]
    first, second = row["replies"]
    assert (first["prompt_tokens"], first["reply_tokens"], first["turn"]) == (1, 6, 0)
    assert second["prompt_tokens"] == 1 + 6 + 2  # 1 | 2..7 | 3 9
    assert (row["questions"], row["replies_counted"], row["passes"], row["accepted"]) == (1, 2, 2, [2, 2, 2, 2])
    assert row["acceptance_length"] == 5.0 and row["buckets"][0]["context"] == "0-2k"
    assert measured["about"]["draft_steps"] == 4 and measured["about"]["draft_tokens"] == 5
    assert json.loads(json.dumps(measured)) == measured


def test_a_turn_that_does_not_fit_ends_its_question_and_is_counted(counting):
    info, engine, folder = counting
    decoder = bench.in_process(folder / "draft", info, engine, cfg())
    sets = {"long": [[user(1), user(*[3] * 60), user(2)], [user(2), user(5)]]}
    (row,) = bench.measure(decoder, bench.Speaker(Letters(), info), sets, cfg(), "ours")["rows"]
    assert row["too_long"] == 1
    assert [(r["question"], r["turn"]) for r in row["replies"]] == [(0, 0), (1, 0), (1, 1)]


def test_every_temperature_and_batch_has_its_row(counting):
    info, engine, folder = counting
    settings = cfg(temperatures=[0.0, 1.0], batches=[1, 2])
    decoder = bench.in_process(folder / "draft", info, engine, settings)
    sets = {"a": [[user(1)], [user(5)], [user(9)]], "b": [[user(7)]]}
    measured = bench.measure(decoder, bench.Speaker(Letters(), info), sets, settings, "ours")
    assert [(r["set"], r["temperature"]) for r in measured["rows"]] == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert [(r["batch"], r["replies"]) for r in measured["throughput"]] == [(1, 2), (2, 2)]
    assert all(r["tokens_per_second"] > 0 and r["tokens_per_second_without"] > 0 for r in measured["throughput"])
    assert "| ours | 1 | 2 |" in comparison.describe([measured])


@pytest.mark.parametrize("at_once", [1, 2, 3])
def test_slots_are_refilled_and_change_no_reply(random_target, at_once):
    info, engine, folder = random_target
    decoder = bench.in_process(folder, info, engine, settings(max_new_tokens=12))
    prompts = [*PROMPTS, PROMPTS[0], [7, 7, 3]]
    got = dict(decoder.decode(prompts, 0.0, [0] * 6, at_once))
    assert [got[n].reply for n in range(6)] == engine.greedy(prompts, 12)


@pytest.mark.parametrize("draft_sampling", ["greedy", "sampled"])
def test_sampled_replies_follow_the_targets_distribution(random_target, draft_sampling):
    """The first three tokens of 2,500 replies against the target's own probabilities, cells of 12 and more expected."""
    info, engine, folder = random_target
    n, prompt = 2500, PROMPTS[0]
    settings_ = settings(max_new_tokens=3, draft_steps=2, draft_sampling=draft_sampling)
    decoder = bench.in_process(folder, info, engine, settings_)
    replies = [one for _, one in decoder.decode([prompt] * n, 1.0, range(n), 250)]
    seen = Counter(tuple(one.reply) for one in replies)
    pairs = Counter(tuple(one.reply[:2]) for one in replies)

    def probabilities(ids):
        logits = engine.session(AUX).forward(ids)[0][-1]
        return torch.softmax(logits.float(), -1).tolist()

    first = probabilities(prompt)
    checked = 0
    for x in range(V):
        if n * first[x] < 60:
            continue
        second = probabilities([*prompt, x])
        for y in range(V):
            if n * first[x] * second[y] >= 12:
                assert_near(pairs[x, y], n, first[x] * second[y])
                third = probabilities([*prompt, x, y])
                for z in range(V):
                    if n * first[x] * second[y] * third[z] >= 12:
                        assert_near(seen[x, y, z], n, first[x] * second[y] * third[z])
                        checked += 1
    assert checked > 12
    accepted = sum(p.accepted for one in replies for p in one.passes)
    assert 0.05 * n < accepted < 0.95 * n  # both ways through a pass were walked


def assert_near(count, n, p):
    """Within 4.5 standard deviations: some hundred cells, a false alarm in a thousand runs."""
    assert abs(count - n * p) < 4.5 * (n * p * (1 - p)) ** 0.5, (count, n * p)


def test_a_reply_depends_on_its_own_seed_alone(random_target):
    info, engine, folder = random_target
    decoder = bench.in_process(folder, info, engine, settings(max_new_tokens=8, draft_sampling="sampled"))
    alone = dict(decoder.decode([PROMPTS[0]], 1.0, [5], 1))
    beside = dict(decoder.decode([PROMPTS[1], PROMPTS[0]], 1.0, [4, 5], 2))
    other = dict(decoder.decode([PROMPTS[0]], 1.0, [6], 1))
    assert alone[0].reply == beside[1].reply != other[0].reply


def test_one_load_serves_all_drafts_and_a_result_is_kept(tmp_path, counting):
    info, engine, folder = counting
    opened = []

    def open_engine(draft):
        opened.append(draft)
        return engine

    def all_of(drafts, sets, code="c"):
        speaker = bench.Speaker(Letters(), info)
        return list(bench.measure_all(drafts, speaker, sets, cfg(), open_engine, tmp_path / "kept", code))

    drafts, sets = [str(folder / "draft"), str(folder / "short")], {"a": [[user(1)], [user(9)]]}
    first = all_of(drafts, sets)
    assert len(opened) == 1
    assert [m["rows"][0]["acceptance_length"] for m in first] == [5.0, pytest.approx(5 / 3)]
    (difference,) = comparison.result(first)["differences"]
    assert difference["difference"] == pytest.approx(5 / 3 - 5) and difference["questions"] == 2
    assert all_of(drafts, sets) == first and len(opened) == 1
    all_of(drafts, {"a": [[user(2)]]})
    all_of(drafts, sets, code="d")
    assert len(opened) == 3


def test_drafts_that_are_not_there(tmp_path):
    with pytest.raises(UserError, match="no such folder and no hub id"):
        bench.find_draft(str(tmp_path / "gone"))
    with pytest.raises(UserError, match="hf download org/gone"):
        bench.find_draft("org/gone")


def test_a_drafts_notes_are_said(tmp_path, counting):
    info, engine, _ = counting
    export_random_draft(tmp_path / "draft", info)
    values = json.loads((tmp_path / "draft/config.json").read_text())
    values["max_position_embeddings"] = 32
    (tmp_path / "draft/config.json").write_text(json.dumps(values))
    said = []
    bench.in_process(tmp_path / "draft", info, engine, cfg(), said.append)
    assert any("max_position_embeddings: 32, the target has 64" in line for line in said)


# --- figures of other harnesses ----------------------------------------------------------------------


def test_other_harnesses_figures_on_one_log(random_target):
    """A log as SGLang hands it out, of a real decoding; theirs by its keys alone, ours and its relation to theirs."""
    info, engine, folder = random_target
    decoder = bench.in_process(folder, info, engine, settings(max_new_tokens=12))
    decoded = [one for _, one in decoder.decode(PROMPTS, 0.0, [0] * 4, 4)]
    log = [sglang_details(one.reply, one.passes) for one in decoded]
    replies = [(len(one.reply), len(one.passes), sum(p.accepted for p in one.passes)) for one in decoded]
    ours = acceptance.as_others(replies)
    # SpecForge, benchmarks/bench_eagle3.py: completion tokens of all requests by spec_verify_ct of all requests.
    theirs = sum(one["completion_tokens"] for one in log) / sum(one["spec_verify_ct"] for one in log)
    assert ours["specforge"] == pytest.approx(theirs)
    # specforge.benchmarks.sglang: the mean of SGLang's own figure.
    assert ours["sglang_mean"] == pytest.approx(sum(one["spec_accept_length"] for one in log) / len(log))
    # vllm bench serve, and the mean of accepted + 1 over all verifications: our acceptance length.
    by_verify = [k + 1 for one in log for k, n in enumerate(one["spec_correct_drafts_histogram"]) for _ in range(n)]
    pooled = acceptance.acceptance_length([p.accepted for one in decoded for p in one.passes])
    assert ours["vllm"] == pytest.approx(sum(by_verify) / len(by_verify)) == pytest.approx(pooled)
    passes = sum(len(one.passes) for one in decoded)
    assert ours["specforge"] - pooled == pytest.approx(len(decoded) / passes)


def sglang_details(reply, passes):
    histogram = [sum(p.accepted == k for p in passes) for k in range(max(p.accepted for p in passes) + 1)]
    return {
        "completion_tokens": len(reply),
        "spec_verify_ct": len(passes),
        "spec_accept_length": len(reply) / len(passes),
        "spec_correct_drafts_histogram": histogram,
    }


# --- servers -----------------------------------------------------------------------------------------


@contextmanager
def server(dialect, decoder=None, broken=None):
    """Answers with what `decoder` says, as SGLang 0.5.23 or vLLM 0.32 (each answer, or counters alone) would."""
    totals, lock = {"passes": 0, "accepted": [0] * 4}, threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_):
            pass

        def send(self, body, status=200):
            self.send_response(status)
            self.end_headers()
            self.wfile.write((body if isinstance(body, str) else json.dumps(body)).encode())

        def do_GET(self):
            if self.path == "/v1/models":
                self.send({"data": [{"id": "target"}]})
            elif self.path == "/get_server_info" and dialect == "sglang":
                chain = {"speculative_num_steps": 4, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 5}
                self.send(chain)
            elif self.path == "/metrics" and dialect == "counters":
                self.send(prometheus(totals))
            else:
                self.send("no such page", 404)

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(body)
            if broken:
                self.send(broken, 400)
                return
            with lock:
                ((_, one),) = decoder.decode([body["prompt"]], body["temperature"], [body["seed"]], 1)
                totals["passes"] += len(one.passes)
                totals["accepted"] = [
                    a + sum(p.accepted > k for p in one.passes) for k, a in enumerate(totals["accepted"])
                ]
            self.send({"choices": [choice(one, body)], **spoken(one, body)})

    def choice(one, body):
        return {"text": Letters().decode(one.reply), "token_ids": one.reply if body["return_token_ids"] else None}

    def spoken(one, body):
        if dialect == "sglang" and body.get("return_spec_tokens_details") and one.passes:
            return {"sglext": {"spec_tokens_details": sglang_details(one.reply, one.passes)}}
        accepted = [p.accepted for p in one.passes]
        told = {"num_spec_tokens": 4, "acceptance_histogram": [accepted.count(k) for k in range(5)]}
        if dialect == "detailed":
            told["per_step_accepted"] = accepted
        return {"metrics": {"speculative_decoding": told}} if dialect in ("summary", "detailed") else {}

    asked: list[dict] = []
    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_address[1]}", asked
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def prometheus(totals):
    head = "# HELP vllm:spec_decode_num_drafts_total Number of spec decoding drafts.\n"
    lines = [f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="t"}} {float(totals["passes"])}']
    lines += ['vllm:spec_decode_num_drafts_created{engine="0",model_name="t"} 1.79e+09']
    lines += [
        f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",model_name="t",position="{k}"}} {float(n)}'
        for k, n in enumerate(totals["accepted"])
    ]
    return head + "\n".join(lines) + "\n"


@pytest.mark.parametrize("dialect", ["sglang", "summary", "detailed", "counters"])
def test_a_server_gives_the_figures_that_its_decoder_has(random_target, dialect):
    info, engine, folder = random_target
    settings_ = settings(max_new_tokens=12, sets=["mt-bench"])
    decoder = bench.in_process(folder, info, engine, settings_)
    speaker, sets = bench.Speaker(Letters(), info), {"a": [[user(*p)] for p in PROMPTS]}
    (own,) = bench.measure(decoder, speaker, sets, settings_, "x")["rows"]
    with server(dialect, decoder) as (url, asked):
        found = openai.Server(url + "/v1/", info, settings_, Letters())
        measured = bench.measure(found, speaker, sets, settings_, "x")
    (row,) = measured["rows"]
    same = ("acceptance_length", "accepted", "passes", "tokens", "others", "replies", "degenerate")
    assert {key: row[key] for key in same} == {key: own[key] for key in same}
    assert row["acceptance_length"] > 1
    assert [measured["about"][name] for name in ("draft_steps", "topk", "draft_tokens")] == [4, 1, 5]
    assert {tuple(body["prompt"]) for body in asked} >= set(map(tuple, PROMPTS))
    assert all(body["temperature"] == 0 for body in asked)


def test_tokens_a_second_ask_both_servers(counting):
    info, engine, folder = counting
    settings_ = cfg(batches=[2])
    decoder = bench.in_process(folder / "draft", info, engine, settings_)
    sets = {"a": [[user(1)], [user(5)]]}
    with server("detailed", decoder) as (url, _), server("none", decoder) as (other, asked):
        found = openai.Server(url, info, settings_, Letters(), without=other)
        (speed,) = bench.measure(found, bench.Speaker(Letters(), info), sets, settings_, "x")["throughput"]
    assert [body["prompt"] for body in sorted(asked, key=lambda b: b["prompt"])] == [[1], [5]]
    assert speed["batch"] == 2 and speed["tokens_per_second_without"] > 0


def test_what_servers_are_refused_for(counting):
    info, engine, folder = counting
    decoder = bench.in_process(folder / "draft", info, engine, cfg())
    with server("none", decoder) as (url, _), pytest.raises(UserError, match="tells nowhere what it accepted"):
        openai.Server(url, info, cfg())
    with server("sglang", broken="no ids here") as (url, _), pytest.raises(UserError, match="answers 400: no ids here"):
        openai.Server(url, info, cfg())
    with pytest.raises(UserError, match="cannot be reached"):
        openai.Server("http://127.0.0.1:9", info, cfg())


def test_counters_are_read_over_engines_and_only_theirs():
    text = prometheus({"passes": 7, "accepted": [5, 2]}) + prometheus({"passes": 1, "accepted": [1, 0]})
    assert openai.counters(text) == {"passes": 8, "accepted": [6, 2]}
    assert openai.counters("vllm:num_requests_running 0.0\n") is None
    assert acceptance.histogram(8, [6, 2]) == [2, 4, 2]


def test_passes_lie_in_the_bucket_of_their_context():
    passes = [Pass(4, 4), Pass(4, 0), Pass(4, 1)]
    placed = acceptance.contexts(2043, 9, passes, ordered=True)
    assert [context for context, _ in placed] == [2044, 2049, 2050]
    assert [(b["context"], b["passes"]) for b in acceptance.by_context(placed, 4)] == [("0-2k", 1), ("2-8k", 2)]
    unordered = acceptance.contexts(8190, 9, passes, ordered=False)
    assert [(b["context"], b["passes"]) for b in acceptance.by_context(unordered, 4)] == [("8-32k", 3)]
    assert evaluation.chain_of(4) == {"draft_steps": 4, "topk": 1, "draft_tokens": 5}
