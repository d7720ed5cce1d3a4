# all of it -> figures and tables of each draft, summary for people and for programs.
#
# in:   results of every run
# out:  results/{target}/{dataset}/{key}/{draft}/plots/*.svg, *.html
#       results/summary.md, results/summary.html, results/summary.json, results/config.yaml


def shown(file, stage, name):
    """A result of one draft in the report: `stage` numbers the list there."""
    return report(
        f"{DRAFT}/plots/{file}",
        category="{target} / {dataset} / {draft}",
        labels={"stage": stage, "shows": name},
        caption=f"../docs/captions/{file.split('.')[0]}.rst",
    )


rule plot_results:
    input:
        samples=f"{DATASET}/samples.parquet",
        target=f"{TARGET}/target.json",
        rejected=f"{DATASET}/rejected.jsonl",
        mixture=f"{DATASET}/mixture.json",
        storage=f"{STATES}/storage_plan.json",
        states=f"{STATES}/data_config.json",
        release=f"{DRAFT}/gpu_release.json",
        training=f"{DRAFT}/training/training.json",
        metrics=f"{DRAFT}/training/metrics.jsonl",
        export=f"{DRAFT}/export",
        acceptance=f"{DRAFT}/acceptance.json",
    output:
        sample_lengths=shown("sample_lengths.svg", "1 samples", "lengths"),
        rejected_samples=shown("rejected_samples.svg", "1 samples", "rejected lines"),
        dataset=shown("dataset.html", "1 samples", "sources, ten samples"),
        storage=shown("storage.svg", "2 hidden states", "storage"),
        gpu_release=shown("gpu_release.html", "3 training", "GPUs before it"),
        training=shown("training.svg", "3 training", "loss and accuracy"),
        acceptance=shown("acceptance.svg", "4 acceptance", "by position"),
        throughput=shown("throughput.svg", "5 whole chain", "throughput"),
        lineage=shown("lineage.html", "5 whole chain", "lineage, versions"),
    log:
        "logs/plot_results/{target}/{dataset}/{key}/{draft}.log",
    benchmark:
        "results/benchmarks/plot_results/{target}/{dataset}/{key}/{draft}.tsv"
    params:
        code=code("eagle3lib.plots", "eagle3lib.pages"),
    script:
        "../scripts/plot_results.py"


def summed_up(file, name):
    """A result of all runs in the report."""
    return report(
        f"results/{file}",
        category="All drafts",
        labels={"file": file, "what": name},
        caption=f"../docs/captions/{file.split('.')[0]}.rst",
    )


rule summarize:
    input:
        targets=plan.paths(f"{TARGET}/target.json"),
        tables=plan.paths(f"{STATES}/hidden_states.parquet"),
        trainings=plan.paths(f"{DRAFT}/training/training.json"),
        acceptances=plan.paths(f"{DRAFT}/acceptance.json"),
        releases=plan.paths(f"{DRAFT}/gpu_release.json"),
        plots=plan.paths(f"{DRAFT}/plots/training.svg"),
    output:
        text=summed_up("summary.md", "text"),
        page=summed_up("summary.html", "tables"),
        json=summed_up("summary.json", "for programs"),
        config=summed_up("config.yaml", "configuration"),
    log:
        "logs/summarize.log",
    benchmark:
        "results/benchmarks/summarize.tsv"
    params:
        names=[run.names for run in plan.runs],
        code=code("eagle3lib.summary", "eagle3lib.pages"),
    script:
        "../scripts/summarize.py"
