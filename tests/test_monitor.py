"""A run that is watched: what jobs tell, what becomes of it, who hears of it."""

import json
import os
import socket
import time

import pytest

from eagle3lib import job, monitor


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    job.REPORTS.mkdir(parents=True)
    return tmp_path


def report(log, **values):
    name = log.replace("/", "~")
    (job.REPORTS / f"{name}.json").write_text(json.dumps({"log": log, "updated": time.time(), **values}))


def status(**values):
    empty = {"steps": {"done": 1, "of": 4}, "extract": [], "train": [], "running": [], "failed": [], "events": []}
    about = {"state": "running", "host": socket.gethostname(), "pid": os.getpid(), "updated": time.time()}
    return empty | about | {"process_started": job.started(os.getpid())} | values


def test_a_job_tells_how_far_it_is_and_that_it_has_ended(folder):
    log = "logs/extract_hidden_states/t/d/k/00000.log"
    with job.job_log(log):
        job.Progress(100, "tokens", "extract").update(40, samples=2)
        assert job.tell(at_once=True)
        (told,) = (json.loads(next(job.REPORTS.glob("*.json")).read_text()),)
        assert (told["log"], told["done"], told["total"], told["figures"]) == (log, 40, 100, {"samples": 2})
    ((name, last),) = monitor._read_reports()
    assert name == log and last["ended"] >= last["started"]
    assert not list(job.REPORTS.glob("*.json"))  # told of once


def test_nobody_watches_nobody_is_told(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with job.job_log("logs/x/y.log"):
        assert not job.tell(at_once=True, done=1)
    assert not (tmp_path / "results").exists()


def test_training_in_its_own_words(folder):
    figures = {"epoch": 2, "loss": 3.5, "accuracy": 0.4}
    one = {"label": "train_draft_model", "done": 30, "total": 90, "rate": 10.0, "figures": figures}
    report("logs/train_draft_model/t/d/k/draft.log", **one)
    ((_, told),) = monitor._read_reports()
    row = monitor._training(told)
    assert (row["name"], row["seconds_left"], row["loss"]) == ("t/d/k/draft", 6.0, 3.5)
    assert "acceptance" not in monitor.describe(status(train=[row]))
    row = monitor._training({**told, "figures": {**figures, "acceptance_length": 1.4321}})
    assert "acceptance length 1.432 (validation)" in monitor.describe(status(train=[row]))


def test_reason_is_the_error_of_the_log(folder):
    (folder / "x.log").write_text("step 1\nerror: no room: 3 bytes free\nTraceback\n")
    assert monitor.reason("x.log") == "no room: 3 bytes free"
    assert monitor.reason("absent.log") == monitor.reason(None) == "no word in its log"


def test_command_for_events_gets_it_and_its_fault_is_noted(folder):
    event = {"event": "failed", "message": "train: no room", "time": 1.0}
    monitor.tell_event('cat > event.json; echo "$EAGLE3LIB_EVENT: $EAGLE3LIB_MESSAGE" > said.txt', event)
    assert json.loads((folder / "event.json").read_text()) == event
    assert (folder / "said.txt").read_text() == "failed: train: no room\n" and not monitor.LOG.exists()
    monitor.tell_event("echo nobody there >&2; exit 3", event)
    assert "ended with 3: nobody there" in monitor.LOG.read_text()


def test_a_run_whose_snakemake_is_gone(folder):
    gone = status(process_started=-1.0)
    assert "its Snakemake is gone: the same command goes on from here" in monitor.describe(gone)
    assert "gone" not in monitor.describe(status())


def test_there_is_no_run_yet(folder, capsys):
    assert monitor.main(as_json=False) == 1
    assert "no run has been watched here yet" in capsys.readouterr().out


def test_a_moment_is_the_engines_else_the_writers_else_ours(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 4.0, 8.0, 8.0])
    monkeypatch.setattr(job.time, "monotonic", lambda: next(now))
    clock = job.Clock()
    with clock.during("engine"), clock.during("writer"):  # from 0; from 1 to 3, while the engine has a request
        pass
    assert clock.seconds == {"engine": 4.0}  # to 4
    assert clock.shares() == {"engine": 0.5, "client": 0.5}  # at 8
