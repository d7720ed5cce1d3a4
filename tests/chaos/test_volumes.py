"""Disks that fill up, fail, turn read-only, vanish, or lose power in the middle of a run.

The job is stopped (SIGSTOP) right before a chosen system call, then its disk is broken, then it goes on: "in the
middle" without waiting for it.
"""

import random
import re
import shutil
import signal

import pytest

from chaos import layout
from chaos.tally import Outcome
from chaos.test_kill_training import Trial as Training
from chaos.volumes import Volumes, command, cut_power, fill, fill_inodes, free_again
from chaos.world import Trial
from chaos.zygote import Fault

MiB = 2**20
FULL = r"No space left on device|no disk: "


@pytest.fixture
def volumes():
    volumes = Volumes()
    yield volumes
    volumes.close()


def stopped(trial, number):
    """Run the trial's job up to its call `number`."""
    layout.skip_probe(trial.world.folder, trial.folder)
    fault = Fault(str(trial.folder / "results"), number, "signal", signal.SIGSTOP)
    ended = trial.run(fault)
    assert ended.stopped
    return ended


def some_calls(world, job, name, many):
    """Where to break it: so early that there is still something to be written."""
    return sorted(random.Random(name).sample(range(1, int(world.calls[job] * 0.9)), many))


def small_volume(volumes, kind, folder):
    if kind == "tmpfs":
        return volumes.tmpfs(folder / "results", 16 * MiB)
    inodes = ["-N", "128"] if kind == "inodes" else []
    return volumes.ext4(folder / "results", folder / "image", 32 * MiB, *inodes)


@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "inodes"])
def test_disk_that_others_fill(need_shim, zygote, world, tmp_path, times, volumes, kind):
    outcome = Outcome(f"disk full in the middle ({kind})")
    for number in some_calls(world, "extract", kind, times(12, 1)):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        results = small_volume(volumes, kind, trial.folder)
        ended = stopped(trial, number)
        filler = fill_inodes(results) if kind == "inodes" else fill(results)
        assert trial.go_on(ended).code == 1
        assert re.search(FULL, trial.message()), trial.message()
        assert not list(results.rglob("*.part"))
        trial.run()  # still full: the same message, nothing worse
        assert re.search(FULL, trial.message()), trial.message()
        free_again(filler)
        trial.complete()
        volumes.unmount(results)
    outcome.check()


@pytest.mark.parametrize("kind", ["tmpfs", "ext4"])
def test_reserve_stays_free(zygote, world, tmp_path, times, volumes, kind):
    """The writer stops before it, with what it has finished; the next run goes on."""
    rng, outcome = random.Random(kind), Outcome(f"storage.reserve_bytes reached ({kind})")
    for number in range(times(6, 1)):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        results = small_volume(volumes, kind, trial.folder)
        layout.skip_probe(world.folder, trial.folder)
        reserve = shutil.disk_usage(results).free - rng.randrange(195_000, 235_000)
        ended = trial.run(storage={"reserve_bytes": reserve})
        assert ended.code == 1 and "no disk: " in trial.message(), trial.message()
        assert 0 < len(trial.before) < len(world.states)
        assert shutil.disk_usage(results).free >= reserve
        assert not list(results.rglob("*.part"))
        trial.complete()
        volumes.unmount(results)
    outcome.check()


def survivors(trial):
    """What a broken disk must keep: all that stands but the newest, which may still be on its way."""
    files = trial.before
    newest = max(files, key=lambda s: layout.store_of(trial.folder).path(s).stat().st_mtime_ns, default=None)
    return {sample: was for sample, was in files.items() if sample != newest}


def comes_back(trial, volumes, results, kept, repair=False):
    """The disk is mounted again: what it must have kept is there, and the next run completes."""
    image = trial.folder / "image"
    if repair:
        command("e2fsck", "-fy", image, check=False)
    volumes.mount(results, image)
    trial.before = kept
    trial.look()
    trial.complete()
    volumes.unmount(results)


def test_disk_whose_own_disk_fills(need_shim, zygote, world, tmp_path, times, volumes):
    """An ext4 in a sparse file: it sees free space, but its writes fail (a thin volume whose pool is full)."""
    outcome = Outcome("thin volume whose pool fills (EIO)")
    for number in some_calls(world, "extract", "thin", times(12, 1)):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        pool = volumes.tmpfs(trial.folder / "pool", 16 * MiB)
        image = pool / "image"
        results = volumes.ext4(trial.folder / "results", image, 64 * MiB)
        ended = stopped(trial, number)
        trial.look()
        kept = survivors(trial)
        fill(pool)
        ended = trial.zygote.go_on(ended)
        # Its journal may swallow little; then the run may even end well, and only the disk knows.
        if ended.code:
            assert re.search(f"Input/output error|Read-only file system|{FULL}", trial.message()), trial.message()
        command("umount", results, check=False)
        volumes.mounted.remove(results)
        shutil.copy(image, trial.folder / "image")
        volumes.unmount(pool)
        comes_back(trial, volumes, results, kept, repair=True)
    outcome.check()


def test_power_cut_during_extraction(need_shim, zygote, world, tmp_path, times, volumes):
    """What the filesystem had not yet written is gone; what was finished is there, whole."""
    outcome = Outcome("power cut during extraction (ext4 shut down, its journal not flushed)")
    for number in some_calls(world, "extract", "power", times(40, 1)):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        results = volumes.ext4(trial.folder / "results", trial.folder / "image", 32 * MiB)
        ended = stopped(trial, number)
        trial.look()
        kept = survivors(trial)
        cut_power(results)
        outcome.kills += trial.zygote.go_on(ended, signal.SIGKILL).killed
        volumes.unmount(results)
        comes_back(trial, volumes, results, kept)
    outcome.check()


def test_power_cut_during_training(need_shim, zygote, world, tmp_path, times, volumes):
    outcome = Outcome("power cut during training (ext4 shut down, its journal not flushed)")
    for number in some_calls(world, "train", "power", times(15, 1)):
        trial = Training(zygote, world, tmp_path / f"{number}", outcome)
        results = volumes.ext4(trial.folder / "results", trial.folder / "image", 64 * MiB)
        ended = trial.run(Fault(str(results), number, "signal", signal.SIGSTOP))
        assert ended.stopped
        cut_power(results)
        outcome.kills += zygote.go_on(ended, signal.SIGKILL).killed
        volumes.unmount(results)
        volumes.mount(results, trial.folder / "image")
        trial.complete()
        volumes.unmount(results)
    outcome.check()


def test_disk_that_turns_read_only(need_shim, zygote, world, tmp_path, times, volumes):
    """As ext4 does at an error of its device."""
    outcome = Outcome("filesystem turned read-only in the middle")
    for number in some_calls(world, "extract", "read-only", times(12, 1)):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        results = volumes.ext4(trial.folder / "results", trial.folder / "image", 32 * MiB)
        ended = stopped(trial, number)
        trial.look()
        kept = survivors(trial)
        command("mount", "-o", "remount,abort", results, check=False)
        assert trial.zygote.go_on(ended).code == 1
        assert re.search("Read-only file system|Input/output error", trial.message()), trial.message()
        volumes.unmount(results)
        comes_back(trial, volumes, results, kept, repair=True)
    outcome.check()


def test_volume_that_vanishes(need_shim, zygote, world, tmp_path, times, volumes):
    """Nothing is written into the bare mount point, where the next mount would hide it."""
    outcome = Outcome("volume unmounted in the middle")
    for number in some_calls(world, "extract", "gone", times(12, 1)):
        trial = Trial(zygote, world, tmp_path / f"{number}", outcome)
        results = volumes.ext4(trial.folder / "results", trial.folder / "image", 32 * MiB)
        ended = stopped(trial, number)
        trial.look()
        before = trial.before
        volumes.unmount(results, "-l")
        assert trial.zygote.go_on(ended).code == 1
        assert re.search("mount it|No such file", trial.message()), trial.message()
        assert not list(results.iterdir()), "the store was made again in the bare mount point"
        comes_back(trial, volumes, results, before)
    outcome.check()
