"""Our side of an engine that serves the draft; the engine itself: tests/engines."""

from __future__ import annotations

import ast
import sys
from dataclasses import replace

import pytest
from test_export import make_target

from eagle3lib.acceptance import Pass
from eagle3lib.config import AcceptanceConfig
from eagle3lib.consumers import vllm
from eagle3lib.errors import UserError

WITHOUT = vllm.Run(
    replies=[[5, 6, 7], [8, 9]],
    gaps=[[1.0, 1e-4, 1.0], [1.0, 1.0]],
    accepted_by_pass=[],
    passes=0,
    drafted=0,
    accepted=[],
    seconds=2.0,
)
ACCEPTED = [[2, 1, 0, 0] * 20, [1, 0] * 10]
OURS = [[Pass(2, n) for n in reply] for reply in ACCEPTED]


def drafting(by_pass=ACCEPTED, **changes):
    """A run with a draft of two steps that accepted so many tokens in each pass of the two replies."""
    passes = [one for reply in by_pass for one in reply]
    counted = {
        "gaps": [],
        "accepted_by_pass": by_pass,
        "passes": len(passes),
        "drafted": 2 * len(passes),
        "accepted": [sum(one > k for one in passes) for k in range(2)],
    }
    return replace(WITHOUT, **counted | changes)


def test_two_decodings_that_agree():
    result = vllm.compare(WITHOUT, drafting(), OURS)
    assert (result["identical"], result["near_ties"], result["same_passes"]) == (2, 0, 2)
    assert result["acceptance_rate"] == [0.5, 0.2] == result["ours"]["acceptance_rate"]
    assert result["acceptance_length"] == result["ours"]["acceptance_length"] == pytest.approx(1.7)
    assert result["largest_difference"] == 0


def test_a_near_tie_is_counted_and_any_other_difference_refused():
    assert vllm.compare(WITHOUT, drafting(replies=[[5, 3, 3], [8, 9]]), OURS)["near_ties"] == 1
    for replies, says in (
        ([[4, 6, 7], [8, 9]], "prompt 0: with the draft it gave 4 at reply token 0 instead of 5"),
        ([[5, 6, 7], [8]], "prompt 1: .* gave its end at reply token 1 instead of 9"),
        ([[5, 6, 7], [8, 9, 2]], "prompt 1: .* gave 2 at reply token 2 instead of its end"),
    ):
        with pytest.raises(UserError, match=says):
            vllm.compare(WITHOUT, drafting(replies=replies), OURS)


@pytest.mark.parametrize(("more", "agrees"), [(0, True), (1, True), (3, False), (20, False)])
def test_the_accepted_share_is_held_against_ours(more, agrees):
    """`more` of the 100 passes accept a token more; in bfloat16 only the shares count."""
    other = drafting(accepted=[50 + more, 20])
    if agrees:
        assert vllm.compare(WITHOUT, other, OURS, dtype="bfloat16")["largest_difference"] <= vllm.TOLERANCE
    else:
        with pytest.raises(UserError, match="serves another draft than the one measured"):
            vllm.compare(WITHOUT, other, OURS, dtype="bfloat16")


def test_in_fp32_the_passes_are_the_same_ones():
    """The same shares in another order: no rate can tell."""
    other = drafting([list(reversed(reply)) for reply in ACCEPTED])
    assert vllm.compare(WITHOUT, other, OURS, dtype="bfloat16")["same_passes"] == 0
    with pytest.raises(UserError, match="the same passes in 0 of 2 replies"):
        vllm.compare(WITHOUT, other, OURS)


def test_no_pass_at_all_is_no_agreement():
    with pytest.raises(UserError, match=r"vLLM accepts - - of the drafts by position, our own decoder 0.500 0.200"):
        vllm.compare(WITHOUT, drafting([[], []]), OURS)


def test_job_leaves_room_behind_the_limit():
    cfg = AcceptanceConfig(prompts=["unused"], max_new_tokens=16, draft_steps=4)
    target = make_target()
    assert vllm.Job.of(target, [None], [[1] * 10, [1]], cfg).max_model_len == 10 + 16 + 5 + 5
    assert vllm.Job.of(target, [None], [[1] * 486], cfg).max_model_len == target.max_position_embeddings
    with pytest.raises(UserError, match="the longest prompt needs 513 positions .* the target has 512"):
        vllm.Job.of(target, [None], [[1] * 487], cfg)
    job = vllm.Job.of(target, [None, "drafts/one"], [[1]], cfg)
    assert job.drafts[0] is None and job.drafts[1].startswith("/") and list(job.stop_ids) == target.eos_token_ids


def test_errors_name_the_remedy_and_the_log(tmp_path):
    job = vllm.Job.of(make_target(), [None], [[1]], AcceptanceConfig(prompts=["unused"]))
    with pytest.raises(UserError, match="make venv-vllm"):
        vllm.decode(job, tmp_path, tmp_path / "bin/python")
    # Our own interpreter has no vLLM: a real process that really fails.
    with pytest.raises(UserError, match=r"vllm.log: vLLM ended with status 1: ModuleNotFoundError: .*'vllm'"):
        vllm.decode(job, tmp_path, sys.executable)


def test_the_script_needs_nothing_of_ours():
    modules = set()
    for node in ast.walk(ast.parse(vllm.SCRIPT.read_text())):
        modules |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
        modules |= {node.module} if isinstance(node, ast.ImportFrom) else set()
    assert {name.split(".")[0] for name in modules} - set(sys.stdlib_module_names) == {"vllm"}
