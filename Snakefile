# EAGLE-3 draft models: conversations -> hidden states -> draft -> acceptance length.
# Each stage is a file in rules/, in order of execution; settings and their reasons are in config/.

import os
from snakemake.utils import min_version

min_version("9.27.1")

# `configfile:` would merge the default under the user's file: a token budget of the demo in a
# run of days. One file, whole.
if not workflow.config_settings.configfiles:

    configfile: os.path.join(workflow.basedir, "config", "config.yaml")


report: "docs/captions/workflow.rst"


include: "rules/common.smk"
include: "rules/samples.smk"
include: "rules/hidden_states.smk"
include: "rules/draft_model.smk"
include: "rules/acceptance.smk"
include: "rules/lineage.smk"


rule all:
    default_target: True
    input:
        all_hidden_states,
        plan.paths(f"{DRAFT}/export"),
        plan.paths(f"{DRAFT}/acceptance.json"),
        plan.comparisons(f"{DRAFT}/comparison.json"),
        "results/summary.json",


# Stages by name: `snakemake extract`, `snakemake train`, … What follows the states asks for each of them, too: the
# index alone would not tell that one is lost.
rule samples:
    input:
        plan.paths(f"{DATASET}/samples.parquet"),


rule extract:
    input:
        all_hidden_states,
        plan.paths(f"{STATES}/hidden_states.parquet"),


# For a dataset of a million: a part of it at a time, `--batch index_hidden_states=1/16` (benchmarks/scale.py).
rule index:
    input:
        plan.paths(f"{STATES}/hidden_states.parquet"),


rule train:
    input:
        all_hidden_states,
        plan.paths(f"{DRAFT}/training/training.json"),


rule export:
    input:
        all_hidden_states,
        plan.paths(f"{DRAFT}/export"),


rule acceptance:
    input:
        all_hidden_states,
        plan.paths(f"{DRAFT}/acceptance.json"),


rule compare:
    input:
        all_hidden_states,
        plan.comparisons(f"{DRAFT}/comparison.json"),


localrules:
    all,
    samples,
    extract,
    index,
    train,
    export,
    acceptance,
    compare,


onstart:
    begin_run()


onsuccess:
    print(end_of_run(log, "done"))


onerror:
    print(end_of_run(log, "failed"))
