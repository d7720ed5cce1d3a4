"""Bytes of hidden states to come against the disk; refuses before the first byte."""

import sys

import pandas as pd

from eagle3lib import disk, overview, plan
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log, write_json
from eagle3lib.store import Store
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    samples = pd.read_parquet(snakemake.input.samples, columns=overview.FORECAST_COLUMNS)
    store = Store(plan.STORE, StateKey.of(snakemake.params.key))
    hidden_size = TargetInfo.read(snakemake.input.target).hidden_size
    forecast, now = overview.storage_plan(samples, store, hidden_size, run.storage)
    table = disk.table(forecast | now, run.storage)
    print(table)
    print(table, file=sys.__stderr__)
    disk.check_plan(now, run.storage)
    # Only what follows from the samples: the disk of the moment would make the extraction run again.
    write_json(snakemake.output.plan, forecast)
