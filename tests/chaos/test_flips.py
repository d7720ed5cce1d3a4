"""Stored samples with a bit flipped or an end cut off: each is found, none is used, all are made again as they were."""

import json
import random
import shutil

from chaos import layout
from chaos.tally import Outcome
from chaos.world import Trial, asked, pt_files, sha256

DAMAGED = 20  # of each round; the others must be left alone


def flip_a_bit(path, rng):
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    overwrite(path, data)


def cut_off(path, rng):
    data = path.read_bytes()
    overwrite(path, data[: rng.randrange(len(data))])


def overwrite(path, data):
    """In place, as a disk does it: all names of the file show it."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate(len(data))


def test_damaged_samples(zygote, world, tmp_path, times):
    rng, outcome = random.Random("flips"), Outcome("stored sample: bit flipped or end cut off")
    trial = Trial(zygote, world, tmp_path / "one", outcome)
    layout.skip_probe(world.folder, trial.folder)
    trial.complete()
    ways = ["find", "trainer", "verify"]
    outcome.trials = 0
    for number in range(times(50, 3)):
        damaged = {}
        for path in rng.sample(pt_files(trial.folder), DAMAGED):
            damage = flip_a_bit if rng.random() < 0.7 else cut_off
            damage(path, rng)
            damaged[path.stem] = sha256(path)
        ended = zygote.run("examine", world.folder, trial.folder, way=ways[number % 3])
        assert ended.code == 0, (trial.folder / "stderr").read_text()
        found = json.loads((trial.folder / "found").read_text())
        outcome.trials += DAMAGED
        outcome.flips += DAMAGED
        outcome.flips_found += len(found.keys() & damaged.keys())
        outcome.lost += len(found.keys() - damaged.keys())  # a good one taken for bad
        check_quarantine(trial, damaged)
        n_asked = len(asked(trial.folder))
        trial.before = {sample: was for sample, was in trial.before.items() if sample not in damaged}
        trial.complete()
        assert set(asked(trial.folder)[n_asked:]) == set(damaged)
    outcome.redone = 0  # they were finished, and damaged; not what a kill cost
    outcome.check()
    assert outcome.flips_found == outcome.flips


def check_quarantine(trial, damaged):
    """There with its reason, as it was found; no dataset names it any more."""
    (folder,) = trial.folder.glob("results/store/quarantine/*")
    assert {path.stem: sha256(path) for path in folder.glob("*.pt")} == damaged
    reasons = [json.loads(line) for line in (folder / "reasons.jsonl").read_text().splitlines()]
    assert sorted(line["file"] for line in reasons) == sorted(f"{sample}.pt" for sample in damaged)
    assert all(line["reason"] for line in reasons)
    assert all(path.stat().st_nlink == 1 for path in folder.glob("*.pt"))
    shutil.rmtree(folder.parent)


def test_damaged_manifests(zygote, world, tmp_path, times):
    """A bit flipped in a line of a store's manifest: at worst a good sample is made again, equal."""
    rng, outcome = random.Random("manifests"), Outcome("manifest of the store: bit flipped")
    trial = Trial(zygote, world, tmp_path / "one", outcome)
    layout.skip_probe(world.folder, trial.folder)
    trial.complete()
    outcome.trials = 0
    for _ in range(times(10, 1)):
        for path in trial.folder.glob("results/store/hidden_states/*/*/manifest.jsonl"):
            flip_a_bit(path, rng)
            outcome.trials += 1
        assert zygote.run("examine", world.folder, trial.folder, way="find").code == 0
        trial.before = {}
        shutil.rmtree(trial.folder / "results/store/quarantine", ignore_errors=True)
        trial.complete()
    outcome.redone = 0
    outcome.check()
