"""Real speculative decoding with the exported draft, on prompts and question sets it has not seen."""

from pathlib import Path

from transformers import AutoTokenizer

from eagle3lib import bench, comparison, engine_job, evaluation, export, plan, samples
from eagle3lib.job import job_log, write_json
from eagle3lib.lineage import digest, file_sha256
from eagle3lib.store import link

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    target, open_engine = engine_job.prepare(run, snakemake, "evaluate")
    tokenizer = AutoTokenizer.from_pretrained(target.path, trust_remote_code=run.target.trust_remote_code)
    conversations = samples.fit(samples.read(snakemake.input.prompts, run.acceptance.max_prompts))
    speaker = bench.Speaker(tokenizer, target, run.dataset.chat_template, run.dataset.chat_template_options)
    prompts = [speaker.prompt(samples.prompt_messages(one.messages)) for one in conversations]
    # Measured once: a sample linked again runs this job again, and changes no byte of the draft.
    draft = [file_sha256(path) for path in export.served_files(snakemake.input.export)]
    params = snakemake.params
    sets = bench.read_sets(run.acceptance, plan.SOURCES)
    measured_by = [params.engine, params.acceptance, params.code, params.versions]
    identity = digest([draft, target.fingerprint, prompts, sets, *measured_by], 32)
    kept = plan.STORE / "acceptance" / f"{identity}.json"
    if not kept.exists():
        engine = open_engine()
        result = evaluation.measure_acceptance(snakemake.input.export, target, engine, prompts, run.acceptance)
        print(evaluation.describe(result))
        if sets:
            decoder = bench.decoder_of(snakemake.input.export, target, engine, run.acceptance)
            result["bench"] = bench.measure(decoder, speaker, sets, run.acceptance, run.draft.name)
            print(comparison.describe([result["bench"]]))
        write_json(kept, result)
    link(kept, Path(snakemake.output.acceptance))
