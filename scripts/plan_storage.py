"""Bytes of hidden states to come against the disk; refuses before the first byte."""

import pandas as pd

from eagle3lib import extraction, plan
from eagle3lib.job import job_log, write_json
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    samples = pd.read_parquet(snakemake.input.samples, columns=["sample_id", "n_tokens"])
    target = TargetInfo.read(snakemake.input.target)
    forecast, disk = extraction.storage_plan(
        samples, plan.STORE, plan.state_key(snakemake.params.key), target.hidden_size, run.storage
    )
    print(forecast, disk)
    extraction.check_storage(forecast | disk)
    # Only what follows from the samples: the disk of the moment would make the extraction run again.
    write_json(snakemake.output.plan, forecast)
