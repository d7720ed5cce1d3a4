"""Between extraction and training: prove that the GPUs are free."""

from eagle3lib import gpus, plan
from eagle3lib.job import job_log, write_json
from eagle3lib.leases import Leases

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    need = gpus.Need(run.training.gpus, "training.gpus")
    write_json(snakemake.output.record, gpus.release(need, run.gpus, Leases(plan.STORE)))
