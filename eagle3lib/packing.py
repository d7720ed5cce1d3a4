"""Results in another place, as tar files: `pack` writes them, `unpack` makes the same results of them elsewhere.

    DEST/states/{target}/{dataset}/{key}/{shard}.tar    the states of a shard, each file once
    DEST/store/{key}/{aa}.tar                           states that no dataset links
    DEST/drafts/{digest}.tar, rest.tar                  drafts; all else, Snakemake's records and the logs included
    DEST/….json                                         a tar's manifest: its sha256; path, bytes, sha256 and mtime of
                                                        each file; further names (hard links) of files
    DEST/pack.json                                      written last: which manifests belong to it, what it needs beside

A tar counts once its manifest stands, the whole once `pack.json` stands: either command run again goes on where it
ended. mtimes are kept to the nanosecond, as Snakemake looks at them; owners are not.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tarfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

from eagle3lib import records, remote, verification
from eagle3lib.errors import UserError
from eagle3lib.job import HashingFile, Progress, atomic_write, file_lock, fsync_folder
from eagle3lib.lineage import file_sha256
from eagle3lib.plan import RESULTS, STORE
from eagle3lib.store import link, open_stores, sync_filesystem

VERSION = 1
INDEX = "pack.json"
LOGS = Path("logs")
METADATA = Path(".snakemake/metadata")
BLOCK = 4 << 20
UNPACKING = ".unpacking"
# What belongs to a process or a host, or is half-written.
LEFT_BEHIND = re.compile(
    r"results/(engine|store/(gpus|fingerprints|session\.json))(/|$)|logs/engine(/|$)|/locks/|/lock$|\.lock$|\.part$"
    rf"|{re.escape(UNPACKING)}$"
)
SHARD = re.compile(r"results/([^/]+/[^/]+/[0-9a-f]{12})/hidden_states/([^/]+)/[^/]+")
STORED = re.compile(r"results/store/hidden_states/([0-9a-f]{12})/([0-9a-f]{2})/[^/]+\.pt")
DRAFT = re.compile(r"results/store/drafts/([^/]+)/.+")


@dataclass(frozen=True)
class File:
    """A file of a tar, by its path from the folder of the results; sha256 is empty until it has been read."""

    path: str
    bytes: int
    mtime_ns: int
    sha256: str = ""


@dataclass
class Bundle:
    """What one tar holds: files, and further names of files of this tar or another one."""

    name: str
    files: list[File] = field(default_factory=list)
    links: list[tuple[str, str]] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    def same_as(self, manifest: dict[str, Any]) -> bool:
        """Was this manifest written for the files as they are now?"""
        then = [(f["path"], f["bytes"], f["mtime_ns"]) for f in manifest["files"]]
        return then == [(f.path, f.bytes, f.mtime_ns) for f in self.files] and self.links == [
            tuple(one) for one in manifest["links"]
        ]


# --- what is to travel --------------------------------------------------------------------------------


def bundles(root: Path) -> list[Bundle]:
    """All that travels of the results in `root`: every file once, whatever its names."""
    names: dict[tuple[int, int], list[str]] = defaultdict(list)
    about: dict[tuple[int, int], os.stat_result] = {}
    for path in _walk(root):
        stat = (root / path).stat()  # of what a symbolic link points to: elsewhere it would point to nothing
        identity = (stat.st_dev, stat.st_ino)
        names[identity].append(path)
        about[identity] = stat
    found: dict[str, Bundle] = {}
    for identity, these in names.items():
        these.sort(key=lambda name: (not name.startswith("results/store/"), name))
        file = File(these[0], about[identity].st_size, about[identity].st_mtime_ns)
        name = min(map(_bundle_of, these), key=lambda name: (not name.startswith("states/"), name))
        bundle = found.setdefault(name, Bundle(name))
        bundle.files.append(file)
        bundle.links += [(other, file.path) for other in these[1:]]
    for bundle in found.values():
        bundle.files.sort(key=lambda file: file.path)
        bundle.links.sort()
    return [found[name] for name in sorted(found)]


def _walk(root: Path) -> Iterator[str]:
    for top in (RESULTS, LOGS):
        for base, _, files in os.walk(root / top, followlinks=True):
            folder = Path(base).relative_to(root).as_posix()
            for name in files:
                if not LEFT_BEHIND.search(path := f"{folder}/{name}") and os.path.exists(root / path):
                    yield path


def _bundle_of(path: str) -> str:
    if found := SHARD.fullmatch(path):
        return f"states/{found[1]}/{found[2]}"
    if found := STORED.fullmatch(path):
        return f"store/{found[1]}/{found[2]}"
    if found := DRAFT.fullmatch(path):
        return f"drafts/{found[1]}"
    return "rest"


def needs(root: Path) -> list[str]:
    """What the results were made from that does not travel with them: the user's own inputs, targets elsewhere."""
    found = set()
    for base, _, names in os.walk(root / STORE / "records"):
        for name in names:
            with suppress(OSError, ValueError, AttributeError):
                found |= set(json.loads(Path(base, name).read_text()).get("input") or [])
    for target in sorted((root / RESULTS / "targets").glob("*/target.json")):
        with suppress(OSError, ValueError, KeyError):
            found.add(json.loads(target.read_text())["path"])
    for lines in (root / RESULTS).glob("*/*/imported.jsonl"):
        with open(lines, encoding="utf-8") as file:
            found.add(str(Path(json.loads(file.readline())["file"]).parent))  # of another tool: its states stay there
    return sorted(path for path in found if not path.startswith(f"{RESULTS}/"))


# --- pack ---------------------------------------------------------------------------------------------


def pack(root: Path, destination: str, jobs: int, say: Callable[[str], None], read_back: bool = False) -> None:
    """Write the results in `root` to `destination`, a folder or a URL that fsspec knows (s3://bucket/prefix).

    read_back: read every tar there again. Raises UserError: a run is at work, no room, a state that is not what the
    store's manifest says (nothing of it is packed), a destination that fails.
    """
    _refuse_while_running(root)
    place = _place(destination)
    if (root / METADATA).exists():
        records.keep(root / METADATA, root / STORE / "records")
    todo = bundles(root)
    if not todo:
        raise UserError(f"{(root / RESULTS).absolute()}: nothing to pack; run it in the folder of the results")
    known = _known_sha256(root)
    manifests = {one.name: _read_json(place, f"{one.name}.json") for one in todo}
    missing = [one for one in todo if not _holds(manifests[one.name], one)]
    _check_room(place.free(), sum(one.bytes for one in missing), destination)

    def write(bundle: Bundle, stop: threading.Event) -> None:
        manifests[bundle.name] = _write_bundle(root, place, bundle, known, stop)

    _in_parallel(write, missing, jobs, "pack")
    if read_back:
        _in_parallel(lambda one, stop: _read_back(place, one.name, manifests[one.name], stop), todo, jobs, "read back")
    index = {
        "version": VERSION,
        "created": time.time(),
        "bundles": {name: _digest(manifest) for name, manifest in manifests.items()},
        "files": sum(len(one.files) for one in todo),
        "bytes": sum(one.bytes for one in todo),
        "needs": needs(root),
    }
    place.write_bytes(INDEX, _as_json(index))
    say(
        f"{len(todo):,} tars, {index['files']:,} files, {index['bytes']:,} bytes in {destination}; "
        f"{len(todo) - len(missing):,} of the tars were there"
    )
    for path in needs(root):
        say(f"not packed, to be brought along: {path}")


def _holds(manifest: Any, bundle: Bundle) -> bool:
    return isinstance(manifest, dict) and manifest.get("version") == VERSION and bundle.same_as(manifest)


def _write_bundle(
    root: Path, place: Place, bundle: Bundle, known: dict[str, str], stop: threading.Event
) -> dict[str, Any]:
    """The tar, then its manifest."""
    files = []
    with place.write(f"{bundle.name}.tar") as raw:
        hashing = HashingFile(raw)
        with tarfile.open(fileobj=hashing, mode="w|", format=tarfile.PAX_FORMAT, bufsize=BLOCK) as tar:  # type: ignore[call-overload]
            for file in bundle.files:
                files.append(_add(tar, root, file, known.get(file.path), stop))
            for name, path in bundle.links:
                member = tarfile.TarInfo(name)
                member.type, member.linkname = tarfile.LNKTYPE, path
                tar.addfile(member)
    manifest = {
        "version": VERSION,
        "tar": {"bytes": hashing.bytes, "sha256": hashing.sha256.hexdigest()},
        "files": [asdict(file) for file in files],
        "links": bundle.links,
    }
    place.write_bytes(f"{bundle.name}.json", _as_json(manifest))
    return manifest


def _add(tar: tarfile.TarFile, root: Path, file: File, expected: str | None, stop: threading.Event) -> File:
    member = tarfile.TarInfo(file.path)
    member.size, member.mtime, member.mode = file.bytes, file.mtime_ns // 10**9, 0o644
    with open(root / file.path, "rb") as raw:
        reader = _Reader(raw, stop)
        try:
            tar.addfile(member, reader)
        except OSError as error:
            if reader.bytes < file.bytes and error.errno is None:
                raise UserError(
                    f"{file.path}: became shorter while it was packed; run the same command again"
                ) from None
            raise
    sha256 = reader.sha256.hexdigest()
    if expected not in (None, sha256):
        raise UserError(
            f"{file.path}: its sha256 is not the store's; `python -m eagle3lib verify` sets it aside, `snakemake "
            "extract` makes it again"
        )
    return File(file.path, file.bytes, file.mtime_ns, sha256)


def _known_sha256(root: Path) -> dict[str, str]:
    """What each state must be, by the store's manifests."""
    known = {}
    for store in open_stores(root / STORE):
        for record in store.records():
            known[store.path(record["sample_id"]).relative_to(root).as_posix()] = record["sha256"]
    return known


def _read_back(place: Place, name: str, manifest: dict[str, Any], stop: threading.Event) -> None:
    with place.open(f"{name}.tar") as raw:
        reader = _Reader(raw, stop)
        reader.drain()
    if reader.sha256.hexdigest() != manifest["tar"]["sha256"]:
        raise UserError(_damaged(place, name, "read back, it is not what was written"))


# --- unpack -------------------------------------------------------------------------------------------


def unpack(source: str, root: Path, jobs: int, say: Callable[[str], None]) -> None:
    """Make the results that were packed to `source` in `root`. What is there already, and the same, is kept.

    Raises UserError: not a finished pack, no room, another file in the way (nothing is overwritten), a damaged tar
    (the others are unpacked all the same).
    """
    place = _place(source)
    index = _read_json(place, INDEX)
    if not isinstance(index, dict) or "bundles" not in index:
        raise UserError(f"{source}: no finished pack ({INDEX} is missing); run `python -m eagle3lib pack` to its end")
    if index["version"] != VERSION:
        raise UserError(f"{source}: packed by version {index['version']}, this release reads {VERSION}")
    _refuse_while_running(root)
    (root / STORE).mkdir(parents=True, exist_ok=True)
    with file_lock(root / STORE / "unpack.lock"):
        bundles, sha256 = [], {}
        for name, digest in sorted(index["bundles"].items()):
            bundle, sha256[name] = _read_bundle(place, name, digest)
            bundles.append(bundle)
        coming = {one.name: [file for file in one.files if not _is_there(root, file)] for one in bundles}
        _check_room(
            shutil.disk_usage(root).free, sum(file.bytes for files in coming.values() for file in files), str(root)
        )

        def extract(bundle: Bundle, stop: threading.Event) -> None:
            wanted = {file.path: file for file in coming[bundle.name]}
            if wanted:
                _extract(root, place, bundle, wanted, sha256[bundle.name], stop)

        try:
            _in_parallel(extract, bundles, jobs, "unpack")
        finally:
            for name, path in (one for bundle in bundles for one in bundle.links):
                if (root / path).exists():
                    link(root / path, root / name)
            sync_filesystem(root)
    there = sum(len(one.files) for one in bundles) - sum(map(len, coming.values()))
    say(f"{index['files']:,} files, {index['bytes']:,} bytes from {source}; {there:,} of the files were there")
    for path in index["needs"]:
        if not os.path.exists(os.path.join(root, path)):
            say(f"not here: {path}; bring it to the same path, or name its new one in the configuration")


def _read_bundle(place: Place, name: str, digest: str) -> tuple[Bundle, str]:
    """What its manifest says that it holds, and its tar's sha256."""
    manifest = _read_json(place, f"{name}.json")
    if not isinstance(manifest, dict) or _digest(manifest) != digest:
        raise UserError(f"{place}/{name}.json: missing or damaged; run `python -m eagle3lib pack` again to mend it")
    bundle = Bundle(name, [File(**file) for file in manifest["files"]], [tuple(one) for one in manifest["links"]])
    for path in [*(file.path for file in bundle.files), *(end for one in bundle.links for end in one)]:
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or pure.parts[0] not in (str(RESULTS), str(LOGS)):
            raise UserError(f"{place}/{name}.json: {path!r} does not lie under {RESULTS}/ or {LOGS}/; not unpacked")
    return bundle, manifest["tar"]["sha256"]


def _is_there(root: Path, file: File) -> bool:
    """Whole already? An unpacked file gets its mtime when it has been checked, so one that has it was."""
    path = root / file.path
    try:
        about = path.stat()
    except FileNotFoundError:
        return False
    if about.st_size == file.bytes and about.st_mtime_ns == file.mtime_ns:
        return True
    if about.st_size == file.bytes and file_sha256(path) == file.sha256:
        return True
    raise UserError(f"{path}: in the way, it differs from the packed one; unpack into a folder without it")


def _extract(
    root: Path, place: Place, bundle: Bundle, wanted: dict[str, File], sha256: str, stop: threading.Event
) -> None:
    """Write the wanted files of a tar beside their names; all checked and synced, they get them."""
    parts: dict[Path, Path] = {}
    try:
        with place.open(f"{bundle.name}.tar") as raw:
            whole = _Reader(raw, stop)
            try:
                with tarfile.open(fileobj=whole, mode="r|", bufsize=BLOCK) as tar:  # type: ignore[call-overload]
                    for member in tar:
                        if member.isreg() and (file := wanted.get(member.name)):
                            part = _write_part(root, file, tar.extractfile(member), bundle, place)
                            parts[part] = root / file.path
            except tarfile.TarError as error:
                raise UserError(_damaged(place, bundle.name, str(error))) from None
            whole.drain()
        if whole.sha256.hexdigest() != sha256 or len(parts) != len(wanted):
            raise UserError(_damaged(place, bundle.name, "its sha256 is not its manifest's"))
        sync_filesystem(root)
        for part, path in parts.items():
            os.replace(part, path)
        for folder in {path.parent for path in parts.values()}:
            fsync_folder(folder)
    except BaseException:
        for part in parts:
            with suppress(OSError):
                part.unlink(missing_ok=True)
        raise


def _write_part(root: Path, file: File, content: IO[bytes] | None, bundle: Bundle, place: Place) -> Path:
    path = root / file.path
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + UNPACKING)
    try:
        with open(part, "wb") as out:
            hashing = HashingFile(out)
            shutil.copyfileobj(content or io.BytesIO(), hashing, BLOCK)  # type: ignore[misc]
        if (hashing.bytes, hashing.sha256.hexdigest()) != (file.bytes, file.sha256):
            raise UserError(_damaged(place, bundle.name, f"{file.path} in it is not what was packed"))
        os.utime(part, ns=(file.mtime_ns, file.mtime_ns))
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    return part


def _damaged(place: Place, name: str, what: str) -> str:
    return (
        f"{place}/{name}.tar: damaged: {what}; copy it again from where it was packed, or delete {name}.json there and "
        "run `python -m eagle3lib pack` again"
    )


# --- both ---------------------------------------------------------------------------------------------


def _in_parallel(
    work: Callable[[Bundle, threading.Event], None], bundles: Sequence[Bundle], jobs: int, label: str
) -> None:
    """`work` on all; a fault of one does not stop the others, that of a disk or a network does. Ctrl-C stops all."""
    stop, faults = threading.Event(), list[str]()
    progress = Progress(sum(one.bytes for one in bundles), "bytes", label)
    pool = ThreadPoolExecutor(max(1, jobs))
    try:
        running = {pool.submit(work, one, stop): one.bytes for one in bundles}
        for done in as_completed(running):
            try:
                done.result()
                progress.update(running[done])
            except UserError as error:
                faults.append(str(error))
            except _Stopped:
                pass
            except Exception as error:
                if not stop.is_set():
                    faults.append(f"{_reason(error)}; mend that, then run the same command again: it goes on")
                stop.set()
    except KeyboardInterrupt:
        stop.set()
        faults.append("interrupted: finished tars are kept, the same command goes on")
    finally:
        pool.shutdown(wait=True, cancel_futures=stop.is_set())
    if faults:
        raise UserError("\n".join(faults))


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class _Stopped(Exception):
    """The work was given up: Ctrl-C, or another part of it failed."""


class _Reader:
    """A file that takes the sha256 of what is read, and ends when it shall stop."""

    def __init__(self, raw: IO[bytes], stop: threading.Event):
        self.raw, self.stop = raw, stop
        self.sha256, self.bytes = hashlib.sha256(), 0

    def read(self, size: int = -1) -> bytes:
        if self.stop.is_set():
            raise _Stopped
        data = self.raw.read(size)
        self.sha256.update(data)
        self.bytes += len(data)
        return data

    def drain(self) -> None:
        while self.read(BLOCK):
            pass


def _refuse_while_running(root: Path) -> None:
    store = root / STORE
    if (store / "session.json").exists() and not verification.ended_uncleanly(store):
        raise UserError(f"{store / 'session.json'}: a run is at work in this folder; wait for its end, or stop it")


def _check_room(free: int | None, coming: int, where: str) -> None:
    if free is not None and coming > free:
        raise UserError(f"{where}: no disk: {coming:,} bytes to come, {free:,} free; nothing was written")


def _digest(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(_as_json(manifest)).hexdigest()


def _as_json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, indent=1).encode() + b"\n"


def _read_json(place: Place, name: str) -> Any:
    data = place.read_bytes(name)
    with suppress(ValueError):
        return json.loads(data) if data else None
    return None


# --- places -------------------------------------------------------------------------------------------


class Place(Protocol):
    """Where tars lie. A file is there whole or not at all."""

    def write(self, name: str) -> Any:
        """A context whose file appears under `name` at its end, unless it fails."""
        ...

    def open(self, name: str) -> IO[bytes]: ...

    def read_bytes(self, name: str) -> bytes | None: ...

    def write_bytes(self, name: str, data: bytes) -> None: ...

    def free(self) -> int | None:
        """Bytes free there, where that can be known."""
        ...


def _place(where: str) -> Place:
    return _Remote(where) if "://" in where else _Folder(Path(where))


class _Folder:
    def __init__(self, folder: Path):
        self.folder = folder

    def __str__(self) -> str:
        return str(self.folder)

    def write(self, name: str) -> Any:
        return atomic_write(self.folder / name)

    def open(self, name: str) -> IO[bytes]:
        return open(self.folder / name, "rb")

    def read_bytes(self, name: str) -> bytes | None:
        try:
            return (self.folder / name).read_bytes()
        except FileNotFoundError:
            return None

    def write_bytes(self, name: str, data: bytes) -> None:
        with self.write(name) as file:
            file.write(data)

    def free(self) -> int | None:
        there = next(folder for folder in (self.folder.absolute(), *self.folder.absolute().parents) if folder.exists())
        return shutil.disk_usage(there).free


class _Remote:
    """An object store through fsspec: an object appears when its last part has been sent."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        try:
            self.files, self.root = remote.file_system(self.url)
        except ImportError as error:
            remedy = "`pip install eagle3lib[s3]`" if url.startswith("s3://") else str(error)
            raise UserError(f"{url}: a package is missing: {remedy}") from None
        except ValueError as error:
            raise UserError(f"{url}: {error}; give a folder, or a URL that fsspec knows (s3://bucket/prefix)") from None

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def write(self, name: str) -> Iterator[IO[bytes]]:
        file = self.files.open(f"{self.root}/{name}", "wb")
        try:
            yield file
        except BaseException:
            file.closed = True  # closing it would send what there is as the whole
            raise
        file.close()

    def open(self, name: str) -> IO[bytes]:
        return self.files.open(f"{self.root}/{name}", "rb")

    def read_bytes(self, name: str) -> bytes | None:
        try:
            return self.files.cat_file(f"{self.root}/{name}")
        except FileNotFoundError:
            return None
        except Exception as error:
            raise UserError(f"{self.url}: {_reason(error)}; check bucket, rights and endpoint (AWS_…)") from None

    def write_bytes(self, name: str, data: bytes) -> None:
        self.files.pipe_file(f"{self.root}/{name}", data)

    def free(self) -> int | None:
        return None
