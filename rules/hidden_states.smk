# samples -> hidden states of the target, one `.pt` a sample, linked from the store; their index.
#
# in:   results/{target}/{dataset}/shards/{shard}.jsonl
# out:  results/{target}/{dataset}/{key}/hidden_states/{shard}/{slot}.pt, manifest.json
#       results/{target}/{dataset}/{key}/sample_lengths.json, hidden_states.parquet, data_config.json


rule plan_storage:
    input:
        target=f"{TARGET}/target.json",
        samples=f"{DATASET}/samples.parquet",
    output:
        plan=f"{STATES}/storage_plan.json",
    log:
        "logs/plan_storage/{target}/{dataset}/{key}.log",
    benchmark:
        "results/benchmarks/plan_storage/{target}/{dataset}/{key}.tsv"
    params:
        key=state_key,
    script:
        "../scripts/plan_storage.py"


# Code and engine version are not part of a state's identity: where they have changed, a few are compared.
rule adopt_hidden_states:
    input:
        target=f"{TARGET}/target.json",
        plan=f"{STATES}/storage_plan.json",
    output:
        record=f"{STATES}/made_by.json",
    log:
        "logs/adopt_hidden_states/{target}/{dataset}/{key}.log",
    benchmark:
        "results/benchmarks/adopt_hidden_states/{target}/{dataset}/{key}.tsv"
    resources:
        gpu=lambda w: cfg(w).engine.gpus_a_job,
    params:
        key=state_key,
        maker=lambda w: plan.of(w).maker(),
        code=code("eagle3lib.adoption"),
    script:
        "../scripts/adopt_hidden_states.py"


# One rule for the full shards and one for each size of tail: Snakemake wants the number of
# outputs of a rule at parse time, and 41 left over = 32 + 8 + 1.
for rule_name, slots, shard in planning.shard_kinds(plan.shard_size):

    rule:
        name:
            rule_name
        input:
            target=f"{TARGET}/target.json",
            plan=f"{STATES}/storage_plan.json",
            made_by=f"{STATES}/made_by.json",
            # A touched shard is the same shard: its sha256 is a param. (Never `ancient` for what a rule makes:
            # Snakemake 9.27.1 then overlooks that this job must run when that rule runs.)
            shard=ancient(functools.partial(shard_file, shard)),
        output:
            states=[
                f"{STATES}/hidden_states/{shard}/{slot:04d}.pt"
                for slot in range(slots)
            ],
            manifest=f"{STATES}/hidden_states/{shard}/manifest.json",
        log:
            f"logs/extract_hidden_states/{{target}}/{{dataset}}/{{key}}/{shard}.log",
        benchmark:
            f"results/benchmarks/extract_hidden_states/{{target}}/{{dataset}}/{{key}}/{shard}.tsv"
        resources:
            gpu=lambda w: cfg(w).engine.gpus_a_job,
        params:
            key=state_key,
            shard_sha256=functools.partial(shard_sha256, shard),
            code=lambda w: plan.of(w).code("eagle3lib.extraction"),
        script:
            "../scripts/extract_hidden_states.py"


rule index_hidden_states:
    input:
        samples=f"{DATASET}/samples.parquet",
        target=f"{TARGET}/target.json",
        manifests=manifests,
    output:
        lengths=f"{STATES}/sample_lengths.json",
        table=f"{STATES}/hidden_states.parquet",
        config=f"{STATES}/data_config.json",
    log:
        "logs/index_hidden_states/{target}/{dataset}/{key}.log",
    benchmark:
        "results/benchmarks/index_hidden_states/{target}/{dataset}/{key}.tsv"
    params:
        key=state_key,
        code=code("eagle3lib.extraction"),
    script:
        "../scripts/index_hidden_states.py"


rule release_gpus:
    input:
        table=f"{STATES}/hidden_states.parquet",
        preflight=f"{DRAFT}/preflight.json",
    output:
        record=f"{DRAFT}/gpu_release.json",
    log:
        "logs/release_gpus/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/release_gpus/{target}/{dataset}/{key}/{draft}.tsv"
    script:
        "../scripts/release_gpus.py"
