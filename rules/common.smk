# What the rules share: the typed configuration, the paths, and functions over them.

import functools
import logging
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from eagle3lib import monitor, overview, records, shards, verification
from eagle3lib import plan as planning
from eagle3lib.errors import UserError
from eagle3lib.lineage import code, versions


def asked(question, *arguments):
    """The answer; a UserError without a traceback."""
    try:
        return question(*arguments)
    except UserError as error:
        raise WorkflowError(str(error)) from None


plan = asked(planning.Plan, config)

METADATA, RECORDS = Path(".snakemake/metadata"), planning.STORE / "records"
if workflow.is_main_process and records.keep(METADATA, RECORDS):
    print(
        f".snakemake was lost: its records are put back from {RECORDS}", file=sys.stderr
    )

TARGET = "results/targets/{target}"
DATASET = "results/{target}/{dataset}"
STATES = DATASET + "/{key}"
DRAFT = STATES + "/{draft}"


wildcard_constraints:
    target=r"[^/]+",
    dataset=r"[^/]+",
    key=r"[0-9a-f]{12}",
    draft=r"[^/]+",
    part=r"\d{3}",
    shard=r"\d{5}",


def cfg(wildcards):
    return plan.of(wildcards).cfg


def state_key(wildcards):
    return plan.of(wildcards).key.values()


def conversation_files(wildcards):
    return asked(planning.conversation_files, cfg(wildcards).dataset.conversations)


def prompt_files(wildcards):
    return asked(planning.conversation_files, cfg(wildcards).acceptance.prompts)


def avoided_files(wildcards):
    return asked(planning.avoided_files, cfg(wildcards))


def set_files(wildcards):
    return asked(planning.set_files, cfg(wildcards).acceptance.sets)


def template_file(wildcards):
    template = cfg(wildcards).dataset.chat_template
    return [str(template)] if template else []


def reply_files(wildcards):
    """The regenerated replies, the conversations as they are, or what was found in a folder of another tool."""
    run = cfg(wildcards)
    if run.dataset.imported:
        return [f"{DATASET}/imported.jsonl"]
    if not run.replies_regenerated:
        return conversation_files(wildcards)
    return [
        f"{DATASET}/replies/{part:03d}.jsonl" for part in range(run.regenerate.parts)
    ]


@functools.cache
def before_states_are_looked_at():
    """Once a run, in the main process: what a crash damaged must be missing when Snakemake looks."""
    if workflow.is_main_process and workflow.dryrun:
        print(*overview.redo(plan), overview.missing(plan), sep="\n", file=sys.stderr)
    elif workflow.is_main_process:
        verification.after_unclean_end(planning.STORE)


def shards_of(target, dataset, **_):
    """shard -> what it holds; Snakemake comes back here once the checkpoint has run."""
    before_states_are_looked_at()
    output = checkpoints.shard_samples.get(target=target, dataset=dataset).output
    return planning.read_shards(output.shards)


def shard_file(shard, wildcards):
    path = f"{DATASET}/shards/{shard}.jsonl".format(**wildcards)
    if shards_of(**wildcards) and not os.path.exists(path):
        samples = f"{DATASET}/samples.parquet".format(**wildcards)
        raise WorkflowError(
            f"{path}: lost; delete {samples} and run the same command again: it is made anew"
        )
    return path


def shard_sha256(shard, wildcards):
    return planning.shard_sha256(
        f"{DATASET}/shards.json".format(**wildcards), shard.format(**wildcards)
    )


def manifests(wildcards):
    return [
        f"{STATES}/hidden_states/{shard}/manifest.json".format(**wildcards)
        for shard in shards_of(**wildcards)
    ]


def all_hidden_states(_):
    files = {}
    for run in plan.runs:
        folder = STATES.format(**run.names) + "/hidden_states"
        files[folder] = planning.hidden_state_files(folder, shards_of(**run.names))
    return sum(files.values(), [])


def begin_run():
    """Refuse before the first job, when nothing is deleted yet; then take note that a run is at work."""
    asked(overview.refuse, plan)
    verification.begin(planning.STORE)
    monitor.begin(plan, logging.getLogger("snakemake.logging"))


def end_of_run(log, state):
    from eagle3lib import gpus
    from eagle3lib.engines.sglang import lease

    lease.release(
        planning.ENGINE, max(run.cfg.engine.grace_seconds for run in plan.runs)
    )
    verification.end(planning.STORE)
    records.keep(METADATA, RECORDS)
    monitor.end(state)
    return f"GPUs: {gpus.summary()}. Summary: results/summary.md; log of this run: {log[0]}"
