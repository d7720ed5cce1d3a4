"""A process is known by pid, start time and boot; only that one is stopped, and its group with it."""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from eagle3lib import processes

HEEDS = "import time; print('ready', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + HEEDS
LEAVES_A_CHILD = (
    "import subprocess, sys, time; child = subprocess.Popen([sys.executable, '-c', sys.argv[1]], stdout=sys.stdout);"
    "time.sleep(60)"
)


@pytest.fixture
def start():
    """start(code, *arguments): a process in a group of its own that has said `ready`."""
    started = []

    def begin(code, *arguments):
        command = [sys.executable, "-c", code, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        started.append(process)
        assert process.stdout.readline() == "ready\n"
        return process

    yield begin
    for process in started:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


def in_group(process, pgid):
    try:
        return os.getpgid(process.pid) == pgid and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def test_the_same_number_is_not_the_same_process(start):
    process = start(HEEDS)
    who = processes.identity(process.pid)
    assert processes.alive(who)
    assert not processes.alive(who | {"started": "1"})
    assert not processes.alive(who | {"boot_id": "an earlier one"})
    assert not processes.alive({"pid": process.pid})
    process.kill()
    process.wait()
    assert not processes.alive(who)
    assert not processes.alive({"pid": process.pid, "started": None, "boot_id": processes.boot_id()})


def test_a_zombie_has_ended(start):
    process = start(HEEDS)
    who = processes.identity(process.pid)
    process.kill()
    while processes.alive(who):  # nobody has waited for it
        time.sleep(0.01)
    assert os.path.exists(f"/proc/{process.pid}")
    with pytest.raises(ProcessLookupError):
        processes.identity(process.pid)


def test_one_that_heeds_needs_no_kill(start):
    process = start(HEEDS)
    assert processes.stop_group(processes.identity(process.pid), process.pid, 20) == "SIGTERM"
    assert process.wait() == -signal.SIGTERM


def test_one_that_is_deaf_is_killed(start):
    process = start(DEAF)
    assert processes.stop_group(processes.identity(process.pid), process.pid, 0.3) == "SIGKILL"
    assert process.wait() == -signal.SIGKILL


def test_a_child_that_outlives_the_leader_is_ended_too(start):
    process = start(LEAVES_A_CHILD, DEAF)
    assert processes.stop_group(processes.identity(process.pid), process.pid, 0.3) == "SIGKILL"
    assert process.wait() == -signal.SIGTERM
    assert not [p.pid for p in psutil.process_iter() if in_group(p, process.pid)]


@pytest.mark.parametrize("other", [{"started": "1"}, {"boot_id": "an earlier one"}], ids=["start time", "boot"])
def test_a_stranger_is_not_touched(start, other):
    process = start(HEEDS)
    who = processes.identity(process.pid) | other
    assert processes.stop_group(who, process.pid, 0) == "gone"
    assert process.poll() is None


def test_a_group_that_is_not_the_leaders_is_not_touched(start):
    first, second = start(HEEDS), start(HEEDS)
    assert processes.stop_group(processes.identity(first.pid), second.pid, 0) == "gone"
    assert first.poll() is None and second.poll() is None
