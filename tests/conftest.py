"""`--chaos=full`: break everything as often as `make chaos` does; otherwise a seeded few of each kind."""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from nvml_stub import Nvml
from workflow import TINY_SAMPLES, TINY_SHARD, tiny_workspace


def pytest_addoption(parser):
    parser.addoption("--chaos", choices=("short", "full"), default="short", help="how often tests/chaos breaks things")


def pytest_configure(config):
    if is_main(config) and config.getoption("--chaos") == "full":  # the workers of xdist write into the same file
        os.environ["CHAOS_TALLY"] = str(Path(tempfile.mkdtemp(prefix="chaos-")) / "tally.jsonl")


def pytest_unconfigure(config):
    """After pytest's own last word: what was broken, and what came out."""
    if is_main(config) and config.getoption("--chaos") == "full":
        from chaos import tally

        print(f"\n{tally.table()}\n\n{tally.last_line()}")
        shutil.rmtree(Path(os.environ.pop("CHAOS_TALLY")).parent)


def is_main(config):
    return not hasattr(config, "workerinput")


@pytest.fixture(scope="session")
def times(request):
    """times(200, 4): 200 trials of `make chaos`, 4 of `make test`."""
    full = request.config.getoption("--chaos") == "full"
    return lambda many, few: many if full else few


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """A whole run on a random target, made once; each test changes a copy."""
    workspace = tiny_workspace(tmp_path_factory.mktemp("workspace") / "first", TINY_SAMPLES, TINY_SHARD)
    workspace.snakemake()
    return workspace


@pytest.fixture
def workspace(finished, tmp_path):
    return finished.copy(tmp_path / "copy")


@pytest.fixture(scope="session")
def nvml_machine(tmp_path_factory):
    machine = Nvml(tmp_path_factory.mktemp("nvml"))
    yield machine
    machine.process.kill()
    machine.process.communicate()


@pytest.fixture
def nvml(nvml_machine, tmp_path):
    """A machine whose NVML says what the test tells it to, and the folder of a run."""
    nvml_machine.folder = tmp_path
    nvml_machine.say([])
    return nvml_machine


@pytest.fixture
def s3(tmp_path, monkeypatch):
    """A server that speaks S3, and the folder where it keeps the objects of s3://bucket."""
    pytest.importorskip("obstore")
    folder, port = tmp_path / "objects", free_port()
    (folder / "bucket").mkdir(parents=True)
    command = [sys.executable, "-m", "localbucket", "--port", str(port), str(folder)]
    with open(tmp_path / "server.log", "w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    settings = {"ENDPOINT_URL": f"http://127.0.0.1:{port}", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}
    for name, value in {**settings, "REGION": "us-east-1", "ALLOW_HTTP": "true"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    try:
        while server.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
                break
            time.sleep(0.05)
        assert server.poll() is None, (tmp_path / "server.log").read_text()
        yield folder / "bucket"
    finally:
        server.kill()
        server.wait()


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
