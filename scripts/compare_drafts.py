"""Other drafts of this target on the same questions, and how they differ from ours."""

import json
import os

from transformers import AutoTokenizer

from eagle3lib import bench, comparison, engine_job, plan
from eagle3lib.job import job_log, write_json, write_text

with job_log(snakemake.log[0]):
    run, params = plan.load_run(snakemake), snakemake.params
    target, _ = engine_job.prepare(run, snakemake, "evaluate")
    tokenizer = AutoTokenizer.from_pretrained(target.path, trust_remote_code=run.target.trust_remote_code)
    with open(snakemake.input.acceptance) as file:
        own = comparison.named(json.load(file)["bench"], run.draft.name)
    others = bench.measure_all(
        run.acceptance.drafts,
        bench.Speaker(tokenizer, target, run.dataset.chat_template, run.dataset.chat_template_options),
        bench.read_sets(run.acceptance, plan.SOURCES),
        run.acceptance,
        lambda folder: engine_job.open_for(run, target, "evaluate", draft=folder),
        plan.STORE / "acceptance",
        [params.engine, params.code, params.versions],
        os.environ.get(run.engine.key_variable, ""),
    )
    measured = [own, *others]
    text = comparison.describe(measured)
    print(text)
    write_json(snakemake.output.json, comparison.result(measured))
    write_text(snakemake.output.text, text)
