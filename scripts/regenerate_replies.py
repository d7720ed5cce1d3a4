"""The target answers its share of the prompts; finished replies are kept, whatever happens."""

import itertools
from pathlib import Path

from transformers import AutoTokenizer

from eagle3lib import curation, engine_job, ledger, plan, regeneration, samples, sources
from eagle3lib.job import job_log

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    target, open_engine = engine_job.prepare(run, snakemake, "generate")
    part, parts = int(snakemake.wildcards.part), run.regenerate.parts
    read = samples.read(sources.of(run.dataset.conversations, plan.SOURCES), run.dataset.max_conversations)
    conversations = curation.Curator(run.dataset, plan.avoided(run), prompts_only=True).curate(read)
    budget = run.dataset.token_budget
    name, shaping = plan.dataset_name(run), snakemake.params.shaping
    with ledger.Work(plan.STORE, "replies", name, shaping) as work:
        counts = regeneration.regenerate(
            itertools.islice(conversations, part, None, parts),
            AutoTokenizer.from_pretrained(target.path, trust_remote_code=run.target.trust_remote_code),
            open_engine,
            run.dataset,
            run.regenerate,
            [target.fingerprint, shaping["engine"], shaping["compute_dtype"], *(["served"] * ("served" in shaping))],
            budget and -(-budget // parts),
            plan.STORE / "replies",
            Path(snakemake.output.replies),
            f"{run.target.name}.{run.dataset.name}.{part:03d}",
            work.count,
        )
    print(counts)
