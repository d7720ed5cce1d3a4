"""A workspace in which the real Snakefile runs as a user would run it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import yaml
from small_target import make_small_target, small_prompts
from tiny import make_target, write_conversations

ROOT = Path(__file__).parent.parent


TINY_SAMPLES, TINY_SHARD = 7, 4  # one full shard, tail_2, tail_1
SMALL_SHARD = 16
TRAINING = {
    "preflight_training": 1,
    "release_gpus": 1,
    "train_draft_model": 1,
    "export_draft_model": 1,
    "measure_acceptance": 1,
    "plot_results": 1,
    "summarize": 1,
}


class Workspace:
    """A copy of the project's code, a configuration, and the folder in which snakemake runs."""

    def __init__(self, folder: Path, config: dict | None = None):
        self.folder = folder
        self.code, self.run_folder = folder / "code", folder / "run"
        if config is not None:
            self.take_code()
            self.run_folder.mkdir(parents=True)
            self.config = config

    def take_code(self) -> None:
        """As it is now."""
        shutil.rmtree(self.code, ignore_errors=True)
        for name in ("eagle3lib", "rules", "scripts", "profiles", "docs/captions", "envs"):
            shutil.copytree(ROOT / name, self.code / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "Snakefile", self.code)

    @property
    def config(self) -> dict:
        return yaml.safe_load((self.folder / "config.yaml").read_text())

    @config.setter
    def config(self, values: dict) -> None:
        (self.folder / "config.yaml").write_text(yaml.safe_dump(values))

    def set(self, path: str, value) -> None:
        values = self.config
        *sections, key = path.split(".")
        section = values
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
        self.config = values

    def copy(self, folder: Path) -> Workspace:
        """The same in another place, hard links kept, as `cp -a` does."""
        subprocess.run(["cp", "-a", self.folder, folder], check=True)
        return Workspace(folder)

    def command(self, *arguments: str) -> list[str]:
        snakemake = [sys.executable, "-m", "snakemake", "--snakefile", str(self.code / "Snakefile")]
        snakemake += ["--directory", str(self.run_folder), "--configfile", str(self.folder / "config.yaml")]
        return [*snakemake, "--workflow-profile", str(self.code / "profiles/default"), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.code), "HF_HUB_OFFLINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}

    def snakemake(self, *arguments: str, check: bool = True, cores: int = 2) -> subprocess.CompletedProcess:
        command = self.command("--cores", str(cores), *arguments)
        done = subprocess.run(
            command,
            cwd=self.run_folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=580,
            check=False,
        )
        if check and done.returncode:
            raise AssertionError(f"{' '.join(command)}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
        return done

    def planned(self, *arguments: str) -> Counter:
        """rule -> number of jobs that a dry run would start."""
        done = self.snakemake("--dry-run", *arguments)
        return job_counts(done.stdout + done.stderr)

    def ask(self, *arguments: str) -> subprocess.CompletedProcess:
        """`python -m eagle3lib COMMAND …` in the folder of the results."""
        command = [sys.executable, "-m", "eagle3lib", *arguments]
        if arguments[0] in ("missing", "why", "gc", "doctor"):
            command += ["--configfile", str(self.folder / "config.yaml")]
        if arguments[0] == "why":
            profile = self.code / "profiles/default"
            command += ["--options", f"--snakefile {self.code / 'Snakefile'} --workflow-profile {profile}"]
        return subprocess.run(
            command, cwd=self.run_folder, env=self.environment, capture_output=True, text=True, check=False
        )

    def computed(self) -> int:
        """Samples that the extraction jobs (their last logs) computed, not found."""
        logs = (self.run_folder / "logs/extract_hidden_states").rglob("*.log")
        return sum(int(n) for log in logs for n in re.findall(r"'computed': (\d+)", log.read_text()))

    def clear_logs(self) -> None:
        shutil.rmtree(self.run_folder / "logs", ignore_errors=True)

    def states(self) -> dict[str, Path]:
        """Path below hidden_states/ -> file, of every linked sample."""
        return {f"{p.parent.name}/{p.name}": p for p in self.run_folder.glob("results/*/*/*/hidden_states/*/*.pt")}

    def result(self, pattern: str) -> Path:
        return next(self.run_folder.glob(f"results/{pattern}"))


def tiny_workspace(folder: Path, samples: int, shard_size: int) -> Workspace:
    """A random target, conversations, prompts, and a configuration; nothing has run."""
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    make_target(inputs / "target")
    write_conversations(inputs / "talk.jsonl", samples)
    write_conversations(inputs / "prompts.jsonl", 3)
    return Workspace(
        folder,
        {
            "target": {"name": "tiny", "model": "../inputs/target"},
            "dataset": {
                "name": "talk",
                "conversations": ["../inputs/talk.jsonl"],
                "max_tokens": 128,
                "shard_size": shard_size,
                "validation_fraction": 0.2,
            },
            "regenerate": {"enabled": False},
            "storage": {"reserve_bytes": 0},
            "draft": {"draft_vocab_size": 64},
            "training": {"ttt_steps": 2, "epochs": 1, "batch_tokens": 256},
            "acceptance": {
                "prompts": ["../inputs/prompts.jsonl"],
                "max_new_tokens": 8,
                "draft_steps": 2,
            },
        },
    )


# Where the end-to-end test leaves its run: what goes on from there need not train a target and a draft again.
KEPT = ROOT / "build" / "small"


def continue_small(folder: Path, runs: list[dict], prompts: int) -> Workspace:
    """`small_workspace`, with what the end-to-end test has left; the workflow itself finds what still holds."""
    if not (KEPT / "config.yaml").exists():
        return small_workspace(folder, runs, prompts)
    workspace = Workspace(KEPT).copy(folder)
    workspace.take_code()
    held_out = folder / "inputs/held_out.jsonl"
    write_prompts(held_out, small_prompts(prompts, held_out=True))
    workspace.config = {**workspace.config, "runs": runs}
    workspace.set("acceptance.prompts", [str(held_out)])
    workspace.set("acceptance.max_prompts", prompts)
    return workspace


def write_prompts(path: Path, questions: list[str]) -> None:
    path.write_text("".join(json.dumps({"prompt": question}) + "\n" for question in questions))


def small_workspace(folder: Path, runs: list[dict], prompts: int) -> Workspace:
    """The trained target of small_target.py and questions about Python for it; nothing has run.

    runs: as in a configuration. prompts: how many held-out questions the acceptance is measured on.
    """
    inputs = folder / "inputs"
    inputs.mkdir(parents=True)
    write_prompts(inputs / "train.jsonl", small_prompts(300))
    write_prompts(inputs / "held_out.jsonl", small_prompts(prompts, held_out=True))
    return Workspace(
        folder,
        {
            "target": {"name": "small", "model": str(make_small_target(inputs / "target"))},
            "dataset": {
                "name": "docs",
                "conversations": [str(inputs / "train.jsonl")],
                "token_budget": 4500,
                "max_tokens": 256,
                "shard_size": SMALL_SHARD,
            },
            "regenerate": {"max_new_tokens": 64, "batch_size": 32},
            "storage": {"reserve_bytes": 0},
            "acceptance": {"prompts": [str(inputs / "held_out.jsonl")], "max_prompts": prompts, "max_new_tokens": 64},
            "runs": runs,
        },
    )


SMALL_DRAFT = {
    "draft": {"name": "trained", "draft_vocab_size": 1024},
    "training": {"ttt_steps": 4, "epochs": 4, "learning_rate": 2e-3, "batch_tokens": 512},
}


def job_counts(text: str) -> Counter:
    """Snakemake's table of jobs, as a Counter without `total` and the rules that only collect."""
    table = re.search(r"^job\s+count\n-+\s+-+\n(.*?)^total", text, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^(\w+)\s+(\d+)\s*$", table.group(1), re.MULTILINE) if table else []
    return Counter({name: int(count) for name, count in rows if name not in ("all", "extract", "train")})
