"""The store of hidden states: one verified file per (token ids, target, aux layers, engine, format).

- A state lies at `{store}/hidden_states/{key}/{aa}/{sample_id}.pt`; `key` digests what it depends on,
  `sample_id` is the sha256 of its token ids, `aa` its first two digits.
- A file counts once its line stands in `{aa}/manifest.jsonl`: {"sample_id", "bytes", "sha256", "written"},
  of a trimmed format also "last_rows" ([start, end) pairs, flattened).
- Published in this order: `.part`, fsync, header checked, manifest line fsynced, rename, folder fsynced.
- `synced.json`: all that was written before its time is on the disk, whatever the disk claimed before.
- Everything under `results/{target}/{dataset}/` is a link into the store (`link`: a hard one where the filesystem
  has them): Snakemake may delete its outputs as it likes.
- What `storage.shared_stores` hold is a symbolic link in ours, its line says where to: checked, never changed.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import itertools
import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from eagle3lib.disk import vanished
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import (
    FORMATS,
    StateKey,
    content_fault,
    convertible,
    load_header,
    load_sample,
    missing_rows,
    stretches,
)
from eagle3lib.in_place import reference_fault
from eagle3lib.job import append_line, clock, file_lock, fsync_folder, read_lines, save_tensors, started, write_json
from eagle3lib.lineage import file_sha256

_NUMBERS = itertools.count()
SYNC_SECONDS = 60  # so much work is hashed again after an unclean end
ABANDONED_SECONDS = 3600  # a `.part` of another host that has not grown for so long


class Store:
    """The states of one key. Safe for several processes: names of `.part` files are unique, renames atomic."""

    def __init__(self, root: str | Path, key: StateKey):
        self.root, self.key = Path(root), key
        self.folder = self.root / "hidden_states" / key.short
        self.fsync_seconds = 0.0  # of the sample published last
        self._manifests: dict[str, dict[str, dict]] = {}
        self._marked = time.monotonic()

    def prepare(self) -> None:
        """Make the folder, with what its key stands for. Nothing later does: a vanished volume is not replaced."""
        if not (self.folder / "key.json").exists():
            self._write("key.json", self.key.values())

    def convertible_from(self) -> list[Store]:
        """Stores of the same states in a format that ours can be made from, the most exact first."""
        keys = [replace(self.key, storage_format=name) for name in FORMATS]
        keys = [key for key in keys if convertible(key.storage_format, self.key.storage_format)]
        return open_stores(self.root, [key.short for key in keys])

    def path(self, sample: str) -> Path:
        return self.folder / sample[:2] / f"{sample}.pt"

    def record(self, sample: str) -> dict[str, Any] | None:
        """The manifest's line of a sample, or None."""
        fan = sample[:2]
        if fan not in self._manifests:
            self._manifests[fan] = _read_manifest(self.folder / fan / "manifest.jsonl")
        return self._manifests[fan].get(sample)

    def records(self) -> Iterator[dict[str, Any]]:
        """The lines of all samples whose file is there, by sample_id."""
        for fan in sorted(self.folder.glob("[0-9a-f][0-9a-f]")):
            present = {entry.name for entry in os.scandir(fan)}
            lines = _read_manifest(fan / "manifest.jsonl")
            yield from (lines[sample] for sample in sorted(lines) if f"{sample}.pt" in present)

    # reading

    def find(self, sample: str, full: bool = False) -> dict[str, Any] | None:
        """The record of a sample that is present and passes its check; None when it must be made.

        The check is the quick one (size, header), or with `full` that of every byte. A file that fails is
        moved to quarantine, with the reason.
        """
        path = self.path(sample)
        if not path.exists():
            return None
        record = self.record(sample)
        reason = self.fault(sample, full)
        if reason is not None:
            self.quarantine(path, reason)
            return None
        if record is None:  # published up to its manifest line, or the manifest was lost: hash it, not make it, again
            record = self._append({"sample_id": sample, "bytes": path.stat().st_size, "sha256": file_sha256(path)})
        return record

    def lacks_rows(self, sample: str, reply_bounds: Sequence[int]) -> list[int]:
        """Rows of the last state that a present sample was trimmed of and that this mask asks for."""
        trimmed = self.key.storage_format.endswith("-trimmed")
        return missing_rows(load_sample(self.path(sample)), reply_bounds) if trimmed else []

    def fault(self, sample: str, full: bool = False) -> str | None:
        """What is wrong with a sample that is present, or None. Nothing is loaded that does not fit its record."""
        path, record = self.path(sample), self.record(sample)
        if record is not None:
            size = path.stat().st_size
            if size != record["bytes"]:
                return f"{size} bytes where the manifest says {record['bytes']}"
            if full and file_sha256(path) != record["sha256"]:
                return "its sha256 is not the manifest's"
        # Without a line nobody vouches for the bytes: look at all of them. Another tool's file has no line of ours.
        return self._header_fault(path, sample, full or record is None)

    def _header_fault(self, path: Path, sample: str, content: bool) -> str | None:
        try:
            stored = load_sample(path) if content else load_header(path)
            meta = stored["meta"]
            if "in_place" in meta and (fault := reference_fault(stored)):
                return fault
            wanted = {"sample_id": sample, **self.key.values()}
            wrong = [f"{name} {meta.get(name)!r}, not {v!r}" for name, v in wanted.items() if meta.get(name) != v]
            return "; ".join(wrong) or (content_fault(stored) if content else None)
        except UserError as error:
            return str(error)

    def share(self, sample: str, others: Iterable[Store], bad: Sequence[list]) -> dict[str, Any] | None:
        """Take in a sample that another project's store has, as a symbolic link; None when none has it whole.

        bad (`found_bad`): what is passed over until it has changed.
        """
        for other in others:
            path, record = other.path(sample), other.record(sample)
            if record is None or not path.exists() or _stamp(path) in bad or other.fault(sample):
                continue
            own = self.path(sample)
            if not own.parent.exists():
                self._make_fan(own.parent)
            _replace_by(own, partial(_symlink, path))
            kept: dict[str, Any] = {
                name: record[name] for name in ("sample_id", "bytes", "sha256", "last_rows") if name in record
            }
            return self._append({**kept, "shared": str(path.resolve())})
        return None

    def take(self, sample: str, path: Path) -> dict[str, Any]:
        """Take in a whole file that the store has lost: another name of it, and its line."""
        link(path, self.path(sample))
        return self._append({"sample_id": sample, "bytes": path.stat().st_size, "sha256": file_sha256(path)})

    def found_bad(self) -> list[list]:
        """Files of shared stores that failed a check, as they were then."""
        lines = read_lines(self.root / "quarantine" / self.key.short / "reasons.jsonl")
        return [line["shared"] for line in lines if line.get("shared")]

    # writing

    def part(self, sample: str) -> Path:
        """A name of ours alone for a sample that is to be written; its folder is there."""
        path = self.path(sample)
        if not path.parent.exists():
            self._make_fan(path.parent)
        return path.with_name(f"{sample}.{socket.gethostname()}.{os.getpid()}-{next(_NUMBERS)}.part")

    def publish(self, content: dict[str, Any]) -> dict[str, Any]:
        """Write one sample; return its record. Nothing appears under its name unless it is whole."""
        sample = content["meta"]["sample_id"]
        part = self.part(sample)
        try:
            with clock.during("writer"), open(part, "wb") as raw:
                hashing = save_tensors(content, raw)
                raw.flush()
                start = time.monotonic()
                os.fsync(raw.fileno())
                seconds = time.monotonic() - start
            return self.accept(sample, part, hashing.bytes, hashing.sha256.hexdigest(), seconds)
        finally:
            with contextlib.suppress(OSError):  # on a read-only or dead volume: the first error is the one to tell
                part.unlink(missing_ok=True)

    def accept(self, sample: str, part: Path, n_bytes: int, sha256: str, fsync_seconds: float) -> dict[str, Any]:
        """Publish a `.part` that is written and synced; return its record. Its header only is read.

        Raises OSError when it is not the sample that it should be.
        """
        self.fsync_seconds = fsync_seconds
        if part.stat().st_size != n_bytes:
            raise OSError(f"{part}: {n_bytes} bytes written, {part.stat().st_size} there")
        if reason := self._header_fault(part, sample, content=False):
            raise OSError(f"{part}: written, but read back differently: {reason}")
        record = self._append({"sample_id": sample, "bytes": n_bytes, "sha256": sha256, **self._kept_rows(part)})
        os.replace(part, self.path(sample))
        fsync_folder(part.parent)
        if time.monotonic() - self._marked > SYNC_SECONDS:
            self.mark_synced()
        return record

    def _kept_rows(self, part: Path) -> dict[str, list[int]]:
        """Which rows of the last state a trimmed file has: for who asks of all samples at once (`missing`)."""
        if not self.key.storage_format.endswith("-trimmed"):
            return {}
        return {"last_rows": stretches(load_sample(part)["last_rows"].tolist())}

    def _make_fan(self, fan: Path) -> None:
        try:
            fan.mkdir(exist_ok=True)  # its parents are there, or the volume is not
        except FileNotFoundError:
            raise vanished(self.folder) from None
        fsync_folder(self.folder)

    def mark_synced(self) -> None:
        """Have the filesystem write out all it holds, then say until when that is true."""
        self._marked, now = time.monotonic(), time.time()
        sync_filesystem(self.folder)
        self._write("synced.json", {"time": now})

    def _write(self, name: str, value: dict[str, Any]) -> None:
        """Jobs side by side would share its `.part`: one after the other."""
        with file_lock(self.folder / "locks" / f"{name}.lock"):
            write_json(self.folder / name, value)

    def synced(self) -> float:
        """Files written before this time (seconds of the epoch) are on the disk."""
        try:
            return float(json.loads((self.folder / "synced.json").read_text())["time"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0.0

    def remove_parts(self, samples: Sequence[str]) -> None:
        """Remove what a killed writer of these samples left behind (call it under the shard's lock)."""
        for sample in samples:
            for part in self.path(sample).parent.glob(f"{sample}.*.part"):
                if not _being_written(part):
                    part.unlink(missing_ok=True)

    def quarantine(self, path: Path, reason: str) -> None:
        """Set a bad file aside, with the reason, and unlink its names in all datasets: no run takes it for done.

        One of a shared store stays where it is; only our names go.
        """
        folder = self.root / "quarantine" / self.key.short
        folder.mkdir(parents=True, exist_ok=True)
        line: dict[str, Any] = {"file": path.name, "reason": reason, "time": time.time()}
        names = linked_names(self.root.parent, self.key.short, {_identity(path)})
        if path.is_symlink():
            line["shared"] = _stamp(path)
            path.unlink()
        else:
            os.replace(path, folder / path.name)
        for name in names:
            name.unlink()
        append_line(folder / "reasons.jsonl", line)
        print(f"{'no longer linked' if 'shared' in line else 'quarantined'} {path.name}: {reason}")

    def _append(self, record: dict[str, Any]) -> dict[str, Any]:
        record = {**record, "written": round(time.time(), 3)}
        append_line(self.folder / record["sample_id"][:2] / "manifest.jsonl", record)
        self._manifests.setdefault(record["sample_id"][:2], {})[record["sample_id"]] = record
        return record


def open_stores(root: Path, keys: Iterable[str] | None = None) -> list[Store]:
    """The stores under `root`, of all keys or those asked for; a folder that no `key.json` explains is passed over."""
    stores = []
    for record in sorted(root.glob("hidden_states/*/key.json")):
        key = StateKey.of(json.loads(record.read_text()))
        if keys is None or key.short in keys:
            stores.append(Store(root, key))
    return stores


def shared_stores(folders: Iterable[str], key: StateKey) -> list[Store]:
    """`storage.shared_stores`, for the states of one key. Raises UserError for a folder that is none."""
    found = []
    for folder in map(Path, folders):
        if not (folder / "hidden_states").is_dir():
            raise UserError(
                f"config: storage.shared_stores: {folder} has no hidden_states/; give another project's results/store"
            )
        found.append(Store(folder, key))
    return found


def is_held(sample: str, stores: Iterable[Store]) -> bool:
    """Has one of them a file of this sample?"""
    return any(store.path(sample).exists() for store in stores)


def linked_names(results: Path, key: str, files: set[tuple[int, int]]) -> list[Path]:
    """The names that the datasets of `results` give to these files (device, inode) of `key`."""
    found = []
    for folder in results.glob(f"*/*/{key}/hidden_states/*"):
        found += [Path(entry.path) for entry in os.scandir(folder) if entry_identity(entry) in files]
    return found


def entry_identity(entry: os.DirEntry) -> tuple[int, int] | None:
    """The file that a name of a folder stands for, through symbolic links; None where it is gone."""
    try:
        about = entry.stat()
    except FileNotFoundError:
        return None
    return about.st_dev, about.st_ino


def _identity(path: Path) -> tuple[int, int]:
    about = path.stat()
    return about.st_dev, about.st_ino


def _stamp(path: Path) -> list:
    about = path.stat()
    return [str(path.resolve()), about.st_size, about.st_mtime_ns]


def set_aside(name: Path, reason: str) -> bool:
    """Quarantine the file that a dataset's name (`results/…/{key}/hidden_states/{shard}/{slot}.pt`) is a link to.

    A name whose file the store does not know (a copy that broke the link) is only removed. False for other paths.
    """
    if len(name.parts) < 7 or name.parts[-3] != "hidden_states":
        return False
    stores = open_stores(name.parents[5] / "store", [name.parts[-4]])
    if not stores:
        return False
    file = _identity(name)
    for fan in stores[0].folder.glob("[0-9a-f][0-9a-f]"):
        for entry in os.scandir(fan):
            if entry_identity(entry) == file:
                stores[0].quarantine(Path(entry.path), reason)
                return True
    name.unlink()
    return True


def _read_manifest(path: Path) -> dict[str, dict]:
    """Lines by sample; a later one wins, one whose names a flipped bit has changed is passed over."""
    records: dict[str, dict] = {}
    for record in read_lines(path):
        with contextlib.suppress(KeyError, TypeError):
            if isinstance(record["bytes"], int) and isinstance(record["sha256"], str):
                records[record["sample_id"]] = record
    return records


def _being_written(part: Path) -> bool:
    """By another process: a job of another dataset that has the same sample. Of a process of another host nobody here
    can say whether it lives: its file is left alone while it may be growing."""
    host, pid = part.name.removesuffix(".part").partition(".")[2].rpartition(".")[::2]
    if host != socket.gethostname():
        with contextlib.suppress(FileNotFoundError):
            return time.time() - part.stat().st_mtime < ABANDONED_SECONDS
        return False
    writer = int(pid.partition("-")[0])
    return writer != os.getpid() and started(writer) is not None


def sync_filesystem(folder: Path) -> None:
    """syncfs(2): the filesystem of `folder`, not (as sync does) every one of the machine. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if hasattr(libc, "syncfs") and libc.syncfs(descriptor):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)


def link(source: Path, destination: Path) -> None:
    """Make `destination` another name of `source`, replacing what stands there.

    A hard link where the filesystem allows it; a reflink (a copy that shares its blocks) where it is one filesystem but
    refuses (a file of another user under fs.protected_hardlinks, too many links); else a symbolic link.
    """
    source.stat()  # before any folder is made: a vanished volume is not replaced
    destination.parent.mkdir(parents=True, exist_ok=True)
    if destination.exists() and destination.samefile(source):
        return
    if source.is_symlink():  # of a shared store: a link to a link would break with the one in between
        _replace_by(destination, partial(_symlink, source))
        return
    try:
        _replace_by(destination, partial(os.link, source))
    except OSError as error:
        if error.errno not in (errno.EXDEV, errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK):
            raise
        _link_otherwise(source, destination, error)


def _link_otherwise(source: Path, destination: Path, refused: OSError) -> None:
    try:
        if refused.errno == errno.EXDEV:
            raise refused
        _replace_by(destination, partial(_reflink, source))
    except OSError:
        try:
            _replace_by(destination, partial(_symlink, source))
        except OSError as error:
            raise UserError(
                f"{destination}: cannot be a hard link to {source} ({refused.strerror}), nor a reflink, nor a symbolic "
                f"link ({error.strerror}); keep results/ and results/store/ on a filesystem that has links"
            ) from None


def _replace_by(destination: Path, make: Callable[[Path], Any]) -> None:
    part = destination.with_name(destination.name + ".part")
    part.unlink(missing_ok=True)
    try:
        make(part)
        os.replace(part, destination)
    finally:
        with contextlib.suppress(OSError):  # the first error is the one to tell
            part.unlink(missing_ok=True)  # rename(2) leaves it where both names are of one file


def _symlink(source: Path, destination: Path) -> None:
    destination.symlink_to(source.resolve())


FICLONE = 0x40049409


def _reflink(source: Path, destination: Path) -> None:
    with open(source, "rb") as there, open(destination, "xb") as here:
        fcntl.ioctl(here.fileno(), FICLONE, there.fileno())
    about = source.stat()
    os.utime(destination, ns=(about.st_atime_ns, about.st_mtime_ns))
