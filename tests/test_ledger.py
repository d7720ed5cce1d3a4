"""Measured rates, and the question before finished work is made again."""

import json

import pytest

from eagle3lib import ledger
from eagle3lib.ledger import Entry, Work


def entry(start, end, tokens=100, shaping=None, **about):
    values = {"kind": "states", "name": "t/d", "samples": 10, **about}
    return Entry(shaping=shaping or {"ids": [1]}, start=start, end=end, tokens=tokens, **values)


def test_jobs_side_by_side_count_their_time_once():
    entries = [entry(0, 10), entry(5, 15), entry(20, 25), entry(21, 22)]
    assert ledger.seconds(entries) == 20
    assert ledger.rate(entries) == 400 / 20
    assert ledger.rate([]) is None


def test_entries_read_back_and_a_torn_line_is_passed_over(tmp_path):
    ledger.add(tmp_path, entry(1, 2))
    with open(tmp_path / "ledger.jsonl", "a") as file:
        file.write('{"kind": "sta')
    assert ledger.read(tmp_path) == [entry(1, 2)]


def test_work_that_ends_by_an_error_is_put_down_as_far_as_it_came(tmp_path):
    with pytest.raises(RuntimeError), Work(tmp_path, "states", "t/d", {"ids": [1]}) as work:
        work.count(1, 30)
        work.count(1, 12)
        raise RuntimeError
    (one,) = ledger.read(tmp_path)
    assert (one.samples, one.tokens) == (2, 42)


def test_long_work_is_put_down_as_it_goes(tmp_path, monkeypatch):
    monkeypatch.setattr(ledger, "PUT_DOWN_SECONDS", -1)
    work = Work(tmp_path, "states", "t/d", {})
    work.count(1, 30)
    assert [e.tokens for e in ledger.read(tmp_path)] == [30], "a SIGKILL now loses nothing"


def test_other_settings_would_make_finished_work_again():
    done = [entry(0, 7200), entry(7200, 10800)]
    one = ledger.redo(done, "states", "t/d", {"ids": [2]})
    assert (one.samples, one.hours, one.causes) == (20, 3.0, ["ids: [1] -> [2]"])
    assert f"python -m eagle3lib confirm {one.token}" in str(one) and "about 3.0 h" in str(one)


def test_same_settings_as_ever_before_make_nothing_again():
    done = [entry(0, 7200), entry(8000, 9000, shaping={"ids": [2]})]
    assert ledger.redo(done, "states", "t/d", {"ids": [1]}) is None
    assert ledger.redo(done, "states", "other/d", {"ids": [9]}) is None
    assert ledger.redo(done, "draft", "t/d", {"ids": [9]}) is None


def test_confirmed_once(tmp_path):
    assert not ledger.confirmed(tmp_path, "abc")
    ledger.confirm(tmp_path, "abc")
    assert ledger.confirmed(tmp_path, "abc") and not ledger.confirmed(tmp_path, "xyz")


def test_differences_name_the_setting():
    old = {"training": {"lr": 1e-4, "epochs": 5}, "code": "a"}
    new = {"training": {"lr": 5e-5, "epochs": 5}, "code": "b", "more": json.loads("null")}
    assert ledger.differences(old, new) == ["training.lr: 0.0001 -> 5e-05", 'code: "a" -> "b"']


def test_vanished_store_is_not_made_again(tmp_path):
    with pytest.raises(FileNotFoundError):
        ledger.add(tmp_path / "store", entry(1, 2))
    assert not list(tmp_path.iterdir())


def test_first_error_is_told_when_the_ledger_cannot_be_written_either(tmp_path):
    with pytest.raises(OSError, match="the disk is full"), Work(tmp_path / "gone", "states", "n", {}) as work:
        work.count(1, 10)
        raise OSError("the disk is full")


def test_torn_line_costs_no_other(tmp_path):
    ledger.add(tmp_path, entry(1, 2))
    with open(tmp_path / "ledger.jsonl", "a") as file:
        file.write('{"kind": "sta')
    ledger.add(tmp_path, entry(2, 3))
    assert len(ledger.read(tmp_path)) == 2
