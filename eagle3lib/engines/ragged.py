"""One pass of a model over rows of several sequences at once, without padding.

The rows of all pieces lie behind each other in one sequence of N rows: [1, N]. All of a transformer but
its attention works row by row, so that only the attention must know which row belongs to whom. It is
registered with transformers under the name `ATTENTION`, gets the `RaggedPass` as a keyword of the
model's forward, and keeps keys and values itself: any model that goes through transformers' attention
interface with `position_ids` can be run so. A prompt's prefill, the decoding of running replies and the
extraction of whole samples are all the same thing.

Shape letters: N rows of the pass, S cached positions, A attention heads, C key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from eagle3lib.errors import UserError

ATTENTION = "eagle3lib_ragged"

# Single rows are attended to in banks of so many neighbouring slots, each up to its own longest sequence:
# attention while decoding takes as long as the cached positions that it reads.
BANK = 8


@dataclass(frozen=True)
class Piece:
    """`length` rows of one sequence from position `start` on; earlier positions lie in `slot` of the cache.

    Pieces may share a slot: each overwrites it from its start on, in their order, and reads it right after.
    """

    length: int
    start: int = 0
    slot: int = 0


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first tokens two sequences share."""
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n


class SlotCache:
    """Keys and values of several sequences: a slot each, [slots, C, S, D] a layer, grown as needed."""

    def __init__(self, slots: int, positions: int = 256):
        self.slots, self.positions = slots, positions
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def reserve(self, positions: int) -> None:
        """Make room for so many positions a slot."""
        if positions <= self.positions:
            return
        grown = max(positions, self.positions * 3 // 2)
        # zeros, not empty: masked positions meet a weight of 0, and 0 * NaN is NaN
        pad = (0, 0, 0, grown - self.positions)
        self.layers = {i: (F.pad(k, pad), F.pad(v, pad)) for i, (k, v) in self.layers.items()}
        self.positions = grown

    def copy(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` positions of slot `source`."""
        if source != target and length:
            for tensors in self.layers.values():
                for tensor in tensors:
                    tensor[target, :, :length] = tensor[source, :, :length]

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of a layer, made in the shape of its first keys and values."""
        if index not in self.layers:
            shape = (self.slots, key.shape[1], self.positions)
            self.layers[index] = (key.new_zeros(*shape, key.shape[-1]), value.new_zeros(*shape, value.shape[-1]))
        return self.layers[index]


class RaggedPass:
    """Which rows of a pass belong together.

    `singles` = n slots 0..n-1 with one row each, at the given positions (running replies); then come the
    rows of `pieces`. Without a cache every piece must start at position 0.
    """

    def __init__(
        self,
        pieces: Sequence[Piece],
        cache: SlotCache | None = None,
        singles: Sequence[int] = (),
        device: torch.device | str = "cpu",
    ):
        self.pieces, self.cache = pieces, cache
        self.n_singles = len(singles)
        starts = [torch.tensor(singles, dtype=torch.int64)]
        starts += [torch.arange(p.start, p.start + p.length) for p in pieces]
        self.position_ids = torch.cat(starts)[None].to(device)  # [1, N]
        self.single_positions = self.position_ids[0, : self.n_singles]
        self.single_slots = torch.arange(self.n_singles, device=device)
        banks = [slice(i, min(i + BANK, self.n_singles)) for i in range(0, self.n_singles, BANK)]
        self.banks = [(bank, max(singles[bank]) + 1) for bank in banks]  # slots, and positions to look at
        self._masks: dict[tuple, torch.Tensor] = {}
        if cache is not None:
            cache.reserve(max([*(p + 1 for p in singles), *(p.start + p.length for p in pieces)]))

    def last_rows(self) -> torch.Tensor:
        """Index of the last row of each single and each piece, in order."""
        ends = torch.tensor([1] * self.n_singles + [p.length for p in self.pieces]).cumsum(0) - 1
        return ends.to(self.position_ids.device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of every row within its own sequence.

        query [1, A, N, D], key and value [1, C, N, D] (positions already rotated in) -> [1, N, A, D].
        """
        outputs = []
        if self.n_singles:
            outputs += self._attend_singles(layer, query, key, value, scale, window)
        row = self.n_singles
        for piece in self.pieces:
            rows = slice(row, row + piece.length)
            q, k, v = query[:, :, rows], key[:, :, rows], value[:, :, rows]
            outputs.append(self._attend_piece(layer, piece, q, k, v, scale, window).transpose(1, 2))
            row += piece.length
        return torch.cat(outputs, 1)

    def _attend_piece(
        self,
        layer: int,
        piece: Piece,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> torch.Tensor:
        start, end = piece.start, piece.start + piece.length
        if self.cache is not None:
            keys, values = self.cache.layer(layer, key, value)
            keys[piece.slot, :, start:end] = key[0]
            values[piece.slot, :, start:end] = value[0]
            if start:
                key, value = keys[piece.slot, None, :, :end], values[piece.slot, None, :, :end]
        mask, ahead = None, 0
        if start > piece.length or (window and window < end):
            mask = self._mask(("piece", start, end), torch.arange(start, end), end, window, query)
        elif start:
            ahead = start  # a square with rows of no use ahead of ours costs less than the mask of an oblong
            query = F.pad(query, (0, 0, ahead, 0))
        grouped = query.shape[1] != key.shape[1]
        out = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=mask is None, scale=scale, enable_gqa=grouped
        )
        return out[:, :, ahead:]

    def _attend_singles(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float | None,
        window: int | None,
    ) -> list[torch.Tensor]:
        n, heads, groups = self.n_singles, query.shape[1], key.shape[1]
        assert self.cache is not None
        keys, values = self.cache.layer(layer, key, value)
        keys[self.single_slots, :, self.single_positions] = key[0, :, :n].transpose(0, 1)
        values[self.single_slots, :, self.single_positions] = value[0, :, :n].transpose(0, 1)
        # The A / C query heads that share a key/value head stand as rows of one query: the cache is read once,
        # and where it lies.
        query = query[0, :, :n].transpose(0, 1).reshape(n, groups, heads // groups, -1)
        outputs = []
        for bank, end in self.banks:
            mask = self._mask(("bank", bank.start), self.single_positions[bank], end, window, query)[:, None, None]
            out = F.scaled_dot_product_attention(
                query[bank], keys[bank, :, :end], values[bank, :, :end], mask, scale=scale
            )
            outputs.append(out.reshape(1, -1, heads, out.shape[-1]))
        return outputs

    def _mask(
        self, name: tuple, positions: torch.Tensor, n_keys: int, window: int | None, like: torch.Tensor
    ) -> torch.Tensor:
        """Additive mask [len(positions), n_keys]: a position sees what is not behind it, at most `window` in all."""
        if (*name, window) not in self._masks:
            distance = positions.to(like.device)[:, None] - torch.arange(n_keys, device=like.device)
            hidden = (distance < 0) | (distance >= window) if window else distance < 0
            self._masks[(*name, window)] = torch.zeros_like(distance, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
        return self._masks[(*name, window)]


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    ragged: RaggedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs,
) -> tuple[torch.Tensor, None]:
    for extra in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(extra) is not None:
            raise UserError(
                f"config: engine.name: the transformers engine cannot run this target, its attention uses {extra}; "
                "use another engine"
            )
    return ragged.attend(module.layer_idx, query, key, value, scaling, sliding_window), None


# Without a mask function of the same name transformers builds no mask: the pass makes its own.
AttentionInterface.register(ATTENTION, _attention)
