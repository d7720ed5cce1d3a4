"""Lengths and places of all samples, from the shards' manifests alone."""

from pathlib import Path

import pandas as pd

from eagle3lib import extraction
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log, write_json, write_parquet
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    manifests = {Path(path).parent.name: Path(path) for path in snakemake.input.manifests}
    extraction.remove_stale(Path(snakemake.output.table).parent / "hidden_states", manifests)
    lengths, table = extraction.index(manifests, pd.read_parquet(snakemake.input.samples))
    write_json(snakemake.output.lengths, lengths, indent=None)
    write_parquet(snakemake.output.table, table)
    target = TargetInfo.read(snakemake.input.target)
    write_json(snakemake.output.config, extraction.data_config(table, StateKey.of(snakemake.params.key), target))
