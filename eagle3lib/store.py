"""The store of hidden states: one verified file per (token ids, target, aux layers, engine, format).

- A state lies at `{store}/hidden_states/{key}/{aa}/{sample_id}.pt`; `key` digests what it depends on,
  `sample_id` is the sha256 of its token ids, `aa` its first two digits.
- A file counts once its line stands in `{aa}/manifest.jsonl`: {"sample_id", "bytes", "sha256"}.
- Published in this order: `.part`, fsync, header checked, manifest line fsynced, rename, folder fsynced.
- Everything under `results/{target}/{dataset}/` is a hard link into the store: Snakemake may delete
  its outputs as it likes.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey, load_sample
from eagle3lib.job import HashingFile, fsync_folder
from eagle3lib.lineage import file_sha256


class Store:
    """The states of one key. Safe for several processes: names of `.part` files are unique, renames atomic."""

    def __init__(self, root: str | Path, key: StateKey):
        self.key = key
        self.folder = Path(root) / "hidden_states" / key.short
        self._manifests: dict[str, dict[str, dict]] = {}

    def path(self, sample: str) -> Path:
        return self.folder / sample[:2] / f"{sample}.pt"

    def record(self, sample: str) -> dict[str, Any] | None:
        """The manifest's line of a sample, or None."""
        fan = sample[:2]
        if fan not in self._manifests:
            self._manifests[fan] = _read_manifest(self.folder / fan / "manifest.jsonl")
        return self._manifests[fan].get(sample)

    def find(self, sample: str) -> dict[str, Any] | None:
        """The record of a sample that is present and passes the quick check; None when it must be made.

        A present file that fails is moved to quarantine, with the reason.
        """
        path = self.path(sample)
        if not path.exists():
            return None
        record = self.record(sample)
        if record is None:  # published up to its manifest line, or the manifest was lost: hash it, not make it, again
            record = {"sample_id": sample, "bytes": path.stat().st_size, "sha256": file_sha256(path)}
            if reason := self._fault(path, sample, record):
                self._quarantine(path, reason)
                return None
            self._append(sample, record)
        elif reason := self._fault(path, sample, record):
            self._quarantine(path, reason)
            return None
        return record

    def publish(self, content: dict[str, Any]) -> dict[str, Any]:
        """Write one sample; return its record. Nothing appears under its name unless it is whole."""
        import torch

        sample = content["meta"]["sample_id"]
        path = self.path(sample)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{sample}.{socket.gethostname()}.{os.getpid()}.part")
        try:
            with open(part, "wb") as raw:
                hashing = HashingFile(raw)
                torch.save(content, hashing)
                raw.flush()
                os.fsync(raw.fileno())
                record = {"sample_id": sample, "bytes": hashing.bytes, "sha256": hashing.sha256.hexdigest()}
            if reason := self._fault(part, sample, record):
                raise OSError(f"{part}: written, but read back differently: {reason}")
            self._append(sample, record)
            os.replace(part, path)
            fsync_folder(path.parent)
        finally:
            part.unlink(missing_ok=True)
        return record

    def remove_parts(self, samples: Sequence[str]) -> None:
        """Remove what a killed writer of these samples left behind (call it under the shard's lock)."""
        for sample in samples:
            for part in self.path(sample).parent.glob(f"{sample}.*.part"):
                part.unlink(missing_ok=True)

    def _fault(self, path: Path, sample: str, record: dict[str, Any]) -> str | None:
        """The quick check: size against the manifest, header against the request. None when all is well."""
        size = path.stat().st_size
        if size != record["bytes"]:
            return f"{size} bytes where the manifest says {record['bytes']}"
        try:
            meta = load_sample(path)["meta"]
        except UserError as error:
            return str(error)
        wanted = {"sample_id": sample, **asdict(self.key)}
        wanted["aux_layer_ids"] = list(self.key.aux_layer_ids)
        wrong = [
            f"{name} {meta.get(name)!r}, not {value!r}" for name, value in wanted.items() if meta.get(name) != value
        ]
        return "; ".join(wrong) or None

    def _append(self, sample: str, record: dict[str, Any]) -> None:
        manifest = self.folder / sample[:2] / "manifest.jsonl"
        descriptor = os.open(manifest, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:  # one write call: lines of several processes do not mix
            os.write(descriptor, (json.dumps(record) + "\n").encode())
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        self._manifests.setdefault(sample[:2], {})[sample] = record

    def _quarantine(self, path: Path, reason: str) -> None:
        folder = self.folder.parent.parent / "quarantine" / self.key.short
        folder.mkdir(parents=True, exist_ok=True)
        os.replace(path, folder / path.name)
        with open(folder / "reasons.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"file": path.name, "reason": reason}) + "\n")
        print(f"quarantined {path.name}: {reason}")


def _read_manifest(path: Path) -> dict[str, dict]:
    """Lines by sample; a later line wins, a torn last line (a crash while appending) is passed over."""
    records: dict[str, dict] = {}
    if path.exists():
        for line in path.read_text("utf-8").splitlines():
            try:
                record = json.loads(line)
                records[record["sample_id"]] = record
            except (ValueError, KeyError):
                continue
    return records


def link(source: Path, destination: Path) -> None:
    """Make `destination` a hard link to `source`, replacing what stands there."""
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists() and destination.samefile(source):
        return
    part = destination.with_name(destination.name + ".part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError as error:
        raise UserError(
            f"{destination}: cannot be a hard link to {source} ({error.strerror}); results/ and results/store/ must "
            "lie on one filesystem that has hard links"
        ) from None
    os.replace(part, destination)
