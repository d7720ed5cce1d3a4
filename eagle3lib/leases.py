"""Which process of ours uses which GPUs of this machine: one handle file a lease, under a lock."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import psutil

from eagle3lib import processes
from eagle3lib.job import file_lock, write_json

MARK = "EAGLE3LIB_GPU_LEASES"  # in the environment of whatever a holder starts: the folder of its lease


class Leases:
    """The leases of this machine in a store; another machine on the same volume has a folder of its own."""

    def __init__(self, store: Path):
        self.folder = (store / "gpus" / socket.gethostname()).resolve()

    def lock(self) -> AbstractContextManager[None]:
        """Who looks and takes does both under this lock."""
        return file_lock(self.folder / "lock")

    def living(self) -> list[dict[str, Any]]:
        """Handles whose very process lives: {"pid", "started", "boot_id", "uuids", "purpose"}."""
        return [handle for _, handle in self._read() if processes.alive(handle)]

    def sweep(self) -> None:
        """Remove the handles of processes that are gone, however they ended. Under the lock."""
        for path, handle in self._read():
            if not processes.alive(handle):
                path.unlink(missing_ok=True)

    def add(self, uuids: Sequence[str], purpose: str) -> None:
        """This process takes these devices. Under the lock."""
        handle = {**processes.identity(os.getpid()), "uuids": list(uuids), "purpose": purpose}
        write_json(self.folder / f"{uuids[0]}.json", handle)

    def remove(self, uuids: Sequence[str]) -> None:
        """This process gives back what it took with `add`."""
        (self.folder / f"{uuids[0]}.json").unlink(missing_ok=True)

    def started(self, pid: int) -> bool:
        """Was this process started by one that holds, or held, a lease here? False also where we may not know."""
        try:
            return psutil.Process(pid).environ().get(MARK) == str(self.folder)
        except (psutil.Error, OSError):
            return False

    @contextmanager
    def environment(self, uuids: Sequence[str]) -> Iterator[None]:
        """This process, and what it starts, sees these devices only. Before CUDA starts in it: later has no effect."""
        names = {"CUDA_VISIBLE_DEVICES": ",".join(uuids), MARK: str(self.folder)}
        before = {name: os.environ.get(name) for name in names}
        os.environ.update(names)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value

    def _read(self) -> list[tuple[Path, dict[str, Any]]]:
        found = []
        for path in sorted(self.folder.glob("*.json")):
            try:
                found.append((path, json.loads(path.read_text())))
            except FileNotFoundError:  # given back meanwhile
                continue
        return found
