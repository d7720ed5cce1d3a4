# exported draft -> acceptance length, by real speculative decoding on prompts and question sets it has not seen.
#
# in:   results/{target}/{dataset}/{key}/{draft}/export
# out:  results/{target}/{dataset}/{key}/{draft}/acceptance.json, comparison.json, comparison.md


rule measure_acceptance:
    input:
        target=f"{TARGET}/target.json",
        export=f"{DRAFT}/export",
        prompts=prompt_files,
        sets=set_files,
        template=template_file,
    output:
        acceptance=f"{DRAFT}/acceptance.json",
    log:
        "logs/measure_acceptance/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/measure_acceptance/{target}/{dataset}/{key}/{draft}.tsv"
    threads: 64  # all that --cores gives
    resources:
        gpu=lambda w: cfg(w).engine.gpus,
    params:
        acceptance=plan.shaping("acceptance"),
        engine=lambda w: cfg(w).engine.name,
        code=code("eagle3lib.bench"),
        versions=versions("eagle3lib.bench"),
    script:
        "../scripts/measure_acceptance.py"


# Asked for where acceptance.drafts names others: measured alike, and held against ours.
rule compare_drafts:
    input:
        target=f"{TARGET}/target.json",
        acceptance=f"{DRAFT}/acceptance.json",
        drafts=lambda w: planning.draft_folders(cfg(w).acceptance.drafts),
        sets=set_files,
        template=template_file,
    output:
        json=f"{DRAFT}/comparison.json",
        text=f"{DRAFT}/comparison.md",
    log:
        "logs/compare_drafts/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/compare_drafts/{target}/{dataset}/{key}/{draft}.tsv"
    threads: 64  # all that --cores gives
    resources:
        gpu=lambda w: cfg(w).engine.gpus,
    params:
        acceptance=plan.shaping("acceptance"),
        drafts=lambda w: cfg(w).acceptance.drafts,
        engine=lambda w: cfg(w).engine.name,
        code=code("eagle3lib.bench"),
        versions=versions("eagle3lib.bench"),
        tables=code("eagle3lib.comparison"),
    script:
        "../scripts/compare_drafts.py"
