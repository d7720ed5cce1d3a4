"""How a run goes: `results/status/run.json`, a live view of it or lines, and a command for events.

Snakemake's main process knows which jobs run, the jobs know how far they are; both meet in one dict, the status, which
is written to the file and shown by whoever asks (`python -m eagle3lib status`). Jobs, also those on other nodes, put
small files into `results/status/jobs` (`job.tell`), which are removed when they have been read for the last time.

A handler of Snakemake's logger, added by the Snakefile: a logger plugin would have to be found by name before the run,
which it is not in an editable installation. It only takes notes; reading and showing are a thread's. Nothing here may
slow a run or end it: what fails is noted in `logs/monitor.log`.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from snakemake_interface_logger_plugins.common import LogEvent

from eagle3lib.disk import size
from eagle3lib.job import REPORTS, started
from eagle3lib.plan import RESULTS, Plan, read_shards

STATUS = REPORTS.parent / "run.json"
LOG = Path("logs/monitor.log")
EVERY_SECONDS = 2
RATE_SECONDS = 600  # a rate is that of the last ten minutes
EVENT_SECONDS = 60  # a command for events is given so long
KEPT_EVENTS = 20
EXTRACT = "extract_"  # begins the names of the rules that extract
STAGES = {
    "regenerate_replies": "regenerate",
    "shard_samples": "samples",
    "index_hidden_states": "extract",
    "train_draft_model": "train",
    "export_draft_model": "export",
    "measure_acceptance": "acceptance",
}
SHOWN_IN_VIEW = {LogEvent.JOB_INFO, LogEvent.JOB_STARTED, LogEvent.JOB_FINISHED, LogEvent.PROGRESS, LogEvent.SHELLCMD}

Status = dict[str, Any]
_monitor: Monitor | None = None


def begin(plan: Plan, snakemake: logging.Logger) -> None:
    """Watch this run, until `end`, or until Snakemake closes its log."""
    global _monitor
    with _never_raises():
        _monitor = Monitor(plan)
        _monitor.start(snakemake)


def end(state: str) -> None:
    """The run has ended in order: "done" or "failed"."""
    if _monitor:
        _monitor.finish(state)


class Monitor(logging.Handler):
    def __init__(self, plan: Plan):
        super().__init__()
        self.plan, self.settings = plan, plan.runs[0].cfg.monitor
        self.state, self.began, self.alive = "running", time.time(), time.time()
        self.steps = {"done": 0, "of": 0}
        self.running: dict[int, dict[str, Any]] = {}  # by Snakemake's number of the job
        self.failed: list[dict[str, Any]] = []
        self.events: deque[dict[str, Any]] = deque(maxlen=KEPT_EVENTS)
        self.extraction = {run.states: Extraction(run) for run in map(_States, plan.runs_by_states)}
        self.stalled = False
        self.to_tell: queue.Queue[dict[str, Any] | None] = queue.Queue()
        self.stop = threading.Event()
        self.threads: list[threading.Thread] = []

    # --- in Snakemake's thread: notes only -----------------------------------------------------------

    def start(self, snakemake: logging.Logger) -> None:
        shutil.rmtree(REPORTS, ignore_errors=True)  # of a run that was killed
        REPORTS.mkdir(parents=True)
        snakemake.addHandler(self)
        show = _show(self.settings, snakemake)
        for work in (lambda: self._watch(show), self._tell_events):
            self.threads.append(threading.Thread(target=work, daemon=True))
            self.threads[-1].start()
        self._event("started", f"{len(self.plan.runs)} drafts asked for")

    def emit(self, record: logging.LogRecord) -> None:
        with _never_raises():
            note = {
                LogEvent.JOB_INFO: self._job_begins,
                LogEvent.JOB_FINISHED: self._job_ends,
                LogEvent.JOB_ERROR: self._job_fails,
                LogEvent.PROGRESS: lambda r: self.steps.update(done=r.done, of=r.total),
            }.get(getattr(record, "event", None))
            if note:
                self.alive, self.stalled = time.time(), False
                note(record)

    def _job_begins(self, record: Any) -> None:
        about = {"rule": record.rule_name, "log": (list(record.log) or [None])[0], "started": time.time()}
        about |= {"wildcards": dict(record.wildcards or {})}
        self.running[record.jobid] = about

    def _job_ends(self, record: Any) -> None:
        about = self.running.pop(record.job_id, None)
        if about is None:
            return
        if about["rule"].startswith(EXTRACT) and about["log"]:
            *_, target, dataset, key, shard = Path(about["log"]).with_suffix("").parts
            self.extraction[f"{target}/{dataset}/{key}"].finished.add(shard)
        stage = STAGES.get(about["rule"])
        if stage and not any(one["rule"] == about["rule"] for one in self.running.values()):
            self._event("stage done", f"{stage}: {'/'.join(about['wildcards'].values())}", stage=stage)

    def _job_fails(self, record: Any) -> None:
        self.running.pop(record.jobid, None)
        log = (list(record.log) or [None])[0]
        about = {"rule": record.rule_name, "log": log, "reason": reason(log), "time": time.time()}
        self.failed.append(about)
        self._event("failed", f"{about['rule']}: {about['reason']}", **about)

    def _event(self, event: str, message: str, **more: Any) -> None:
        about = {"time": time.time(), **more, "event": event, "message": message}
        self.events.append(about)
        self.to_tell.put(about)

    def finish(self, state: str) -> None:
        """Say how it ended, and wait for those who are to hear of it, for a while."""
        if self.state != "running":
            return
        self.state = state
        with _never_raises():
            if state != "failed" or not self.failed:  # a failed job has been told
                self._event(state, f"{self.steps['done']} of {self.steps['of']} steps")
            self.stop.set()
            self.to_tell.put(None)
            for thread in self.threads:
                thread.join(EVENT_SECONDS)
            shutil.rmtree(REPORTS, ignore_errors=True)

    def close(self) -> None:
        self.finish("interrupted")
        super().close()

    # --- threads --------------------------------------------------------------------------------------

    def _watch(self, show: Callable[[Status, bool], None]) -> None:
        last = False
        while not last:
            last = self.stop.wait(EVERY_SECONDS)
            with _never_raises():
                status = self.status()
                self._look_for_a_stall(status)
                _write(status)
                show(status, last)

    def _look_for_a_stall(self, status: Status) -> None:
        quiet = time.time() - self.alive
        if self.running and not self.stalled and quiet > 60 * self.settings.stalled_minutes:
            self.stalled = True
            jobs = ", ".join(f"{job['rule']} ({job['log']})" for job in status["running"][:4])
            self._event("stalled", f"no progress for {quiet / 60:.0f} minutes; running: {jobs}")

    def _tell_events(self) -> None:
        while (event := self.to_tell.get()) is not None:
            if self.settings.on_event:
                with _never_raises():
                    tell_event(self.settings.on_event, event)

    # --- the status -----------------------------------------------------------------------------------

    def status(self) -> Status:
        reports = dict(_read_reports())
        running = [{**job, "report": reports.get(job["log"], {})} for job in list(self.running.values())]
        latest = max((report["updated"] for report in reports.values()), default=0.0)
        if latest > self.alive:
            self.alive, self.stalled = latest, False
        return {
            "state": "stalled" if self.stalled and self.state == "running" else self.state,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "process_started": started(os.getpid()),
            "started": self.began,
            "updated": time.time(),
            "steps": dict(self.steps),
            "extract": [about for one in self.extraction.values() if (about := one.status(reports))],
            "train": [_training(report) for report in reports.values() if report.get("label") == "train_draft_model"],
            "running": running,
            "failed": list(self.failed),
            "events": list(self.events),
        }


class _States:
    """Where the states of a run lie."""

    def __init__(self, run: Any):
        target, dataset, key, _ = run.names.values()
        self.states = f"{target}/{dataset}/{key}"
        self.shards = run.samples_file.with_name("shards.json")
        self.folder = RESULTS / self.states


class Extraction:
    """How far the states of one dataset are."""

    def __init__(self, run: _States):
        self.run = run
        self.finished: set[str] = set()
        self.looked = False
        self.absorbed = {"tokens": 0, "samples": 0, "bytes": 0}  # made in this run, by jobs that have ended
        self.past: deque[tuple[float, int, int]] = deque()  # time, tokens and bytes made so far

    def status(self, reports: dict[str, dict]) -> Status | None:
        """None before the samples are sharded."""
        if not self.run.shards.exists():
            return None
        about = read_shards(self.run.shards)
        mine = {
            log: r for log, r in reports.items() if log.startswith(f"logs/extract_hidden_states/{self.run.states}/")
        }
        self._look(about)
        made = dict(self.absorbed)
        for report in mine.values():
            these = _made(report)
            made = {name: made[name] + these[name] for name in made}
            if "ended" in report:
                self.absorbed = {name: self.absorbed[name] + these[name] for name in made}
        done = [about[shard] for shard in list(self.finished) if shard in about]
        live = [_made(r) for log, r in mine.items() if Path(log).stem not in self.finished]
        samples = sum(one["n_samples"] for one in done) + sum(one["samples"] for one in live)
        tokens = sum(one["n_tokens"] for one in done) + sum(one["tokens"] for one in live)
        all_tokens = sum(one["n_tokens"] for one in about.values())
        rates = self._rates(made)
        left = max(0, all_tokens - tokens)
        shares = [r["time"] for r in mine.values() if r.get("time") and "ended" not in r]
        return {
            "name": self.run.states,
            "shards": {"done": len(done), "of": len(about)},
            "samples": {"done": samples, "of": sum(one["n_samples"] for one in about.values())},
            "tokens": {"done": tokens, "of": all_tokens},
            "tokens_per_second": rates[0],
            "bytes_per_second": rates[1],
            "seconds_left": left / rates[0] if rates[0] else None,
            "bytes_left": round(self._bytes_all() * left / all_tokens) if all_tokens else 0,
            "time": {n: sum(s.get(n, 0) for s in shares) / len(shares) for n in ("engine", "writer", "client")}
            if shares
            else None,
        }

    def _look(self, about: dict[str, dict]) -> None:
        """Once: which shards were there before this run."""
        if not self.looked:
            folder = self.run.folder / "hidden_states"
            self.finished |= {shard for shard in about if (folder / shard / "manifest.json").exists()}
            self.looked = True

    def _rates(self, made: dict[str, int]) -> tuple[float, float]:
        now = time.time()
        self.past.append((now, made["tokens"], made["bytes"]))
        while len(self.past) > 2 and now - self.past[0][0] > RATE_SECONDS:
            self.past.popleft()
        began, tokens, n_bytes = self.past[0]
        seconds = max(now - began, 1e-9)
        return max(0.0, made["tokens"] - tokens) / seconds, max(0.0, made["bytes"] - n_bytes) / seconds

    def _bytes_all(self) -> int:
        try:
            return json.loads((self.run.folder / "storage_plan.json").read_text())["bytes_all"]
        except (OSError, ValueError, KeyError):
            return 0


def _made(report: dict[str, Any]) -> dict[str, int]:
    figures = report.get("figures", {})
    return {"tokens": report.get("done", 0), **{name: figures.get(name, 0) for name in ("samples", "bytes")}}


def _read_reports() -> Iterator[tuple[str, dict[str, Any]]]:
    """(log, report) of the jobs; those that have ended are told of once."""
    for path in sorted(REPORTS.glob("*.json")):
        with suppress(OSError, ValueError):
            report = json.loads(path.read_text())
            if "ended" in report:
                path.unlink()
            yield report["log"], report


def _training(report: dict[str, Any]) -> Status:
    """Of a training that runs, in its own words; acceptance_length is that of its last validation."""
    done, total, rate = report["done"], report["total"], report["rate"]
    return {
        "name": "/".join(Path(report["log"]).with_suffix("").parts[2:]),
        "tokens": {"done": done, "of": total},
        "tokens_per_second": rate,
        "seconds_left": (total - done) / rate if rate else None,
        **report.get("figures", {}),
    }


def reason(log: str | None) -> str:
    """The last line of a failed job's log: there `job_log` puts what went wrong."""
    with suppress(OSError, TypeError):
        lines = [line for line in Path(log or "").read_text(errors="replace").splitlines() if line.strip()]
        if lines:
            errors = [line for line in lines if line.startswith("error: ")]
            return (errors or lines)[-1].removeprefix("error: ")[:500]
    return "no word in its log"


def tell_event(command: str, event: dict[str, Any]) -> None:
    """Run the user's command; one that fails, or that takes too long, is noted."""
    environment = {**os.environ, "EAGLE3LIB_EVENT": event["event"], "EAGLE3LIB_MESSAGE": event["message"]}
    try:
        done = subprocess.run(
            command, shell=True, input=json.dumps(event), text=True, env=environment, timeout=EVENT_SECONDS,
            capture_output=True, check=False, start_new_session=True,
        )  # fmt: skip
        fault = f"ended with {done.returncode}: {done.stderr.strip()[-300:]}" if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        fault = str(error)
    if fault:
        note(f"monitor.on_event: {event['event']}: {command!r} {fault}")


def note(text: str) -> None:
    """What went wrong here, for who looks for it."""
    with suppress(OSError):
        LOG.parent.mkdir(parents=True, exist_ok=True)
        with open(LOG, "a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {text.rstrip()}\n")


@contextmanager
def _never_raises() -> Iterator[None]:
    try:
        yield
    except Exception:
        note(traceback.format_exc())


def _write(status: Status) -> None:
    """Whole or not at all; not synced: the next one comes soon."""
    part = STATUS.with_name("run.json.part")
    part.write_text(json.dumps(status, indent=1))
    os.replace(part, STATUS)


# --- shown --------------------------------------------------------------------------------------------


def read() -> Status | None:
    """The status of the run in this folder, or of the last one."""
    try:
        return json.loads(STATUS.read_text())
    except (OSError, ValueError):
        return None


def rows(status: Status) -> list[tuple[str, float | None, str]]:
    """(what, share done, the rest in words): the same for terminal, lines and command."""
    steps = status["steps"]
    found = [("run", _share(steps), f"{steps['done']} of {steps['of']} steps, {status['state']}")]
    for one in status["extract"]:
        if one["shards"]["done"] == one["shards"]["of"] and not one["tokens_per_second"]:
            continue
        text = [f"shards {_of(one['shards'])}", f"samples {_of(one['samples'])}"]
        text += [f"{one['tokens_per_second']:,.0f} tokens/s", f"{one['bytes_per_second'] / 1e9:.3f} GB/s"]
        text += [_left(one["seconds_left"]), f"disk to go {size(one['bytes_left'])}"]
        if one["time"]:
            shares = ", ".join(f"{name} {share:.1%}" for name, share in one["time"].items())
            text.append(f"jobs wait for: {shares}")
        found.append((f"extract {one['name']}", _share(one["tokens"]), ", ".join(text)))
    for one in status["train"]:
        text = [f"{one['tokens_per_second']:,.0f} tokens/s", _left(one["seconds_left"])]
        text += [f"{name} {one[name]:.4g}" for name in ("epoch", "loss", "accuracy") if name in one]
        if "acceptance_length" in one:
            text.append(f"acceptance length {one['acceptance_length']:.3f} (validation)")
        found.append((f"train {one['name']}", _share(one["tokens"]), ", ".join(text)))
    for job in status["running"]:
        report = job["report"]
        if not job["rule"].startswith((EXTRACT, "train")) and report.get("total"):
            of = {"done": report["done"], "of": report["total"]}
            found.append((job["rule"], _share(of), f"{_of(of)} {report['unit']}, {report['rate']:,.1f}/s"))
    found += [("failed", None, f"{job['rule']}: {job['reason']} (log: {job['log']})") for job in status["failed"][-3:]]
    return found


def describe(status: Status) -> str:
    """For `python -m eagle3lib status`."""
    lines = [f"{what}: {text}" for what, _, text in rows(status)]
    age = time.time() - status["updated"]
    if status["state"] in ("running", "stalled"):
        here = status["host"] == socket.gethostname()
        if here and started(status["pid"]) != status["process_started"]:
            lines.append("its Snakemake is gone: the same command goes on from here")
        elif age > 10 * EVERY_SECONDS:
            lines.append(f"no word for {_time(age)} from pid {status['pid']} on {status['host']}")
        lines += [
            f"  {job['rule']} {job['log'] or ''}, {_time(time.time() - job['started'])}" for job in status["running"]
        ]
    lines += [f"  {time.strftime('%H:%M:%S', time.localtime(e['time']))} {e['event']}: {e['message']}"
              for e in status["events"][-5:]]  # fmt: skip
    return "\n".join(lines) + "\n"


def _show(settings: Any, snakemake: logging.Logger) -> Callable[[Status, bool], None]:
    """How the status is shown here: (status, is it the last?)."""
    streams = [
        h for h in snakemake.handlers if isinstance(h, logging.StreamHandler) and h.name == "DefaultStreamHandler"
    ]
    if settings.view == "none" or not streams:  # another plugin, or --quiet, has the terminal
        return lambda status, last: None
    if settings.view == "auto" and streams[0].stream.isatty():
        return _Live(streams[0])
    return _Lines(settings.line_seconds, streams[0])


class _Lines:
    """A line now and then, while something is under way."""

    def __init__(self, seconds: float, stream: logging.StreamHandler):
        self.seconds, self.stream, self.shown = seconds, stream, time.monotonic()

    def __call__(self, status: Status, last: bool) -> None:
        if time.monotonic() - self.shown < self.seconds or last:
            return
        self.shown = time.monotonic()
        for what, _, text in rows(status):
            print(f"{what}: {text}", file=self.stream.stream, flush=True)


class _Live:
    """Below what Snakemake has to say (faults and warnings: jobs are in the view) a table that is kept up to date."""

    def __init__(self, stream: logging.StreamHandler):
        from rich.console import Console
        from rich.file_proxy import FileProxy
        from rich.live import Live

        self.stream, self.terminal = stream, stream.stream
        console = Console(file=self.terminal)
        self.live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self.live.start()
        stream.setStream(FileProxy(console, self.terminal))  # type: ignore[arg-type]
        stream.addFilter(self._not_in_view)

    @staticmethod
    def _not_in_view(record: logging.LogRecord) -> bool:
        return getattr(record, "event", None) not in SHOWN_IN_VIEW

    def __call__(self, status: Status, last: bool) -> None:
        self.live.update(table(status), refresh=True)
        if last:
            self.live.stop()
            self.stream.setStream(self.terminal)
            self.stream.removeFilter(self._not_in_view)


def table(status: Status) -> Any:
    """The status for a terminal."""
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(width=20)
    grid.add_column(overflow="fold")
    for what, share, text in rows(status):
        bar = ProgressBar(total=1, completed=share, width=20) if share is not None else ""
        grid.add_row(Text(what, style="bold red" if what == "failed" else "bold"), bar, Text(text))
    return grid


def _of(count: dict[str, int]) -> str:
    return f"{count['done']:,}/{count['of']:,}"


def _share(count: dict[str, int]) -> float | None:
    return count["done"] / count["of"] if count["of"] else None


def _left(seconds: float | None) -> str:
    return f"{_time(seconds)} to go" if seconds is not None else "time to go not known yet"


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def main(as_json: bool) -> int:
    """`python -m eagle3lib status`."""
    status = read()
    if status is None:
        print(f"{STATUS}: no run has been watched here yet")
        return 1
    sys.stdout.write(json.dumps(status, indent=1) + "\n" if as_json else describe(status))
    return 1 if status["state"] == "failed" else 0
