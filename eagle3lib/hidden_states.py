"""The store of hidden states: one verified file per (token ids, target, aux layers, engine, format).

- A state lies at `{store}/hidden_states/{key}/{aa}/{sample_id}.pt`; `key` digests what it depends on,
  `sample_id` is the sha256 of its token ids, `aa` its first two digits.
- It is a `torch.save` zip of plain tensors (`weights_only=True, mmap=True` loads it); design: docs/formats.md.
- A file counts once its line stands in `{aa}/manifest.jsonl`: {"sample_id", "bytes", "sha256"}.
- Published in this order: `.part`, fsync, header checked, manifest line fsynced, rename, folder fsynced.
- Everything under `results/{target}/{dataset}/` is a hard link into the store: Snakemake may delete
  its outputs as it likes.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lib.errors import UserError
from eagle3lib.job import fsync_folder
from eagle3lib.lineage import digest, file_sha256

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
BYTES_PER_VALUE = {"bf16": 2}


@dataclass(frozen=True)
class StateKey:
    """All that a hidden state depends on beside its token ids."""

    target_fingerprint: str
    aux_layer_ids: tuple[int, ...]
    engine: str
    compute_dtype: str
    storage_format: str
    format_version: int = FORMAT_VERSION

    @property
    def short(self) -> str:
        return digest({**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)})


def sample_id(input_ids: Sequence[int]) -> str:
    """sha256 of the token ids, as little-endian int64."""
    return hashlib.sha256(b"".join(int(i).to_bytes(8, "little", signed=True) for i in input_ids)).hexdigest()


def sample_bytes(n_tokens: int, hidden_size: int, n_aux: int, storage_format: str = "bf16") -> int:
    """Bytes of a stored sample, within 1 %: the states, ids and mask, and the zip's own overhead."""
    values = n_tokens * hidden_size * (n_aux + 1) * BYTES_PER_VALUE[storage_format]
    return values + n_tokens * 16 + 3072 + 256 * n_aux


# --- the sample file ---------------------------------------------------------------------------------


def pack_sample(
    key: StateKey,
    input_ids: Sequence[int],
    reply_bounds: Sequence[int],
    states: Sequence[torch.Tensor],
    engine_version: str,
    code: str,
) -> dict[str, Any]:
    """The content of a sample file (design.md section 4).

    `states` are L+1 tensors [T, H]: the aux layers ascending, then the last one, post-norm.
    Raises ValueError for non-finite states or a wrong number of rows.
    """
    import torch

    n = len(input_ids)
    for layer, state in zip([*key.aux_layer_ids, "last"], states, strict=True):
        if state.shape[0] != n:
            raise ValueError(f"layer {layer} has {state.shape[0]} rows for {n} tokens")
        if not torch.isfinite(state).all():
            raise ValueError(f"layer {layer} holds values that are not finite")
    mask = torch.zeros(n, dtype=torch.int64)
    for start, end in pairs(reply_bounds):
        mask[start:end] = 1
    return {
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "loss_mask": mask,
        "reply_starts": torch.tensor(list(reply_bounds[::2]), dtype=torch.int64),
        # clone: a view of a batch would drag the whole batch's storage into the file
        "hidden_states": [state.to(torch.bfloat16).contiguous().clone() for state in states],
        "meta": {
            "sample_id": sample_id(input_ids),
            "target_fingerprint": key.target_fingerprint,
            "engine": key.engine,
            "engine_version": engine_version,
            "compute_dtype": key.compute_dtype,
            "aux_layer_ids": list(key.aux_layer_ids),
            "last_is_post_norm": True,
            "storage_format": key.storage_format,
            "format_version": key.format_version,
            "code": code,
        },
    }


def slot_path(shard: str, slot: int) -> str:
    """Path of a sample below a dataset's `hidden_states/`."""
    return f"{shard}/{slot:04d}.pt"


def pairs(reply_bounds: Sequence[int]) -> list[tuple[int, int]]:
    """[s0, e0, s1, e1, …] -> [(s0, e0), (s1, e1), …]."""
    return list(zip(reply_bounds[::2], reply_bounds[1::2], strict=True))


def load_sample(path: str | Path) -> dict[str, Any]:
    """Read a sample file, memory-mapped and without running any pickled code.

    Raises UserError when it is not one of ours.
    """
    import torch

    try:
        sample = torch.load(path, weights_only=True, mmap=True, map_location="cpu")
        version = sample["meta"]["format_version"]
    except FileNotFoundError:
        raise
    except Exception as error:
        raise UserError(
            f"{path}: not a readable sample file ({type(error).__name__}); delete it and run snakemake again"
        ) from None
    if version != FORMAT_VERSION:
        raise UserError(f"{path}: format version {version}, this release reads {FORMAT_VERSION}; extract it again")
    return sample


# --- the store ---------------------------------------------------------------------------------------


class _Hashing:
    """A file that hashes what is written to it (the zip writer of torch only appends)."""

    def __init__(self, file: Any):
        self.file, self.hash = file, hashlib.sha256()

    def write(self, data: Any) -> int:
        self.hash.update(data)
        return self.file.write(data)

    def flush(self) -> None:
        self.file.flush()


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
                hashing = _Hashing(raw)
                torch.save(content, hashing)
                raw.flush()
                os.fsync(raw.fileno())
                record = {"sample_id": sample, "bytes": raw.tell(), "sha256": hashing.hash.hexdigest()}
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
