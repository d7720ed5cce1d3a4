"""The sample file: hidden states of one sample, its token ids and its mask; and what they depend on.

A `torch.save` zip of plain tensors, which `torch.load(path, weights_only=True, mmap=True)` reads; the
keys are in docs/formats.md. Where files lie and when one counts: `eagle3lib.store`.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lib.errors import UserError
from eagle3lib.lineage import digest

if TYPE_CHECKING:
    import torch

FORMAT_VERSION = 1
# Name -> bytes of a value. `-trimmed`: the last state is kept in rows that supervise something, which loses nothing
# for this mask and any narrower one.
FORMATS = {"bf16": 2, "fp8": 1, "bf16-trimmed": 2, "fp8-trimmed": 1}
IN_PLACE = "in-place"  # ids and mask only; the states stay in a file of another tool (eagle3lib.in_place)
FP8_MAX = 448.0  # of float8_e4m3fn


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
    return hashlib.sha256(struct.pack(f"<{len(input_ids)}q", *input_ids)).hexdigest()


def sample_bytes(
    n_tokens: int, hidden_size: int, n_aux: int, storage_format: str = "bf16", n_last: int | None = None
) -> int:
    """Bytes of a stored sample, within 1 %: states, scales, ids and mask, and the zip's own overhead.

    n_last: rows of the last state that a trimmed format keeps (`supervising_rows`); None: all.
    """
    size, trimmed = FORMATS.get(storage_format, 0), storage_format.endswith("-trimmed")
    kept = n_last if trimmed and n_last is not None else n_tokens
    values = (n_tokens * n_aux + kept) * hidden_size * size
    scales = n_tokens * 4 * (n_aux + 1) if size == 1 else 0
    return values + scales + n_tokens * 16 + trimmed * kept * 8 + 3072 + 256 * n_aux


def stored_bytes(key: StateKey, hidden_size: int, n_tokens: int, reply_bounds: Sequence[int]) -> int:
    """`sample_bytes` of a sample under a key."""
    return sample_bytes(n_tokens, hidden_size, len(key.aux_layer_ids), key.storage_format, n_supervising(reply_bounds))


def convertible(source: str, destination: str) -> bool:
    """Can states of one storage format be turned into the other without the target? (Rows may still be missing.)"""
    return (
        IN_PLACE not in (source, destination)
        and source != destination
        and FORMATS[source] >= FORMATS[destination]
        and (FORMATS[source] == 2 or FORMATS[destination] == 1)
        and (not source.endswith("-trimmed") or destination.endswith("-trimmed"))
    )


def supervising_rows(reply_bounds: Sequence[int]) -> list[int]:
    """Rows t of the last state that training can read, at any number of draft steps: x_t and x_{t+1} in one reply.

    Row t is compared with what a draft predicts for x_{t+1}; the first token that a draft predicts in a reply
    [a, e) is x_{a+1}, the last x_{e-1} (training_time_test.py).
    """
    return [row for start, end in pairs(reply_bounds) for row in range(start, end - 1)]


def n_supervising(reply_bounds: Sequence[int]) -> int:
    """How many rows `supervising_rows` has."""
    return sum(max(0, int(end) - int(start) - 1) for start, end in pairs(reply_bounds))


def loss_mask(n_tokens: int, reply_bounds: Sequence[int]) -> list[int]:
    """1 on the tokens of the replies."""
    mask = [0] * n_tokens
    for start, end in pairs(reply_bounds):
        mask[start:end] = [1] * (end - start)
    return mask


def pack_sample(
    key: StateKey,
    input_ids: Sequence[int],
    reply_bounds: Sequence[int],
    states: Sequence[torch.Tensor],
    engine_version: str,
    code: str,
    more_rows: Sequence[int] = (),
) -> dict[str, Any]:
    """The content of a sample file (docs/formats.md).

    `states` are L+1 tensors [T, H]: the aux layers ascending, then the last one, post-norm. A trimmed format keeps
    of the last one the rows that `reply_bounds` asks for, and `more_rows`.
    Raises ValueError for non-finite states or a wrong number of rows.
    """
    import torch

    n = len(input_ids)
    for layer, state in zip([*key.aux_layer_ids, "last"], states, strict=True):
        if state.shape[0] != n:
            raise ValueError(f"layer {layer} has {state.shape[0]} rows for {n} tokens")
        if not finite(state):
            raise ValueError(f"layer {layer} holds values that are not finite")
    content: dict[str, Any] = {
        "input_ids": torch.tensor(input_ids, dtype=torch.int64),
        "loss_mask": torch.tensor(loss_mask(n, reply_bounds), dtype=torch.int64),
        "reply_starts": torch.tensor(list(reply_bounds[::2]), dtype=torch.int64),
    }
    if FORMATS[key.storage_format] == 1:
        quantised = [to_fp8(state) for state in states]
        stored = [values for values, _ in quantised]
        content["scales"] = torch.stack([scales for _, scales in quantised])
    else:
        stored = [_alone(state.to(torch.bfloat16).contiguous()) for state in states]
    if key.storage_format.endswith("-trimmed"):
        content["last_rows"] = torch.tensor(sorted({*supervising_rows(reply_bounds), *more_rows}), dtype=torch.int64)
        stored[-1] = stored[-1][content["last_rows"]]
    content["hidden_states"] = stored
    content["meta"] = {
        "sample_id": sample_id(input_ids),
        **key.values(),
        "engine_version": engine_version,
        "last_is_post_norm": True,
        "code": code,
    }
    return content


def finite(state: torch.Tensor) -> bool:
    """Are all values finite? One pass without a mask in between: 20 times as fast as isfinite on bf16."""
    import torch

    if not state.numel():
        return True
    values = state if state.dtype.itemsize > 1 else state.to(torch.bfloat16)  # fp8 has no comparisons
    return all(math.isfinite(end) for end in torch.aminmax(values))  # NaN wins in both


def _alone(state: torch.Tensor) -> torch.Tensor:
    """The tensor in a storage of its own: a view of a batch would drag all of that into the file."""
    return state if state.untyped_storage().nbytes() == state.nbytes else state.clone()


def to_fp8(state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [T, H] and its fp32 scale a token [T]: value = fp8 * scale, the largest of a row at the format's
    largest."""
    import torch

    state = state.float()
    largest = state.abs().amax(dim=-1)
    scale = torch.where(largest > 0, largest / FP8_MAX, torch.ones_like(largest))
    return (state / scale[:, None]).to(torch.float8_e4m3fn), scale


def unpack(sample: dict[str, Any], reply_bounds: Sequence[int] | None = None) -> list[torch.Tensor]:
    """L+1 states [T, H] in bf16, of any storage format; rows that a trimmed one left out are zeros.

    Raises UserError when a row that `reply_bounds` asks for was left out.
    """
    import torch

    states = list(sample["hidden_states"])
    if "last_rows" in sample:
        if reply_bounds is not None and (missing := missing_rows(sample, reply_bounds)):
            raise UserError(
                f"sample {sample['meta']['sample_id']}: {len(missing)} rows of its last state are missing under this "
                "mask; `snakemake extract` makes them"
            )
        last = torch.zeros(states[0].shape, dtype=states[-1].dtype)
        last.view(torch.uint8)[sample["last_rows"]] = states[-1].view(torch.uint8)  # fp8 has no index_put
        states[-1] = last
    if "scales" in sample:
        scales = sample["scales"]
        return [(s.float() * scale[:, None]).to(torch.bfloat16) for s, scale in zip(states, scales, strict=True)]
    return states


def missing_rows(sample: dict[str, Any], reply_bounds: Sequence[int]) -> list[int]:
    """Rows of the last state that this mask asks for and a trimmed file was not made with (its mask was narrower)."""
    if "last_rows" not in sample:
        return []
    return sorted(set(supervising_rows(reply_bounds)) - set(sample["last_rows"].tolist()))


def stretches(rows: Sequence[int]) -> list[int]:
    """Ascending rows as [s0, e0, s1, e1, …]: few numbers, as replies are few."""
    ends = [i for i in range(len(rows)) if i + 1 == len(rows) or rows[i + 1] != rows[i] + 1]
    starts = [0, *(i + 1 for i in ends[:-1])] if ends else []
    return [edge for start, end in zip(starts, ends, strict=True) for edge in (rows[start], rows[end] + 1)]


def covers(kept: Sequence[int], reply_bounds: Sequence[int]) -> bool:
    """Do these `stretches` hold every row that a mask asks for?"""
    rows = {row for start, end in pairs(kept) for row in range(start, end)}
    return rows.issuperset(supervising_rows(reply_bounds))


def slot_path(shard: str, slot: int) -> str:
    """Path of a sample below a dataset's `hidden_states/`."""
    return f"{shard}/{slot:04d}.pt"


def pairs(reply_bounds: Sequence[int]) -> list[tuple[int, int]]:
    """[s0, e0, s1, e1, …] -> [(s0, e0), (s1, e1), …]."""
    return list(zip(reply_bounds[::2], reply_bounds[1::2], strict=True))


def load_sample(path: str | Path) -> dict[str, Any]:
    """Read a sample file, memory-mapped and without running any pickled code; one whose states lie in a file of another
    tool, with those.

    Raises UserError when it is not one of ours.
    """
    from eagle3lib import in_place

    sample = load_header(path)
    if "in_place" in sample["meta"]:
        sample["hidden_states"] = in_place.states(sample)
    return sample


def load_header(path: str | Path) -> dict[str, Any]:
    """`load_sample`, without a look into another tool's file."""
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
    from eagle3lib import in_place

    if "in_place" in sample["meta"] and (fault := in_place.reference_fault(sample, full=True)):
        return fault
    meta, states = sample["meta"], sample["hidden_states"]
    ids = sample["input_ids"].tolist()
    if sample_id(ids) != meta["sample_id"]:
        return "its token ids do not have the sha256 that is its name"
    if len(states) != len(meta["aux_layer_ids"]) + 1:
        return f"{len(states)} states for {len(meta['aux_layer_ids'])} aux layers and the last"
    rows = [len(ids)] * (len(states) - 1) + [len(sample.get("last_rows", ids))]
    for layer, state, wanted in zip([*meta["aux_layer_ids"], "last"], states, rows, strict=True):
        if len(state) != wanted:
            return f"layer {layer} has {len(state)} rows, not {wanted}, for {len(ids)} tokens"
        if not finite(state):
            return f"layer {layer} holds values that are not finite"
    if "scales" in sample and not sample["scales"].isfinite().all():
        return "a scale is not finite"
    return None


def distance(new: torch.Tensor, old: torch.Tensor) -> float:
    """Relative L2 distance of two states [T, H]: |new - old| / |old|."""
    new, old = new.float(), old.float()
    return ((new - old).norm() / old.norm().clamp_min(1e-12)).item()
