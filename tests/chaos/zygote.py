"""Trials by the second: a process that has imported torch and transformers once, and forks for each trial.

`python -m chaos.zygote` reads requests from stdin and answers on stdout, a JSON line each; `Zygote` is its client.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
SECONDS = 120  # a trial that takes longer hangs


@dataclass(frozen=True)
class Fault:
    """What the shim (shim.c) does at call number `at` of these kinds below `folder`."""

    folder: str
    at: int = 0
    action: str = "count"
    value: int = 0  # the signal or the errno
    kinds: tuple[str, ...] = ("open", "write", "fsync", "rename", "link", "unlink", "mkdir", "truncate")

    def environment(self) -> str:
        """For CHAOS_ARM."""
        kinds = sum(KINDS[kind] for kind in self.kinds)
        return f"{kinds},{self.at},{ACTIONS[self.action]},{int(self.value)},{self.folder}"


KINDS = {n: 1 << i for i, n in enumerate(("open", "write", "fsync", "rename", "link", "unlink", "mkdir", "truncate"))}
ACTIONS = {"count": 0, "signal": 1, "fail_once": 2, "fail_on": 3}


@dataclass(frozen=True)
class Ended:
    """How a trial came out; `stopped`: it waits for `Zygote.go_on`."""

    pid: int
    seconds: float
    code: int | None  # as of subprocess: -9 for SIGKILL
    left: list[int]  # processes of its session that have outlived it
    stopped: bool = False

    @property
    def killed(self) -> bool:
        """By a signal: it ended by it, or in order because of it (130)."""
        return self.code not in (None, 0, 1)


class Zygote:
    """The client."""

    def __init__(self, shim: Path | None):
        self.shim = shim
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), str(TESTS.parent)])
        if shim:
            environment["LD_PRELOAD"] = str(shim)
        command = [sys.executable, "-m", "chaos.zygote"]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
        )

    def run(
        self,
        job: str,
        world: Path,
        folder: Path,
        fault: Fault | None = None,
        after: float | None = None,
        number: int = signal.SIGKILL,
        **options: Any,
    ) -> Ended:
        """Run a job; with `after`, send it the signal so many seconds after its start."""
        folder.mkdir(parents=True, exist_ok=True)
        request = {
            "job": job,
            "arguments": {"world": str(world), "folder": str(folder), **options},
            "fault": vars(fault) if fault else None,
            "after": after,
            "number": int(number),
        }
        return self._ask(request)

    def go_on(self, ended: Ended, number: int = signal.SIGCONT) -> Ended:
        """Let a stopped trial go on (or kill it), and wait for its end."""
        return self._ask({"pid": ended.pid, "number": int(number)})

    def _ask(self, request: dict[str, Any]) -> Ended:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, "the zygote has died"
        return Ended(**json.loads(line))

    def close(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


# --- in the zygote -----------------------------------------------------------------------------------


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})  # first: threads of libraries inherit it
    import torch
    from tqdm import tqdm

    # Of multiprocessing it would be one lock for all forks, which a killed one takes with it.
    tqdm.set_lock(threading.RLock())
    tqdm.monitor_interval = 0  # no thread: it would not survive the fork

    from chaos import jobs  # all that is slow to import

    os.environ.pop("LD_PRELOAD", None)  # for this process and its forks
    torch.set_num_threads(1)  # a pool of threads would not survive the fork
    torch.set_num_interop_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.monotonic()
        if request.get("job") == "make_world":
            jobs.make_world(Path(request["arguments"]["world"]))
            pid, code = 0, 0
        elif "pid" in request:
            pid = request["pid"]
            os.kill(pid, request["number"])
            code = _wait(pid)
        else:
            pid = os.fork()
            if not pid:
                _trial(jobs.JOBS, request)
            code = _wait(pid, request["after"], request["number"])
        left = _session(pid) if pid and code is not None else []
        ended = Ended(pid, time.monotonic() - start, code, left, code is None)
        print(json.dumps(vars(ended)), file=answers, flush=True)


def _trial(by_name: dict[str, Any], request: dict[str, Any]) -> None:
    """In the child; does not return."""
    import torch

    code = 1
    try:
        os.setsid()
        # torch makes its pool of threads anew when it is first asked after a fork; a second thread that asks meanwhile
        # finds none ("Invalid thread pool!").
        torch.set_num_threads(1)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        arguments = request["arguments"]
        world, folder = Path(arguments.pop("world")), Path(arguments.pop("folder"))
        errors = os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(errors, 1)
        os.dup2(errors, 2)
        shim = ctypes.CDLL(None)
        if request["fault"]:
            fault = Fault(**request["fault"])
            kinds = sum(KINDS[kind] for kind in fault.kinds)
            shim.chaos_arm(fault.folder.encode(), kinds, ctypes.c_long(fault.at), ACTIONS[fault.action], fault.value)
        by_name[request["job"]](world, folder, **arguments)
        if request["fault"]:
            (folder / "calls").write_text(str(shim.chaos_seen()))
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except KeyboardInterrupt:
        code = 130
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _wait(pid: int, after: float | None = None, number: int = 0) -> int | None:
    """Its exit code, or None when it has stopped; sends the signal on the way."""
    start = time.monotonic()
    while True:
        passed = time.monotonic() - start
        if after is not None and passed >= after:
            os.kill(pid, number)
            after = None
        if passed > SECONDS:
            os.kill(pid, signal.SIGKILL)
        signal.sigtimedwait([signal.SIGCHLD], max(0.0, (after if after is not None else SECONDS + 1) - passed))
        done, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
        if done and os.WIFSTOPPED(status):
            return None
        if done:
            return os.waitstatus_to_exitcode(status)


def _session(leader: int) -> list[int]:
    """The processes of a session (each trial is one)."""
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and os.getsid(int(entry)) == leader:
                found.append(int(entry))
        except ProcessLookupError:
            continue
    return found


if __name__ == "__main__":
    main()
