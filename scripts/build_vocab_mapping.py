"""The draft's vocabulary: the tokens that the training replies use most."""

from pathlib import Path

import pandas as pd
import torch

from eagle3lib import shards
from eagle3lib.job import job_log
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping

with job_log(snakemake.log[0]):
    vocab_size = TargetInfo.read(snakemake.input.target).vocab_size
    samples = pd.read_parquet(snakemake.input.samples, columns=["sample_id", "split", "shard"])
    folder = Path(snakemake.input.shards).parent / "shards"
    counts = torch.tensor(shards.count_supervised_tokens(folder, samples, vocab_size))
    mapping = VocabMapping.from_counts(counts, snakemake.params.draft_vocab_size)
    print(f"the mapping covers {mapping.coverage(counts):.4%} of {int(counts.sum())} supervised tokens")
    mapping.save(snakemake.output.mapping)
