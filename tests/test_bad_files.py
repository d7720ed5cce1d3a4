"""Files that cannot be read: one line that names file, row and remedy, and nothing else."""

import re

import pytest
from bad_inputs.files import ENTRIES, FILES

from eagle3lib import samples
from eagle3lib.errors import UserError


def matches(expected: str, path, said: str) -> bool:
    pattern = ".*".join(re.escape(part) for part in expected.format(path=path).split("…"))
    return re.fullmatch(pattern, said) is not None


@pytest.mark.parametrize("name", FILES)
def test_bad_file(tmp_path, name):
    content, expected = FILES[name]
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        list(samples.read([path]))
    assert matches(expected, path, str(error.value)), str(error.value)


@pytest.mark.parametrize("entry", ENTRIES)
def test_bad_entry(tmp_path, entry):
    make, expected = ENTRIES[entry]
    path = tmp_path / entry
    if make:
        make(path)
    with pytest.raises(UserError) as error:
        list(samples.read([path]))
    assert matches(expected, path, str(error.value)), str(error.value)


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    """Root may read everything, so the refusal is the system call's."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')

    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("builtins.open", refused)
    with pytest.raises(UserError, match=r"a.jsonl: cannot be read \(Permission denied\); check its rights"):
        list(samples.read([path]))


def test_a_row_of_the_named_format(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x", "response": "y"}\n')
    source = samples.Source("a", (path,), format="alpaca")
    with pytest.raises(UserError, match=r"a.jsonl:1: instruction: missing, and the source's format is alpaca; correct"):
        list(samples.read([source]))
