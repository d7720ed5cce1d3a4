"""The vocabulary map: choice of tokens, both directions, and files that are not one."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st

from eagle3lib.errors import UserError
from eagle3lib.vocab_mapping import VocabMapping


def test_most_frequent_then_lower_id_then_unused():
    counts = torch.tensor([0, 5, 2, 0, 2, 9, 2])
    assert VocabMapping.from_counts(counts, 3).target_ids.tolist() == [1, 2, 5]
    assert VocabMapping.from_counts(counts, 4).target_ids.tolist() == [1, 2, 4, 5]
    assert VocabMapping.from_counts(counts, 6).target_ids.tolist() == [0, 1, 2, 4, 5, 6]


def test_d2t_holds_offsets():
    mapping = VocabMapping.from_target_ids(torch.tensor([6, 1, 4]), 8)
    assert mapping.d2t.tolist() == [1, 3, 4]
    assert mapping.t2d.tolist() == [False, True, False, False, True, False, True, False]


@given(st.lists(st.integers(0, 50), min_size=2, max_size=40), st.data())
def test_round_trip(counts, data):
    size = data.draw(st.integers(1, len(counts)))
    mapping = VocabMapping.from_counts(torch.tensor(counts), size)
    draft = torch.arange(size)
    assert torch.equal(mapping.to_draft(mapping.to_target(draft)), draft)
    known = mapping.to_draft(torch.arange(len(counts)))
    assert torch.equal(known >= 0, mapping.t2d)
    assert mapping.is_full == (size == len(counts))
    if mapping.is_full:
        assert not mapping.d2t.any()


def test_coverage():
    counts = torch.tensor([1, 0, 3, 6])
    assert VocabMapping.from_counts(counts, 2).coverage(counts) == pytest.approx(0.9)
    assert VocabMapping.from_counts(counts, 2).coverage(torch.zeros(4)) == 0.0


def test_saved_and_loaded(tmp_path):
    mapping = VocabMapping.from_counts(torch.tensor([0, 5, 2, 0, 2]), 2)
    mapping.save(tmp_path / "m.safetensors")
    loaded = VocabMapping.load(tmp_path / "m.safetensors")
    assert torch.equal(loaded.t2d, mapping.t2d) and torch.equal(loaded.d2t, mapping.d2t)


def test_bad_files_and_sizes(tmp_path):
    path = tmp_path / "m.safetensors"
    with pytest.raises(UserError, match="no vocabulary mapping"):
        VocabMapping.load(path)
    mapping = VocabMapping.from_counts(torch.tensor([0, 5, 2, 0, 2]), 2)
    ids_not_offsets = {"t2d": mapping.t2d, "d2t": mapping.target_ids}
    safetensors.torch.save_file(ids_not_offsets, path)
    with pytest.raises(UserError, match="different tokens"):
        VocabMapping.load(path)
    mapping.save(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match="not a vocabulary mapping"):
        VocabMapping.load(path)
    with pytest.raises(UserError, match="draft.draft_vocab_size: 9 is larger"):
        VocabMapping.from_counts(torch.zeros(8), 9)
