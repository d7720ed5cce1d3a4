"""A finished run as an RO-Crate; tests/engines/test_crate_validators.py asks the profile's own validator."""

import json
import shutil
from urllib.parse import unquote, urlparse

import pytest


@pytest.fixture
def crate(workspace):
    done = workspace.ask("crate", "--workflow", str(workspace.code))
    assert done.returncode == 0, done.stderr
    return workspace, {
        e["@id"]: e for e in json.loads(workspace.result("ro-crate-metadata.json").read_text())["@graph"]
    }


def refs(value):
    if isinstance(value, dict):
        yield value["@id"]
    elif isinstance(value, list):
        for one in value:
            yield from refs(one)


def test_what_it_names_is_described_and_there(crate):
    workspace, entities = crate
    outside = {"http://schema.org/CompletedActionStatus"}
    for entity in entities.values():
        for name, value in entity.items():
            if name not in ("@id", "@type", "conformsTo", "identifier", "url"):
                missing = set(refs(value)) - set(entities) - outside
                assert not missing, (entity["@id"], name, missing)
    parts = {ref for e in entities.values() for ref in refs(e.get("hasPart", []))}
    for identity, entity in entities.items():
        if {"File", "Dataset"} & set([entity["@type"]] if isinstance(entity["@type"], str) else entity["@type"]):
            assert identity == "./" or identity in parts, identity
            path = (
                urlparse(identity).path
                if identity.startswith("file:")
                else workspace.run_folder / "results" / unquote(identity)
            )
            assert (workspace.run_folder / path).exists(), identity


def test_jobs_are_actions_with_what_they_read_and_made(crate):
    workspace, entities = crate
    jobs = {e["name"]: e for e in entities.values() if e["@id"].startswith("#job/")}
    training = next(e for name, e in jobs.items() if name.startswith("train_draft_model: "))
    draft = next(workspace.run_folder.glob("results/tiny/talk/*/draft")).relative_to(workspace.run_folder / "results")
    assert f"{draft}/training/model.safetensors" in set(refs(training["result"]))
    assert f"{draft}/vocab_mapping.safetensors" in set(refs(training["object"]))
    assert training["instrument"] == {"@id": "workflow/scripts/train_draft_model.py"}
    assert training["startTime"] <= training["endTime"]
    assert len([name for name in jobs if name.startswith("extract_")]) == 3
    run = entities["#run"]
    assert any(ref.endswith("inputs/talk.jsonl") for ref in refs(run["object"]))
    assert {f"{draft}/export/", f"{draft}/acceptance.json"} <= set(refs(run["result"]))


def test_unfinished_run_is_refused(workspace):
    workspace.result("summary.json").unlink()
    done = workspace.ask("crate")
    assert done.returncode == 1 and "summary.json: not there; a crate is made of a finished run" in done.stderr


def test_records_of_a_moved_run_do(crate):
    workspace, entities = crate
    shutil.rmtree(workspace.run_folder / ".snakemake")
    workspace.ask("crate", "--workflow", str(workspace.code))
    again = {e["@id"] for e in json.loads(workspace.result("ro-crate-metadata.json").read_text())["@graph"]}
    assert again == set(entities)
