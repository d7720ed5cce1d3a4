# exported draft -> acceptance length, by real greedy speculative decoding on prompts it has not seen.
#
# in:   results/{target}/{dataset}/{key}/{draft}/export
# out:  results/{target}/{dataset}/{key}/{draft}/acceptance.json


rule measure_acceptance:
    input:
        target=f"{TARGET}/target.json",
        export=f"{DRAFT}/export",
        prompts=prompt_files,
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
        engine=lambda w: plan.of(w).key.engine,
        code=code("eagle3lib.evaluation"),
        versions=versions("eagle3lib.evaluation"),
    script:
        "../scripts/measure_acceptance.py"
