"""The RO-Crate of a finished run, by the validator of its profiles and by `runcrate`. Needs `make venv-crate`."""

import json
import subprocess
from pathlib import Path

import pytest

FOLDER = Path(".venv-crate/bin").absolute()
pytestmark = pytest.mark.skipif(not (FOLDER / "runcrate").exists(), reason="no .venv-crate; `make venv-crate`")


def test_crate_conforms_to_its_profiles(workspace):
    workspace.ask("crate", "--workflow", str(workspace.code), "--licence", "https://spdx.org/licenses/CC-BY-4.0")
    results = workspace.run_folder / "results"
    script = Path(__file__).with_name("validate_crate.py")
    done = subprocess.run([FOLDER / "python", script, results], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    required = [issue for issue in said["issues"] if issue["severity"] == "REQUIRED"]
    assert not required, required
    names = ("process-run", "workflow-run", "provenance-run")
    assert set(said["profiles"]) >= {"ro-crate-1.1", "workflow-ro-crate-1.0", *(f"{name}-crate-0.5" for name in names)}
    report = subprocess.run([FOLDER / "runcrate", "report", results], capture_output=True, text=True, check=True).stdout
    assert "step: workflow/Snakefile#train_draft_model" in report and "export/ <- #parameter/results" in report


def test_crate_without_its_workflow_does_not_pass(workspace):
    """The validator finds what is wrong: it is not that it finds nothing."""
    workspace.ask("crate", "--workflow", str(workspace.code))
    (workspace.run_folder / "results/workflow/Snakefile").unlink()
    script = Path(__file__).with_name("validate_crate.py")
    command = [FOLDER / "python", script, workspace.run_folder / "results"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert any(issue["severity"] == "REQUIRED" for issue in json.loads(done.stdout.splitlines()[-1])["issues"])
