"""What every job that asks the target does first."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from eagle3lib import gpus
from eagle3lib.config import RunConfig
from eagle3lib.engines import Engine, open_engine
from eagle3lib.targets import TargetInfo


def prepare(run: RunConfig, job: Any) -> tuple[TargetInfo, Callable[[], Engine]]:
    """Hold the GPUs granted to the script's `job` against engine.gpus and take its threads; the target, and how to
    load it (which costs minutes: call it when something must be computed)."""
    gpus.check_granted(job.resources.gpu, run.engine.gpus, "engine.gpus")
    torch.set_num_threads(job.threads)
    target = TargetInfo.read(job.input.target)
    return target, partial(open_engine, run.engine, target.path, run.target.trust_remote_code)
