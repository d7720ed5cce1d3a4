"""The undisturbed run, and what a disturbed one is held against. Reads files with its own eyes, not the product's."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from chaos import layout
from chaos.tally import Outcome
from chaos.zygote import Ended, Fault, Zygote

Finished = dict[str, tuple[int, str]]  # sample_id -> inode, sha256


def compile_shim(folder: Path) -> Path | None:
    if not shutil.which("gcc"):
        return None
    shim = folder / "shim.so"
    source = Path(__file__).with_name("shim.c")
    subprocess.run(["gcc", "-O2", "-Wall", "-shared", "-fPIC", "-o", shim, source, "-ldl"], check=True)
    return shim


@dataclass(frozen=True)
class World:
    """Paths of the inputs, and what an undisturbed run makes of them."""

    folder: Path
    states: dict[str, str]  # sample_id -> sha256 of its file
    manifest: bytes
    seconds: dict[str, float]  # job -> how long it takes undisturbed
    calls: dict[str, int]  # job -> its file-changing system calls


def make(zygote: Zygote, folder: Path) -> World:
    """`whole` is the undisturbed run; it is timed when the store has seen the engine before, as are the trials."""
    zygote.run("make_world", folder, folder)
    whole = folder / "whole"
    fault = Fault(str(whole / "results")) if zygote.shim else None
    states, seconds, calls = {}, {}, {}
    assert zygote.run("extract", folder, whole).code == 0, (whole / "stderr").read_text()
    for path in pt_files(whole):
        states[path.stem] = sha256(path)
    shutil.rmtree(layout.states_folder(whole))
    for path in pt_files(whole):
        path.unlink()
    for job in ("extract", "train"):
        ended = zygote.run(job, folder, whole, fault)
        assert ended.code == 0, (whole / "stderr").read_text()
        seconds[job] = ended.seconds
        calls[job] = int((whole / "calls").read_text()) if fault else 0
    assert {path.stem: sha256(path) for path in pt_files(whole)} == states, "two runs give the same bytes"
    assert len(states) == layout.SAMPLES
    return World(folder, states, (layout.states_folder(whole) / "manifest.json").read_bytes(), seconds, calls)


def pt_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("results/store/hidden_states/*/*/*.pt"))


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def finished(folder: Path) -> Finished:
    """Samples whose manifest line and final file stand."""
    found = {}
    for path in pt_files(folder):
        lines = path.with_name("manifest.jsonl").read_bytes().splitlines()
        if any(f'"sample_id": "{path.stem}"'.encode() in line and line.endswith(b"}") for line in lines):
            found[path.stem] = (path.stat().st_ino, sha256(path))
    return found


def asked(folder: Path) -> list[str]:
    """The samples that the engine was asked for, in order, of all runs so far."""
    path = folder / "asked"
    return path.read_text().split() if path.exists() else []


class Trial:
    """One extraction that is broken off, once or several times, and then runs to its end."""

    def __init__(self, zygote: Zygote, world: World, folder: Path, outcome: Outcome):
        self.zygote, self.world, self.folder, self.outcome = zygote, world, folder, outcome
        self.before: Finished = {}
        self.n_asked = 0
        outcome.trials += 1

    def run(self, fault: Fault | None = None, inodes: bool = True, **how) -> Ended:
        ended = self.zygote.run("extract", self.world.folder, self.folder, fault, **how)
        if not ended.stopped:
            self.look(ended, inodes)
        return ended

    def go_on(self, ended: Ended, **how) -> Ended:
        ended = self.zygote.go_on(ended, **how)
        self.look(ended)
        return ended

    def look(self, ended: Ended | None = None, inodes: bool = True) -> None:
        """After each end: what was finished before is still there and was not asked for again; nothing is wrong."""
        assert ended is None or ended.left == []
        now, new = finished(self.folder), asked(self.folder)[self.n_asked :]
        for sample, was in self.before.items():
            same = now.get(sample) == was if inodes else now.get(sample, (0, ""))[1] == was[1]
            self.outcome.lost += not same or sample in new
        files = {*pt_files(self.folder), *self.folder.glob("results/tiny/talk/*/hidden_states/*/*.pt")}
        hashes = {path: sha256(path) for path in files}
        by_slot = {str(row["slot"]).zfill(4): row["sha256"] for row in json.loads(self.world.manifest)["samples"]}
        for path, value in hashes.items():
            self.outcome.wrong += value != (self.world.states.get(path.stem) or by_slot.get(path.stem))
        manifest = layout.states_folder(self.folder) / "manifest.json"
        self.outcome.wrong += manifest.exists() and manifest.read_bytes() != self.world.manifest
        self.before, self.n_asked = now, len(asked(self.folder))
        self.outcome.kills += bool(ended and ended.killed)

    def complete(self, **how) -> None:
        """The run that nobody breaks: all is there, and nothing else."""
        self.outcome.kept += len(self.before)
        ended = self.run(**how)
        assert ended.code == 0, (ended, (self.folder / "stderr").read_text())
        assert set(self.before) == set(self.world.states)
        assert (layout.states_folder(self.folder) / "manifest.json").exists()
        links = sorted(path.stat().st_ino for path in layout.states_folder(self.folder).glob("*.pt"))
        assert links == sorted(inode for inode, _ in self.before.values())
        assert list(self.folder.rglob("*.part")) == []
        assert list(self.folder.rglob("quarantine")) == []
        self.outcome.redone += len(asked(self.folder)) - len(set(asked(self.folder)))

    def message(self) -> str:
        """The one line that the user sees of a job that failed."""
        errors = [line for line in (self.folder / "stderr").read_text().splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, (self.folder / "stderr").read_text()
        return errors[0]

    def clear(self) -> None:
        shutil.rmtree(self.folder)
