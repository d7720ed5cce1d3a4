"""Figures and tables of one draft for the report."""

import json
from collections import Counter
from pathlib import Path

import pandas as pd

from eagle3lib import pages, plots, summary
from eagle3lib.job import job_log, write_text

with job_log(snakemake.log[0]):
    out, files = snakemake.output, snakemake.input
    run = summary.collect(dict(snakemake.wildcards.items()))
    plots.plot_training(files.metrics, out.training)
    plots.plot_acceptance(run["acceptance"], run["predicted"], out.acceptance)
    plots.plot_sample_lengths(pd.read_parquet(files.samples)["n_tokens"].tolist(), out.sample_lengths)
    plots.plot_rejected(Counter(run["rejected"]), out.rejected_samples)
    plots.plot_storage(run["storage"], out.storage)
    plots.plot_throughput({summary.WORK[kind]: one for kind, one in run["throughput"].items()}, out.throughput)
    write_text(out.dataset, pages.dataset(Path(files.samples).parent))
    write_text(out.gpu_release, pages.gpu_release(json.loads(Path(files.release).read_text())))
    write_text(out.lineage, pages.lineage(Path(files.acceptance).parent, Path(files.acceptance)))
