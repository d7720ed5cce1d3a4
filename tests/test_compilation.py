"""`training.compile`: the same figures, and a clear word where nothing can be compiled."""

from __future__ import annotations

import shutil

import pytest
import torch
import torch._inductor.config
from test_training import SETTINGS, job_of, world  # noqa: F401 - a fixture
from test_training_time_test import MAPPING, gradients, make_document, make_head, make_model, packed

from eagle3lib import compilation, preflight, training
from eagle3lib.errors import UserError
from eagle3lib.plan import NOT_SHAPING
from eagle3lib.training_time_test import TrainingTimeTest

COMPILER = pytest.mark.skipif(not shutil.which("g++"), reason="no C++ compiler here")
CASES = [("aot_eager", True), pytest.param("inductor", False, marks=COMPILER)]


@pytest.mark.parametrize(("backend", "recompute"), CASES)
def test_compiled_equals_eager(backend, recompute):
    """Traced whole, with shapes that change: loss and every gradient of two batches of other sizes."""
    torch._dynamo.reset()
    plain, compiled = make_model(), make_model()
    compilation.compile_parts(compiled, backend)
    tests = [TrainingTimeTest(model, make_head(), MAPPING, 3, 0.8, recompute=recompute) for model in (plain, compiled)]
    whole = packed(tests[0])
    torch._dynamo.utils.counters.clear()
    for batch in (whole, make_smaller(tests[0])):
        (expected, _), (loss, _) = (test(batch) for test in tests)
        torch.testing.assert_close(loss, expected)
        ours, theirs = gradients(compiled, loss), gradients(plain, expected)
        for name in theirs:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=name)
    assert torch._dynamo.utils.counters["stats"]["calls_captured"] > 0
    assert not torch._dynamo.utils.counters["graph_break"]


def make_smaller(test):
    return test.with_target_tokens(make_document(3, 9, [1, 8]))


def test_how_it_is_computed_does_not_train_anew():
    """As other numbers of GPUs: at most the last bits differ."""
    assert {"gpus", "processes", "parallel", "recompute", "compile"} <= NOT_SHAPING["training"]
    assert not {"best_by", "compute_dtype", "loss"} & NOT_SHAPING["training"]


def test_without_a_compiler_it_is_refused(world, tmp_path, monkeypatch):  # noqa: F811
    """Before the GPUs are freed for it, and when the training starts."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("/nonexistent/g++",))
    job = job_of(world, tmp_path, SETTINGS.model_copy(update={"compile": True}))
    for start in (training.train, lambda job: preflight.check(job, 3, {}, None)):
        with pytest.raises(UserError, match=r"training\.compile: torch\.compile does not work .*install a C\+\+ comp"):
            start(job)
