"""Snakemake's records survive the loss of `.snakemake`."""

import json
import shutil
from base64 import urlsafe_b64encode

import pytest

from eagle3lib import records


def write(folder, output, **values):
    name = urlsafe_b64encode(output.encode()).decode()
    pieces = [name[i : i + 254] for i in range(0, len(name), 254)]
    path = folder.joinpath(*[f"@{piece}" for piece in pieces[:-1]], pieces[-1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return path


def contents(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_records_come_back_and_those_of_states_are_left_out(tmp_path):
    live, kept = tmp_path / "live", tmp_path / "kept"
    write(live, "results/a/manifest.json", params=["1"])
    write(live, "results/" + "long/" * 80 + "manifest.json", params=["2"])
    state = write(live, "results/a/0000.pt", params=["1"])
    assert records.keep(live, kept) == 0
    state.unlink()
    before = contents(live)
    assert contents(kept) == before and len(before) == 2
    shutil.rmtree(live)
    assert records.keep(live, kept) == 2
    assert contents(live) == before


def test_copies_follow_changes_and_removals(tmp_path):
    live, kept = tmp_path / "live", tmp_path / "kept"
    first, second = (write(live, f"results/{name}.json", params=["1"]) for name in "ab")
    records.keep(live, kept)
    first.write_text('{"params": ["changed"]}')
    second.unlink()
    records.keep(live, kept)
    assert contents(kept) == contents(live)


def test_torn_record_does_not_replace_a_whole_one(tmp_path):
    live, kept = tmp_path / "live", tmp_path / "kept"
    path = write(live, "results/a.json", params=["1"])
    records.keep(live, kept)
    path.write_text('{"par')
    records.keep(live, kept)
    assert list(contents(kept).values()) == ['{"params": ["1"]}']


def test_output_of_a_record(tmp_path):
    path = write(tmp_path, "results/" + "x" * 400 + ".pt")
    assert records.output_of(str(path.relative_to(tmp_path))) == "results/" + "x" * 400 + ".pt"


@pytest.mark.parametrize("length", [1, 150, 400])
def test_record_of_an_output(tmp_path, length):
    output = "results/" + "x" * length + ".parquet"
    write(tmp_path, output, rule="all")
    assert records.of(output, tmp_path / "none", tmp_path) == {"rule": "all"}
    assert records.of(output + "s", tmp_path) is None
