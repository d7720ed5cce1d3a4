"""results/summary.md, .html and .json: what was made, from what, how good, how long."""

from eagle3lib import pages, summary
from eagle3lib.job import job_log, write_text

with job_log(snakemake.log[0]):
    runs = [summary.collect(names) for names in snakemake.params.names]
    out = snakemake.output
    summary.write(runs, snakemake.config, out.text, out.json, out.config)
    write_text(out.page, pages.summary(runs))
