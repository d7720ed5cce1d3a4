"""What was written is still there, to the byte; after an unclean end only what may be damaged is read."""

import json
import os
import subprocess
import time

import pytest
import torch

from eagle3lib import hidden_states, verification
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import started
from eagle3lib.store import Store

KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")


@pytest.fixture
def store(tmp_path):
    store = Store(tmp_path / "store", KEY)
    store.prepare()
    return store


def publish(store, count, first=0):
    made = []
    for n in range(first, first + count):
        states = [torch.randn(3, 8) for _ in range(4)]
        made.append(store.publish(hidden_states.pack_sample(KEY, [1, 2, n], [1, 3], states, "v", "c")))
    return made


def flip(path, position=-1000):
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_every_byte_is_read_and_the_damaged_are_set_aside(store):
    records = publish(store, 30)
    bad = [records[3], records[17]]
    for record in bad:
        flip(store.path(record["sample_id"]))
    report = verification.verify(verification.everything(store.root))
    assert (report.files, report.bytes) == (30, sum(r["bytes"] for r in records))
    assert sorted(path.stem for path, _ in report.bad) == sorted(r["sample_id"] for r in bad)
    assert "2 bad, quarantined" in str(report)
    assert verification.verify(verification.everything(store.root)).bad == []


def test_clean_end_leaves_nothing_to_verify(store):
    verification.begin(store.root)
    publish(store, 3)
    verification.end(store.root)
    assert not verification.ended_uncleanly(store.root)
    assert verification.after_unclean_end(store.root) is None


def crashed(store):
    """The session of a process that is gone."""
    verification.begin(store.root)
    path = store.root / "session.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "1"}))


def test_after_an_unclean_end_what_the_sync_mark_does_not_cover_is_hashed(store, monkeypatch):
    monkeypatch.setattr(verification, "SAMPLE_OF_THE_REST", 0)
    publish(store, 5)
    store.mark_synced()
    time.sleep(0.01)  # the mark's clock, not a wait for anything
    late = publish(store, 4, first=100)
    flip(store.path(late[1]["sample_id"]))
    crashed(store)
    assert verification.ended_uncleanly(store.root)
    report = verification.after_unclean_end(store.root)
    assert (report.files, len(report.bad)) == (4, 1)
    assert report.bytes == sum(r["bytes"] for r in late)
    assert not verification.ended_uncleanly(store.root), "it is not done twice"


def test_a_seeded_share_of_the_rest_is_hashed_too(store):
    publish(store, 400)
    (store.folder / "synced.json").write_text('{"time": 4e9}')  # the seed, too
    drawn = verification.suspects(store.root)
    assert 0 < len(drawn) < 20
    assert [r for _, r in drawn] == [r for _, r in verification.suspects(store.root)]


def test_a_run_that_is_still_at_work_is_not_an_unclean_end(store):
    verification.begin(store.root)
    assert not verification.ended_uncleanly(store.root)


@pytest.mark.parametrize("change", [{"boot": "another"}, {"host": "another"}, {"pid": 999999999}])
def test_another_boot_host_or_process_is(store, change):
    crashed(store)
    path = store.root / "session.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"started": "1"} | change))
    assert verification.ended_uncleanly(store.root)


def test_ctrl_c_ends_with_the_report_so_far(store, monkeypatch):
    publish(store, 20)
    fault, calls = Store.fault, []

    def interrupted(self, sample, full=False):
        calls.append(sample)
        if len(calls) == 8:
            raise KeyboardInterrupt
        return fault(self, sample, full)

    monkeypatch.setattr(Store, "fault", interrupted)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    report = verification.verify(verification.everything(store.root))
    assert report.files == 7 and report.of_files == 20 and "interrupted" in str(report)
    monkeypatch.setattr(Store, "fault", fault)
    crashed(store)
    monkeypatch.setattr(Store, "fault", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        verification.after_unclean_end(store.root)
    assert verification.ended_uncleanly(store.root), "an interrupted check is done again"


def test_a_killed_run_that_nobody_has_waited_for_is_dead(store):
    """As under a container's first process that reaps no children: the pid and its start time are still there."""
    verification.begin(store.root)
    session = json.loads((store.root / "session.json").read_text())
    process = subprocess.Popen(["sleep", "60"])
    session |= {"pid": process.pid, "started": started(process.pid)}
    (store.root / "session.json").write_text(json.dumps(session))
    assert not verification.ended_uncleanly(store.root)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert verification.ended_uncleanly(store.root)
    process.wait()
