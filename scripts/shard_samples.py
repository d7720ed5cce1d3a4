"""Conversations or the target's replies -> samples in shards, with reasons for what was left out."""

from pathlib import Path

from transformers import AutoTokenizer

from eagle3lib import plan, shards
from eagle3lib.job import job_log
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    target = TargetInfo.read(snakemake.input.target)
    shards.shard_samples(
        snakemake.input.conversations,
        AutoTokenizer.from_pretrained(target.path, trust_remote_code=run.target.trust_remote_code),
        run.dataset,
        Path(snakemake.output.samples).parent,
        vocab_size=target.vocab_size,
        kind="imported" if run.dataset.imported else "replies" if run.replies_regenerated else "conversations",
    )
