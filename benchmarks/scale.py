"""The workflow at 37,312 samples and more: what planning costs, and what is lost beside the engine's own time.

`plan`: dry run, a run with nothing to do and --summary, ours against a bare Snakefile of the same shape (rules, paths,
directives, 64 slots; no Python of ours), in turns; CPU time and peak memory of Snakemake's process. Shards and states
are placeholders: planning opens none. Above 100,000 samples without the bare one, but also one of `--parts` parts.

`simulation`: every shard job runs for real against `benchmarks.stand_in`, which takes as long for a token as the
headline's engine (2,439 tokens/s), less by `--time-scale`, and is killed after every `--crash-every` samples. Tokens
are scaled by 8: a sample of 2,353 tokens has 294, each takes eight tokens' time. What the run lasts beyond the passes'
own time does not shrink with them, so it is held against the time that the passes would take unscaled:
overhead = (wall - passes) / (passes * time scale), busy = 1 / (1 + overhead). Loading the target after a crash is
the engine's own; the stand-in takes none.

Last line: `scale dry_ratio_37k=… dry_ratio_100k=… overhead=… busy=…` (goals <= 1.2, <= 1.2, < 0.02, >= 0.98).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from benchmarks import common
from eagle3lib import plan, shards
from eagle3lib.job import write_json

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from tiny import make_target  # noqa: E402
from workflow import Workspace, tiny_workspace  # noqa: E402

HEADLINE, SHARD_SIZE = 37_312, 64
KIMI_TOKENS_PER_SECOND, MEAN_TOKENS, MAX_TOKENS, TOKEN_SCALE, PASS_TOKENS = 2_439, 2_353, 8_192, 8, 2_048
HIDDEN = 8
BARE = '''
import json

DATASET = "results/{target}/{dataset}"
STATES = DATASET + "/{key}"
NAMES = {"target": "t", "dataset": "d", "key": "0123456789ab"}

wildcard_constraints:
    target=r"[^/]+", dataset=r"[^/]+", key=r"[0-9a-f]{12}", shard=r"\\d{5}"

def named(pattern, **more):
    names = [{"shard": shard, "slot": slot} for shard in shards() for slot in more.get("slots", "0")]
    return [pattern.format(**NAMES, **one) for one in names]

def shards():
    with open(checkpoints.shard_samples.get(target="t", dataset="d").output.shards) as file:
        return json.load(file)

SLOTS = [f"{slot:04d}" for slot in range(64)]

rule all:
    input:
        lambda w: named(STATES + "/hidden_states/{shard}/{slot}.pt", slots=SLOTS),
        STATES.format(**NAMES) + "/index.json"

rule prepare_target:
    output: info="results/targets/{target}/target.json"
    log: "logs/prepare_target/{target}.log"
    benchmark: "results/benchmarks/prepare_target/{target}.tsv"
    params: code="0123456789ab"
    shell: "touch {output}"

checkpoint shard_samples:
    input: target="results/targets/{target}/target.json"
    output: shards=DATASET + "/shards.json"
    log: "logs/shard_samples/{target}/{dataset}.log"
    benchmark: "results/benchmarks/shard_samples/{target}/{dataset}.tsv"
    params: code="0123456789ab"
    shell: "echo '[]' > {output}"

rule plan_storage:
    input: target="results/targets/{target}/target.json", shards=DATASET + "/shards.json"
    output: plan=STATES + "/storage_plan.json"
    log: "logs/plan_storage/{target}/{dataset}/{key}.log"
    benchmark: "results/benchmarks/plan_storage/{target}/{dataset}/{key}.tsv"
    params: code="0123456789ab"
    shell: "touch {output}"

rule adopt_hidden_states:
    input: target="results/targets/{target}/target.json", plan=STATES + "/storage_plan.json"
    output: record=STATES + "/made_by.json"
    log: "logs/adopt_hidden_states/{target}/{dataset}/{key}.log"
    benchmark: "results/benchmarks/adopt_hidden_states/{target}/{dataset}/{key}.tsv"
    params: code="0123456789ab"
    shell: "touch {output}"

rule extract_hidden_states:
    input:
        target="results/targets/{target}/target.json",
        plan=STATES + "/storage_plan.json",
        made_by=STATES + "/made_by.json",
        shard=ancient(DATASET + "/shards/{shard}.jsonl")
    output:
        states=[STATES + f"/hidden_states/{{shard}}/{slot}.pt" for slot in SLOTS],
        manifest=STATES + "/hidden_states/{shard}/manifest.json"
    log: "logs/extract_hidden_states/{target}/{dataset}/{key}/{shard}.log"
    benchmark: "results/benchmarks/extract_hidden_states/{target}/{dataset}/{key}/{shard}.tsv"
    resources: gpu=0
    params: key="0123456789ab", shard_sha256="0123456789ab", code="0123456789ab"
    shell: "false"

rule index_hidden_states:
    input: lambda w: named(STATES + "/hidden_states/{shard}/manifest.json")
    output: STATES + "/index.json"
    log: "logs/index_hidden_states/{target}/{dataset}/{key}.log"
    benchmark: "results/benchmarks/index_hidden_states/{target}/{dataset}/{key}.tsv"
    params: code="0123456789ab"
    shell: "false"
'''  # fmt: skip


# --- the plan ----------------------------------------------------------------------------------------


@dataclass
class Cost:
    """Of one command: seconds of CPU and of the clock, and the peak of its memory."""

    cpu: float
    wall: float
    gib: float


@dataclass
class Side:
    """A workflow that can be asked."""

    name: str
    command: list[str]
    folder: Path
    environment: dict[str, str]
    states: str  # folder of a dataset's states, seen from `folder`

    def run(self, *arguments: str) -> tuple[Cost, str]:
        said = self.folder / "said.txt"
        start = time.monotonic()
        with open(said, "w") as file:
            process = subprocess.Popen(
                [*self.command, *arguments], cwd=self.folder, env=self.environment, stdout=file, stderr=file
            )
            _, status, used = os.wait4(process.pid, 0)
        text = said.read_text()
        if status:
            raise SystemExit(f"{self.name}: {' '.join(arguments)} failed:\n{text[-3000:]}")
        cost = Cost(used.ru_utime + used.ru_stime, time.monotonic() - start, used.ru_maxrss / 2**20)
        return cost, text


def ours(folder: Path) -> Side:
    workspace = tiny_workspace(folder, SHARD_SIZE, SHARD_SIZE)
    workspace.snakemake("samples")
    states = next(path.parent for path in (workspace.run_folder / "results").glob("*/*/samples.parquet"))
    with _inside(workspace.run_folder):
        key = plan.Plan(workspace.config).runs[0].key.short
    relative = str(states.relative_to(workspace.run_folder) / key)
    return Side("ours", workspace.command("--cores", "2"), workspace.run_folder, workspace.environment, relative)


def bare(folder: Path) -> Side:
    folder.mkdir()
    (folder / "Snakefile").write_text(BARE)
    command = [sys.executable, "-m", "snakemake", "--workflow-profile", str(ROOT / "profiles/default"), "--cores", "2"]
    side = Side("bare", command, folder, dict(os.environ), "results/t/d/0123456789ab")
    side.run("results/t/d/shards.json")
    return side


def fill(side: Side, samples: int) -> None:
    """What sharding leaves of so many samples: as far as planning looks at it."""
    folder = side.folder / Path(side.states).parent
    names = dict(shards.plan_shards(samples, SHARD_SIZE))
    if side.name == "bare":  # one kind of shard
        names = {name: size for name, size in names.items() if size == SHARD_SIZE}
    (folder / "shards").mkdir(exist_ok=True)
    for name in names:
        (folder / f"shards/{name}.jsonl").touch()
    if side.name == "bare":
        write_json(folder / "shards.json", list(names), indent=None)
        return
    about = {name: {"sha256": "0" * 64, "n_samples": n, "n_tokens": 50 * n} for name, n in names.items()}
    write_json(folder / "shards.json", about, indent=None)
    first = pd.read_parquet(folder / "samples.parquet").iloc[:1]
    table = pd.concat([first] * samples, ignore_index=True)
    table["shard"] = [name for name, size in names.items() for _ in range(size)]
    table["slot"] = [slot for size in names.values() for slot in range(size)]
    table["sample_id"] = [hashlib.sha256(str(i).encode()).hexdigest() for i in range(samples)]
    table.to_parquet(folder / "samples.parquet", index=False)


def finish(side: Side, target: str) -> None:
    """All results up to the index, empty, with Snakemake's records of them (`--touch` writes them)."""
    states = side.folder / side.states
    for name in json.loads((states.parent / "shards.json").read_text()):
        folder = states / "hidden_states" / name
        folder.mkdir(parents=True)
        for file in [*(f"{slot:04d}.pt" for slot in range(SHARD_SIZE)), "manifest.json"]:
            (folder / file).touch()
    index = ["sample_lengths.json", "hidden_states.parquet", "data_config.json", "index.json"]
    for file in ["storage_plan.json", "made_by.json", *index]:
        (states / file).touch()
    side.run("--touch", target)


def plan_costs(folder: Path, sizes: list[int], parts: int) -> list[tuple[int, str, str, Cost]]:
    """(samples, command, side, cost)."""
    sides = [(ours(folder / "ours"), "extract"), (bare(folder / "bare"), "all")]
    rows = []
    for samples in sizes:
        compared = sides if samples <= 100_000 else sides[:1]
        for side, target in compared:
            fill(side, samples)
            cost, _ = side.run(target, "--dry-run", "--quiet", "rules")
            rows.append((samples, "dry run", side.name, cost))
        if samples > 100_000:
            batch = ["--batch", f"index_hidden_states=1/{parts}"]
            cost, _ = sides[0][0].run("index", "--dry-run", "--quiet", "rules", *batch)
            rows.append((samples, f"dry run, 1 of {parts} parts", "ours", cost))
    for side, target in sides:
        shutil.rmtree(side.folder / Path(side.states).parent / "shards")
        fill(side, HEADLINE)
        finish(side, target)
        cost, text = side.run(target)
        if "Nothing to be done" not in text:
            raise SystemExit(f"{side.name}: a finished run is run again:\n{text[-3000:]}")
        rows.append((HEADLINE, "nothing to do", side.name, cost))
        rows.append((HEADLINE, "--summary", side.name, side.run(target, "--summary")[0]))
    return rows


def ratio(rows: list[tuple[int, str, str, Cost]], samples: int, command: str) -> float:
    cpu = {side: cost.cpu for n, what, side, cost in rows if (n, what) == (samples, command)}
    return cpu["ours"] / cpu["bare"] if "bare" in cpu else float("nan")


@contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


# --- the simulation ----------------------------------------------------------------------------------


def conversations(path: Path, samples: int, seed: int) -> None:
    """One user's word, a reply of a length as in the headline's data, a token a letter of the tests' tokenizer."""
    generator = random.Random(seed)
    with open(path, "w") as file:
        for i in range(samples):
            length = min(MAX_TOKENS, max(16, int(generator.expovariate(1 / MEAN_TOKENS)))) // TOKEN_SCALE
            reply = "".join(generator.choices("bcdfghjklmnpqrstvwxz", k=max(4, length - 20)))
            messages = [{"role": "user", "content": str(i)}, {"role": "assistant", "content": reply}]
            file.write(json.dumps({"messages": messages}) + "\n")


def simulated(folder: Path, options: argparse.Namespace) -> Workspace:
    """A workspace whose engine is the stand-in; nothing has run."""
    workspace = tiny_workspace(folder, 1, SHARD_SIZE)
    make_target(folder / "inputs/target", hidden=HIDDEN)
    conversations(folder / "inputs/talk.jsonl", options.samples, options.seed)
    spec = {
        "tokens_per_second": KIMI_TOKENS_PER_SECOND / TOKEN_SCALE * options.time_scale,
        "log": str(folder / "stand_in.jsonl"),
        "crash_every": options.crash_every,
        "load_seconds": 0,
    }
    config = workspace.config
    config["dataset"]["max_tokens"] = MAX_TOKENS // TOKEN_SCALE
    config["training"]["batch_tokens"] = MAX_TOKENS // TOKEN_SCALE
    config["engine"] = {
        "name": "sglang",
        "command": [sys.executable, "-m", "benchmarks.stand_in"],
        "batch_tokens": PASS_TOKENS // TOKEN_SCALE,
        "jobs": options.jobs,
        "environment": {"PYTHONPATH": str(ROOT), "STAND_IN": json.dumps(spec)},
    }
    workspace.config = config
    return workspace


def simulate(folder: Path, options: argparse.Namespace) -> dict[str, float]:
    """Shares and counts; raises SystemExit when anything is lost."""
    workspace = simulated(folder, options)
    workspace.snakemake("samples")
    with _inside(workspace.run_folder):
        run = plan.Plan(workspace.config).runs[0]
        store = plan.STORE / "hidden_states" / run.key.short
        # The probe asks for right states, which a stand-in has not.
        write_json(store / "probe-sglang-0.5.23.json", {"stand-in": True})
        wanted = pd.read_parquet(run.samples_file)
    start = time.time()
    with open(folder / "said.txt", "w") as said:
        command = workspace.command("--cores", str(options.jobs), "extract")
        done = subprocess.run(
            command, cwd=workspace.run_folder, env=workspace.environment, stdout=said, stderr=said, check=False
        )
    wall = time.time() - start
    if done.returncode:
        raise SystemExit(f"the run failed:\n{(folder / 'said.txt').read_text()[-4000:]}")
    table = pd.read_parquet(workspace.result("*/*/*/hidden_states.parquet"))
    missing = set(wanted["sample_id"]) - set(table["sample_id"])
    if missing or len(list(workspace.states())) != len(wanted):
        raise SystemExit(f"lost: {len(missing)} samples of {len(wanted)}")
    log = [json.loads(line) for line in (folder / "stand_in.jsonl").read_text().splitlines()]
    servers = {line["pid"]: line for line in log}.values()  # the last of each says what it did in all
    passes = sum(one["busy"] for one in servers)
    writer = sum(one["writer"] for one in servers)
    crashes = sum(one["event"] == "crash" for one in servers)
    overhead = (wall - passes) / (passes * options.time_scale)
    return {
        "samples": len(wanted), "tokens": int(table["n_tokens"].sum()), "wall": wall, "passes": passes,
        "writer": writer, "crashes": crashes, "overhead": overhead, "busy": 1 / (1 + overhead),
    }  # fmt: skip


# --- figures -----------------------------------------------------------------------------------------


def plot(rows: list[tuple[int, str, str, Cost]], file: Path) -> None:
    """CPU time and memory of a dry run against the samples."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "scale"  # the same figures, the same file
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for axis, field, label in ((axes[0], "cpu", "CPU-seconds"), (axes[1], "gib", "peak memory, GiB")):
        for what, side in dict.fromkeys((what, side) for _, what, side, _ in rows if what.startswith("dry run")):
            points = sorted((n, getattr(cost, field)) for n, w, s, cost in rows if (w, s) == (what, side))
            axis.plot(*zip(*points, strict=True), marker="o", label=f"{what}, {side}")
        axis.set(xlabel="samples", ylabel=label, xscale="log", yscale="log")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize="small")
    figure.savefig(file, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("plan", "simulation"), help="one of the two only")
    parser.add_argument("--sizes", type=int, nargs="+", default=[HEADLINE, 100_000], help="samples to plan")
    parser.add_argument("--million", action="store_true", help="plan 1,000,000 samples too, whole and in parts")
    parser.add_argument("--parts", type=int, default=16, help="parts of the million")
    parser.add_argument("--samples", type=int, default=HEADLINE, help="samples to simulate")
    parser.add_argument("--time-scale", type=float, default=100, help="so much faster than Kimi-K2.5 on 8 GPUs")
    parser.add_argument("--crash-every", type=int, default=100 * SHARD_SIZE, help="samples; 0: no crashes")
    parser.add_argument("--jobs", type=int, default=2, help="jobs that share the engine")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument("--plot", type=Path, help="write the plot there (docs/scale.svg)")
    options = parser.parse_args()
    figures = {}
    with common.scratch() as folder:
        if options.part != "simulation":
            rows = plan_costs(folder.resolve(), options.sizes + [1_000_000] * options.million, options.parts)
            table = [[f"{n:,}", what, side, cost.cpu, cost.wall, cost.gib] for n, what, side, cost in rows]
            common.table(["samples", "command", "side", "CPU-s", "wall s", "GiB"], table)
            for what in ("nothing to do", "--summary"):
                print(f"{what}: {ratio(rows, HEADLINE, what):.2f} of bare")
            if options.plot:
                plot(rows, options.plot)
            for samples in options.sizes:
                figures[f"dry_ratio_{samples // 1000}k"] = f"{ratio(rows, samples, 'dry run'):.2f}"
        if options.part != "plan":
            result = simulate(folder.resolve() / "simulated", options)
            print(" ".join(f"{name}={value:.5g}" for name, value in result.items()))
            figures |= {name: f"{result[name]:.4f}" for name in ("overhead", "busy")}
    print("scale", *(f"{name}={value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
