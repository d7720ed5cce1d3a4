"""The path of serving, slot by slot, finds the trainer's own accuracies; the finished chain's: test_end_to_end.py."""

from __future__ import annotations

import pytest
import torch
from test_evaluation import AUX, PROMPTS, export_trained_draft, make_random_target

from eagle3lib import export, replay, targets
from eagle3lib.errors import UserError
from eagle3lib.training_time_test import Batch, TrainingTimeTest, reply_index


def test_finds_what_the_trainer_finds(tmp_path):
    """Three replies, two of them adjacent, in one sequence; most drafted tokens right at the first step, some later."""
    info, engine = make_random_target(tmp_path / "target")
    export_trained_draft(tmp_path / "draft", info, engine, steps=30)
    draft, mapping, _ = export.load_exported(tmp_path / "draft", targets.load_embedding(info))
    head, served, sums = targets.load_head(info), replay.Accuracy(4), torch.zeros(2, 4, dtype=torch.float64)
    for prompt, reply in zip(PROMPTS, engine.greedy(PROMPTS, 20), strict=True):
        ids, start = prompt + reply, len(prompt)
        replies = reply_index([start, start + 5, start + 5, start + 11, start + 13, len(ids)], len(ids))
        (states,) = engine.extract([ids], AUX)
        aux = torch.cat(states.aux, -1)
        served.add(draft, mapping, ids, replies, aux, replay.target_choice(head, states.last))
        test = TrainingTimeTest(draft, head, mapping, 4, 1.0)
        with torch.no_grad():
            batch = test.with_target_tokens(Batch.document(torch.tensor(ids), aux, states.last, replies))
            found = test(batch)[1]
        sums += torch.stack([found["correct"], found["supervised"]])
    assert [served.correct, served.of] == sums.long().tolist()
    assert served.of[0] > served.of[3] > 0 and 0.3 < served.by_step[0] < 1


def test_a_draft_whose_training_is_not_here(tmp_path):
    info, engine = make_random_target(tmp_path / "target")
    export_trained_draft(tmp_path / "draft", info, engine, steps=0)
    with pytest.raises(UserError, match="the training of .* is not in this store; .* check"):
        replay.job_of(tmp_path / "draft", tmp_path / "store")
