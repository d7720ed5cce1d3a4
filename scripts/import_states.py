"""Every file of another tool's hidden states, read once: its ids, its mask, its sha256, or what is wrong with it."""

from pathlib import Path

from eagle3lib import in_place, plan
from eagle3lib.job import job_log
from eagle3lib.lineage import digest

with job_log(snakemake.log[0]):
    imported, shaping = plan.load_run(snakemake).dataset.imported, snakemake.params.shaping
    progress = plan.STORE / "imported" / f"{digest(shaping)}.jsonl"
    print(in_place.scan(imported, shaping["aux_layers"], progress, Path(snakemake.output.lines), snakemake.threads))
