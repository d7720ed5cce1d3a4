"""The report's pages of tables: which GPUs were free when the training began, and what a draft came from."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle3lib import gpus, summary, trace
from eagle3lib.tables import Table, as_page, facts


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
    tables = [facts("Before the training", about)]
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
    about = "The same of any file: python -m eagle3lib trace PATH. Of an input line: python -m eagle3lib trace FILE:LINE."
    versions = Table("Versions of the packages", list(summary.versions().items()), ("package", "version"))
    return as_page("Lineage", [*trace.of_draft(folder, result), versions], about)
