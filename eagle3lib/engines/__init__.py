"""What runs the target model. Only this package imports an engine; it is imported without one (and without torch)."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from eagle3lib.config import EngineConfig
from eagle3lib.errors import UserError

if TYPE_CHECKING:
    import torch

# (key, prompt ids, seed of its sampling) and (key, reply ids, "stop" or "length")
Prompt = tuple[Any, Sequence[int], int]
Reply = tuple[Any, list[int], str]


# The module that computes, by the engine's name. (The one of `sglang` arrives with a later version.)
MODULES = {"transformers": "eagle3lib.engines.transformers", "sglang": "eagle3lib.engines"}


@dataclass(frozen=True)
class States:
    """Hidden states of one sequence: `aux` is a list of L tensors [T, H], `last` [T, H] is POST-norm."""

    aux: list[torch.Tensor]
    last: torch.Tensor


class Engine(Protocol):
    """A loaded target. Aux layer ids are indices into transformers' output_hidden_states, ascending."""

    name: str
    version: str
    dtype: str

    def extract(self, id_lists: Sequence[Sequence[int]], aux_layer_ids: Sequence[int]) -> list[States]:
        """The states of each sequence, in the order given."""
        ...

    def generate(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        eos_ids: Sequence[int] | None = None,
    ) -> Iterator[Reply]:
        """The target's own replies, in the order in which they end; `prompts` is read as slots become free."""
        ...

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy replies in the order of the prompts."""
        ...

    def probe(self, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
        """Prove that the states are those asked for; a record of what was checked. UserError names what differs."""
        ...


def installed_version(name: str) -> str:
    """Version of an engine and of what it computes with, without importing either; "not installed" is one too."""
    return " ".join(f"{package} {_version(package)}" for package in (name, "torch"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def open_engine(engine: EngineConfig, target_folder: str | Path, trust_remote_code: bool = False) -> Engine:
    """Load the target in `target_folder` into the configured engine."""
    if engine.name == "sglang":
        raise UserError("config: engine.name: 'sglang' arrives with a later version; set engine.name: transformers")
    from eagle3lib.engines.transformers import TransformersEngine

    return TransformersEngine(
        target_folder, engine.compute_dtype, batch_tokens=engine.batch_tokens, trust_remote_code=trust_remote_code
    )
