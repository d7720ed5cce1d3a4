"""What a trial runs: the product's own jobs on a tiny world, as their scripts run them; no fault is in here.

A world holds what a job reads: a random target, a shard, and (`whole`) what an uninterrupted run made of them.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pandas  # noqa: F401 - loaded once, before the fork
import torch
import torch.utils.tensorboard
from tiny import make_target

from chaos.layout import DIGEST, SAMPLES, draft_folder, states_folder, store_of
from eagle3lib import drafts, extraction, targets, verification
from eagle3lib.config import DraftConfig, EngineConfig, StorageConfig, TrainingConfig
from eagle3lib.engines import open_engine, transformers  # noqa: F401
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import sample_id
from eagle3lib.job import job_log
from eagle3lib.loader import Documents, Sample
from eagle3lib.targets import TargetInfo
from eagle3lib.training import Job
from eagle3lib.vocab_mapping import VocabMapping

TOKENS_IN_FLIGHT = 96  # several batches: a kill finds some samples finished, some in flight, some not begun


def make_world(world: Path, samples: int = SAMPLES) -> None:
    """Target and shard."""
    make_target(world / "target")
    world.joinpath("target.json").write_text(json.dumps(asdict(targets.load_info(world / "target"))))
    rng = random.Random(0)
    with open(world / "00000.jsonl", "w") as shard:
        for _ in range(samples):
            ids = [rng.randrange(3, 300) for _ in range(rng.randrange(8, 40))]
            line = {"sample_id": sample_id(ids), "input_ids": ids, "reply_bounds": [4, len(ids)], "origin": {}}
            shard.write(json.dumps(line) + "\n")
    VocabMapping.from_target_ids(torch.arange(64), 320).save(world / "mapping.safetensors")
    open_engine(EngineConfig(), world / "target")  # what transformers caches at its first model, trials need not


def extract(world: Path, folder: Path, storage: dict[str, Any] | None = None) -> dict[str, int]:
    """As scripts/extract_hidden_states.py, between what the workflow does before and after all its jobs.

    `asked` notes each sample that the engine is asked for.
    """
    extraction.TOKENS_IN_FLIGHT = TOKENS_IN_FLIGHT
    lines = (world / "00000.jsonl").read_text().splitlines()
    links, root = states_folder(folder), folder / "results/store"
    with job_log(folder / "job.log"):
        verification.after_unclean_end(root)
        verification.begin(root)
        counts = extraction.extract_shard(
            world / "00000.jsonl",
            [links / f"{slot:04d}.pt" for slot in range(len(lines))],
            links / "manifest.json",
            store_of(folder),
            partial(_open_engine, world, folder),
            "code",
            TargetInfo.read(world / "target.json"),
            StorageConfig(**{"reserve_bytes": 0, **(storage or {})}),
            "tiny/talk",
        )
        verification.end(root)
        print(counts)
    return counts


def _open_engine(world: Path, folder: Path) -> Any:
    engine = open_engine(EngineConfig(), world / "target")
    plain = engine.extract
    asked = os.open(folder / "asked", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def noted(id_lists: Any, layers: Any) -> Any:
        os.write(asked, "".join(f"{sample_id(ids)}\n" for ids in id_lists).encode())
        return plain(id_lists, layers)

    engine.extract = noted
    return engine


def train(world: Path, folder: Path, processes: int = 1) -> None:
    """As scripts/train_draft_model.py, with a checkpoint after each step."""
    rows = json.loads((states_folder(world / "whole") / "manifest.json").read_text())["samples"]
    samples = [
        Sample(
            str(states_folder(world / "whole") / f"{row['slot']:04d}.pt"),
            row["n_tokens"],
            (4, row["n_tokens"]),
            "validation" if row["slot"] % 6 == 5 else "train",
            row["sha256"],
        )
        for row in rows
    ]
    settings = TrainingConfig(
        ttt_steps=2,
        epochs=2,
        batch_tokens=128,
        learning_rate=1e-2,
        warmup_fraction=0.1,
        checkpoint_minutes=1e-6,
        processes=processes,
    )
    job = Job(
        samples,
        TargetInfo.read(world / "target.json"),
        DraftConfig(draft_vocab_size=64),
        settings,
        str(world / "mapping.safetensors"),
        str(draft_folder(folder)),
        DIGEST,
    )
    links = folder / "results/tiny/talk/training"
    outputs = [links / name for name in ("model.safetensors", "training.json", "metrics.jsonl")]
    with job_log(folder / "job.log"):
        drafts.train_once(job, outputs, "tiny/talk/draft", {"seed": 0})


def examine(world: Path, folder: Path, way: str) -> None:
    """Let the product look at all samples, in one of its ways; `found` names those that it refuses."""
    links, store = states_folder(folder), store_of(folder)
    rows = json.loads((links / "manifest.json").read_text())["samples"]
    found = {}
    if way == "verify":
        report = verification.verify(verification.everything(folder / "results/store"))
        found = {path.stem: reason for path, reason in report.bad}
    for row in rows:
        sample = row["sample_id"]
        if way == "trainer":
            path = str(links / f"{row['slot']:04d}.pt")
            read = Documents([Sample(path, row["n_tokens"], (4, row["n_tokens"]), "train", row["sha256"])], 3, 32).read
            try:
                read(0)
            except UserError as error:
                found[sample] = str(error)
        # The quick check of each extraction; what it lets pass must fail the full one.
        for full in (False, True):
            if way != "verify" and store.path(sample).exists() and store.find(sample, full) is None:
                found.setdefault(sample, "full" if full else "quick")
    (folder / "found").write_text(json.dumps(found))


JOBS = {"extract": extract, "train": train, "examine": examine}
