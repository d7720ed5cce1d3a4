"""Drafts in the store: trained once for a digest of all that shapes them, linked wherever asked for."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from eagle3lib import ledger, shards, training, warm_start
from eagle3lib.config import RunConfig
from eagle3lib.job import file_lock, write_json
from eagle3lib.lineage import digest, file_sha256
from eagle3lib.loader import Sample
from eagle3lib.plan import STORE
from eagle3lib.store import link
from eagle3lib.targets import TargetInfo
from eagle3lib.training import Job


def samples_of(table: pd.DataFrame, folder: Path) -> list[Sample]:
    """The samples of `hidden_states.parquet`; `folder` holds their links. Their source is the name of their file."""
    names = ("path", "n_tokens", "reply_bounds", "split", "sha256", "file")
    columns = zip(*(table[name] for name in names), shards.weights_of(table), strict=True)
    return [
        Sample(str(folder / path), int(n), tuple(map(int, bounds)), split, sha256, weight, source=Path(file).name)
        for path, n, bounds, split, sha256, file, weight in columns
    ]


def of(job: Any, run: RunConfig) -> tuple[Job, dict[str, Any]]:
    """The training that a script's `job` is about, and all that shapes it: params.shaping and the dataset."""
    table = pd.read_parquet(job.input.table)
    shaping, dataset = job.params.shaping, shards.dataset_digest(table)
    target = TargetInfo.read(job.input.target)
    warm_start.check(run.draft, target, shaping["key"]["aux_layer_ids"], shaping.get("initial"))
    identity = digest([dataset, file_sha256(job.input.mapping), shaping], 32)
    training_job = Job(
        samples_of(table, Path(job.input.table).parent / "hidden_states"),
        target=target,
        draft=run.draft,
        training=run.training,
        mapping=job.input.mapping,
        folder=str(STORE / "drafts" / identity),
        digest=identity,
        initial=shaping.get("initial"),
    )
    return training_job, {**shaping, "dataset": dataset}


def is_trained(job: Job) -> bool:
    """Does the store hold this draft, finished and whole? Then it is only linked."""
    return training.result_of(job) is not None


def train_once(job: Job, outputs: Sequence[Path], name: str, shaping: dict[str, Any]) -> dict[str, Any]:
    """Train the draft of `job.digest`, go on training it, or find it finished; then link its files to `outputs`.

    `outputs` are named as the files in the store's folder: model.safetensors, training.json, metrics.jsonl. The
    work is put down in the ledger under `name` and `shaping`.
    """
    folder = Path(job.folder)
    with file_lock(folder / "lock"):
        found = is_trained(job)
        print(f"draft {job.digest}: {'found' if found else 'to be trained'} in {folder}")
        job.write(folder / "job.json")
        write_json(folder / "made_from.json", {"name": name, "shaping": shaping})
        result = training.launch(folder / "job.json", job.training)
        if not found:
            now = time.time()
            work = ledger.Entry(
                "draft", name, shaping, now - result["seconds"], now, len(job.samples), result["tokens"]
            )
            ledger.add(folder.parent.parent, work)
    for output in outputs:
        link(folder / output.name, output)
    return result
