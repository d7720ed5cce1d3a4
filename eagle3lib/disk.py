"""Room for hidden states: what is to come against what the volume has, before the first byte and while writing."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from pathlib import Path

from eagle3lib.config import StorageConfig
from eagle3lib.errors import UserError

COMMAND_SECONDS = 60  # a hung `ceph df` must not hang the run
ASK_AGAIN_SECONDS = 30  # a free_command costs a request to the storage cluster; between two answers we subtract


class Disk:
    """The volume under `folder` as `storage.*` sees it. Asked again and again by a writer, it stays cheap."""

    def __init__(self, folder: Path, storage: StorageConfig):
        self.folder, self.storage = folder, storage
        self._asked = float("-inf")
        self._answer = 0

    def free(self) -> int:
        """Bytes free: the least of statvfs and `storage.free_command`. Raises UserError when either cannot be had."""
        try:
            here = shutil.disk_usage(self.folder).free
        except FileNotFoundError:
            raise vanished(self.folder) from None
        if self.storage.free_command is None:
            return here
        if time.monotonic() - self._asked >= ASK_AGAIN_SECONDS:
            self._answer, self._asked = ask_free_bytes(self.storage.free_command), time.monotonic()
        return min(here, self._answer)

    def check_room(self, coming: int, under_way: int = 0) -> None:
        """Refuse to write `coming` bytes that would go into the reserve; `under_way`: already let through, and not
        seen by statvfs yet."""
        free = self.free()
        if coming + under_way > free - self.storage.reserve_bytes:
            raise UserError(
                f"no disk: {coming + under_way:,} bytes to be written next, {free:,} free less storage.reserve_bytes "
                f"({self.storage.reserve_bytes:,}) under {self.folder}; free space, then run the same command again: "
                "finished samples are kept"
            )
        self._answer -= coming

    def check_fsync(self, seconds: float) -> None:
        """A volume that takes so long to make a file durable is about to fail, or to hang every process on it."""
        limit = self.storage.max_fsync_seconds
        if seconds > limit:
            raise UserError(
                f"{self.folder}: fsync took {seconds:.0f} s, storage.max_fsync_seconds is {limit:g}: the volume "
                "stalls. The sample is kept; mend the volume or raise the limit, then run the same command again"
            )


def vanished(folder: Path) -> UserError:
    return UserError(
        f"{folder}: gone while it was in use (a volume that is no longer mounted?); mount it, then run the same "
        "command again: finished samples are kept"
    )


def ask_free_bytes(command: str) -> int:
    """What `storage.free_command` prints: one number of bytes. Raises UserError when it does not."""
    try:
        done = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=COMMAND_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        raise UserError(
            f"storage.free_command: no answer within {COMMAND_SECONDS} s from {command!r}; run it by hand, or set it "
            "to null"
        ) from None
    text = done.stdout.strip()
    if done.returncode or not re.fullmatch(r"\d+", text):
        said = (done.stderr.strip() or text)[:200]
        raise UserError(
            f"storage.free_command: {command!r} must print one number, the bytes free; it ended with code "
            f"{done.returncode} and {said!r}"
        )
    return int(text)


def check_plan(plan: dict[str, int], storage: StorageConfig) -> None:
    """Refuse before the first byte when the states to come do not fit; the numbers are in the message.

    plan: {"bytes_to_come", "bytes_stored" (all keys), "bytes_free"}.
    """
    room = plan["bytes_free"] - storage.reserve_bytes
    remedy = "`python -m eagle3lib gc` lists what is no longer used; or lower dataset.max_conversations"
    if plan["bytes_to_come"] > max(room, 0):
        raise UserError(
            f"no disk: {plan['bytes_to_come']:,} bytes of hidden states to come, {plan['bytes_free']:,} free less "
            f"storage.reserve_bytes ({storage.reserve_bytes:,}); free {plan['bytes_to_come'] - room:,} bytes. {remedy}"
        )
    all_bytes = plan["bytes_stored"] + plan["bytes_to_come"]
    if storage.limit_bytes is not None and all_bytes > storage.limit_bytes:
        raise UserError(
            f"no disk: {all_bytes:,} bytes of hidden states in all ({plan['bytes_stored']:,} stored, "
            f"{plan['bytes_to_come']:,} to come), storage.limit_bytes allows {storage.limit_bytes:,}; raise it. "
            + remedy
        )


def table(plan: dict[str, int], storage: StorageConfig) -> str:
    """The plan for the log and the terminal."""
    rows = [
        ("samples", f"{plan['samples']:,}"),
        ("tokens", f"{plan['tokens']:,}"),
        ("all states of this dataset", size(plan["bytes_all"])),
        ("of these to come", f"{size(plan['bytes_to_come'])} ({plan['samples_to_come']:,} samples)"),
        ("stored, all keys", size(plan["bytes_stored"])),
        ("of these under other keys", size(plan["bytes_other_keys"])),
        ("free" + (" (storage.free_command)" if storage.free_command else ""), size(plan["bytes_free"])),
        ("reserve", size(storage.reserve_bytes)),
        *(
            [("doubled by a copy without -H", f"{size(doubled)}; `python -m eagle3lib relink` frees it")]
            if (doubled := plan["bytes_doubled"])
            else []
        ),
        ("limit", "none" if storage.limit_bytes is None else size(storage.limit_bytes)),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def size(count: float) -> str:
    """Bytes for people: exact, and in the unit in which they think of it."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if count >= factor:
            return f"{count:,.0f} B ({count / factor:.2f} {unit})"
    return f"{count:,.0f} B"
