"""What came from what: digests of code and of values. No torch: parsed in every Snakemake job."""

from __future__ import annotations

import ast
import bisect
import functools
import hashlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "eagle3lib"
# These decide what is asked for or how it is told, never a value that is computed.
NOT_COMPUTING = {
    f"{PACKAGE}.{name}"
    for name in (
        *("config", "disk", "errors", "job", "ledger", "lineage", "plan", "processes", "remote"),
        *("store", "trackers", "warm_start"),
    )
}
# Of others: what they compute may differ from version to version.
COMPUTING_PACKAGES = {"torch": ("torch",), "transformers": ("transformers", "tokenizers")}
REPORTING_CALLS = {"print", "update", "info", "debug", "warning"}


def digest(value: Any, length: int = 12) -> str:
    """Short sha256 (hex) of plain values: dicts, lists, strings, numbers."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:length]


def file_sha256(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@functools.cache
def code(*modules: str) -> str:
    """Digest of what `modules` compute: their tokens and those of the modules of ours that they import.

    Comments, docstrings, blank lines and reporting calls (print, log, progress) do not count,
    so that an edit of those reruns nothing. Tokens, not `ast.dump`, which differs between
    versions of Python.
    """
    sources = sorted(_closure(modules))
    return digest([(name, _tokens(_path(name))) for name in sources])


@functools.cache
def versions(*modules: str) -> dict[str, str]:
    """Versions of the packages that `modules`, and those of ours that they import, compute with; not imported here.

    Without what follows a `+`: a build for another device is held to the same values.
    """
    imported = {name.partition(".")[0] for module in _closure(modules) for name in _imported(module)}
    packages = [package for name in sorted(imported) for package in COMPUTING_PACKAGES.get(name, ())]
    return {package: importlib.metadata.version(package).partition("+")[0] for package in packages}


def computing_tokens(source: str) -> list[str]:
    """The tokens of a module without comments, layout, docstrings and reporting calls."""
    silent = sorted(_silent_lines(ast.parse(source)))
    starts, ends = [start for start, _ in silent], list(itertools.accumulate((end for _, end in silent), max))
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.ENCODING, tokenize.ENDMARKER}
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    kept = []
    for token in tokens:
        before = bisect.bisect_right(starts, token.start)
        if token.type in layout or (before and token.start < ends[before - 1]):
            continue
        # The width of an indentation does not count; that there is one does.
        kept.append("INDENT" if token.type == tokenize.INDENT else token.string)
    return kept


def _silent_lines(tree: ast.AST) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """(start, end) positions of statements that compute nothing."""
    spans = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and (_is_text(node.value) or _is_reporting(node.value)):
            spans.append(((node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)))
    return spans


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_reporting(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call):
        return False
    if isinstance(node.func, ast.Name):
        return node.func.id == "print"
    # `progress.update(…)`, `log.info(…)`: by the name of the object, lest `dict.update` be left out.
    if not isinstance(node.func, ast.Attribute) or node.func.attr not in REPORTING_CALLS:
        return False
    owner = node.func.value
    return isinstance(owner, ast.Name) and owner.id in {"log", "logger", "progress"}


def _closure(modules: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    todo = list(modules)
    while todo:
        name = todo.pop()
        if name in found or name in NOT_COMPUTING:
            continue
        found.add(name)
        todo.extend(_imports(name))
    return found


def _imports(name: str) -> Iterator[str]:
    """Modules of ours that module `name` imports, wherever in it."""
    return (c for c in _imported(name) if c.startswith(f"{PACKAGE}.") and _is_module(c))


def _imported(name: str) -> list[str]:
    """All that module `name` imports: modules, and names that may be modules."""
    return _imported_in(_path(name))


# Every job parses the rules, which ask for a dozen digests of much the same modules: each is read once.
@functools.cache
def _tokens(path: Path) -> list[str]:
    return computing_tokens(path.read_text("utf-8"))


@functools.cache
def _imported_in(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return found


def _is_module(name: str) -> bool:
    base = _root().joinpath(*name.split(".")[1:])
    return base.with_suffix(".py").is_file() or (base / "__init__.py").is_file()


def _path(name: str) -> Path:
    base = _root().joinpath(*name.split(".")[1:])
    module = base.with_suffix(".py")
    return module if module.is_file() else base / "__init__.py"


@functools.cache
def _root() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec and spec.origin, "eagle3lib is not importable"
    return Path(spec.origin).parent
