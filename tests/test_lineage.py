"""Digests of code: what computes counts, what only tells does not."""

import pytest
import torch

from eagle3lib import lineage
from eagle3lib.lineage import computing_tokens

SOURCE = '''"""Docstring."""
import os


def f(x):
    """Twice."""
    # a comment
    print("working", x)
    log.info("still %s", x)
    progress.update(1)
    return x * 2
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Docstring."""', '"""Another."""'),
        ('"""Twice."""', '"""Doubled,\n    over two lines."""'),
        ("# a comment", "# another comment"),
        ('print("working", x)', 'print("at work", x, x)'),
        ('log.info("still %s", x)', 'log.info("yet %s", x)'),
        ("progress.update(1)", "progress.update(2, loss=x)"),
        ("import os\n\n\n", "import os\n\n"),
        ("return x * 2", "return x*2  # twice"),
    ],
)
def test_what_computes_nothing_changes_nothing(old, new):
    assert old in SOURCE
    assert computing_tokens(SOURCE.replace(old, new)) == computing_tokens(SOURCE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return x * 2", "return x * 3"),
        ("progress.update(1)", "settings.update(1)"),
        ('print("working", x)', 'y = print("working", x)'),
        ("    return x * 2", "    if x:\n        return x * 2"),
        ("import os", "import sys"),
    ],
)
def test_what_computes_changes_the_digest(old, new):
    assert old in SOURCE
    assert computing_tokens(SOURCE.replace(old, new)) != computing_tokens(SOURCE)


def test_a_string_that_is_a_value_counts():
    assert computing_tokens('x = "a"') != computing_tokens('x = "b"')


def test_code_follows_imports_and_leaves_settings_out():
    modules = lineage._closure(("eagle3lib.extraction",))
    assert "eagle3lib.hidden_states" in modules
    assert "eagle3lib.config" not in modules
    assert "eagle3lib.training" not in modules


def test_code_changes_with_an_imported_module(tmp_path, monkeypatch):
    (tmp_path / "__init__.py").write_text("")
    (tmp_path / "a.py").write_text("from eagle3lib import b\nx = b.y\n")
    (tmp_path / "b.py").write_text("y = 1\n")
    monkeypatch.setattr(lineage, "_root", lambda: tmp_path)

    def digest():
        for cached in (lineage.code, lineage._tokens, lineage._imported_in):
            cached.cache_clear()
        return lineage.code("eagle3lib.a")

    first = digest()
    (tmp_path / "b.py").write_text("y = 1  # one\n")
    assert digest() == first
    (tmp_path / "b.py").write_text("y = 2\n")
    assert digest() != first
    lineage.code.cache_clear()


def test_digest_does_not_depend_on_the_order_of_keys():
    assert lineage.digest({"a": 1, "b": [2]}) == lineage.digest({"b": [2], "a": 1})
    assert lineage.digest({"a": 1}) != lineage.digest({"a": 2})


def test_versions_of_what_computes_and_of_nothing_else():
    found = lineage.versions("eagle3lib.training")
    assert found["torch"] == torch.__version__.partition("+")[0] and {"transformers", "tokenizers"} <= set(found)
    assert lineage.versions("eagle3lib.acceptance") == {}
