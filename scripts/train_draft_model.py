"""Train the draft, or go on training it, or link the one that the store holds for the same digest."""

from pathlib import Path

import pandas as pd
import torch

from eagle3lib import drafts, gpus, plan, shards
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log
from eagle3lib.leases import Leases
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    gpus.check_granted(snakemake.resources.gpu, run.training.gpus, "training.gpus")
    torch.set_num_threads(snakemake.threads)
    table = pd.read_parquet(snakemake.input.table)
    shaping, dataset = snakemake.params.shaping, shards.dataset_digest(table)
    job = drafts.make_job(
        table,
        Path(snakemake.input.table).parent / "hidden_states",
        plan.STORE,
        snakemake.input.mapping,
        dataset,
        shaping,
        target=TargetInfo.read(snakemake.input.target),
        draft=run.draft,
        training=run.training,
    )
    name = plan.draft_name(run, StateKey.of(shaping["key"]))
    need = gpus.Need(run.training.gpus, "training.gpus")
    with gpus.lease(need, run.gpus, Leases(plan.STORE), f"training of {name}"):
        drafts.train_once(job, [Path(path) for path in snakemake.output], name, {**shaping, "dataset": dataset})
