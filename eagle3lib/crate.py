"""A finished run as an RO-Crate: `results/ro-crate-metadata.json`, by the Provenance Run Crate profile.

The folder of the results is the crate: what it names is there. Written from Snakemake's records: an action a job, with
its inputs, outputs, log and times. The workflow's own files are copied to results/workflow/. Inputs from elsewhere
are named by their place (file://…) and are not copied.

Profiles: https://w3id.org/ro/wfrun/{process,workflow,provenance}/0.5, https://w3id.org/workflowhub/workflow-ro-crate/1.0
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from eagle3lib import __version__, records
from eagle3lib.errors import UserError
from eagle3lib.job import write_json
from eagle3lib.plan import RESULTS, STORE

METADATA = "ro-crate-metadata.json"
WORKFLOW = "workflow"
PROFILES = [
    *(f"https://w3id.org/ro/wfrun/{name}/0.5" for name in ("process", "workflow", "provenance")),
    "https://w3id.org/workflowhub/workflow-ro-crate/1.0",
]
CONTEXT = "https://w3id.org/ro/crate/1.1/context"
FORMAL_PARAMETER = "https://bioschemas.org/profiles/FormalParameter/1.0-RELEASE"
# What the whole run is about, of all that its jobs make.
RESULT_RULES = ("export_draft_model", "measure_acceptance", "compare_drafts", "summarize")
MEDIA_TYPES = {
    ".json": "application/json",
    ".jsonl": "application/jsonl",
    ".md": "text/markdown",
    ".html": "text/html",
    ".svg": "image/svg+xml",
    ".yaml": "application/yaml",
    ".tsv": "text/tab-separated-values",
    ".log": "text/plain",
    ".py": "text/x-python",
    ".smk": "text/plain",
    ".parquet": "application/vnd.apache.parquet",
}


@dataclass
class Job:
    """A job of Snakemake, out of the records of its outputs."""

    rule: str
    log: str
    start: float
    end: float
    inputs: list[str]
    outputs: list[str] = field(default_factory=list)


def write(code: Path, licence: str | None) -> Path:
    """Write the crate of the run in this folder; `code` is the folder of its Snakefile. Returns the metadata file.

    licence: URL of the results' licence. Raises UserError when the run is not finished.
    """
    if not (RESULTS / "summary.json").exists():
        raise UserError(f"{RESULTS / 'summary.json'}: not there; a crate is made of a finished run")
    jobs = list(jobs_on_record())
    _copy_workflow(code, RESULTS / WORKFLOW)
    graph = _Graph()
    _describe(graph, jobs, licence)
    write_json(RESULTS / METADATA, {"@context": CONTEXT, "@graph": graph.entities()})
    return RESULTS / METADATA


def jobs_on_record() -> Iterator[Job]:
    """All jobs of which something is still there, in the order in which they began."""
    folder = Path(".snakemake/metadata")
    found: dict[tuple[str, str], Job] = {}
    base = folder if folder.is_dir() else STORE / "records"
    for path in sorted(base.rglob("*")):
        output = records.output_of(path.relative_to(base).as_posix())
        if not path.is_file() or output.endswith(".pt") or not Path(output).exists():
            continue
        with suppress(OSError, ValueError, KeyError):
            record = json.loads(path.read_text())
            log = (record.get("log") or [output])[0]
            new = Job(record["rule"], log, record["starttime"], record["endtime"], list(record.get("input") or []))
            found.setdefault((record["rule"], log), new).outputs.append(output)
    return iter(sorted(found.values(), key=lambda job: (job.start, job.log)))


def _copy_workflow(code: Path, to: Path) -> None:
    if not (code / "Snakefile").exists():
        raise UserError(f"{code / 'Snakefile'}: not there; name the workflow's folder with --workflow")
    to.mkdir(parents=True, exist_ok=True)
    shutil.copy2(code / "Snakefile", to / "Snakefile")
    for folder in ("rules", "scripts"):
        shutil.copytree(code / folder, to / folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))


class _Graph:
    """Entities by their id, in the order in which they came."""

    def __init__(self) -> None:
        self._entities: dict[str, dict[str, Any]] = {}
        self.parts: list[str] = []

    def add(self, identity: str, kind: Any, **values: Any) -> dict[str, str]:
        entity = {
            "@id": identity,
            "@type": kind,
            **{name: value for name, value in values.items() if value is not None},
        }
        self._entities.setdefault(identity, entity)
        return _ref(identity)

    def extend(self, identity: str, name: str, refs: Iterable[dict[str, str]]) -> None:
        known = self._entities[identity].setdefault(name, [])
        known += [ref for ref in refs if ref not in known]

    def file(self, path: str) -> dict[str, str]:
        """A file or folder by its path from the run's folder; below results/ it is part of the crate."""
        there = Path(path)
        try:
            relative = there.relative_to(RESULTS).as_posix()
        except ValueError:
            identity = Path(os.path.abspath(path)).as_uri()
            if identity not in self._entities:
                self.parts.append(identity)
            about = {"name": there.name, "description": f"{path}, which does not lie in the crate"}
            kind, media = ("Dataset", None) if there.is_dir() else ("File", _media_type(there))
            return self.add(identity, kind, encodingFormat=media, **about)
        identity = quote(relative) + ("/" if there.is_dir() else "")
        if identity not in self._entities:
            self.parts.append(identity)
        if there.is_dir():
            return self.add(identity, "Dataset", name=there.name, hasPart=[self.file(str(p)) for p in _files(there)])
        stat = there.stat()
        return self.add(
            identity,
            "File",
            name=there.name,
            contentSize=str(stat.st_size),
            dateModified=_time(stat.st_mtime),
            encodingFormat=_media_type(there),
        )

    def entities(self) -> list[dict[str, Any]]:
        """A list of one stands as its one value."""
        return [{name: _alone(value) for name, value in entity.items()} for entity in self._entities.values()]


def _alone(value: Any) -> Any:
    return value[0] if isinstance(value, list) and len(value) == 1 else value


def _media_type(path: Path) -> str:
    return MEDIA_TYPES.get(path.suffix, "application/octet-stream")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))


def _ref(identity: str) -> dict[str, str]:
    return {"@id": identity}


def _describe(graph: _Graph, jobs: list[Job], licence: str | None) -> None:
    snakefile = f"{WORKFLOW}/Snakefile"
    graph.add(
        METADATA,
        "CreativeWork",
        about=_ref("./"),
        conformsTo=[_ref(CONTEXT.removesuffix("/context")), _ref(PROFILES[-1])],
    )
    runs = json.loads((RESULTS / "summary.json").read_text())["runs"]
    drafts = ", ".join(f"{run['target']}/{run['dataset']}/{run['draft']}" for run in runs)
    graph.add(
        "./",
        "Dataset",
        name=f"EAGLE-3 drafts: {drafts}",
        description="Speculative-decoding draft models, the samples and hidden states they were trained on, and what "
        "they were measured to accept; made by a Snakemake workflow.",
        datePublished=_time(max((job.end for job in jobs), default=0.0)),
        license=_licence(graph, licence),
        conformsTo=[
            graph.add(url, "CreativeWork", name=url.split("/ro/")[-1], version=url.rpartition("/")[2])
            for url in PROFILES
        ],
        mainEntity=_ref(snakefile),
        mentions=[_ref("#run"), _ref("#orchestration"), *(_ref(f"#job/{number}") for number in range(len(jobs)))],
        hasPart=[],
    )
    _workflow(graph, snakefile, jobs)
    actions = [_action(graph, job, number) for number, job in enumerate(jobs)]
    _run(graph, snakefile, jobs)
    _orchestration(graph, jobs, actions)
    for name in ("summary.md", "summary.html", "summary.json", "config.yaml"):
        if (RESULTS / name).exists():
            graph.file(str(RESULTS / name))
    graph.extend("./", "hasPart", map(_ref, dict.fromkeys([snakefile, *graph.parts])))


def _licence(graph: _Graph, licence: str | None) -> dict[str, str]:
    about = "Of the results: not stated by who made them. Of the workflow: Apache-2.0."
    if licence is None:
        return graph.add("#licence", "CreativeWork", name="Not stated", description=about)
    return graph.add(licence, "CreativeWork", name=licence.rpartition("/")[2], url=licence)


def _workflow(graph: _Graph, snakefile: str, jobs: list[Job]) -> None:
    rules = list(dict.fromkeys(job.rule for job in jobs))
    version = importlib.metadata.version("snakemake")
    graph.add(
        "https://w3id.org/workflowhub/workflow-ro-crate#snakemake",
        "ComputerLanguage",
        name="Snakemake",
        identifier=_ref("https://snakemake.readthedocs.io"),
        url=_ref("https://snakemake.readthedocs.io"),
        version=version,
    )
    graph.add(
        "#snakemake",
        "SoftwareApplication",
        name="Snakemake",
        url="https://snakemake.readthedocs.io",
        softwareVersion=version,
    )
    tools = {rule: _tool(graph, rule) for rule in rules}
    steps = []
    for position, rule in enumerate(rules):
        identity = f"{snakefile}#{rule}"
        steps.append(graph.add(identity, "HowToStep", name=rule, position=str(position), workExample=tools[rule]))
    graph.add(
        snakefile,
        ["File", "SoftwareSourceCode", "ComputationalWorkflow", "HowTo"],
        name="EAGLE-3 draft models with Snakemake",
        version=__version__,
        license=graph.add("https://spdx.org/licenses/Apache-2.0", "CreativeWork", name="Apache-2.0"),
        encodingFormat="text/plain",
        programmingLanguage=_ref("https://w3id.org/workflowhub/workflow-ro-crate#snakemake"),
        hasPart=list({tool["@id"]: tool for tool in tools.values()}.values()),
        step=steps,
        input=[],
        output=[],
    )


def _tool(graph: _Graph, rule: str) -> dict[str, str]:
    """The script of a rule (the tail shards' rules share one)."""
    name = rule if (RESULTS / WORKFLOW / "scripts" / f"{rule}.py").exists() else "extract_hidden_states"
    path = RESULTS / WORKFLOW / "scripts" / f"{name}.py"
    text = path.read_text().split('"""')[1].strip()
    identity = f"{WORKFLOW}/scripts/{path.name}"
    graph.parts.append(identity)
    return graph.add(
        identity,
        ["File", "SoftwareSourceCode", "SoftwareApplication"],
        name=name,
        description=text,
        encodingFormat="text/x-python",
        programmingLanguage=graph.add("#python", "ComputerLanguage", name="Python", url=_ref("https://www.python.org")),
        version=__version__,
    )


def _action(graph: _Graph, job: Job, number: int) -> str:
    identity = f"#job/{number}"
    inputs = [path for path in job.inputs if Path(path).exists()]
    graph.add(
        identity,
        "CreateAction",
        name=f"{job.rule}: {Path(job.log).relative_to('logs') if job.log.startswith('logs/') else job.log}",
        description=f"log: {job.log}",
        instrument=_tool(graph, job.rule),
        object=[graph.file(path) for path in inputs],
        result=[graph.file(path) for path in sorted(job.outputs)],
        startTime=_time(job.start),
        endTime=_time(job.end),
        actionStatus="http://schema.org/CompletedActionStatus",
    )
    return identity


def _run(graph: _Graph, snakefile: str, jobs: list[Job]) -> None:
    made = {path for job in jobs for path in job.outputs}
    objects = sorted({path for job in jobs for path in job.inputs if path not in made and Path(path).exists()})
    results = sorted(path for job in jobs if job.rule in RESULT_RULES for path in job.outputs)
    config = [str(RESULTS / "config.yaml")] if (RESULTS / "config.yaml").exists() else []
    for direction, name, paths in (
        ("input", "inputs", [p for p in objects if not p.startswith(f"{RESULTS}/")]),
        ("input", "configuration", config),
        ("output", "results", [path for path in results if path not in config]),
    ):
        parameter = graph.add(
            f"#parameter/{name}",
            "FormalParameter",
            name=name,
            additionalType="File",
            conformsTo=_ref(FORMAL_PARAMETER),
            workExample=[],
            multipleValues="True" if len(paths) > 1 else None,
        )
        graph.extend(snakefile, direction, [parameter])
        graph.extend(parameter["@id"], "workExample", map(graph.file, paths))
        for path in paths:
            graph.extend(graph.file(path)["@id"], "exampleOfWork", [parameter])
    graph.add(
        "#run",
        "CreateAction",
        name="the workflow's run",
        description="All jobs of which the results are there, from whichever invocation of Snakemake.",
        instrument=_ref(snakefile),
        object=[graph.file(path) for path in [*objects, *config]],
        result=[graph.file(path) for path in results if path not in config],
        startTime=_time(min((job.start for job in jobs), default=0.0)),
        endTime=_time(max((job.end for job in jobs), default=0.0)),
        actionStatus="http://schema.org/CompletedActionStatus",
    )


def _orchestration(graph: _Graph, jobs: list[Job], actions: list[str]) -> None:
    by_rule = defaultdict(list)
    for job, action in zip(jobs, actions, strict=True):
        by_rule[job.rule].append(_ref(action))
    controls = [
        graph.add(
            f"#control/{rule}",
            "ControlAction",
            name=f"orchestrate {rule}",
            instrument=_ref(f"{WORKFLOW}/Snakefile#{rule}"),
            object=these,
        )
        for rule, these in by_rule.items()
    ]
    times = [_time(min((j.start for j in jobs), default=0.0)), _time(max((j.end for j in jobs), default=0.0))]
    graph.add(
        "#orchestration",
        "OrganizeAction",
        name="Snakemake's run",
        instrument=_ref("#snakemake"),
        object=controls,
        result=_ref("#run"),
        startTime=times[0],
        endTime=times[1],
    )


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
