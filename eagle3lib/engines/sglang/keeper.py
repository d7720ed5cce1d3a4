"""Beside a server, as long as that lives: starts it, and ends it in order when told to or when no client is left.

`python -m eagle3lib.engines.sglang.keeper FOLDER`, with `spec.json` there. A client holds a shared lock on
`clients`; the kernel frees it however the client ends, so nobody has to renew anything. The keeper leads a session of
its own: all that is in it belongs to the server. (A mark in the environment would not do: SGLang's processes rename
themselves, which overwrites it.)
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from eagle3lib import gpus, processes
from eagle3lib.config import GpusConfig
from eagle3lib.errors import UserError
from eagle3lib.job import private_files, write_json
from eagle3lib.leases import Leases


def main() -> None:
    folder = Path(sys.argv[1])
    spec = json.loads((folder / "spec.json").read_text())
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: told.append(got))
    with open(spec["log"], "a", buffering=1, encoding="utf-8") as log, redirect_stdout(log):
        try:
            keep(folder, spec, told)
        except UserError as error:  # no GPUs to be had
            print(f"error: {error}")
            raise SystemExit(1) from None


def keep(folder: Path, spec: dict[str, Any], told: list[int]) -> None:
    """Lease the GPUs, run the server until it ends, nobody asks it any more, or `told` holds a signal."""
    leases = Leases(Path(spec["store"]))
    need, cfg, me = gpus.Need(spec["gpus"], "engine.gpus"), GpusConfig(**spec["gpus_config"]), os.getpid()
    with gpus.lease(need, cfg, leases, "the SGLang server"):
        server = subprocess.Popen(
            spec["command"],
            env={**os.environ, **spec["environment"]},
            stdin=subprocess.DEVNULL,
            stdout=sys.stdout,
            stderr=subprocess.STDOUT,
            preexec_fn=processes.end_with_parent,  # noqa: PLW1509 - no thread runs here
        )
        about = {name: spec[name] for name in ("id", "url", "key", "wanted", "log")}
        with private_files():
            write_json(folder / "server.json", {**about, "keeper": processes.identity(me)})
        asked = time.monotonic()
        while server.poll() is None and not told:
            if _has_clients(folder):
                asked = time.monotonic()
            elif time.monotonic() - asked > spec["idle_seconds"]:
                print(f"keeper: no client for {spec['idle_seconds']:.0f} s")
                break
            time.sleep(0.2)
        print(f"keeper: the server ended with {server.poll()}, signals to us: {told}")
        end(processes.identity(me), server, spec["grace_seconds"])


def _has_clients(folder: Path) -> bool:
    with open(folder / "clients", "a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return True
        return False


def end(keeper: dict[str, Any], server: subprocess.Popen | None, grace_seconds: float) -> None:
    """SIGTERM: the server takes no new requests, ends those it has, and the writer writes what is whole. Then SIGKILL
    to what is still there: a hung scheduler does not answer."""

    def gone() -> bool:
        if server:
            server.poll()  # lest it stays a zombie
        return not processes.session(keeper)

    if server and server.poll() is None:
        server.terminate()
    elif not server:
        processes.send(signal.SIGTERM, processes.session(keeper))
    if not processes.wait_until(gone, grace_seconds):
        processes.send(signal.SIGKILL, processes.session(keeper))
        processes.wait_until(gone, grace_seconds)


if __name__ == "__main__":
    main()
