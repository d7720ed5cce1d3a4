"""One shard of samples -> its hidden states: those in the store are linked, the others computed."""

from functools import partial
from pathlib import Path

import torch

from eagle3lib import extraction, gpus, plan
from eagle3lib.engines import open_engine
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log
from eagle3lib.store import Store
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    gpus.check_granted(snakemake.resources.gpu, run.engine.gpus, "engine.gpus")
    torch.set_num_threads(snakemake.threads)
    target = TargetInfo.read(snakemake.input.target)
    counts = extraction.extract_shard(
        Path(snakemake.input.shard),
        [Path(path) for path in snakemake.output.states],
        Path(snakemake.output.manifest),
        Store(plan.STORE, StateKey.of(snakemake.params.key)),
        partial(open_engine, run.engine, target.path, run.target.trust_remote_code),
        snakemake.params.code,
        target,
        run.storage,
        f"{run.target.name}/{run.dataset.name}",
    )
    print(counts)
