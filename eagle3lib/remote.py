"""Conversations that lie elsewhere: `hub:NAME@REVISION` and `s3://…`, or any other file system that fsspec knows.

    hub:org/name@REVISION            the split `train` of a dataset on the Hugging Face hub
    hub:org/name@REVISION:SPLIT      another split
    hub:org/name@REVISION:CONFIG:SPLIT
    s3://bucket/folder/*.parquet     files of any kind that `readers` knows, globs included

A rule fetches them once, as one JSONL under results/store/sources; beside it lies a record of what was fetched: the
commit on the hub, or each file's size, time and ETag. Fetched conversations stay as they are until they are deleted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib import readers
from eagle3lib.errors import UserError, one_line
from eagle3lib.job import Progress, atomic_write, write_json

HUB = "hub:"
URL = re.compile(r"[a-z][a-z0-9+.-]*://")
FACTS = ("size", "ETag", "LastModified", "VersionId", "mtime", "created")  # that file systems tell of a file


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub; revision: a commit, a tag or a branch."""

    name: str
    revision: str
    config: str | None
    split: str


def is_remote(entry: str) -> bool:
    return entry.startswith(HUB) or URL.match(entry) is not None


def path_of(spec: str, folder: str | Path) -> Path:
    """Where `fetch` puts it; pure. Raises UserError for a spec of the hub without a revision."""
    if spec.startswith(HUB):
        _hub(spec)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", spec).strip("-")[-60:]
    return Path(folder) / "remote" / f"{name}-{hashlib.sha256(spec.encode()).hexdigest()[:12]}.jsonl"


def record_of(path: str | Path) -> dict[str, Any] | None:
    """What was fetched to `path`: {"spec", "revision", "rows", "files"}; None for a file that was not."""
    record = Path(path).with_suffix(".json")
    if record.parent.name != "remote" or not record.exists():
        return None
    return json.loads(record.read_text("utf-8"))


def fetch(spec: str, path: Path) -> Path:
    """Fetch all rows of `spec` to `path`, unless it is there. Raises UserError for what cannot be had."""
    if path.exists():
        return path
    if spec.startswith(HUB):
        dataset = _hub(spec)
        revision = _commit(dataset)
        about: dict[str, Any] = {"spec": spec, "revision": revision, "files": []}
        rows = hub_rows(dataset, revision)
    else:
        about, rows = _files(spec)
    write(path, about, rows)
    return path


def write(path: Path, about: dict[str, Any], rows: Iterable[dict[str, Any]]) -> None:
    """Rows as JSONL, whole or not at all, and beside it the record of what they are."""
    progress, count = Progress(None, "rows", f"fetch {about['spec']}"), 0
    with atomic_write(path) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False, default=_placeholder).encode("utf-8", "replace") + b"\n")
            count += 1
            progress.update()
        write_json(path.with_suffix(".json"), about | {"rows": count})


def _placeholder(value: Any) -> str:
    """What JSON has no word for: an image, say, which the readers reject by its key."""
    return f"<{type(value).__name__}>"


# --- the hub -----------------------------------------------------------------------------------------


def _hub(spec: str) -> HubDataset:
    name, at, rest = spec.removeprefix(HUB).partition("@")
    revision, *parts = rest.split(":")
    if not name or not at or not revision or len(parts) > 2 or not all(parts):
        raise UserError(
            f"{spec}: not hub:NAME@REVISION, perhaps with :SPLIT or :CONFIG:SPLIT behind it; a commit is reproducible"
        )
    return HubDataset(name, revision, parts[0] if len(parts) == 2 else None, parts[-1] if parts else "train")


def _commit(dataset: HubDataset) -> str:
    """The commit that a revision is now."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        return str(HfApi().dataset_info(dataset.name, revision=dataset.revision).sha)
    except OfflineModeIsEnabled:
        raise UserError(f"{HUB}{dataset.name}: HF_HUB_OFFLINE is set; unset it for this run") from None
    except Exception as error:  # the hub's refusals and the many ways in which a network fails
        raise _cannot(
            f"{HUB}{dataset.name}@{dataset.revision}", error, "name, revision, network and HF_TOKEN"
        ) from None


def hub_rows(dataset: HubDataset, revision: str) -> Iterator[dict[str, Any]]:
    """The rows of a split, streamed by `datasets`; images and the like stay undecoded."""
    _need("datasets", "hub")
    import datasets

    spec = f"{HUB}{dataset.name}@{revision}"
    try:
        stream = datasets.load_dataset(
            dataset.name, dataset.config, split=dataset.split, revision=revision, streaming=True
        )
        for row in stream.decode(False) if stream.features else stream:  # it need not be able to open images
            yield {key: value for key, value in row.items() if value is not None}
    except Exception as error:  # `datasets` raises all there is: of the network, of files, of names
        raise _cannot(spec, error, "its configs and splits, and the network") from None


# --- file systems ------------------------------------------------------------------------------------


def file_system(url: str) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the path there; s3:// goes through obstore. Raises ImportError for a package
    that is missing, ValueError for what fsspec does not know."""
    import fsspec

    if url.startswith("s3://"):
        from obstore.fsspec import register

        register("s3")
    return fsspec.core.url_to_fs(url)


def _files(spec: str) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
    _need("fsspec", "s3")
    try:
        system, pattern = file_system(spec)
        names = sorted(system.glob(pattern)) if re.search(r"[*?\[]", pattern) else [pattern]
        infos = [system.info(name) for name in names]
    except ImportError as error:
        raise UserError(f"{spec}: {error}; pip install 'eagle3lib[s3]'") from None
    except Exception as error:
        raise _cannot(spec, error, "its name and your credentials") from None
    if not names:
        raise UserError(f"{spec}: the pattern matches no file; check dataset.conversations")
    files = [
        {"name": name, **{key: str(info[key]) for key in FACTS if key in info}}
        for name, info in zip(names, infos, strict=True)
    ]
    about = {"spec": spec, "revision": _revision(files), "files": files}
    rows = (row.value for name in names for row in readers.rows(name, lambda one: system.open(one, "rb")))
    return about, rows


def _revision(files: Iterable[dict[str, str]]) -> str:
    """One name for the state of all files."""
    return hashlib.sha256(json.dumps(list(files), sort_keys=True).encode()).hexdigest()[:40]


def _need(module: str, extra: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise UserError(f"{module} is not installed; pip install 'eagle3lib[{extra}]'")


def _cannot(spec: str, error: Exception, what: str) -> UserError:
    reason = one_line(f"{type(error).__name__}: {error}", 300)
    return UserError(f"{spec}: cannot be fetched ({reason}); check {what}")
