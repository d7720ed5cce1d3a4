"""The sample file: hidden states of one sample, its token ids and its mask; and what they depend on.

A `torch.save` zip of plain tensors, which `torch.load(path, weights_only=True, mmap=True)` reads; the
keys are in docs/formats.md. Where files lie and when one counts: `eagle3lib.store`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lib.errors import UserError
from eagle3lib.lineage import digest

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
        return digest(self.values())

    def values(self) -> dict[str, Any]:
        """As plain values."""
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)}

    @classmethod
    def of(cls, values: dict[str, Any]) -> StateKey:
        """Back from plain values."""
        return cls(**{**values, "aux_layer_ids": tuple(values["aux_layer_ids"])})


def sample_id(input_ids: Sequence[int]) -> str:
    """sha256 of the token ids, as little-endian int64."""
    return hashlib.sha256(b"".join(int(i).to_bytes(8, "little", signed=True) for i in input_ids)).hexdigest()


def sample_bytes(n_tokens: int, hidden_size: int, n_aux: int, storage_format: str = "bf16") -> int:
    """Bytes of a stored sample, within 1 %: the states, ids and mask, and the zip's own overhead."""
    values = n_tokens * hidden_size * (n_aux + 1) * BYTES_PER_VALUE[storage_format]
    return values + n_tokens * 16 + 3072 + 256 * n_aux


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


def content_fault(sample: dict[str, Any]) -> str | None:
    """What is wrong inside of a loaded sample: token ids, rows, number of states, values; None when all is well.

    Reads every byte of it; `load_sample` reads the header only.
    """
    meta, states = sample["meta"], sample["hidden_states"]
    ids = sample["input_ids"].tolist()
    if sample_id(ids) != meta["sample_id"]:
        return "its token ids do not have the sha256 that is its name"
    if len(states) != len(meta["aux_layer_ids"]) + 1:
        return f"{len(states)} states for {len(meta['aux_layer_ids'])} aux layers and the last"
    for layer, state in zip([*meta["aux_layer_ids"], "last"], states, strict=True):
        if len(state) != len(ids):
            return f"layer {layer} has {len(state)} rows for {len(ids)} tokens"
        if not state.isfinite().all():
            return f"layer {layer} holds values that are not finite"
    return None
