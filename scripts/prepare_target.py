"""Bring the target into a Hugging Face folder and write down its facts."""

from pathlib import Path

from eagle3lib import plan, targets
from eagle3lib.job import job_log

with job_log(snakemake.log[0]):
    info = Path(snakemake.output.info)
    targets.prepare(
        plan.load_run(snakemake).target, snakemake.params.fingerprint, info, info.parent / "model", plan.SOURCES
    )
