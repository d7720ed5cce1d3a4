"""The one server of a results folder: found, started, changed to another role, restarted, ended.

Everything lies in `results/engine/`: `lock` (who changes something), `clients` (who uses it), `server.json` (the
handle), `spec.json` (what the keeper was told). Nothing is in /tmp: a run after a reboot finds what is stale.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from eagle3lib import processes
from eagle3lib.config import EngineConfig, GpusConfig
from eagle3lib.engines import http
from eagle3lib.engines.sglang import keeper, launch
from eagle3lib.engines.sglang.launch import Wanted
from eagle3lib.errors import UserError
from eagle3lib.job import file_lock, private_files, write_json

LOG_LINES = 15  # of a failed server, in the error that the user sees

Handle = dict[str, Any]


class Lease:
    """The right of this process to use a server in one role. Ends with the process, or by `close`."""

    def __init__(self, folder: Path, logs: Path, engine: EngineConfig, wanted: Wanted, gpus: GpusConfig | None = None):
        self.folder, self.logs, self.engine, self.wanted = folder.resolve(), logs.resolve(), engine, wanted
        self.gpus = gpus or GpusConfig()
        self.failures = 0  # of servers, since one of our requests ended well
        self.held: IO[str] | None = None
        self.handle = self._attached() if engine.url else self._local()
        self.version = str(get(self.handle, "/server_info")["version"])
        launch.check_version(self.version, engine)

    def close(self) -> None:
        if self.held:
            self.held.close()
            self.held = None

    def alive(self, handle: Handle) -> bool:
        """As far as can be told without asking it."""
        return bool(self.engine.url) or processes.alive(handle["keeper"])

    def worked(self) -> None:
        """A request has ended well."""
        self.failures = 0

    def replace(self, failed: Handle, reason: str) -> None:
        """`failed` does not answer: go on with another server. Raises UserError when it happens too often."""
        if self.engine.url:
            raise UserError(
                f"config: engine.url: the server at {self.engine.url} does not answer ({reason}); start it "
                "again, then run the same command again: finished samples are kept"
            )
        with file_lock(self.folder / "lock"):
            current = read_handle(self.folder)
            if current and current["id"] != failed["id"] and self.alive(current):
                self.handle = current  # another request, or another job, was quicker
                return
            self.failures += 1
            if self.failures > self.engine.restarts:
                raise UserError(
                    f"the SGLang server failed {self.failures} times ({reason}); see {failed['log']}, which ends:\n"
                    f"{tail(Path(failed['log']))}"
                )
            print(f"engine: {reason}; started again ({self.failures} of {self.engine.restarts})")
            if current:
                stop(self.folder, current, grace_seconds=5)
            self.handle = self._start()

    # --- ours ----------------------------------------------------------------------------------------

    def _local(self) -> Handle:
        launch.check_engine(self.engine)
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting = False
        while True:
            with file_lock(self.folder / "lock"):
                current = read_handle(self.folder)
                ours = current is not None and current["wanted"] == self.wanted.values()
                if current is None or ours or self._unused():
                    self._hold()  # first: its keeper may be about to end it
                    if current and ours and _healthy(current):
                        return current
                    if current:  # of a dead one in our role the other clients go on with the next: see `replace`
                        stop(self.folder, current, self.engine.grace_seconds)
                    return self._start()
            # Without the lock: when it dies now, those who use it must be able to replace it.
            if not waiting:
                print(f"engine: waiting for the jobs that use it for {current['wanted']['role']}")
            waiting = True
            time.sleep(1)

    def _hold(self) -> None:
        self.held = open(self.folder / "clients", "a")  # noqa: SIM115 - held as long as we are
        fcntl.flock(self.held, fcntl.LOCK_SH)

    def _unused(self) -> bool:
        """Have all jobs ended that used the server in its role?"""
        with open(self.folder / "clients", "a") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    def _start(self) -> Handle:
        """Under the lock."""
        started, role = time.monotonic(), self.wanted.role
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{role}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.log"
        port, key = self.engine.port or free_port(), secrets.token_urlsafe(24)
        check_port(port)
        launch.write_plugin(self.folder / "plugin")
        (self.folder / "plugin.ready").unlink(missing_ok=True)
        command = launch.server_command(self.engine, self.wanted, port, key)
        spec = {
            "id": secrets.token_hex(8),
            "command": command,
            "environment": launch.server_environment(self.engine, self.wanted, self.folder),
            "url": f"http://127.0.0.1:{port}",
            "key": key,
            "wanted": self.wanted.values(),
            "log": str(log),
            "idle_seconds": self.engine.idle_seconds,
            "grace_seconds": self.engine.grace_seconds,
            "gpus": self.engine.gpus,
            "gpus_config": self.gpus.model_dump(mode="json"),
            "store": str(self.folder.parent / "store"),
        }
        with private_files():
            write_json(self.folder / "spec.json", spec)
        log.write_text(shlex.join(command).replace(key, "…") + "\n")
        root = str(Path(__file__).parents[3])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        process = subprocess.Popen(
            [sys.executable, "-m", "eagle3lib.engines.sglang.keeper", str(self.folder)],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # what it has to say is in the log
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the jobs; the server has no client then
        )
        print(f"engine: starting SGLang for {role}, log {log}")
        handle = self._ready(process, spec)
        print(f"engine: ready after {time.monotonic() - started:.0f} s")
        return handle

    def _ready(self, process: subprocess.Popen, spec: dict[str, Any]) -> Handle:
        log = Path(spec["log"])

        def fail(what: str) -> UserError:
            if handle := read_handle(self.folder):
                stop(self.folder, handle, grace_seconds=5)
            return UserError(f"the SGLang server {what}; its log {log} ends:\n{tail(log)}")

        def up() -> bool:
            if process.poll() is not None:
                raise fail("ended while it started")
            return _healthy(read_handle(self.folder))

        if not processes.wait_until(up, self.engine.start_minutes * 60, every=0.5):
            raise fail(f"was not ready after {self.engine.start_minutes:g} minutes (engine.start_minutes)")
        if self.wanted.role == "extract" and not (self.folder / "plugin.ready").exists():
            raise fail("runs without our plugin: it would hand out no states. Look for 'eagle3lib' in its log")
        handle = read_handle(self.folder)
        assert handle
        return handle

    # --- the user's ----------------------------------------------------------------------------------

    def _attached(self) -> Handle:
        """A server that the user has started: used, never stopped by us."""
        assert self.engine.url
        key = os.environ.get(self.engine.key_variable, "")
        handle = {"id": self.engine.url, "url": self.engine.url.rstrip("/"), "key": key, "log": "(the server's own)"}
        try:
            get(handle, "/server_info")
        except urllib.error.HTTPError as error:
            raise UserError(
                f"config: engine.url: {self.engine.url} answers {error.code} {error.reason}"
                + (
                    f"; put its --api-key into the environment variable {self.engine.key_variable}"
                    if error.code == 401
                    else ""
                )
            ) from None
        except OSError as error:
            raise UserError(
                f"config: engine.url: nothing answers at {self.engine.url} ({error}); start the server that "
                "`python -m eagle3lib engine-command` prints"
            ) from None
        return handle


# --- the handle --------------------------------------------------------------------------------------


def read_handle(folder: Path) -> Handle | None:
    try:
        return json.loads((folder / "server.json").read_text())
    except (OSError, ValueError):
        return None


def running(folder: Path) -> Handle | None:
    """The server that we started and that still lives."""
    handle = read_handle(folder)
    return handle if handle and processes.alive(handle["keeper"]) else None


def release(folder: Path, grace_seconds: float) -> list[str]:
    """End the server, if there is one of ours; what was done, for the record. It is idle: its jobs come before ours."""
    if not folder.exists():
        return []
    with file_lock(folder / "lock"):
        handle = read_handle(folder)
        return stop(folder, handle, grace_seconds) if handle else []


def stop(folder: Path, handle: Handle, grace_seconds: float) -> list[str]:
    """In steps, under the lock: its keeper ends it in order; what is left, of an orphan too, is ended here."""
    steps = []

    def gone() -> bool:
        return not processes.alive(handle["keeper"]) and not processes.session(handle["keeper"])

    if processes.alive(handle["keeper"]):
        steps.append(f"SIGTERM to the keeper, pid {handle['keeper']['pid']}")
        with suppress(ProcessLookupError):
            os.kill(handle["keeper"]["pid"], signal.SIGTERM)
        processes.wait_until(gone, 2 * grace_seconds + 5)
    if left := processes.session(handle["keeper"]):
        steps.append(f"no keeper any more: SIGTERM, then SIGKILL to pids {sorted(p.pid for p in left)}")
        keeper.end(handle["keeper"], None, grace_seconds)
    (folder / "server.json").unlink(missing_ok=True)
    return steps


def _healthy(handle: Handle | None) -> bool:
    if not handle or not processes.alive(handle["keeper"]):
        return False
    try:
        get(handle, "/health")
    except OSError:
        return False
    return True


# --- HTTP --------------------------------------------------------------------------------------------


def get(handle: Handle, path: str, timeout: float = 30) -> Any:
    return _request(handle, path, None, timeout)


def post(handle: Handle, path: str, body: dict[str, Any], timeout: float) -> Any:
    """The JSON that comes back. Raises OSError (urllib's HTTPError with its text as reason)."""
    return _request(handle, path, body, timeout)


def _request(handle: Handle, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
    text = http.ask(handle["url"] + path, body, handle["key"], timeout)
    return json.loads(text) if text else None


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def check_port(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"config: engine.port: {port} cannot be had ({error.strerror}){_holder(port)}; stop that, or set "
                "engine.port: 0 for any free one"
            ) from None


def _holder(port: int) -> str:
    import psutil

    with suppress(psutil.Error):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == "LISTEN" and connection.pid:
                return f", held by pid {connection.pid} ({' '.join(psutil.Process(connection.pid).cmdline())[:80]})"
    return ""


def tail(log: Path, lines: int = LOG_LINES) -> str:
    with suppress(OSError):
        return "\n".join(f"  {line}" for line in log.read_text(errors="replace").splitlines()[-lines:])
    return "  (no log)"
