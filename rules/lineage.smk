# all of it -> plots, summary for people and for programs.
#
# in:   results of every run
# out:  results/{target}/{dataset}/{key}/{draft}/plots/*.svg, results/summary.md, results/summary.json


def figure(name):
    return report(
        f"{DRAFT}/plots/{name}.svg",
        category="{target} / {dataset} / {draft}",
        labels={"figure": name.replace("_", " ")},
        caption=f"../docs/captions/{name}.rst",
    )


rule plot_results:
    input:
        samples=f"{DATASET}/samples.parquet",
        rejected=f"{DATASET}/rejected.jsonl",
        metrics=f"{DRAFT}/training/metrics.jsonl",
        acceptance=f"{DRAFT}/acceptance.json",
    output:
        training=figure("training"),
        acceptance=figure("acceptance"),
        sample_lengths=figure("sample_lengths"),
        rejected_samples=figure("rejected_samples"),
    log:
        "logs/plot_results/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/plot_results/{target}/{dataset}/{key}/{draft}.tsv"
    params:
        code=code("eagle3lib.plots"),
    script:
        "../scripts/plot_results.py"


rule summarize:
    input:
        targets=plan.paths(f"{TARGET}/target.json"),
        tables=plan.paths(f"{STATES}/hidden_states.parquet"),
        trainings=plan.paths(f"{DRAFT}/training/training.json"),
        acceptances=plan.paths(f"{DRAFT}/acceptance.json"),
        releases=plan.paths(f"{DRAFT}/gpu_release.json"),
        plots=plan.paths(f"{DRAFT}/plots/training.svg"),
    output:
        text=report(
            "results/summary.md",
            category="Summary",
            caption="../docs/captions/summary.rst",
        ),
        json=report(
            "results/summary.json",
            category="Summary",
            caption="../docs/captions/summary.rst",
        ),
        config=report(
            "results/config.yaml",
            category="Summary",
            caption="../docs/captions/config.rst",
        ),
    log:
        "logs/summarize.log",
    benchmark:
        "results/benchmarks/summarize.tsv"
    params:
        names=[run.names for run in plan.runs],
        code=code("eagle3lib.summary"),
    script:
        "../scripts/summarize.py"
