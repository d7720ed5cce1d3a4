"""One shard of samples -> its hidden states: those in the store are linked, the others computed."""

from pathlib import Path

from eagle3lib import engine_job, extraction, plan
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log
from eagle3lib.store import Store

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    target, open_engine = engine_job.prepare(run, snakemake, "extract")
    counts = extraction.extract_shard(
        Path(snakemake.input.shard),
        [Path(path) for path in snakemake.output.states],
        Path(snakemake.output.manifest),
        Store(plan.STORE, StateKey.of(snakemake.params.key)),
        open_engine,
        snakemake.params.code,
        target,
        run.storage,
        f"{run.target.name}/{run.dataset.name}",
    )
    print(counts)
