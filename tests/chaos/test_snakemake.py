"""The whole workflow, interrupted in every way that its users know; the next run goes on.

Its jobs stop themselves (SIGSTOP, by the shim) at a chosen system call; then the signal is sent.
"""

import contextlib
import os
import random
import signal
import subprocess
import time

import psutil
import pytest
from workflow import tiny_workspace

from chaos.tally import Outcome
from chaos.world import finished, pt_files, sha256
from chaos.zygote import Fault
from eagle3lib import ledger

N, K = 12, 4
DEADLINE = 300  # seconds: something hangs


@pytest.fixture(scope="module")
def sharded(tmp_path_factory, times):
    if not times(1, 0):
        pytest.skip("minutes of whole workflows: make chaos (test_durability.py breaks some in make test)")
    workspace = tiny_workspace(tmp_path_factory.mktemp("chaos") / "sharded", N, K)
    workspace.set("storage.max_fsync_seconds", 10_000)  # a stopped job is no slow disk
    workspace.snakemake("samples")
    return workspace


@pytest.fixture(scope="module")
def trained(extracted, tmp_path_factory):
    workspace = extracted.copy(tmp_path_factory.mktemp("chaos") / "trained")
    workspace.snakemake("train")
    return workspace


@pytest.fixture(scope="module")
def extracted(sharded, tmp_path_factory):
    workspace = sharded.copy(tmp_path_factory.mktemp("chaos") / "extracted")
    workspace.snakemake("extract")
    return workspace


def heed_sigint():
    """A shell's background jobs ignore it, and all that they start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Run:
    """`snakemake TARGET`, up to the moment in which one of its jobs has stopped itself."""

    def __init__(self, workspace, shim, target, fault=None):
        environment = workspace.environment
        if fault:
            environment |= {"LD_PRELOAD": str(shim), "CHAOS_ARM": fault.environment()}
        self.log = open(workspace.folder / "snakemake.log", "w+")  # noqa: SIM115 - closed by end()
        self.main = subprocess.Popen(
            workspace.command("--cores", "2", target),
            cwd=workspace.run_folder,
            env=environment,
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            preexec_fn=heed_sigint,  # noqa: PLW1509
        )
        self.workspace = workspace

    def jobs(self):
        try:
            return psutil.Process(self.main.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def stopped_jobs(self):
        """Wait for the first."""
        while self.main.poll() is None:
            jobs = [p for p in self.jobs() if status(p) == psutil.STATUS_STOPPED]
            if jobs:
                return jobs
            time.sleep(0.02)
        raise AssertionError(f"it ended before its jobs stopped\n{self.output()}")

    def output(self):
        self.log.seek(0)
        return self.log.read()

    def end(self):
        limit = time.monotonic() + DEADLINE
        while self.main.poll() is None:
            assert time.monotonic() < limit, self.output()
            let_go_on(self.workspace)
            time.sleep(0.05)
        code = self.main.returncode
        text = self.output()
        self.log.close()
        return code, text


def status(process):
    try:
        return process.status()
    except psutil.NoSuchProcess:
        return None


def processes_of(workspace):
    """All that work on it, orphans included."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.cwd() == str(workspace.run_folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def let_go_on(workspace):
    for process in processes_of(workspace):
        if status(process) == psutil.STATUS_STOPPED:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)


def wait_for_end_of(workspace):
    """Of all its processes: none stays."""
    limit = time.monotonic() + DEADLINE
    while left := processes_of(workspace):
        assert time.monotonic() < limit, f"still running: {left}"
        let_go_on(workspace)
        time.sleep(0.05)


def store_fault(workspace, rng, folder="hidden_states", most=5):
    """The n-th rename below the store: with `hidden_states`, a job has then published some samples."""
    store = workspace.run_folder.resolve() / "results/store" / folder
    return Fault(str(store), rng.randrange(3, most + 1), "signal", signal.SIGSTOP, ("rename",))


def complete(workspace, target, reference, before, outcome):
    """Unlock where it must be, run again; nothing finished is made again, nothing is wrong."""
    done = workspace.snakemake(target, check=False)
    if "--unlock" in done.stdout + done.stderr:
        workspace.snakemake("--unlock")
        done = workspace.snakemake(target)
    assert done.returncode == 0, done.stderr[-4000:]
    now = finished(workspace.run_folder)
    outcome.kept += len(before)
    outcome.lost += sum(now.get(sample) != was for sample, was in before.items())
    outcome.wrong += states(workspace) != states(reference)
    assert len(workspace.states()) == N
    assert not list(workspace.run_folder.rglob("*.part"))
    wait_for_end_of(workspace)


def states(workspace):
    return {path.stem: sha256(path) for path in pt_files(workspace.run_folder)}


WAYS = ["SIGINT to the group", "SIGTERM to the main process", "SIGKILL to the group", "SIGKILL to the main process"]


def strike(run, way):
    name, _, whom = way.partition(" to the ")
    (os.killpg if whom == "group" else os.kill)(run.main.pid, getattr(signal, name))


def broken_off(workspace, shim, target, fault, way, outcome):
    """A run that is struck when its first job has stopped; what was finished then."""
    run = Run(workspace, shim, target, fault)
    run.stopped_jobs()
    before = finished(workspace.run_folder)
    strike(run, way)
    code, text = run.end()
    assert code, text
    wait_for_end_of(workspace)  # orphans end their job
    outcome.trials += 1
    outcome.kills += 1
    return before


@pytest.mark.parametrize("way", WAYS)
def test_extraction(need_shim, shim, sharded, extracted, tmp_path, way):
    rng, outcome = random.Random(way), Outcome(f"snakemake extract: {way}")
    workspace = sharded.copy(tmp_path / "copy")
    before = broken_off(workspace, shim, "extract", store_fault(workspace, rng), way, outcome)
    complete(workspace, "extract", extracted, before, outcome)
    outcome.check()


@pytest.mark.parametrize("way", WAYS)
def test_training(need_shim, shim, extracted, trained, tmp_path, way):
    """Weights equal to the bit; no state is made again."""
    rng, outcome = random.Random(way), Outcome(f"snakemake train: {way}")
    workspace = extracted.copy(tmp_path / "copy")
    before = broken_off(workspace, shim, "train", store_fault(workspace, rng, "drafts", 4), way, outcome)
    complete(workspace, "train", trained, before, outcome)
    weights, reference = (w.result("tiny/talk/*/draft/training/model.safetensors") for w in (workspace, trained))
    outcome.wrong += weights.read_bytes() != reference.read_bytes()
    assert not list(workspace.result("store/drafts").rglob("checkpoints/*"))
    outcome.check()


def test_orphan_that_still_writes_when_the_next_run_starts(need_shim, shim, sharded, tmp_path):
    """Only the main process is killed; `--unlock` and the next run come while a job of the first is in the middle."""
    rng, outcome = random.Random("orphan"), Outcome("snakemake extract: next run beside orphans that still write")
    for number in range(2):
        workspace = sharded.copy(tmp_path / f"{number}")
        run = Run(workspace, shim, "extract", store_fault(workspace, rng))
        orphans = run.stopped_jobs()
        before = finished(workspace.run_folder)
        run.main.kill()
        outcome.trials, outcome.kills = outcome.trials + 1, outcome.kills + 1
        run.main.wait()
        workspace.snakemake("--unlock")
        following = Run(workspace, shim, "extract")
        while following.main.poll() is None and not extracts(following):
            time.sleep(0.02)
        assert any(status(p) == psutil.STATUS_STOPPED for p in orphans), "it was to be in the middle of its work"
        code, text = following.end()
        assert code == 0, text
        wait_for_end_of(workspace)
        now = finished(workspace.run_folder)
        outcome.kept += len(before)
        outcome.lost += sum(now.get(sample) != was for sample, was in before.items())
        entries = ledger.read(workspace.run_folder / "results/store")
        assert sum(entry.samples for entry in entries if entry.kind == "states") == len(now) == N, "computed once each"
        assert not list(workspace.run_folder.rglob("*.part"))
    outcome.check()


def extracts(run):
    """Has its first extraction job begun?"""
    for process in run.jobs():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "extract_hidden_states" in " ".join(process.cmdline()):
                return True
    return False


def test_shard_file_deleted_while_samples_parquet_stands(sharded, extracted, tmp_path):
    """The message names the remedy, the remedy works, nothing is computed again."""
    outcome = Outcome("snakemake extract: shard file deleted")
    workspace = extracted.copy(tmp_path / "copy")
    before = finished(workspace.run_folder)
    workspace.result("tiny/talk/shards/00001.jsonl").unlink()
    workspace.states()["00001/0002.pt"].unlink()
    done = workspace.snakemake("extract", check=False)
    text = done.stdout + done.stderr
    assert done.returncode and "shards/00001.jsonl: lost; delete results/tiny/talk/samples.parquet" in text
    workspace.result("tiny/talk/samples.parquet").unlink()
    outcome.trials += 1
    complete(workspace, "extract", extracted, before, outcome)
    outcome.check()
