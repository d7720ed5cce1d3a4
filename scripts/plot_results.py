"""Figures of one draft for the report."""

import json
from collections import Counter

import pandas as pd

from eagle3lib import plots
from eagle3lib.job import job_log

with job_log(snakemake.log[0]):
    out = snakemake.output
    plots.plot_training(snakemake.input.metrics, out.training)
    with open(snakemake.input.acceptance) as file:
        plots.plot_acceptance(json.load(file), out.acceptance)
    plots.plot_sample_lengths(pd.read_parquet(snakemake.input.samples)["n_tokens"].tolist(), out.sample_lengths)
    with open(snakemake.input.rejected) as file:
        plots.plot_rejected(Counter(json.loads(line)["reason"] for line in file), out.rejected_samples)
