"""Two processes that stay for a module's tests, joined by gloo: what runs in both costs no start of a torchrun."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

WORLD = 2
SECONDS = 120  # far more than anything here takes: a hang is a failure, not a wait


class TwoRanks:
    def __init__(self, folder: Path):
        context = multiprocessing.get_context("spawn")
        self.pools = [
            ProcessPoolExecutor(1, context, initializer=_join, initargs=(rank, f"file://{folder}/store"))
            for rank in range(WORLD)
        ]

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What `function` returns on each rank."""
        running = [pool.submit(function, *args) for pool in self.pools]
        return [result.result(SECONDS) for result in running]

    def close(self) -> None:
        for pool in self.pools:
            pool.shutdown(cancel_futures=True)


def _join(rank: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=WORLD, timeout=timedelta(seconds=SECONDS / 2)
    )
