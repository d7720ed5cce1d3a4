"""The canary is the user's configuration with the least of everything, and comes through the real workflow."""

import re
import subprocess
import sys

import pytest
import yaml
from workflow import ROOT, tiny_workspace

from eagle3lib import canary, config


@pytest.mark.parametrize("name", ["config", "smoke", "kimi-k2.5", "demo-sglang"])
def test_changes_the_amount_and_nothing_else(name):
    values = yaml.safe_load((ROOT / f"config/{name}.yaml").read_text())
    full = config.plain(config.load(values).expand()[0])
    small = canary.smallest(values)
    config.load(small)
    changed = {(section, key) for section in full for key in full[section] if full[section][key] != small[section][key]}
    allowed = {"dataset": {"name", "max_conversations", "token_budget", "validation_fraction"}}
    allowed |= {"regenerate": {"max_new_tokens", "parts"}, "draft": {"name"}, "training": {"epochs"}}
    assert changed <= {(section, key) for section, keys in allowed.items() for key in keys}
    assert ("dataset", "max_conversations") in changed


def test_comes_through_and_leaves_its_states_for_the_long_run(tmp_path):
    workspace = tiny_workspace(tmp_path, samples=9, shard_size=4)
    options = f"--snakefile {workspace.code / 'Snakefile'} --workflow-profile {workspace.code / 'profiles/default'}"
    command = [sys.executable, "-m", "eagle3lib", "canary", "--configfile", str(workspace.folder / "config.yaml")]

    def send():
        return subprocess.run(
            [*command, "--options", options], cwd=workspace.run_folder, env=workspace.environment,
            capture_output=True, text=True, check=False,
        )  # fmt: skip

    done = send()
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"samples +5, .*canary: alive", done.stdout, re.DOTALL)
    workspace.snakemake("extract")
    assert workspace.computed() == 5 + 4, "the long run computes what the canary has not"

    workspace.set("target.model", "../inputs/nothing")
    failed = send()
    assert failed.returncode == 1 and "target.model" in failed.stderr and "canary: it did not" in failed.stderr
