"""Imported states in the place of an engine: proven to be the target's, then referred to, never copied."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from eagle3lib import in_place
from eagle3lib.config import EngineConfig, ImportedConfig
from eagle3lib.engines import fits
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import distance, pairs
from eagle3lib.in_place import POST_NORM, PRE_NORM, rms_norm
from eagle3lib.targets import TargetInfo, load_head, norm_factor

SAMPLES = 8  # that the probe reads
# Relative L2 distance of a layer of a sample: both sides round to bf16 and compute in another order; the next layer of
# a small target differs by 0.1 and more, a state without its norm by about 1.
TOLERANCE = 0.05
FEWEST = 0.05  # share of next tokens that head(last) must choose where there is nothing else to compare with
UNIT = 0.05  # a post-norm row, divided by the norm's weight, has a root mean square of 1 within this

Reference = Callable[[list[int]], Sequence[torch.Tensor]]


class Imported:
    """`dataset.imported` where an engine is asked for; `lines`: what the scan wrote. The target's own states are those
    of transformers, where it fits into memory."""

    name = "imported"

    def __init__(
        self, imported: ImportedConfig, lines: Path, target: TargetInfo, engine: EngineConfig, trust_remote_code: bool
    ):
        self.imported, self.lines, self.target = imported, lines, target
        self.version = imported.format
        self._fits = engine.name == "transformers" or fits(Path(target.path))
        self._engine, self._trust = engine, trust_remote_code

    def _reference(self) -> Reference:
        """ids -> transformers' n + 1 states [T, H]."""
        from eagle3lib.engines.transformers import TransformersEngine

        engine = TransformersEngine(self.target.path, self._engine.compute_dtype, trust_remote_code=self._trust)
        return engine.reference

    def probe(self, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
        """Are these states the target's, of these layers, and is the last one taken before or after its final norm?

        The record: {"last": "pre-norm" | "post-norm", "agreement": share of the replies' tokens that head(last) chooses
        under that reading, "compared": distances to the target's own states, or why there are none}. Raises UserError.
        """
        lines = in_place.some_lines(self.lines, SAMPLES)
        compared: Any = "the target does not fit into memory"
        if self._fits:
            found, compared = self._against_target(self._reference(), lines[0], aux_layer_ids)
        else:
            found = self._by_scale(lines, len(aux_layer_ids))
        configured = self.imported.last
        if configured not in ("probe", found):
            raise UserError(f"config: dataset.imported.last: {configured}, but the probe finds {found}; leave it out")
        agreement = self._agreement(lines, len(aux_layer_ids), found)
        if configured == "probe" and not self._fits and agreement < FEWEST:
            raise UserError(
                f"probe: head(last), taken as {found}, chooses {agreement:.1%} of the replies' tokens, and the target "
                "does not fit into memory to compare with. Are the states this target's? If you know, set "
                f"dataset.imported.last: {found}"
            )
        return {"last": found, "agreement": agreement, "compared": compared, "files": [line["file"] for line in lines]}

    def refer(self, key: Any, sample: Any, code: str, record: dict[str, Any]) -> dict[str, Any]:
        """A sample's file for the store. Raises ValueError when the file is not what was scanned."""
        path = Path(sample.origin["file"])
        try:
            size = path.stat().st_size
        except OSError as error:
            raise ValueError(f"{path}: {error.strerror}") from None
        about = {"file": str(path.absolute()), "format": self.imported.format, "bytes": size}
        about["sha256"] = sample.origin["sha256"]
        norm = (norm_factor(self.target), self.target.rms_norm_eps) if record["last"] == PRE_NORM else None
        return in_place.refer(key, sample.sample_id, sample.input_ids, sample.reply_bounds, about, code, norm)

    def _read(self, line: dict[str, Any], aux_layers: int) -> in_place.Content:
        try:
            return in_place.read(line["file"], self.imported.format, aux_layers)
        except in_place.Unreadable as fault:
            raise UserError(f"{line['file']}: {fault}; it could be read when it was scanned") from None

    def _agreement(self, lines: list[dict[str, Any]], aux_layers: int, reading: str) -> float:
        """Share of the replies' tokens that argmax(head(last)) of the row before them is."""
        head, right, rows = load_head(self.target).float(), 0, 0
        for line in lines:
            last = self._post_norm(self._last(line, aux_layers), reading)
            ids = torch.tensor(line["input_ids"])
            spans = [range(max(start - 1, 0), end - 1) for start, end in pairs(line["reply_bounds"])]
            at = torch.tensor([row for span in spans for row in span], dtype=torch.long)
            right += int(((last[at] @ head.T).argmax(-1) == ids[at + 1]).sum())
            rows += len(at)
        return round(right / max(rows, 1), 4)

    def _last(self, line: dict[str, Any], aux_layers: int) -> torch.Tensor:
        last = self._read(line, aux_layers).states[-1].float()
        if last.shape[1] != self.target.hidden_size:
            raise UserError(
                f"{line['file']}: states of size {last.shape[1]}, the target's are {self.target.hidden_size}: of "
                "another target"
            )
        return last

    def _post_norm(self, last: torch.Tensor, reading: str) -> torch.Tensor:
        return (
            last.float() if reading == POST_NORM else rms_norm(last, norm_factor(self.target), self.target.rms_norm_eps)
        )

    def _by_scale(self, lines: list[dict[str, Any]], aux_layers: int) -> str:
        """A norm leaves each row at the length of its weight; before it, rows have lengths of their own."""
        weight = norm_factor(self.target)
        kept = weight.abs() > 1e-3 * weight.abs().max()
        rows = torch.cat([self._last(line, aux_layers)[:, kept] / weight[kept] for line in lines])
        off = (rows.square().mean(-1).sqrt() - 1).abs()
        return POST_NORM if (off < UNIT).float().mean() > 0.9 else PRE_NORM

    def _against_target(
        self, reference: Reference, line: dict[str, Any], aux_layer_ids: Sequence[int]
    ) -> tuple[str, dict[str, float]]:
        """The reading of the last state, and how far the states are from the target's own."""
        self._last(line, len(aux_layer_ids))
        states = self._read(line, len(aux_layer_ids)).states
        expected = [state.float().cpu() for state in reference(line["input_ids"])]
        self._check_layers(line["file"], states[:-1], expected, aux_layer_ids)
        readings = {
            reading: distance(self._post_norm(states[-1], reading), expected[-1]) for reading in (POST_NORM, PRE_NORM)
        }
        # A norm of a normed row is the row, up to its weight: what passes as post-norm is.
        found = POST_NORM if readings[POST_NORM] <= TOLERANCE else PRE_NORM
        if readings[found] > TOLERANCE:
            raise UserError(
                f"{line['file']}: its last state is not the target's: {readings[POST_NORM]:.2g} of its size away as a "
                f"post-norm one, {readings[PRE_NORM]:.2g} as a pre-norm one; made by another target or revision?"
            )
        compared = {str(k): distance(state, expected[k]) for k, state in zip(aux_layer_ids, states[:-1], strict=True)}
        return found, {**compared, "last": readings[found]}

    def _check_layers(
        self, file: str, aux: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], aux_layer_ids: Sequence[int]
    ) -> None:
        distances = [[distance(state, one) for one in expected[:-1]] for state in aux]
        like = [min(range(len(row)), key=row.__getitem__) for row in distances]
        far = [min(row) > TOLERANCE for row in distances]
        if any(far):
            worst = far.index(True)
            raise UserError(
                f"{file}: aux state {worst} is none of the target's: the nearest, output_hidden_states[{like[worst]}], "
                f"is {min(distances[worst]):.2g} of its size away; made by another target or revision?"
            )
        # Equal layers cannot be told apart: what is asked for may be as near as the nearest.
        if any(row[k] > TOLERANCE for row, k in zip(distances, aux_layer_ids, strict=True)):
            raise UserError(
                f"{file}: its layers are {like}, not {list(aux_layer_ids)}; set hidden_states.aux_layer_ids: {like}"
            )
