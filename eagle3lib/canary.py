"""Five samples down the whole way, before the long run: what fails after days fails here after minutes.

The user's configuration with the least of everything, through the very same workflow: replies, probe, extraction, GPU
release, one pass of training, export. The states stay in the store, where the long run finds them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import yaml

from eagle3lib import config, plan
from eagle3lib.config import plain
from eagle3lib.errors import UserError
from eagle3lib.job import write_text

NAME, SAMPLES, NEW_TOKENS = "canary", 5, 64


def smallest(values: dict[str, Any]) -> dict[str, Any]:
    """The first run of a configuration, cut down; as a configuration."""
    run = plain(config.load(values).expand()[0])
    run["dataset"] |= {
        "name": NAME,
        "max_conversations": SAMPLES,
        "token_budget": None,
        "validation_fraction": 0.0,
    }
    run["regenerate"] |= {"max_new_tokens": min(NEW_TOKENS, run["regenerate"]["max_new_tokens"]), "parts": 1}
    run["draft"]["name"] = NAME
    run["training"]["epochs"] = 1
    return run


def send(values: dict[str, Any], options: Sequence[str] = ()) -> str:
    """Run it; a line for each stage that it came through.

    options: more of snakemake's. Raises UserError when a stage fails: Snakemake and the job have said why.
    """
    values = smallest(values)
    file = plan.RESULTS / f"{NAME}.yaml"
    write_text(file, yaml.safe_dump(values, sort_keys=False))
    gpus = max(values["engine"]["gpus"], values["training"]["gpus"])
    command = [sys.executable, "-m", "snakemake", "export", "--configfile", str(file), "--cores", "all"]
    if subprocess.run([*command, "--resources", f"gpu={gpus}", *options], check=False).returncode:
        raise UserError(f"canary: it did not come through (see above; its configuration: {file})")
    return describe(plan.Plan(values).runs[0])


def describe(run: plan.Run) -> str:
    """What a canary has left."""
    target, dataset, key, draft = run.names.values()
    states = plan.RESULTS / target / dataset / key
    data = json.loads((states / "data_config.json").read_text())
    training = json.loads((states / draft / "training" / "training.json").read_text())
    release = json.loads((states / draft / "gpu_release.json").read_text())
    loss = training["metrics"]["train"]["loss"]
    return "\n".join(
        [
            f"samples    {data['samples']}, {data['tokens']:,} tokens, {data['supervised_tokens']:,} supervised",
            f"states     probed and stored: {data['bytes']:,} bytes, layers {data['aux_layer_ids']} and the last",
            f"GPUs       {', '.join(release['free']) or release['nvml'] or 'none needed'}",
            f"training   {training['steps']} steps, loss {loss:.3f}, {training['processes']} processes",
            f"export     {states / draft / 'export'}",
            "canary: alive",
        ]
    )
