"""Train the draft, or go on training it, or link the one that the store holds for the same digest."""

import json
from pathlib import Path

import torch

from eagle3lib import drafts, gpus, plan
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log
from eagle3lib.leases import Leases

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    gpus.check_granted(snakemake.resources.gpu, run.training.gpus, "training.gpus")
    torch.set_num_threads(snakemake.threads)
    job, shaping = drafts.of(snakemake, run)
    name = plan.draft_name(run, StateKey.of(shaping["key"]))
    # The record of release_gpus may be of another day: the lease looks again.
    bytes_each = json.loads(Path(snakemake.input.release).read_text())["bytes_each"]
    need = gpus.Need(0 if drafts.is_trained(job) else run.training.gpus, "training.gpus", bytes_each)
    with gpus.lease(need, run.gpus, Leases(plan.STORE), f"training of {name}"):
        drafts.train_once(job, [Path(path) for path in snakemake.output], name, shaping)
