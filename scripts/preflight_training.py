"""Before the GPUs are freed for it: can this training start, and will it fit?"""

import torch

from eagle3lib import drafts, gpus, plan, preflight
from eagle3lib.disk import Disk
from eagle3lib.job import job_log, write_json
from eagle3lib.leases import Leases

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    torch.set_num_threads(snakemake.threads)
    job, shaping = drafts.of(snakemake, run)
    if drafts.is_trained(job):  # and only linked
        record = {"trained": True, "bytes_each": 0}
    else:
        seen = gpus.look(gpus.Need(run.training.gpus, "training.gpus"), run.gpus, Leases(plan.STORE))
        aux_layers = len(shaping["key"]["aux_layer_ids"])
        record = {"trained": False, **preflight.check(job, aux_layers, seen, Disk(plan.STORE, run.storage))}
    write_json(snakemake.output.record, record)
