"""States that other code or another engine version made: compared on a few samples, not thrown away."""

from functools import partial

import torch

from eagle3lib import adoption, gpus, plan
from eagle3lib.engines import open_engine
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log, write_json
from eagle3lib.store import Store
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    gpus.check_granted(snakemake.resources.gpu, run.engine.gpus, "engine.gpus")
    torch.set_num_threads(snakemake.threads)
    target = TargetInfo.read(snakemake.input.target)
    makers = adoption.adopt(
        Store(plan.STORE, StateKey.of(snakemake.params.key)),
        snakemake.params.maker,
        partial(open_engine, run.engine, target.path, run.target.trust_remote_code),
    )
    write_json(snakemake.output.record, makers)
