"""A process is known by pid, start time and boot; what it started, by its session."""

import contextlib
import os
import signal
import subprocess
import sys
import time

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


def test_session_holds_what_the_leader_started(start):
    process = start(LEAVES_A_CHILD, DEAF)
    who = processes.identity(process.pid)
    (child,) = processes.session(who)
    assert child.ppid() == process.pid
    process.kill()
    process.wait()
    assert [p.pid for p in processes.session(who)] == [child.pid]
    processes.send(signal.SIGKILL, processes.session(who))
    assert processes.wait_until(lambda: not processes.session(who), 20)


@pytest.mark.parametrize("other", [{"started": "1"}, {"boot_id": "an earlier one"}], ids=["start time", "boot"])
def test_session_of_a_stranger_is_none_of_ours(start, other):
    process = start(LEAVES_A_CHILD, DEAF)
    assert processes.session(processes.identity(process.pid) | other) == []


def test_a_child_ends_with_its_parent():
    code = (
        "import subprocess, sys, time; from eagle3lib import processes; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], "
        "preexec_fn=processes.end_with_parent); print(child.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    child = processes.identity(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert processes.wait_until(lambda: not processes.alive(child), 20)
