"""States that other code or another engine version made: compared on a few samples, not thrown away."""

from eagle3lib import adoption, engine_job, plan
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import job_log, write_json
from eagle3lib.store import Store

with job_log(snakemake.log[0]):
    run = plan.load_run(snakemake)
    _, open_engine = engine_job.prepare(run, snakemake, "extract")
    store = Store(plan.STORE, StateKey.of(snakemake.params.key))
    makers = adoption.adopt(store, snakemake.params.maker, open_engine)
    write_json(snakemake.output.record, makers)
