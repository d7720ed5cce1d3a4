"""Snakemake's records of what made each result, kept beside the results.

Snakemake notices a changed setting by the params it wrote into `.snakemake/metadata`. That folder is
thought of as a cache, and gets lost; results that are moved alone leave it behind. So a copy of its records
(one small file an output, named by the output's path) lies in `store/records`, and is put back when it is gone.
"""

from __future__ import annotations

import binascii
import json
import os
import shutil
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAME_MAX = 255  # of a file's name


def keep(metadata: Path, kept: Path) -> int:
    """Put the records back when there are none, else copy those that are new; returns how many were put back.

    Those of `.pt` files are left out: the manifest beside them has the same params, and there may be 100,000.
    """
    live = dict(_records(metadata))
    copies = dict(_records(kept))
    if not live:
        for name, path in copies.items():
            _copy(path, metadata / name)
        return len(copies)
    for name, path in live.items():
        if (name not in copies or _stamp(path) != _stamp(copies[name])) and _whole(path):
            _copy(path, kept / name)
    for name in copies.keys() - live.keys():
        copies[name].unlink()
    return 0


def _records(folder: Path) -> Iterator[tuple[str, Path]]:
    for base, _, names in os.walk(folder):
        for name in names:
            path = Path(base, name)
            relative = str(path.relative_to(folder))
            if name != "migration_underway" and not output_of(relative).endswith(".pt"):
                yield relative, path


def of(output: str, *folders: Path) -> dict[str, Any] | None:
    """Snakemake's record of the job that made `output`, from the first of `folders` that has one."""
    for path in (folder / record_of(output) for folder in folders):
        if path.is_file() and _whole(path):
            return json.loads(path.read_text())
    return None


def record_of(output: str) -> str:
    """The name of an output's record."""
    name, step = urlsafe_b64encode(output.encode()).decode(), NAME_MAX - 1
    parts = [name[i : i + step] for i in range(0, len(name), step)]
    return "/".join([*(f"@{part}" for part in parts[:-1]), parts[-1]])


def output_of(record: str) -> str:
    """The output that a record's name stands for: base64, cut into folders `@…` where it is long."""
    try:
        return urlsafe_b64decode(record.replace("@", "").replace("/", "")).decode(errors="replace")
    except binascii.Error:
        return ""


def _whole(path: Path) -> bool:
    """Snakemake does not write them atomically."""
    try:
        return isinstance(json.loads(path.read_text()), dict)
    except ValueError:
        return False


def _stamp(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_mtime_ns, about.st_size


def _copy(source: Path, destination: Path) -> None:
    destination.parent.mkdir(parents=True, exist_ok=True)
    part = destination.with_name(destination.name + ".part")
    shutil.copy2(source, part)
    os.replace(part, destination)
