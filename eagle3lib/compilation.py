"""`training.compile`: torch.compile for the parts of a draft whose many small operations it can fuse."""

from __future__ import annotations

import torch
from torch import Tensor

from eagle3lib.draft_model import DraftModel
from eagle3lib.errors import UserError

PARTS = ("fuse", "finish")  # norms, residuals and the MLP; projections and attention are kernels of their own


def check() -> None:
    """Does torch.compile work here? Raises UserError: it needs a compiler that pip does not bring."""
    try:
        torch.compile(_tried, dynamic=True)(torch.ones(3))
    except Exception as error:  # each of torch's layers has its own
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"training.compile: torch.compile does not work here ({reason}); install a C++ compiler (Debian: apt-get "
            "install g++), or set it to false"
        ) from None


def _tried(x: Tensor) -> Tensor:
    return x.sin() + 1


def compile_parts(model: DraftModel, backend: str = "inductor") -> None:
    """In place. Shapes are dynamic: each batch has its own number of slots."""
    for name in PARTS:
        setattr(model, name, torch.compile(getattr(model, name), dynamic=True, backend=backend))
