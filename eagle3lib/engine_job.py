"""What every job that asks the target does first."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from eagle3lib import gpus, plan
from eagle3lib.config import RunConfig
from eagle3lib.engines import open_engine
from eagle3lib.targets import TargetInfo


def prepare(run: RunConfig, job: Any, role: str) -> tuple[TargetInfo, Callable[[], Any]]:
    """Hold the GPUs granted to the script's `job` against engine.gpus and take its threads; the target, and how to
    load it (which costs minutes: call it when something must be computed) for "generate", "extract" or "evaluate"."""
    served = role == "generate" and run.regenerate.url
    gpus.check_granted(job.resources.gpu, 0 if served else run.engine.gpus_a_job, "engine.gpus")
    torch.set_num_threads(job.threads)
    target = TargetInfo.read(job.input.target)
    layers = job.params.key["aux_layer_ids"] if role == "extract" else []
    draft = {"generate": run.regenerate.draft, "evaluate": job.input.get("export")}.get(role)
    return target, partial(open_for, run, target, role, layers, draft)


def open_for(
    run: RunConfig,
    target: TargetInfo,
    role: str,
    aux_layer_ids: Sequence[int] = (),
    draft: str | Path | None = None,
) -> Any:
    """The configured engine; to extract where states are imported, what stands for one.

    Without a GPU drafts are evaluated in transformers: SGLang cannot serve them there.
    """
    if role == "generate" and run.regenerate.url:
        from eagle3lib.engines.served import ServedEngine

        return ServedEngine(run.regenerate.url, target, os.environ.get(run.engine.key_variable, ""))
    if role == "extract" and run.dataset.imported:
        from eagle3lib.engines.imported import Imported

        lines = plan.RESULTS / plan.dataset_name(run) / "imported.jsonl"
        return Imported(run.dataset.imported, lines, target, run.engine, run.target.trust_remote_code)
    if run.engine.name == "transformers" or (role == "evaluate" and not run.engine.gpus):
        return open_engine(run.engine, target.path, run.target.trust_remote_code)
    from eagle3lib.engines.sglang.client import SGLangEngine

    server = wanted(run, target, role, aux_layer_ids, draft)
    return SGLangEngine(plan.ENGINE, plan.ENGINE_LOGS, run.engine, server, target, run.gpus)


def wanted(
    run: RunConfig, target: TargetInfo, role: str, aux_layer_ids: Sequence[int], draft: str | Path | None = None
) -> Any:
    """The SGLang server that this run asks for in a role."""
    from eagle3lib.engines.sglang.launch import Wanted

    return Wanted.of(
        role,
        run.engine,
        target,
        run.dataset.max_tokens,
        aux_layer_ids=tuple(aux_layer_ids),
        trust_remote_code=run.target.trust_remote_code,
        draft_folder=str(Path(draft).resolve()) if draft else None,
        draft_steps=run.acceptance.draft_steps if draft else 0,
    )
