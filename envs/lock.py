"""Pin what pyproject.toml (trainer) and lint.in ask for, to the last dependency, for this platform."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).parent


def resolve(requirements: list[str]) -> list[str]:
    """name==version of everything pip would install; local version labels (+cpu) left out."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = json.loads(subprocess.run([*command, *requirements], check=True, capture_output=True, text=True).stdout)
    found = [(item["metadata"]["name"].lower(), item["metadata"]["version"]) for item in report["install"]]
    return [f"{name}=={version.split('+')[0]}" for name, version in sorted(found)]


def main() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    locks = {
        "trainer.txt": (
            "Workflow, trainer, transformers engine and tests",
            project["dependencies"] + project["optional-dependencies"]["test"],
        ),
        "lint.txt": (
            "Linters, apart from the rest: their pins disagree with Snakemake's",
            (HERE / "lint.in").read_text().split(),
        ),
    }
    for name, (about, requirements) in locks.items():
        pins = resolve(requirements)
        (HERE / name).write_text(f"# {about}. Made by `make lock`.\n" + "\n".join(pins) + "\n")
        print(f"envs/{name}: {len(pins)} packages")


if __name__ == "__main__":
    main()
