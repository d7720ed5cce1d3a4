"""Between extraction and training: end the engine that we started, then prove that the GPUs are free."""

import json
from pathlib import Path

from eagle3lib import gpus, plan
from eagle3lib.engines.sglang import lease
from eagle3lib.job import job_log, write_json
from eagle3lib.leases import Leases

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    stopped = lease.release(plan.ENGINE, run.engine.grace_seconds)
    training = json.loads(Path(snakemake.input.preflight).read_text())
    need = gpus.Need(0 if training["trained"] else run.training.gpus, "training.gpus", training["bytes_each"])
    write_json(snakemake.output.record, {"stopped": stopped, **gpus.release(need, run.gpus, Leases(plan.STORE))})
