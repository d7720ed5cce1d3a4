"""The draft's vocabulary: the tokens that the training replies use most, or those of the draft it starts from."""

from pathlib import Path

import pandas as pd
import torch

from eagle3lib import plan, shards, warm_start
from eagle3lib.job import job_log
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping

with job_log(snakemake.log[0]):
    draft, target = plan.load_run(snakemake).draft, TargetInfo.read(snakemake.input.target)
    samples = pd.read_parquet(snakemake.input.samples, columns=["sample_id", "split", "shard"])
    folder = Path(snakemake.input.shards).parent / "shards"
    counts = torch.tensor(shards.count_supervised_tokens(folder, samples, target.vocab_size))
    dictated = warm_start.dictated_mapping(draft, target)
    mapping = dictated or VocabMapping.from_counts(counts, draft.draft_vocab_size)
    print(f"the mapping covers {mapping.coverage(counts):.4%} of {int(counts.sum())} supervised tokens")
    mapping.save(snakemake.output.mapping)
