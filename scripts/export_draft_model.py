"""The trained draft as one folder that SGLang and vLLM load."""

import json

from safetensors.torch import load_file

from eagle3lib import export, plan
from eagle3lib.draft_model import DraftModelConfig
from eagle3lib.job import job_log
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping

with job_log(snakemake.log[0]):
    with open(snakemake.input.record) as file:
        record = json.load(file)
    run = plan.load_run(snakemake)
    export.export_draft(
        load_file(snakemake.input.weights),
        DraftModelConfig.from_dict(record["draft_model"]),
        VocabMapping.load(snakemake.input.mapping),
        TargetInfo.read(snakemake.input.target),
        snakemake.params.key["aux_layer_ids"],
        snakemake.output.export,
        {
            "lineage": record["digest"],
            "initial": record.get("initial"),
            "target_model": run.target.model,
            "metrics": record["metrics"].get("validation", {}),
        },
    )
