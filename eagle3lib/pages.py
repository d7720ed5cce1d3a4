"""The report's pages of tables: all drafts, the dataset, the GPUs before a training, what a draft came from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib import gpus, inspection, trace
from eagle3lib import summary as figures
from eagle3lib.comparison import figure
from eagle3lib.disk import size
from eagle3lib.tables import Table, as_page, facts


def summary(runs: Sequence[Mapping[str, Any]]) -> str:
    """All drafts beside each other, then each one's way (runs: of `summary.collect`)."""
    ways = [table for run in runs for table in _way(run, f": {run['draft']}" if len(runs) > 1 else "")]
    return as_page("Summary", [_drafts(runs), *ways, _versions(runs[0]["versions"])])


def _drafts(runs: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        (
            " / ".join(run[name] for name in ("target", "dataset", "draft")),
            *(figure(one["acceptance_length"]) for one in (run, run["predicted"], run["acceptance"]["ngram"])),
            ", ".join("-" if rate is None else f"{rate:.1%}" for rate in run["acceptance_rate"]),
            f"{run['acceptance']['prompts']:,}",
        )
        for run in runs
    ]
    header = ("draft", "acceptance length", "training said", "n-gram drafter", "accepted, by position", "prompts")
    note = "Acceptance length: tokens per pass of the target, its own included. By position: share of the drafts there."
    return Table("How good", rows, header, note)


def _way(run: Mapping[str, Any], of: str) -> list[Table]:
    """What was made, and how long it took."""
    training, acceptance = run["training"], run["acceptance"]
    made = {
        "states": f"{run['target']} / {run['dataset']} / {run['key']}" if of else None,
        "samples": f"{run['samples']:,} ({run['tokens']:,} tokens, {run['supervised_tokens']:,} of them supervised)",
        "rejected": ", ".join(f"{n:,} {reason}" for reason, n in run["rejected"].items()) or "none",
        "hidden states": f"{size(run['hidden_state_bytes'])}, aux layers {run['aux_layer_ids']}",
        "draft": f"parameters {training['parameters']:,}, epochs {training['epochs']}, steps {training['steps']:,}",
        "left out": f"{acceptance['degenerate']} replies; {acceptance['degenerate_rule']}",
        "formula": acceptance["formula"],
        "GPUs": run["gpu_release"],
    }
    jobs = [(n, str(s["jobs"]), f"{s['minutes']:.2f}", f"{s['cpu_seconds']:.0f}") for n, s in run["stages"].items()]
    speed = [
        (figures.WORK[kind], f"{one['tokens_per_second']:,.0f}", f"{one['hours_per_million_tokens']:.2f}")
        for kind, one in run["throughput"].items()
    ]
    last = "The last run of each job: one that found its work in the store was short. Jobs side by side count each."
    done = "Of the work that was really done; a million tokens of the samples, trained on in all epochs."
    return [
        facts(f"What was made{of}", made),
        Table(f"Stages{of}", jobs or [("-",) * 4], ("stage", "jobs", "minutes", "CPU-seconds"), last),
        Table(
            f"Throughput{of}",
            speed or [("not on record", "-", "-")],
            ("stage", "tokens/s", "hours per million tokens"),
            done,
        ),
    ]


def _versions(versions: Mapping[str, str]) -> Table:
    return Table("Versions of the packages", list(versions.items()), ("package", "version"))


def dataset(folder: Path, shown: int = 10) -> str:
    """What became of the conversations of `results/{target}/{dataset}`, and a few of its samples."""
    table = pd.read_parquet(folder / "samples.parquet")
    mixture = json.loads((folder / "mixture.json").read_text("utf-8"))
    tokenizer = inspection.tokenizer_of(folder)
    texts = [inspection.as_table(tokenizer, sample) for sample in inspection.drawn(folder, table, shown)]
    about = "Marked: the tokens that supervise. Any other sample: python -m eagle3lib show SHARD SLOT"
    return as_page("Dataset", [*_mixture(mixture), *texts], about)


def _mixture(mixture: Mapping[str, Any]) -> list[Table]:
    every = max(mixture["conversations"], 1)
    sources = [
        (
            one["source"] + "".join(f" at {fetched['revision'][:12]}" for fetched in one["fetched"]),
            f"{one['conversations']:,}",
            f"{one['samples']:,}",
            f"{one['tokens']:,}",
            f"{one['supervised']:,}",
            f"{one['weight']:g}",
            f"{one['taken']:.1%}",
        )
        for one in mixture["sources"]
    ]
    header = ("source", "conversations", "samples", "tokens", "supervised", "weight", "share of an epoch")
    found = [Table("Sources", sources, header, "The share of an epoch is of the tokens, by weight.")]
    rejected = [
        (reason, f"{n:,}", f"{n / every:.1%}", ", ".join(_rejected_by(mixture, reason)))
        for reason, n in mixture["rejected"].items()
    ]
    reasons, note = ("reason", "conversations", "share", "of"), "Each with file and line in rejected.jsonl."
    found.append(Table("Rejected", rejected or [("none", "0", "-", "")], reasons, note))
    for title, first, key in (("Lengths", "tokens, at most", "lengths"), ("Languages", "language", "languages")):
        counts = [(f"{int(name):,}" if name.isdigit() else name, f"{n:,}") for name, n in mixture[key].items()]
        found += [Table(title, counts, (first, "samples"))] if counts else []
    return found


def _rejected_by(mixture: Mapping[str, Any], reason: str) -> list[str]:
    return [f"{one['source']} {one['rejected'][reason]:,}" for one in mixture["sources"] if reason in one["rejected"]]


def gpu_release(record: Mapping[str, Any]) -> str:
    """`gpu_release.json` for people."""
    needed = f"{record['gpus']} ({record['setting']})"
    about = {
        "NVML": record["nvml"],
        "driver": record["driver"],
        "GPUs needed": f"{needed}, {record['bytes_each'] / 2**30:.1f} GiB on each" if record["gpus"] else needed,
        "proved free": ", ".join(record["free"]) or "none",
        "waited": f"{record['waited_seconds']:.1f} s",
        "ended before": "; ".join(map(str, record["stopped"])) or "no engine of ours was left",
        gpus.MASK: record["mask"],
    }
    tables = [facts("Needed and found", about)]
    if record["devices"]:
        header = ("GPU", "name", "UUID", "MiB used", "of MiB", "state", "held by")
        tables.append(Table("Devices", [_device(device, record["leases"]) for device in record["devices"]], header))
    return as_page("GPUs before training", tables)


def _device(device: Mapping[str, Any], leases: Any) -> tuple[str, ...]:
    known = [f"{device[name]:,}" if name in device else "-" for name in ("used_mib", "total_mib")]
    holder = "-" if device["state"] == "free" else gpus.holder(dict(device), leases)
    return (str(device["index"]), device.get("name", "-"), device.get("uuid", "-"), *known, device["state"], holder)


def lineage(folder: Path, result: Path) -> str:
    """What the draft in `folder` came from, down to the jobs that lead to `result`, and the versions at work."""
    about = "The same of any other result: python -m eagle3lib trace PATH"
    return as_page("Lineage", [*trace.of_draft(folder, result), _versions(figures.versions())], about)
