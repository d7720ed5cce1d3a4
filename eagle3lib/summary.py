"""results/summary.json for programs and summary.md for people: what was made, from what, how good, how long."""

from __future__ import annotations

import csv
import json
import platform
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from eagle3lib import __version__, comparison, hidden_states, ledger
from eagle3lib.comparison import figure
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import write_json, write_text

PACKAGES = ("snakemake", "torch", "transformers", "safetensors", "pandas", "nvidia-ml-py")
# Benchmark folders of a run, by how deep in target/dataset/key/draft their files lie.
STAGES = {
    "prepare_target": "{target}",
    "regenerate_replies": "{target}/{dataset}",
    "shard_samples": "{target}/{dataset}",
    "extract_hidden_states": "{target}/{dataset}/{key}",
    "index_hidden_states": "{target}/{dataset}/{key}",
    "train_draft_model": "{target}/{dataset}/{key}/{draft}",
    "export_draft_model": "{target}/{dataset}/{key}/{draft}",
    "measure_acceptance": "{target}/{dataset}/{key}/{draft}",
    "compare_drafts": "{target}/{dataset}/{key}/{draft}",
}
# Kinds of the ledger, by the names under which they are shown.
WORK = {"replies": "replies", "states": "hidden states", "draft": "training"}


def collect(names: dict[str, str], results: Path = Path("results")) -> dict[str, Any]:
    """The figures of one run (`names`: its wildcards), from the files its rules made."""
    dataset = results / names["target"] / names["dataset"]
    draft = dataset / names["key"] / names["draft"]
    states = _read(draft.parent / "data_config.json")
    training = _read(draft / "training" / "training.json")
    acceptance = _read(draft / "acceptance.json")
    return {
        **names,
        "acceptance_length": acceptance["acceptance_length"],
        "acceptance_rate": acceptance["acceptance_rate"],
        "acceptance": {k: v for k, v in acceptance.items() if k not in ("per_prompt", "bench")},
        "bench": comparison.named(acceptance["bench"], names["draft"]) if "bench" in acceptance else None,
        "predicted": predicted(training["metrics"]),
        "accuracy": training["metrics"].get("validation", training["metrics"]["train"])["accuracy_of_supervised"],
        "validation": training["metrics"].get("validation", {}),
        "training": {k: training[k] for k in ("epochs", "steps", "tokens", "seconds", "processes", "parameters")},
        "samples": states["samples"],
        "tokens": states["tokens"],
        "supervised_tokens": states["supervised_tokens"],
        "hidden_state_bytes": states["bytes"],
        "storage": storage(draft.parent, states),
        "throughput": throughput(names, states, training, results / "store"),
        "rejected": _rejected(dataset / "rejected.jsonl"),
        "target_fingerprint": states["target_fingerprint"],
        "aux_layer_ids": states["aux_layer_ids"],
        "gpu_release": _read(draft / "gpu_release.json")["nvml"],
        "stages": stages(names, results / "benchmarks"),
        "versions": versions(),
    }


def predicted(metrics: dict[str, Any]) -> dict[str, Any]:
    """What training promises of the acceptance: its joint prefix hits, on held-out samples where there are any."""
    split = "validation" if "validation" in metrics else "train"
    return {
        "split": split,
        "acceptance_length": metrics[split].get("acceptance_length"),
        "acceptance_rate": metrics[split].get("prefix_of_supervised", []),
    }


def storage(folder: Path, states: dict[str, Any]) -> dict[str, Any]:
    """Bytes of the hidden states: as forecast from the lengths before the first one, as they are, and as the forecast
    is for the other storage formats. states: data_config.json of `folder`."""
    key = StateKey.of({name: states[name] for name in StateKey.__dataclass_fields__})
    samples = pd.read_parquet(folder.parent / "samples.parquet", columns=["n_tokens", "reply_bounds"])
    lengths = list(zip(samples["n_tokens"].tolist(), samples["reply_bounds"], strict=True))

    def forecast(storage_format: str) -> int:
        other = replace(key, storage_format=storage_format)
        return sum(hidden_states.stored_bytes(other, states["hidden_size"], n, bounds) for n, bounds in lengths)

    return {
        "storage_format": key.storage_format,
        "forecast": _read(folder / "storage_plan.json")["bytes_all"],
        "actual": states["bytes"],
        "other_formats": {name: forecast(name) for name in hidden_states.FORMATS if name != key.storage_format},
    }


def throughput(
    names: dict[str, str], states: dict[str, Any], training: dict[str, Any], store: Path
) -> dict[str, dict[str, float]]:
    """Of each dear stage: tokens/s of all its jobs together, and hours per million tokens of the samples at that rate.

    Out of the ledger, which knows the work that was really done: a job that only links takes a second and says
    nothing. A stage whose work is not on record is left out. The tokens are those of the replies, of the samples, and
    of all epochs.
    """
    entries = ledger.read(store)
    key = {name: states[name] for name in StateKey.__dataclass_fields__}
    made_from = store / "drafts" / str(training.get("digest")) / "made_from.json"
    shaping = _read(made_from)["shaping"] if made_from.exists() else None
    dataset, who = f"{names['target']}/{names['dataset']}", ("target_fingerprint", "engine", "compute_dtype")
    done = {
        "replies": [e for e in entries if e.name == dataset and all(e.shaping.get(k) == key[k] for k in who)],
        "states": [e for e in entries if e.shaping == key],
        "draft": [e for e in entries if e.shaping == shaping],
    }
    tokens = {"replies": states["supervised_tokens"], "states": states["tokens"], "draft": training["tokens"]}
    found = {}
    for kind, of_stage in done.items():
        rate = ledger.rate(entry for entry in of_stage if entry.kind == kind)
        if rate:
            hours = tokens[kind] / rate / 3600 / (states["tokens"] / 1e6)
            found[kind] = {"tokens_per_second": rate, "hours_per_million_tokens": hours}
    return found


def stages(names: dict[str, str], folder: Path) -> dict[str, dict[str, float]]:
    """Minutes and CPU-seconds by stage, summed over its jobs' last runs (jobs side by side count each)."""
    found = {}
    for stage, pattern in STAGES.items():
        files = [folder / stage / f"{pattern.format(**names)}.tsv"]
        files += sorted((folder / stage / pattern.format(**names)).glob("*.tsv"))
        rows = [row for path in files if path.exists() for row in _benchmark_rows(path)]
        if rows:
            found[stage] = {
                "jobs": len(rows),
                "minutes": round(sum(_number(row["s"]) for row in rows) / 60, 2),
                "cpu_seconds": round(sum(_number(row.get("cpu_time")) for row in rows), 1),
            }
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "eagle3lib": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    return found


def write(runs: Sequence[dict[str, Any]], config: dict[str, Any], text: str, json_file: str, config_file: str) -> None:
    write_json(json_file, {"runs": [_without_replies(run) for run in runs]})
    write_text(text, "\n".join(_as_text(run) for run in runs))
    write_text(config_file, yaml.safe_dump(_plain(config), sort_keys=False))


def _without_replies(run: dict[str, Any]) -> dict[str, Any]:
    return run | {"bench": comparison.result([run["bench"]])} if run.get("bench") else run


def _as_text(run: dict[str, Any]) -> str:
    acceptance = run["acceptance"]
    rates = ", ".join(figure(rate) for rate in run["acceptance_rate"])
    lines = [
        f"# {run['draft']} for {run['target']}, trained on {run['dataset']}",
        "",
        f"acceptance length  {figure(run['acceptance_length'])}, over all replies "
        f"{figure(acceptance['acceptance_length_all'])}, n-gram drafter "
        f"{figure(acceptance['ngram_acceptance_length'])}",
        f"acceptance rate    {rates}   by position",
        f"as training said   {', '.join(map(figure, run['predicted']['acceptance_rate'])) or '-'}   "
        f"({run['predicted']['split']})",
        f"validation         acceptance length {figure(run['validation'].get('acceptance_length'))}, accuracy of "
        f"supervised tokens {', '.join(map(figure, run['validation'].get('accuracy_of_supervised', [])))}",
        f"samples            {run['samples']:,} ({run['tokens']:,} tokens, {run['supervised_tokens']:,} supervised)",
        f"hidden states      {run['hidden_state_bytes'] / 1e6:,.1f} MB, aux layers {run['aux_layer_ids']}",
        f"rejected           {run['rejected'] or 'none'}",
        f"GPUs               {run['gpu_release']}",
        "",
        *(acceptance[name] for name in ("formula", "rate_formula", "degenerate_rule")),
        f"{acceptance['prompts']} prompts, {acceptance['degenerate']} degenerate replies left out",
        "",
        *([comparison.describe([run["bench"]])] if run.get("bench") else []),
        "| stage | jobs | minutes | CPU-seconds |",
        "| --- | ---: | ---: | ---: |",
        *(f"| {n} | {s['jobs']} | {s['minutes']:.2f} | {s['cpu_seconds']:.0f} |" for n, s in run["stages"].items()),
        "",
        *(
            f"{WORK[kind]}: {one['tokens_per_second']:,.0f} tokens/s, {one['hours_per_million_tokens']:.2f} hours per "
            "million tokens of the samples"
            for kind, one in run["throughput"].items()
        ),
        "",
        "versions: " + ", ".join(f"{name} {number}" for name, number in run["versions"].items()),
        "",
    ]
    return "\n".join(lines)


def _rejected(path: Path) -> dict[str, int]:
    reasons = [json.loads(line)["reason"] for line in path.read_text().splitlines()]
    return {str(name): int(count) for name, count in pd.Series(reasons, dtype=str).value_counts().items()}


def _benchmark_rows(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def _number(text: str | None) -> float:
    try:
        return float(text or 0)
    except ValueError:  # Snakemake writes "-" or "NA" for a job that was over at once
        return 0.0


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return value


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())
