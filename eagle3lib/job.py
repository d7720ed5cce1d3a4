"""What every job needs: a log file, a clear last line for the user, progress, atomic files."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from eagle3lib.errors import UserError


@contextmanager
def job_log(path: str | os.PathLike) -> Iterator[IO[str]]:
    """Run a job with its stdout in the log file at `path`.

    A UserError ends the job with exit code 1 and its one line on stderr; any other
    exception leaves its traceback in the log and names that file on stderr.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    terminal = sys.stderr
    os.environ[JOB] = str(path)  # for the processes that it starts, too: torchrun's
    with open(path, "w", buffering=1, encoding="utf-8") as log:
        sys.stdout = sys.stderr = _Tee(log, terminal)
        try:
            tell(at_once=True)
            yield log
        except UserError as error:
            print(f"error: {error}", file=terminal)
            print(f"error: {error}", file=log)
            raise SystemExit(1) from None
        except OSError as error:
            traceback.print_exc(file=log)
            print(f"error: {describe_os_error(error)} (log: {path})", file=terminal)
            raise SystemExit(1) from None
        except Exception as error:
            traceback.print_exc(file=log)
            print(f"error: {type(error).__name__}: {error} (traceback in {path})", file=terminal)
            raise SystemExit(1) from None
        finally:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
            tell(at_once=True, ended=time.time())
            del os.environ[JOB]


class _Tee:
    """Whole lines go to the log; `\\r` progress goes to the terminal only."""

    def __init__(self, log: IO[str], terminal: IO[str]):
        self.log, self.terminal = log, terminal

    def write(self, text: str) -> int:
        if not text.startswith("\r"):
            self.log.write(text)
        return len(text)

    def flush(self) -> None:
        self.log.flush()

    def isatty(self) -> bool:
        return False


def describe_os_error(error: OSError) -> str:
    where = f"{error.filename}: " if error.filename else ""
    remedy = {
        errno.ENOSPC: "; free space or set storage.limit_bytes",
        errno.EDQUOT: "; raise the quota",
        errno.EROFS: "; the filesystem is read-only (after an error?): look at dmesg, remount it writable",
        errno.EIO: "; the volume fails: look at dmesg",
        errno.ESTALE: "; the volume is no longer there: mount it again",
        errno.ENOTCONN: "; the volume is no longer there: mount it again",
    }.get(error.errno or 0)
    remedy = f"{remedy}, then run the same command again: finished samples are kept" if remedy else ""
    return f"{where}{error.strerror or error}{remedy}"


@contextmanager
def atomic_write(path: str | os.PathLike) -> Iterator[IO[bytes]]:
    """A binary file that appears under `path` whole or not at all (`.part`, fsync, rename, fsync of the folder)."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
        fsync_folder(path.parent)
    except BaseException:
        with suppress(OSError):  # on a dead volume: the first error is the one to tell
            part.unlink(missing_ok=True)
        raise


THREAD_BYTES = 2**20  # hashed in a millisecond; a thread costs a twentieth of that


class HashingFile:
    """Takes the sha256 of what is written through it (the zip writer of torch only appends)."""

    def __init__(self, file: IO[bytes]):
        self.file, self.sha256, self.bytes = file, hashlib.sha256(), 0
        self.error: OSError | None = None  # the first

    def write(self, data: Any) -> int:
        """Both at once where it pays: either lets the other run meanwhile."""
        hashing = threading.Thread(target=self.sha256.update, args=(data,))
        (hashing.start if len(data) > THREAD_BYTES else hashing.run)()
        self.bytes += len(data)
        try:
            return self.file.write(data)
        except OSError as error:
            self.error = self.error or error
            raise
        finally:
            if hashing.ident:
                hashing.join()

    def flush(self) -> None:
        self.file.flush()


def save_tensors(content: Any, file: IO[bytes]) -> HashingFile:
    """`torch.save`, hashed on the way. What fails is the file's own error, not what torch makes of it."""
    import torch

    hashing = HashingFile(file)
    try:
        torch.save(content, hashing)
    except RuntimeError:  # the zip writer: "unexpected pos", on top of the error of a write
        if hashing.error:
            raise hashing.error from None
        raise
    return hashing


def append_line(path: str | os.PathLike, value: Any) -> None:
    """One line of JSON, durable, in one write call: lines of several processes do not mix.

    A line that a full disk tore gets its end first. `read_lines` reads them back.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size and os.pread(descriptor, 1, size - 1) != b"\n"
        line = (("\n" if torn else "") + json.dumps(value) + "\n").encode()
        while line:  # once, unless the disk is filling up: then the next call says why
            line = line[os.write(descriptor, line) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    if not size:
        fsync_folder(os.path.dirname(path) or ".")


def read_lines(path: str | os.PathLike) -> Iterator[Any]:
    """The values of a file of `append_line`, none of a file that is not there.

    A line that is torn or damaged (a crash, a full disk, a flipped bit) is passed over.
    """
    if not os.path.exists(path):
        return
    with open(path, "rb") as file:
        for line in file:
            with suppress(ValueError):
                yield json.loads(line)


def in_order(function: Callable[[Any], Any], inputs: Iterable[Any], threads: int, ahead: int) -> Generator:
    """`function` of each input, in their order, computed by `threads` up to `ahead` inputs before it is asked for.

    The inputs are read in the caller's thread. What reading them raises comes after the results of those before.
    """
    source, waiting = iter(inputs), deque[Future]()
    fault: Exception | None = None
    pool = ThreadPoolExecutor(threads)
    try:
        while True:
            while fault is None and len(waiting) < ahead:
                try:
                    waiting.append(pool.submit(function, next(source)))
                except Exception as error:
                    fault = error
            if not waiting:
                break
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
    if fault is not None and not isinstance(fault, StopIteration):
        raise fault


def in_flight(function: Callable[[Any], Any], items: Iterable[Any], n: int) -> Iterator[tuple[Future, Any]]:
    """(future, item) as they end, `n` running; `items` may have one more after it had none (as regeneration's)."""
    waiting = iter(items)
    running: dict[Future, Any] = {}
    with ThreadPoolExecutor(n) as pool:
        while True:
            while len(running) < n and (item := next(waiting, None)) is not None:
                running[pool.submit(function, item)] = item
            if not running:
                return
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield future, running.pop(future)


def fsync_folder(folder: str | os.PathLike) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: str | os.PathLike) -> Iterator[None]:
    """Wait for the lock at `path`: an orphan of a killed run may still be writing. The kernel frees it with its
    holder, on whatever host; who that is stands in the file, for people to read."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        _lock(descriptor, path)
        with suppress(OSError):  # a full disk has locks all the same
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            print(f"waiting for {path}, held by {holder or 'an earlier version'}")
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise
        raise UserError(
            f"{path}: this filesystem has no locks ({error.strerror}), so two jobs could write the same; mount it with "
            "them (Lustre: -o flock), or keep results/ elsewhere"
        ) from None


def started(pid: int) -> str | None:
    """Start time of a process that lives (clock ticks since boot): a pid alone may be somebody else's by now."""
    try:
        state, *rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if state in "ZX" else rest[18]  # a killed one that nobody waits for is dead too


def write_text(path: str | os.PathLike, text: str) -> None:
    with atomic_write(path) as file:
        file.write(text.encode())


def write_json(path: str | os.PathLike, value: Any, indent: int | None = 2) -> None:
    """`indent` None: on one line, for what programs read (ten times faster)."""
    write_text(path, json.dumps(value, indent=indent, ensure_ascii=False) + "\n")


@contextmanager
def private_files() -> Iterator[None]:
    """Files made within are for their owner only: they hold a key."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def write_parquet(path: str | os.PathLike, table: Any) -> None:
    """A pandas frame, without its index."""
    with atomic_write(path) as file:
        table.to_parquet(file, index=False)


# --- what a job says of itself while it runs ----------------------------------------------------------

REPORTS = Path("results/status/jobs")  # there while a run is watched: see `monitor`
REPORT_SECONDS = 2
JOB = "EAGLE3LIB_JOB"  # environment variable: the log file of the job that this process belongs to

_report: dict[str, Any] = {}
_reported = 0.0


def tell(at_once: bool = False, **values: Any) -> bool:
    """Put values into this job's report, a small JSON file written at most every REPORT_SECONDS. False: nobody reads
    it. Never raises."""
    global _report, _reported
    log = os.environ.get(JOB)
    if log is None or not REPORTS.is_dir():
        return False
    if _report.get("log") != log:
        _report = {"log": log, "host": socket.gethostname(), "pid": os.getpid(), "started": time.time()}
    _report |= {**values, "updated": time.time(), "time": clock.shares()}
    if not at_once and time.monotonic() - _reported < REPORT_SECONDS:
        return True
    _reported = time.monotonic()
    path = REPORTS / f"{log.replace('/', '~')[-200:]}.json"
    part = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    with suppress(OSError):  # no fsync: the next one comes soon
        part.write_text(json.dumps(_report))
        os.replace(part, path)
    return True


class Clock:
    """Where a job's time goes: a moment belongs to the engine while it has a request of ours, else to the writer
    while it has a file of ours, else to the client, that is, to us."""

    ORDER = ("engine", "writer")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way = dict.fromkeys(self.ORDER, 0)
        self.seconds: dict[str, float] = {}
        self.since: float | None = None
        self.rest = "engine"

    @contextmanager
    def during(self, name: str) -> Iterator[None]:
        self._count(name, 1)
        try:
            yield
        finally:
            self._count(name, -1)

    def shares(self) -> dict[str, float]:
        """Of the time since the first of them began. In our own process the rest is the engine's: it is not asked."""
        with self.lock:
            self._pass()
            total = sum(self.seconds.values())
            return {name: round(seconds / total, 4) for name, seconds in self.seconds.items()} if total else {}

    def _count(self, name: str, by: int) -> None:
        with self.lock:
            self._pass()
            self.under_way[name] += by
            if name == "engine":
                self.rest = "client"

    def _pass(self) -> None:
        now = time.monotonic()
        if self.since is not None:
            name = next((name for name in self.ORDER if self.under_way[name]), self.rest)
            self.seconds[name] = self.seconds.get(name, 0.0) + now - self.since
        self.since = now


clock = Clock()


class Progress:
    """How far a job is: in its log, and where a run is watched in its report; else one live line on a terminal, a line
    every half minute elsewhere."""

    def __init__(self, total: int | None, unit: str, label: str):
        self.total, self.unit, self.label = total, unit, label
        self.done = 0
        self.start = self.shown = time.monotonic()
        self.terminal = sys.__stderr__

    def update(self, n: int = 1, **extras: Any) -> None:
        """Count `n` more units; `extras` are shown behind, as `name value`."""
        self.done += n
        now = time.monotonic()
        about: dict[str, Any] = {"label": self.label, "unit": self.unit, "done": self.done, "total": self.total}
        watched = tell(**about, rate=self.done / max(now - self.start, 1e-9), figures=extras)
        live = bool(self.terminal and self.terminal.isatty()) and not watched
        if now - self.shown < (0.5 if live else 30) and self.done != self.total:
            return
        self.shown = now
        line = self._line(now, extras)
        print(line)
        if self.terminal and not watched:
            print(f"\r{line}\x1b[K" if live else line, end="" if live else "\n", file=self.terminal, flush=True)
            if live and self.done == self.total:
                print(file=self.terminal)

    def _line(self, now: float, extras: dict[str, Any]) -> str:
        rate = self.done / max(now - self.start, 1e-9)
        of = f"/{self.total}" if self.total else ""
        left = (
            f", {(self.total - self.done) / rate:.0f} s left" if self.total and rate and self.done < self.total else ""
        )
        shown = "".join(f", {k} {v:.4g}" if isinstance(v, float) else f", {k} {v}" for k, v in extras.items())
        return f"{self.label}: {self.done}{of} {self.unit}, {rate:.1f}/s{left}{shown}"
