"""The summary holds what the files say, also where a figure is missing."""

import json

from eagle3lib import summary

NAMES = {"target": "t", "dataset": "d", "key": "0123456789ab", "draft": "x"}
FORMULAS = {"formula": "F", "rate_formula": "R", "degenerate_rule": "D"}


def make_run(results, acceptance, metrics):
    draft = results / "t/d/0123456789ab/x"
    (draft / "training").mkdir(parents=True)
    states = {
        "samples": 3,
        "tokens": 30,
        "supervised_tokens": 20,
        "bytes": 999,
        "target_fingerprint": "f",
        "aux_layer_ids": [2],
    }
    training = dict.fromkeys(("epochs", "steps", "tokens", "seconds", "processes", "parameters"), 1)
    (draft.parent / "data_config.json").write_text(json.dumps(states))
    (draft / "training/training.json").write_text(json.dumps({"metrics": metrics, **training}))
    common = {"prompts": 4, "degenerate": 1, "per_prompt": [{}], **FORMULAS}
    (draft / "acceptance.json").write_text(json.dumps(acceptance | common))
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
    figures = {"acceptance_length": 1.4, "accuracy_of_supervised": [0.5, 0.25]}
    text, data = written(tmp_path, make_run(tmp_path, acceptance, {"train": figures, "validation": figures}))
    run = data["runs"][0]
    assert (run["acceptance_length"], run["acceptance_rate"], run["accuracy"]) == (1.5, [0.4, 0.1], [0.5, 0.25])
    assert run["rejected"] == {"duplicate": 2, "too_long": 1}
    assert run["stages"]["extract_hidden_states"] == {"jobs": 2, "minutes": 1.5, "cpu_seconds": 45}
    assert "acceptance length  1.500, over all replies 1.600, n-gram drafter 1.200" in text
    assert "1 degenerate replies left out" in text
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
