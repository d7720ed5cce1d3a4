"""From the command to the first request, at the seed's crash: 18,421 of 37,312 samples done, the machine killed.

The real Snakefile with the tests' tiny target: a state takes kilobytes, everything else has its full number. What a
crash leaves is made by the pipeline's own extraction (random states, no engine); then `snakemake extract` is started,
and ended when its first job asks the engine for the probe. Last line: `resume seconds=… hashed=… bytes_read=…`
(goal < 60 s beside the model's load). Of real samples the hashing takes longer: bytes_read / the disk's rate.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks import common
from eagle3lib import adoption, extraction, plan, shards
from eagle3lib.config import StorageConfig
from eagle3lib.store import Store
from eagle3lib.targets import TargetInfo

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from workflow import Workspace, tiny_workspace

SAMPLES, DONE, SHARD_SIZE = 37_312, 18_421, 64


class RandomEngine:
    """Hands out random states where the tiny target would compute some."""

    name, version = "transformers", "benchmark"

    def extract(self, sequences: list[list[int]], aux_layer_ids: list[int]) -> list[SimpleNamespace]:
        return [
            SimpleNamespace(aux=list(torch.randn(len(aux_layer_ids), len(ids), 32)), last=torch.randn(len(ids), 32))
            for ids in sequences
        ]

    def probe(self, aux_layer_ids: list[int]) -> dict:
        return {}


def extract_half(workspace: Workspace) -> None:
    """The states of the first samples, shard by shard, as the jobs would have left them."""
    run = plan.Plan(workspace.config).runs[0]
    store, target = Store(plan.STORE, run.key), TargetInfo.read(run.target_file)
    adoption.adopt(store, run.maker(), RandomEngine)  # else the resumed run would find these states to be none of its
    folder, left = run.samples_file.parent, DONE
    for shard, about in plan.read_shards(folder / "shards.json").items():
        file, links = folder / "shards" / f"{shard}.jsonl", folder / run.key.short / "hidden_states"
        if left < about["n_samples"]:  # the shard in which the machine died: nothing of it is linked
            for sample in shards.read_shard(file)[:left]:
                (state,) = RandomEngine().extract([sample.input_ids], list(run.key.aux_layer_ids))
                extraction._publish(sample, [*state.aux, state.last], store, "benchmark", "benchmark")
            break
        outputs = [links / shard / f"{slot:04d}.pt" for slot in range(about["n_samples"])]
        manifest = links / shard / "manifest.json"
        extraction.extract_shard(
            file, outputs, manifest, store, RandomEngine, "benchmark", target, StorageConfig(reserve_bytes=0), "t/d"
        )
        left -= about["n_samples"]
    for record in store.folder.glob("probe-*.json"):
        record.unlink()


def first_request(workspace: Workspace) -> tuple[float, str]:
    """Seconds until a job's log says that the engine is probed, and what Snakemake has said by then."""
    errors = workspace.folder / "errors.txt"
    with open(errors, "w") as stderr:
        start = time.monotonic()
        run = subprocess.Popen(
            workspace.command("extract", "--cores", "2"), cwd=workspace.run_folder, env=workspace.environment,
            stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True,
        )  # fmt: skip
        logs = workspace.run_folder / "logs/extract_hidden_states"
        while not any("probe:" in log.read_text() for log in logs.rglob("*.log")):
            if run.poll() is not None:
                raise SystemExit(f"snakemake ended with {run.returncode}: {errors.read_text()[-2000:]}")
            time.sleep(0.1)
        seconds = time.monotonic() - start
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    return seconds, errors.read_text()


def run(samples: int = SAMPLES) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    with common.scratch() as folder:
        workspace = tiny_workspace(folder.resolve(), samples, SHARD_SIZE)
        workspace.snakemake("samples")
        os.chdir(workspace.run_folder)
        extract_half(workspace)
        begin = "import pathlib, eagle3lib.verification as v; v.begin(pathlib.Path('results/store'))"
        subprocess.run([sys.executable, "-c", begin], env=workspace.environment, check=True)
        seconds, said = first_request(workspace)
        os.chdir(Path(__file__).parents[1])
    hashed, read = re.search(r"([\d,]+) files, ([\d,]+) bytes read", said).groups()
    figures = f"hashed={hashed.replace(',', '')} bytes_read={read.replace(',', '')}"
    print(f"resume seconds={seconds:.1f} {figures} samples={samples} done={DONE}")


if __name__ == "__main__":
    common.main(run)
