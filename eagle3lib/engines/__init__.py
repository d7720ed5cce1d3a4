"""What runs the target model. Only this package imports an engine; it is imported without one (and without torch)."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from eagle3lib.config import EngineConfig

# (key, prompt ids, seed of its sampling) and (key, reply ids, "stop" or "length")
Prompt = tuple[Any, Sequence[int], int]
Reply = tuple[Any, list[int], str]
# One for all prompts, or that of a prompt by its key. 0 is greedy.
Temperature = float | Callable[[Any], float]


def of_prompt(temperature: Temperature, key: Any) -> float:
    return temperature(key) if callable(temperature) else temperature


# The modules that compute, by the engine's name. (Who starts a server or ends it computes nothing.)
MODULES = {
    "transformers": ["eagle3lib.engines.transformers"],
    "sglang": [f"eagle3lib.engines.sglang.{name}" for name in ("plugin", "collector", "writer")],
}


# A target is compared with transformers when it fits into this share of the memory that is free, twice (fp32 weights).
REFERENCE_SHARE = 0.5


@dataclass(frozen=True)
class States:
    """Hidden states of one sequence: `aux` is a list of L tensors [T, H], `last` [T, H] is POST-norm."""

    aux: list[torch.Tensor]
    last: torch.Tensor


@dataclass(frozen=True)
class File:
    """A sample's file that an engine is to write itself; storage_format None: the states as computed, not a sample."""

    input_ids: Sequence[int]
    part: Path
    storage_format: str | None
    reply_bounds: Sequence[int] = ()
    last_rows: Sequence[int] = ()  # that a trimmed format keeps beside those of reply_bounds
    code: str = ""


class Speaker(Protocol):
    """What answers prompts."""

    def generate(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        temperature: Temperature = 0.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        eos_ids: Sequence[int] | None = None,
    ) -> Iterator[Reply]:
        """The target's own replies, in the order in which they end; `prompts` is read as slots become free."""
        ...


class Engine(Speaker, Protocol):
    """A loaded target. Aux layer ids are indices into transformers' output_hidden_states, ascending."""

    name: str
    version: str
    dtype: str

    def extract(self, id_lists: Sequence[Sequence[int]], aux_layer_ids: Sequence[int]) -> list[States]:
        """The states of each sequence, in the order given."""
        ...

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy replies in the order of the prompts."""
        ...

    def probe(self, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
        """Prove that the states are those asked for; a record of what was checked. UserError names what differs."""
        ...


def installed_version(engine: EngineConfig) -> str:
    """Version of an engine and of what it computes with, without importing either; "not installed" is one too.

    Of a server that comes out of a container or that runs already: where it comes from.
    """
    if engine.name == "sglang":
        from eagle3lib.engines.sglang import launch

        if engine.url or engine.command:
            return f"sglang of {engine.url or ' '.join(engine.command or [])}"
        return launch.installed_versions(engine.python)
    return " ".join(f"{package} {_version(package)}" for package in (engine.name, "torch"))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def fits(folder: Path) -> bool:
    """Has this machine the memory for a target, to compare with what another engine or tool made of it?"""
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2 * weights < REFERENCE_SHARE * free


def open_engine(engine: EngineConfig, target_folder: str | Path, trust_remote_code: bool = False) -> Engine:
    """Load the target in `target_folder` into transformers, in this process."""
    from eagle3lib.engines.transformers import TransformersEngine

    return TransformersEngine(
        target_folder, engine.compute_dtype, batch_tokens=engine.batch_tokens, trust_remote_code=trust_remote_code
    )
