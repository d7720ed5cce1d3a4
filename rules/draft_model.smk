# hidden states -> draft model -> a folder that SGLang and vLLM load.
#
# in:   results/{target}/{dataset}/{key}/hidden_states.parquet
# out:  results/{target}/{dataset}/{key}/{draft}/training/, export/


rule build_vocab_mapping:
    input:
        target=f"{TARGET}/target.json",
        samples=f"{DATASET}/samples.parquet",
        shards=f"{DATASET}/shards.json",
    output:
        mapping=f"{DRAFT}/vocab_mapping.safetensors",
    log:
        "logs/build_vocab_mapping/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/build_vocab_mapping/{target}/{dataset}/{key}/{draft}.tsv"
    params:
        shaping=lambda w: plan.of(w).vocabulary_shaping(),
        code=code("eagle3lib.shards", "eagle3lib.vocab_mapping"),
    script:
        "../scripts/build_vocab_mapping.py"


# Before `release_gpus`: nobody frees the GPUs for a training that cannot start.
rule preflight_training:
    input:
        target=f"{TARGET}/target.json",
        table=f"{STATES}/hidden_states.parquet",
        mapping=f"{DRAFT}/vocab_mapping.safetensors",
    output:
        record=f"{DRAFT}/preflight.json",
    log:
        "logs/preflight_training/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/preflight_training/{target}/{dataset}/{key}/{draft}.tsv"
    threads: 4
    params:
        shaping=lambda w: plan.of(w).draft_shaping(),
        code=code("eagle3lib.preflight"),
    script:
        "../scripts/preflight_training.py"


rule train_draft_model:
    input:
        target=f"{TARGET}/target.json",
        table=f"{STATES}/hidden_states.parquet",
        mapping=f"{DRAFT}/vocab_mapping.safetensors",
        release=f"{DRAFT}/gpu_release.json",
    output:
        weights=f"{DRAFT}/training/model.safetensors",
        record=f"{DRAFT}/training/training.json",
        metrics=f"{DRAFT}/training/metrics.jsonl",
    log:
        "logs/train_draft_model/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/train_draft_model/{target}/{dataset}/{key}/{draft}.tsv"
    threads: 64  # all that --cores gives
    resources:
        gpu=lambda w: cfg(w).training.gpus,
    params:
        shaping=lambda w: plan.of(w).draft_shaping(),
    script:
        "../scripts/train_draft_model.py"


rule export_draft_model:
    input:
        target=f"{TARGET}/target.json",
        weights=f"{DRAFT}/training/model.safetensors",
        record=f"{DRAFT}/training/training.json",
        mapping=f"{DRAFT}/vocab_mapping.safetensors",
    output:
        export=directory(f"{DRAFT}/export"),
    log:
        "logs/export_draft_model/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/export_draft_model/{target}/{dataset}/{key}/{draft}.tsv"
    params:
        key=state_key,
        code=code("eagle3lib.export"),
    script:
        "../scripts/export_draft_model.py"
