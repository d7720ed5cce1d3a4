"""`--chaos=full`: break everything as often as `make chaos` does; otherwise a seeded few of each kind."""

import os
import shutil
import tempfile
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
