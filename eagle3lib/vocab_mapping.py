"""Which target tokens the draft can propose, and the two ways between their ids.

A draft head over a part of the vocabulary is smaller and faster; `t2d` and `d2t`
are the two tensors by which SGLang and vLLM translate. Only this module touches them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from eagle3lib.errors import UserError
from eagle3lib.job import atomic_write


@dataclass(frozen=True, eq=False)
class VocabMapping:
    """A subset of the target's vocabulary, in ascending order of ids.

    t2d: bool [V], true where the draft knows the token.
    d2t: int64 [Vd], OFFSETS: draft index i is target id i + d2t[i].
    """

    t2d: Tensor
    d2t: Tensor

    def __post_init__(self) -> None:
        fault = _fault(self.t2d, self.d2t)
        if fault:
            raise ValueError(fault)

    @classmethod
    def from_counts(cls, counts: Tensor, draft_vocab_size: int) -> VocabMapping:
        """The `draft_vocab_size` most frequent tokens; ties by lower id, then unused ids ascending.

        counts: [V], occurrences of each target id among the supervised tokens.
        """
        if draft_vocab_size > counts.numel():
            raise UserError(
                f"draft.draft_vocab_size: {draft_vocab_size} is larger than the target's vocabulary "
                f"({counts.numel()}); lower it"
            )
        order = torch.sort(counts, descending=True, stable=True).indices
        return cls.from_target_ids(order[:draft_vocab_size], counts.numel())

    @classmethod
    def from_target_ids(cls, target_ids: Tensor, vocab_size: int) -> VocabMapping:
        """The mapping that holds exactly these ids (any order, [Vd]) of a vocabulary of `vocab_size`."""
        t2d = torch.zeros(vocab_size, dtype=torch.bool)
        t2d[target_ids] = True
        kept = t2d.nonzero().squeeze(1)
        return cls(t2d=t2d, d2t=kept - torch.arange(kept.numel()))

    @property
    def vocab_size(self) -> int:
        return self.t2d.numel()

    @property
    def draft_vocab_size(self) -> int:
        return self.d2t.numel()

    @property
    def is_full(self) -> bool:
        """Every target token is a draft token: no translation is needed (nor exported)."""
        return self.draft_vocab_size == self.vocab_size

    @cached_property
    def target_ids(self) -> Tensor:
        """int64 [Vd], ascending: the target id of each draft index."""
        return self.d2t + torch.arange(self.draft_vocab_size)

    @cached_property
    def _draft_index(self) -> Tensor:
        index = torch.full((self.vocab_size,), -1, dtype=torch.int64)
        index[self.target_ids] = torch.arange(self.draft_vocab_size)
        return index

    def to_draft(self, target_ids: Tensor) -> Tensor:
        """Draft index of each target id (any shape); -1 where the draft does not know it."""
        return self._draft_index.to(target_ids.device)[target_ids]

    def to_target(self, draft_index: Tensor) -> Tensor:
        """Target id of each draft index (any shape)."""
        return self.target_ids.to(draft_index.device)[draft_index]

    def coverage(self, counts: Tensor) -> float:
        """Share of the counted tokens (counts: [V]) that the draft knows; 0 when there are none."""
        total = counts.sum().item()
        return counts[self.t2d].sum().item() / total if total else 0.0

    def save(self, path: str | os.PathLike) -> None:
        """Write `t2d` and `d2t` as safetensors, atomically."""
        with atomic_write(path) as file:
            file.write(safetensors.torch.save({"t2d": self.t2d, "d2t": self.d2t}))

    @classmethod
    def load(cls, path: str | os.PathLike) -> VocabMapping:
        """Read what `save` wrote; raise UserError when it is missing, damaged or inconsistent."""
        try:
            tensors = safetensors.torch.load_file(path)
            return cls(t2d=tensors["t2d"], d2t=tensors["d2t"])
        except FileNotFoundError:
            raise UserError(f"{path}: no vocabulary mapping here; run `snakemake build_vocab_mapping`") from None
        except (SafetensorError, KeyError, ValueError) as error:
            raise UserError(f"{path}: not a vocabulary mapping ({error}); delete it and run again") from None


def _fault(t2d: Tensor, d2t: Tensor) -> str | None:
    """What is wrong with the pair, or None."""
    if t2d.dtype != torch.bool or t2d.ndim != 1 or d2t.dtype != torch.int64 or d2t.ndim != 1:
        return f"t2d must be bool [V] and d2t int64 [Vd], not {t2d.dtype} and {d2t.dtype}"
    if not torch.equal(t2d.nonzero().squeeze(1), d2t + torch.arange(d2t.numel())):
        return "t2d and d2t name different tokens"
    return None
