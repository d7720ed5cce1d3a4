"""Lower layers never import higher ones; what every job parses stays free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "eagle3lib"
LAYERS = [
    {"errors"},
    {"config", "job", "lineage", "processes", "leases"},
    {
        "messages",
        "chat",
        "template_check",
        "vocab_mapping",
        "norm",
        "mla",
        "draft_model",
        "losses",
        "attention",
        "compilation",
        "parallel",
        "speed",
        "training_time_test",
        "acceptance",
        "comparison",
        "rejection",
        "wheels",
        "gguf_target",
        "tables",
        "trackers",
        "early_stopping",
    },
    {
        "readers",
        "samples",
        "remote",
        "sources",
        "curation",
        "question_sets",
        "targets",
        "shards",
        "hidden_states",
        "in_place",
        "checkpoint",
        "export",
        "foreign",
        "warm_start",
        "gpus",
        "plots",
        "engines",
    },
    {"disk", "links", "store", "ledger", "records", "verification"},
    {
        "dataset_export",
        "extraction",
        "adoption",
        "engine_job",
        "loader",
        "training",
        "evaluation",
        "regeneration",
        "summary",
        "plan",
        "drafts",
        "preflight",
    },
    {"consumers", "crate", "hub", "inspection", "monitor", "overview", "packing", "replay", "trace", "why"},
    {"canary", "diagnosis", "doctor", "pages"},
    {"bench"},
    {"__main__"},
]
RANK = {name: rank for rank, names in enumerate(LAYERS) for name in names}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "eagle3lib":
            found |= {alias.name for alias in node.names if alias.name in RANK}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("eagle3lib."):
            found.add(node.module.split(".")[1])
        elif isinstance(node, ast.Import):
            found |= {a.name.split(".")[1] for a in node.names if a.name.startswith("eagle3lib.")}
    return found


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_dependency_direction(path):
    name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if name == "__init__":
        return
    assert name in RANK, f"give {name} a place in LAYERS"
    higher = {other for other in imports(path) if RANK[other] > RANK[name]}
    assert not higher, f"{name} imports from above: {higher}"


def test_only_engines_know_the_engines():
    for path in PACKAGE.rglob("*.py"):
        if "engines" not in path.parts:
            assert "AutoModelForCausalLM" not in path.read_text() or path.name == "gguf_target.py", path


def test_planning_imports_no_torch():
    code = "import sys, eagle3lib.plan; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_rule_script_and_log_share_a_name():
    root = PACKAGE.parent
    rules = "".join(path.read_text() for path in sorted((root / "rules").glob("*.smk")))
    for script in (root / "scripts").glob("*.py"):
        name = script.stem
        assert f'"../scripts/{name}.py"' in rules
        assert f'"logs/{name}' in rules and f'"results/benchmarks/{name}' in rules, name
        assert len(script.read_text().splitlines()) <= 45, f"{script}: thin, please"
