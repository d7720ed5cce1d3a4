"""Training checkpoints that are whole or absent, and never another configuration's.

- `{digest}.{step:09d}.pt` holds the state (`torch.save` of plain values and tensors), the `.json` beside it
  says {"digest", "step", "bytes", "sha256"}; a checkpoint counts once its JSON stands.
- `torch.load` accepts flipped bytes silently, so the sha256 decides; a damaged checkpoint is
  passed over, with a line that says so, for the one before it. Hence two are kept.
- `digest` stands for everything that shapes the training: one of another digest is not there.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch

from eagle3lib.job import atomic_write, save_tensors, write_json

KEEP = 2


def save(folder: str | os.PathLike, digest: str, step: int, state: dict[str, Any]) -> Path:
    """Write a checkpoint, then delete all of its digest but the newest two. Returns the path of its `.pt`."""
    path = _path(folder, digest, step)
    # A JSON of an earlier attempt at this step would vouch for the wrong bytes.
    path.with_suffix(".json").unlink(missing_ok=True)
    with atomic_write(path) as file:
        hashing = save_tensors(state, file)
    record = {"digest": digest, "step": step, "bytes": hashing.bytes, "sha256": hashing.sha256.hexdigest()}
    write_json(path.with_suffix(".json"), record)
    _keep_only(folder, digest, _records(folder, digest)[:KEEP])
    return path


def latest(folder: str | os.PathLike, digest: str) -> dict[str, Any] | None:
    """The state of the newest undamaged checkpoint of this digest, on the CPU; None when there is none."""
    for record in _records(folder, digest):
        path = _path(folder, digest, record["step"])
        fault = _fault(path, record)
        if fault is None:
            return torch.load(path, weights_only=True, map_location="cpu")
        print(f"checkpoint {path} is passed over: {fault}")
    return None


def clear(folder: str | os.PathLike, digest: str) -> None:
    """Delete the checkpoints of this digest: the training is finished."""
    _keep_only(folder, digest, [])


def _records(folder: str | os.PathLike, digest: str) -> list[dict[str, Any]]:
    """What the JSON files say, of this digest, newest first; unreadable ones are not there."""
    records = []
    for path in Path(folder).glob(f"{digest}.*.json"):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["digest"] == digest and path == _path(folder, digest, record["step"]).with_suffix(".json"):
                records.append(record)
        except (ValueError, KeyError, TypeError):
            print(f"checkpoint {path} is passed over: not readable")
    return sorted(records, key=lambda record: -record["step"])


def _fault(path: Path, record: dict[str, Any]) -> str | None:
    if not path.exists():
        return "its .pt is missing"
    if path.stat().st_size != record["bytes"]:
        return f"{path.stat().st_size} bytes instead of {record['bytes']}"
    with open(path, "rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != record["sha256"]:
            return "its sha256 differs"
    return None


def _path(folder: str | os.PathLike, digest: str, step: int) -> Path:
    return Path(folder) / f"{digest}.{step:09d}.pt"


def _keep_only(folder: str | os.PathLike, digest: str, records: list[dict[str, Any]]) -> None:
    """Delete all else of this digest, what a kill left half-made included."""
    kept = {_path(folder, digest, record["step"]).stem for record in records}
    # Each JSON before its .pt: what is left after a crash in between does not count.
    for path in sorted(Path(folder).glob(f"{digest}.*")):
        if path.stem not in kept:
            path.unlink(missing_ok=True)
