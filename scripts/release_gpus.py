"""Between extraction and training: prove that the GPUs are free."""

import json
from pathlib import Path

from eagle3lib import gpus, plan
from eagle3lib.job import job_log, write_json
from eagle3lib.leases import Leases

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    training = json.loads(Path(snakemake.input.preflight).read_text())
    need = gpus.Need(0 if training["trained"] else run.training.gpus, "training.gpus", training["bytes_each"])
    write_json(snakemake.output.record, gpus.release(need, run.gpus, Leases(plan.STORE)))
