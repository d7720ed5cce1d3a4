"""The epoch whose draft had the longest validation acceptance length, and when to wait for a better one no longer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor


class Best:
    """What is kept of the best epoch so far. All of it is in the training's checkpoints: a resumed one decides alike.

    patience: epochs without a better one; None: nothing is ended. by: whose acceptance length decides: a source's, or
    `validation`, that of all held-out samples (None: the same). With neither nothing is kept. Of equal epochs the first
    is the best.
    """

    def __init__(self, patience: int | None, by: str | None = None):
        self.patience, self.by = patience, by
        self.state: dict[str, Any] = {}

    def offer(self, epoch: int, results: dict[str, Any], weights: Callable[[], Mapping[str, Tensor]]) -> None:
        """After `epoch`: its figures (with those of the validation), and its weights where they are wanted."""
        if self.patience is None and self.by is None:
            return
        figures = results["validation"]
        if self.by not in (None, "validation"):
            figures = figures.get("by_source", {}).get(self.by, figures)  # of a single source: those of all
        length = figures["acceptance_length"]
        if not self.state or length > self.state["acceptance_length"]:
            copied = {name: tensor.detach().cpu().clone() for name, tensor in weights().items()}
            self.state = {"epoch": epoch, "acceptance_length": length, "results": dict(results), "weights": copied}

    def ends(self, epochs_done: int) -> bool:
        """Has there been no better epoch for as long as patience lasts?"""
        return bool(self.state and self.patience) and epochs_done - 1 - self.state["epoch"] >= (self.patience or 0)
