"""The summary holds what the files say, also where a figure is missing."""

import json

import pandas as pd
import pytest

from eagle3lib import ledger, pages, summary

NAMES = {"target": "t", "dataset": "d", "key": "0123456789ab", "draft": "x"}
KEY = {
    "target_fingerprint": "f",
    "aux_layer_ids": [2],
    "engine": "e",
    "compute_dtype": "float32",
    "storage_format": "bf16",
    "format_version": 1,
}
FORMULAS = {"formula": "F", "rate_formula": "R", "degenerate_rule": "D"}


def make_run(results, acceptance, metrics):
    missing = dict.fromkeys(("acceptance_length_all", "ngram_acceptance_length"))
    missing["ngram"] = {"acceptance_length": acceptance.get("ngram_acceptance_length")}
    draft = results / "t/d/0123456789ab/x"
    (draft / "training").mkdir(parents=True)
    states = {"samples": 3, "tokens": 30, "supervised_tokens": 20, "bytes": 999, "hidden_size": 8, **KEY}
    (results / "store").mkdir()
    (draft.parent / "storage_plan.json").write_text('{"bytes_all": 1000}')
    lengths = {"n_tokens": [10, 10, 10], "reply_bounds": [[4, 10]] * 3}
    pd.DataFrame(lengths).to_parquet(results / "t/d/samples.parquet")
    training = dict.fromkeys(("epochs", "steps", "tokens", "seconds", "processes", "parameters"), 1)
    (draft.parent / "data_config.json").write_text(json.dumps(states))
    (draft / "training/training.json").write_text(json.dumps({"metrics": metrics, **training}))
    common = {"prompts": 4, "degenerate": 1, "per_prompt": [{}], **FORMULAS}
    (draft / "acceptance.json").write_text(json.dumps(missing | acceptance | common))
    (draft / "gpu_release.json").write_text(json.dumps({"nvml": "ok"}))
    (results / "t/d/rejected.jsonl").write_text(
        '{"reason": "duplicate"}\n{"reason": "duplicate"}\n{"reason": "too_long"}\n'
    )
    for job, seconds in (("00000", 60), ("tail_1", 30)):
        path = results / f"benchmarks/extract_hidden_states/t/d/0123456789ab/{job}.tsv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"s\tcpu_time\n{seconds}\t{seconds / 2}\n")
    return summary.collect(NAMES, results)


def written(tmp_path, run):
    paths = [str(tmp_path / name) for name in ("summary.md", "summary.json", "config.yaml")]
    summary.write([run], {"a": {"b": (1, 2)}}, *paths)
    return (tmp_path / "summary.md").read_text(), json.loads((tmp_path / "summary.json").read_text())


def test_figures_are_those_of_the_files(tmp_path):
    acceptance = {
        "acceptance_length": 1.5,
        "acceptance_rate": [0.4, 0.1],
        "acceptance_length_all": 1.6,
        "ngram_acceptance_length": 1.2,
    }
    figures = {"acceptance_length": 1.4, "accuracy_of_supervised": [0.5, 0.25], "prefix_of_supervised": [0.3, 0.1]}
    text, data = written(tmp_path, make_run(tmp_path, acceptance, {"train": figures, "validation": figures}))
    run = data["runs"][0]
    assert (run["acceptance_length"], run["acceptance_rate"], run["accuracy"]) == (1.5, [0.4, 0.1], [0.5, 0.25])
    assert run["predicted"] == {"split": "validation", "acceptance_length": 1.4, "acceptance_rate": [0.3, 0.1]}
    assert run["rejected"] == {"duplicate": 2, "too_long": 1}
    assert run["stages"]["extract_hidden_states"] == {"jobs": 2, "minutes": 1.5, "cpu_seconds": 45}
    assert "acceptance length  1.500, over all replies 1.600, n-gram drafter 1.200" in text
    assert "1 degenerate replies left out" in text
    page = pages.summary([run])
    for cell in ('<td class="n whole">1.500</td>', ">40.0%, 10.0%</td>", ">2 duplicate, 1 too_long</td>"):
        assert cell in page
    assert (tmp_path / "config.yaml").read_text() == "a:\n  b:\n  - 1\n  - 2\n"


def test_missing_figures_are_shown_as_missing(tmp_path):
    acceptance = {
        "acceptance_length": None,
        "acceptance_rate": [0.4, None],
        "acceptance_length_all": 1.6,
        "ngram_acceptance_length": None,
    }
    figures = {"acceptance_length": 1.4, "accuracy_of_supervised": [0.5, 0.25]}
    text, data = written(tmp_path, make_run(tmp_path, acceptance, {"train": figures}))
    assert data["runs"][0]["acceptance_length"] is None
    assert "acceptance rate    0.400, -" in text
    assert data["runs"][0]["predicted"]["split"] == "train"
    assert data["runs"][0]["throughput"] == {} and "not on record" in pages.summary(data["runs"])


def test_forecasts_of_the_formats(tmp_path):
    acceptance = {"acceptance_length": 1.0, "acceptance_rate": []}
    storage = make_run(tmp_path, acceptance, {"train": {"accuracy_of_supervised": []}})["storage"]
    assert (storage["storage_format"], storage["forecast"], storage["actual"]) == ("bf16", 1000, 999)
    others = storage["other_formats"]
    assert others.keys() == {"fp8", "bf16-trimmed", "fp8-trimmed"}
    # A sample's two states of 10 rows of 8 values, 5 rows of the last supervising something: their numbers, int64,
    # for the one; for the other a scale, fp32, a row and state.
    assert others["bf16-trimmed"] - others["fp8"] == 3 * ((10 + 5) * 8 * 2 + 5 * 8 - (20 * 8 + 20 * 4))


def test_throughput_is_that_of_the_work_that_was_done(tmp_path):
    """By the ledger: of these states, this draft, this dataset's replies by this target; jobs side by side once."""
    make_run(tmp_path, {"acceptance_length": 1.0, "acceptance_rate": []}, {"train": {"accuracy_of_supervised": []}})
    store, made_from = tmp_path / "store", {"name": "t/d/0123456789ab/x", "shaping": {"key": KEY, "code": "1"}}
    (store / "drafts/abc").mkdir(parents=True)
    (store / "drafts/abc/made_from.json").write_text(json.dumps(made_from))
    who = {name: KEY[name] for name in ("target_fingerprint", "engine", "compute_dtype")}
    for kind, name, shaping, start, end, tokens in [
        ("replies", "t/d", {**who, "regenerate": {}}, 0, 10, 100),
        ("replies", "t/other", {**who, "regenerate": {}}, 0, 10, 900),
        ("states", "t/d", KEY, 0, 10, 500),
        ("states", "t/other", KEY, 5, 15, 1000),
        ("states", "t/d", {**KEY, "engine": "another"}, 0, 1, 10**6),
        ("draft", made_from["name"], made_from["shaping"], 0, 50, 100),
        ("draft", made_from["name"], {**made_from["shaping"], "code": "2"}, 0, 1, 100),
    ]:
        ledger.add(store, ledger.Entry(kind, name, shaping, start, end, 1, tokens))
    states = {"tokens": 1000, "supervised_tokens": 400, **KEY}
    found = summary.throughput(NAMES, states, {"digest": "abc", "tokens": 5000}, store)
    assert {kind: one["tokens_per_second"] for kind, one in found.items()} == {"replies": 10, "states": 100, "draft": 2}
    hours = {kind: one["hours_per_million_tokens"] for kind, one in found.items()}
    # 400 reply tokens and 5 epochs for each 1000 tokens of samples.
    wanted = {"replies": 4e5 / 10 / 3600, "states": 1e6 / 100 / 3600, "draft": 5e6 / 2 / 3600}
    assert hours == pytest.approx(wanted)
