"""NVML as a test wants it: the real pynvml, in processes of their own, with the library that nvml/nvml.c becomes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent / "nvml"


def compile_stub(folder: Path) -> Path:
    """The folder for LD_LIBRARY_PATH. Skips where no C compiler is."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler: the stand-in for libnvidia-ml.so.1 cannot be built")
    command = [compiler, "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1"]
    subprocess.run([*command, HERE / "nvml.c"], check=True)
    return folder


class Nvml:
    """A machine with GPUs: `say` what NVML says, `ask` what our code makes of it."""

    def __init__(self, folder: Path):
        """folder: of the library and of what it says; that of the run (`folder`) is each test's own."""
        self.libraries, self.file, self.folder = compile_stub(folder), folder / "nvml.txt", folder
        self.say([])
        self.process = self.start()

    def say(self, devices: list[dict], driver: int = 0) -> None:
        """From now on. A device: used, total (MiB), mig, rc, capability, processes [(pid, MiB)]; UUIDs: GPU-0, …"""
        lines = [f"driver {driver}"]
        for number, device in enumerate(devices):
            about = {"used": 10, "total": 96000, "mig": 0, "rc": 0, "capability": 9, **device}
            lines.append("device GPU-{number} {used} {total} {mig} {rc} {capability}".format(number=number, **about))
            lines += [f"process {number} {pid} {mib}" for pid, mib in device.get("processes", [])]
        part = self.file.with_suffix(".part")
        part.write_text("\n".join(lines) + "\n")
        part.replace(self.file)

    @property
    def environment(self) -> dict[str, str]:
        root = str(HERE.parent.parent)
        own = {"NVML_STUB": str(self.file), "LD_LIBRARY_PATH": str(self.libraries), "PYTHONPATH": root}
        return {**{k: v for k, v in os.environ.items() if k != "CUDA_VISIBLE_DEVICES"}, **own}

    def start(self, **environment: str) -> subprocess.Popen:
        """A process of its own that takes questions (`question`); its stdout is a pipe of answers."""
        return subprocess.Popen(
            [sys.executable, HERE / "ask.py"],
            env=self.environment | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ask(self, what: str, gpus: int = 0, **options) -> dict:
        """The answer to a question; a lease is given back. Raises Refused with the message of a UserError."""
        self.put(self.process, what, gpus, **options)
        give_back(self.process)
        return answer(self.process)

    def put(
        self,
        process: subprocess.Popen,
        what: str,
        gpus: int = 0,
        bytes_each: int = 0,
        mask: str | None = None,
        **cfg: object,
    ) -> None:
        """Write a question; the configuration is {"free_below_mib": 1000, "wait_seconds": 0} and `cfg`."""
        need = {"gpus": gpus, "setting": "training.gpus", "bytes_each": bytes_each}
        settings = {"free_below_mib": 1000, "wait_seconds": 0, **cfg}
        question = {"what": what, "folder": str(self.folder), "mask": mask, "need": need, "cfg": settings}
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()


def answer(process: subprocess.Popen) -> dict:
    """Wait for it. A lease is held on."""
    said = json.loads(process.stdout.readline())
    if "error" in said:
        raise Refused(said["error"])
    return said


def give_back(process: subprocess.Popen) -> None:
    process.stdin.write("\n")
    process.stdin.flush()


class Refused(Exception):
    """A UserError in another process."""
