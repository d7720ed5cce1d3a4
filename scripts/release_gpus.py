"""Between extraction and training: prove that the GPUs are free."""

from eagle3lib import gpus, plan
from eagle3lib.job import job_log, write_json

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    write_json(snakemake.output.record, gpus.release(run.training.gpus, run.gpus))
