"""Conversations or the target's replies -> samples in shards, with reasons for what was left out."""

from pathlib import Path

from transformers import AutoTokenizer

from eagle3lib import plan, shards, sources
from eagle3lib.job import job_log
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    target = TargetInfo.read(snakemake.input.target)
    shards.shard_samples(
        sources.of(run.dataset.conversations, plan.SOURCES),
        AutoTokenizer.from_pretrained(target.path, trust_remote_code=run.target.trust_remote_code),
        run.dataset,
        Path(snakemake.output.samples).parent,
        vocab_size=target.vocab_size,
        replies=snakemake.input.conversations if run.replies_regenerated else None,
        imported=snakemake.input.conversations if run.dataset.imported else None,
        asked=plan.avoided(run),
    )
