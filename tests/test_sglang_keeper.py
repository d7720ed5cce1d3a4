"""The process beside a server: leases, idleness, ending in steps. The server here is any process: real ones are in
tests/engines."""

import fcntl
import json
import os
import signal
import subprocess
import sys

import pytest

from eagle3lib import processes
from eagle3lib.engines.sglang import lease

SLEEPS = "import os, time; print('sees', os.environ.get('CUDA_VISIBLE_DEVICES'), flush=True); time.sleep(600)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEPS


@pytest.fixture
def start(tmp_path):
    """start(code, …): (keeper, folder, log) of a server; `held` by a client until the test ends, or not."""
    started = []

    def begin(code, held=True, environment=None, **changes):
        folder = tmp_path / "engine"
        folder.mkdir()
        clients = open(folder / "clients", "a")  # noqa: SIM115 - held
        if held:
            fcntl.flock(clients, fcntl.LOCK_SH)
        log = tmp_path / "server.log"
        spec = {
            "id": "1", "command": [sys.executable, "-c", code], "environment": {}, "url": "", "key": "", "wanted": {},
            "log": str(log), "idle_seconds": 0.5, "grace_seconds": 1, "gpus": 0, "gpus_config": {"wait_seconds": 0},
            "store": str(tmp_path / "store"), **changes,
        }  # fmt: skip
        (folder / "spec.json").write_text(json.dumps(spec))
        command = [sys.executable, "-m", "eagle3lib.engines.sglang.keeper", str(folder)]
        keeper = subprocess.Popen(command, env=environment or os.environ, start_new_session=True)
        started.append((keeper, clients))
        processes.wait_until(lambda: keeper.poll() is not None or (log.exists() and "sees" in log.read_text()), 30)
        return keeper, folder, log

    yield begin
    for keeper, clients in started:
        keeper.kill()
        keeper.wait()
        clients.close()


def test_a_server_without_clients_ends(start):
    keeper, folder, log = start(SLEEPS, held=False)
    assert keeper.wait(30) == 0
    assert "keeper: no client for" in log.read_text()
    assert lease.running(folder) is None


@pytest.mark.parametrize("code", [SLEEPS, DEAF], ids=["heeds", "deaf"])
def test_a_server_with_a_client_lives_until_it_is_told(start, code):
    keeper, folder, log = start(code)
    handle = lease.running(folder)
    assert len(processes.session(handle["keeper"])) == 1
    assert "no client" not in log.read_text()
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0
    assert not processes.session(handle["keeper"])


def test_a_killed_keeper_leaves_nothing_that_stop_does_not_end(start):
    keeper, folder, _ = start(DEAF)
    handle = lease.running(folder)
    keeper.kill()
    keeper.wait()
    assert len(processes.session(handle["keeper"])) == 1  # deaf to the SIGTERM that its parent's death sends
    (step,) = lease.stop(folder, handle, grace_seconds=1)
    assert "SIGKILL" in step and not processes.session(handle["keeper"])
    assert not (folder / "server.json").exists()


def test_a_server_has_leased_gpus_and_sees_no_others(start, nvml, tmp_path):
    nvml.say([{}, {"processes": [(os.getpid(), 900)], "used": 900}, {}])
    keeper, _, log = start(SLEEPS, environment=nvml.environment, gpus=2)
    assert "sees GPU-0,GPU-2" in log.read_text()
    (leased,) = (tmp_path / "store/gpus").glob("*/GPU-0.json")
    assert json.loads(leased.read_text())["pid"] == keeper.pid
    keeper.send_signal(signal.SIGTERM)
    assert keeper.wait(30) == 0 and not leased.exists()


def test_a_stranger_on_the_gpus_is_named_before_anything_is_loaded(start, nvml, tmp_path):
    nvml.say([{"processes": [(os.getpid(), 900)], "used": 900}])
    keeper, folder, log = start(SLEEPS, environment=nvml.environment, gpus=1)
    assert keeper.wait(30) == 1
    assert "error: engine.gpus: 0 of 1 GPUs are free, 1 needed" in log.read_text()
    assert f"pid {os.getpid()} (" in log.read_text() and lease.read_handle(folder) is None
