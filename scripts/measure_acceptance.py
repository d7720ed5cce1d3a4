"""Real greedy speculative decoding with the exported draft, on prompts it has not seen."""

import torch
from transformers import AutoTokenizer

from eagle3lib import chat, evaluation, gpus, plan, samples
from eagle3lib.engines import open_engine
from eagle3lib.job import job_log, write_json
from eagle3lib.targets import TargetInfo

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    gpus.check_granted(snakemake.resources.gpu, run.engine.gpus, "engine.gpus")
    torch.set_num_threads(snakemake.threads)
    target = TargetInfo.read(snakemake.input.target)
    tokenizer = AutoTokenizer.from_pretrained(target.path, trust_remote_code=run.target.trust_remote_code)
    conversations = samples.read(snakemake.input.prompts, run.acceptance.max_prompts)
    prompts = [
        chat.prompt_ids(tokenizer, samples.prompt_messages(one.messages), run.dataset.chat_template)
        for one in conversations
    ]
    engine = open_engine(run.engine, target.path, run.target.trust_remote_code)
    result = evaluation.measure_acceptance(snakemake.input.export, target, engine, prompts, run.acceptance)
    print(evaluation.describe(result))
    write_json(snakemake.output.acceptance, result)
