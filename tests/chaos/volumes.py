"""Real filesystems that can be filled, broken and taken away; they need root and mount(8), else a test is skipped."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

import pytest

EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2


def command(*arguments: object, check: bool = True) -> None:
    done = subprocess.run([str(a) for a in arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise OSError(f"{' '.join(map(str, arguments))}: {done.stderr.strip()}")


class Volumes:
    """What one test has mounted; all of it is unmounted at its end."""

    def __init__(self) -> None:
        self.mounted: list[Path] = []

    def tmpfs(self, folder: Path, size: int) -> Path:
        return self._mount(folder, "-t", "tmpfs", "-o", f"size={size}", "tmpfs")

    def ext4(self, folder: Path, image: Path, size: int, *options: str) -> Path:
        """In a sparse file: it takes from its own volume only what is written."""
        image.parent.mkdir(parents=True, exist_ok=True)
        with open(image, "wb") as file:
            file.truncate(size)
        if not shutil.which("mkfs.ext4"):
            pytest.skip("no mkfs.ext4 here")
        command("mkfs.ext4", "-q", "-m", "0", "-J", "size=4", "-E", "lazy_itable_init=1", *options, image)
        return self.mount(folder, image)

    def mount(self, folder: Path, image: Path) -> Path:
        return self._mount(folder, "-o", "loop,errors=remount-ro", image)

    def _mount(self, folder: Path, *arguments: object) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            command("mount", *arguments, folder)
        except OSError as error:
            pytest.skip(f"this machine refuses the mount: {error}")
        self.mounted.append(folder)
        return folder

    def unmount(self, folder: Path, *options: str) -> None:
        command("umount", *options, folder)
        self.mounted.remove(folder)

    def close(self) -> None:
        for folder in reversed(self.mounted):
            command("umount", "-l", folder, check=False)


def fill(folder: Path) -> Path:
    """A file that takes all there is; remove it to free the space."""
    filler = folder / "filler"
    descriptor = os.open(filler, os.O_WRONLY | os.O_CREAT)
    try:
        for size in (2**20, 4096, 512, 1):
            with contextlib.suppress(OSError):
                while True:
                    os.write(descriptor, b"\1" * size)
        with contextlib.suppress(OSError):  # what the filesystem still held back
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return filler


def fill_inodes(folder: Path) -> Path:
    fillers = folder / "filler"
    fillers.mkdir()
    try:
        for number in range(10**6):
            (fillers / str(number)).touch()
    except OSError as error:
        assert error.errno == errno.ENOSPC
    return fillers


def free_again(filler: Path) -> None:
    shutil.rmtree(filler) if filler.is_dir() else filler.unlink()


def cut_power(folder: Path) -> None:
    """The filesystem stops at once: what it has not written to its device by now never gets there."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.ioctl(descriptor, EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH.to_bytes(4, "little"))
    except OSError as error:
        pytest.skip(f"this kernel does not shut an ext4 down: {error}")
    finally:
        os.close(descriptor)
