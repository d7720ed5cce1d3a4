# conversations -> replies of the target -> samples: token ids with a loss mask, in shards.
#
# in:   the user's files, or what is fetched: of the hub, of a bucket, out of a package
# out:  results/targets/{target}/target.json
#       results/{target}/{dataset}/samples.parquet, shards/{shard}.jsonl, shards.json, rejected.jsonl, mixture.json


rule prepare_target:
    output:
        info=f"{TARGET}/target.json",
    log:
        "logs/prepare_target/{target}.log",
    benchmark:
        "results/benchmarks/prepare_target/{target}.tsv"
    params:
        target=plan.shaping("target"),
        fingerprint=lambda w: plan.of(w).identity.fingerprint,
        code=code("eagle3lib.targets", "eagle3lib.gguf_target"),
        versions=versions("eagle3lib.gguf_target"),
    script:
        "../scripts/prepare_target.py"


rule fetch_prompts:
    output:
        prompts="results/store/sources/{source}.jsonl",
    log:
        "logs/fetch_prompts/{source}.log",
    benchmark:
        "results/benchmarks/fetch_prompts/{source}.tsv"
    params:
        source=lambda w, output: plan.source_spec(output.prompts),
        code=lambda w, output: plan.source_code(output.prompts),
    script:
        "../scripts/fetch_prompts.py"


rule regenerate_replies:
    input:
        target=f"{TARGET}/target.json",
        conversations=conversation_files,
        avoided=avoided_files,
        template=template_file,
    output:
        replies=f"{DATASET}/replies/{{part}}.jsonl",
    log:
        "logs/regenerate_replies/{target}/{dataset}/{part}.log",
    benchmark:
        "results/benchmarks/regenerate_replies/{target}/{dataset}/{part}.tsv"
    resources:
        gpu=lambda w: plan.of(w).gpus_of_replies,
    params:
        dataset=plan.shaping("dataset"),
        shaping=lambda w: plan.of(w).reply_shaping(),
        code=lambda w: plan.of(w).code("eagle3lib.regeneration", "eagle3lib.curation"),
    script:
        "../scripts/regenerate_replies.py"


# Where `dataset.imported` names a folder of another tool.
rule import_states:
    input:
        target=f"{TARGET}/target.json",
    output:
        lines=f"{DATASET}/imported.jsonl",
    log:
        "logs/import_states/{target}/{dataset}.log",
    benchmark:
        "results/benchmarks/import_states/{target}/{dataset}.tsv"
    threads: 64  # all that --cores gives
    params:
        shaping=lambda w: asked(plan.of(w).import_shaping),
        code=code("eagle3lib.in_place"),
    script:
        "../scripts/import_states.py"


checkpoint shard_samples:
    input:
        target=f"{TARGET}/target.json",
        conversations=reply_files,
        avoided=avoided_files,
        template=template_file,
    output:
        samples=f"{DATASET}/samples.parquet",
        shards=f"{DATASET}/shards.json",
        rejected=f"{DATASET}/rejected.jsonl",
        mixture=f"{DATASET}/mixture.json",
    log:
        "logs/shard_samples/{target}/{dataset}.log",
    benchmark:
        "results/benchmarks/shard_samples/{target}/{dataset}.tsv"
    params:
        dataset=plan.shaping("dataset"),
        shard_size=plan.shard_size,
        code=code("eagle3lib.shards"),
        versions=versions("eagle3lib.chat", "eagle3lib.targets"),
    script:
        "../scripts/shard_samples.py"
