"""Why would a file be made? Snakemake's own reasons, from its dry run, causes first and short enough to read."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from eagle3lib.errors import UserError
from eagle3lib.ledger import differences

NAMED_FILES = 3
JOB = re.compile(r"^(?:local)?(?:rule|checkpoint) (\w+):$")
PARAMS = re.compile(r"Params have changed since last execution: .*?before: (.*?) now: (.*?)\s*$")
CODE_DIGEST = re.compile(r"[0-9a-f]{12}")


@dataclass
class Job:
    """A job of a dry run, with Snakemake's reason."""

    rule: str
    reason: str = ""
    wildcards: str = ""

    @property
    def is_cause(self) -> bool:
        """Not merely the consequence of another job."""
        return not self.reason.startswith("Input files updated by another job") or ";" in self.reason


def explain(file: str, configfile: str, options: Sequence[str] = ()) -> str:
    """The jobs that would run to make `file`, those that start the chain first.

    Raises UserError when Snakemake cannot plan it, with its message.
    """
    command = [sys.executable, "-m", "snakemake", "--dry-run", "--nolock", "--configfile", configfile]
    command += [*options, "--", file]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "COLUMNS": "1000"})
    text = done.stdout + done.stderr
    if done.returncode:
        raise UserError(f"{file}: {_message(text)}")
    jobs = [job for job in parse(text) if job.rule != "all"]
    if not jobs:
        return f"{file}: is there, and nothing that shapes it has changed\n"
    causes = [job for job in jobs if job.is_cause]
    after: dict[str, int] = {}
    for job in jobs:
        if not job.is_cause:
            after[job.rule] = after.get(job.rule, 0) + 1
    lines = [f"{job.rule} ({job.wildcards}): {shorten(job.reason)}" for job in causes]
    if after:
        counted = ", ".join(rule if n == 1 else f"{rule} x {n}" for rule, n in after.items())
        lines.append(f"therefore also, what is in the store being linked, not made: {counted}")
    return "\n".join(lines) + "\n"


def parse(text: str) -> list[Job]:
    """The jobs in the output of `snakemake --dry-run`."""
    jobs: list[Job] = []
    for line in text.splitlines():
        if match := JOB.match(line):
            jobs.append(Job(match[1]))
        elif jobs and line.startswith("    reason: "):
            jobs[-1].reason = line.removeprefix("    reason: ").strip()
        elif jobs and line.startswith("    wildcards: "):
            jobs[-1].wildcards = line.removeprefix("    wildcards: ").strip()
    return jobs


def shorten(reason: str) -> str:
    """One job's reason: changed settings by their names, long lists of files by their number."""
    parts = []
    for part in reason.split("; "):
        if match := PARAMS.match(part):
            parts.append("; ".join(_params(match[1], match[2])))
        elif part.startswith(("Missing output files: ", "Input files", "Updated input files: ")):
            what, _, files = part.partition(": ")
            names = files.split(", ")
            more = f" and {len(names) - NAMED_FILES} more" if len(names) > NAMED_FILES else ""
            parts.append(f"{what[0].lower()}{what[1:]}: {', '.join(names[:NAMED_FILES])}{more}")
        else:
            parts.append(part)
    return "; ".join(parts)


def _params(before: str, now: str) -> list[str]:
    """What differs between params, as `setting: old -> new`."""
    old, new = _values(before), _values(now)
    lines = []
    for value in new:
        other = next((o for o in old if _alike(o, value)), None)
        if other is not None:
            old.remove(other)
        lines += ["the code that computes it" if _is_code(value) else line for line in differences(other, value)]
    return lines or [f"params: {before} -> {now}"]


def _values(text: str) -> list:
    """Params as Snakemake prints them: Python literals, joined by commas."""
    try:
        return [] if text == "<nothing exclusive>" else list(ast.literal_eval(f"[{text}]"))
    except (ValueError, SyntaxError):
        return []


def _alike(a: object, b: object) -> bool:
    """The same param at two times?"""
    if isinstance(a, dict) and isinstance(b, dict):
        return bool(a.keys() & b.keys())
    return type(a) is type(b) and _is_code(a) == _is_code(b)


def _is_code(value: object) -> bool:
    return isinstance(value, str) and bool(CODE_DIGEST.fullmatch(value))


def _message(text: str) -> str:
    """The last lines of a failed dry run that say something."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    start = next((i for i, line in enumerate(lines) if re.match(r"\w*(Error|Exception)\b", line)), len(lines) - 1)
    return " ".join(lines[start : start + 3])
