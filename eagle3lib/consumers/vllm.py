"""Does vLLM decode with an exported draft as we measured it?

vLLM runs in an environment of its own (`make venv-vllm`), as a subprocess: `decode_in_vllm.py` knows nothing of this
package, and nothing here imports vLLM.

Greedy output with a draft must be the output without, which a random draft passes too; so what vLLM accepts is held
against our own decoder: by draft position, whatever the dtype, and in fp32 pass by pass. The latter is the sharper
one: of layer ids that are off by one a robust draft may lose less than a hundredth of its acceptance.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lib import acceptance
from eagle3lib.acceptance import Pass
from eagle3lib.config import AcceptanceConfig
from eagle3lib.errors import UserError
from eagle3lib.evaluation import TIE_GAP
from eagle3lib.job import write_json
from eagle3lib.targets import TargetInfo

PYTHON = Path(".venv-vllm/bin/python")
SCRIPT = Path(__file__).with_name("decode_in_vllm.py")
TOLERANCE = 0.02  # of an accepted share
SAME_PASSES = 0.9  # fp32: share of the replies with the very same passes; only a near tie of the draft's own excuses
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # an engine core of its own would import vLLM again: half a minute
    "TORCH_COMPILE_DISABLE": "1",  # log-probabilities alone would take another half
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
KV_CACHE_GIB = ("VLLM_CPU_KVCACHE_SPACE", "1")  # the caller's environment may say more


@dataclass(frozen=True)
class Job:
    """What `decode_in_vllm.py` reads: all prompts once for each of `drafts` (folders; None: without a draft)."""

    target: str
    drafts: Sequence[str | None]
    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    draft_steps: int
    stop_ids: Sequence[int]
    max_model_len: int
    dtype: str = "float32"
    temperature: float = 0.0
    seed: int = 0

    @classmethod
    def of(
        cls,
        target: TargetInfo,
        drafts: Sequence[str | os.PathLike | None],
        prompts: Sequence[Sequence[int]],
        cfg: AcceptanceConfig,
        **more: Any,
    ) -> Job:
        """As `evaluation.passes_as_engines_count` decodes: same prompts, limit, draft steps, ends of turn.

        Raises UserError where the longest prompt and its reply come too near to the target's positions.
        """
        # vLLM drafts zeros, for the whole batch, as soon as one sequence and K tokens more do not fit.
        room = max(map(len, prompts)) + cfg.max_new_tokens + 2 * (cfg.draft_steps + 1)
        if room > target.max_position_embeddings:
            raise UserError(
                f"vLLM: the longest prompt needs {room} positions with acceptance.max_new_tokens and twice the draft "
                f"steps, the target has {target.max_position_embeddings}; leave it out or lower max_new_tokens"
            )
        return cls(
            target=str(Path(target.path).resolve()),
            drafts=[None if draft is None else str(Path(draft).resolve()) for draft in drafts],
            prompts=[list(prompt) for prompt in prompts],
            max_new_tokens=cfg.max_new_tokens,
            draft_steps=cfg.draft_steps,
            stop_ids=list(target.eos_token_ids),
            max_model_len=room,
            **more,
        )


@dataclass(frozen=True)
class Run:
    """What vLLM made of the prompts with one draft, or (`passes` 0) without.

    replies: token ids, a list a prompt. gaps: the lead of the best token at each, without a draft only.
    accepted_by_pass: a list a prompt. The engine's counters over all prompts: passes of the target with drafts to
    verify, drafted tokens, accepted tokens [K] by draft position.
    """

    replies: list[list[int]]
    gaps: list[list[float]]
    accepted_by_pass: list[list[int]]
    passes: int
    drafted: int
    accepted: list[int]
    seconds: float

    @property
    def acceptance_rate(self) -> list[float | None]:
        """By draft position (`acceptance.RATE_FORMULA`); vLLM drafts all K in every pass."""
        return [accepted / self.passes if self.passes else None for accepted in self.accepted]

    @property
    def acceptance_length(self) -> float | None:
        """`acceptance.FORMULA`, all replies included."""
        return 1 + sum(self.accepted) / self.passes if self.passes else None


def decode(job: Job, folder: str | os.PathLike, python: str | os.PathLike = PYTHON) -> tuple[dict[str, str], list[Run]]:
    """vLLM's versions, and a Run for each of the job's drafts.

    folder: takes job.json, result.json and vllm.log. python: the interpreter of vLLM's environment.
    Raises UserError when that environment is not there, or with vLLM's own last error.
    """
    folder, python = Path(folder), Path(python)
    if not python.exists():
        raise UserError(f"{python}: vLLM's environment is not here; `make venv-vllm` makes it")
    folder.mkdir(parents=True, exist_ok=True)
    job_file, result_file, log_file = (folder / name for name in ("job.json", "result.json", "vllm.log"))
    write_json(job_file, asdict(job))
    result_file.unlink(missing_ok=True)
    # -P: the script's own folder must not be searched for modules.
    command = [str(part) for part in (python, "-P", SCRIPT, job_file.resolve(), result_file.resolve())]
    with open(log_file, "wb") as log:
        status = subprocess.run(command, env=_environment(), stdout=log, stderr=log, check=False).returncode
    if status or not result_file.exists():
        raise UserError(f"{log_file}: vLLM ended with status {status}: {_last_error(log_file)}")
    result = json.loads(result_file.read_text(encoding="utf-8"))
    return result["versions"], [Run(**run) for run in result["runs"]]


def compare(
    without: Run,
    drafting: Run,
    ours: Sequence[Sequence[Pass]],
    dtype: str = "float32",
    tolerance: float = TOLERANCE,
) -> dict[str, Any]:
    """Hold vLLM's decoding with a draft against its decoding without, and against our own; plain values.

    ours: `evaluation.passes_as_engines_count` of the same draft and prompts. Raises UserError for a reply that the
    draft changed (unless at a near tie: `evaluation.TIE_GAP` of the dtype), for an accepted share, by draft position,
    that differs from ours by more than `tolerance`, and in fp32 for other passes than ours (`SAME_PASSES`).
    """
    ties = [_parted_at(n, without, drafting, TIE_GAP[dtype]) is not None for n in range(len(without.replies))]
    own = acceptance.summarize([one for passes in ours for one in passes], len(drafting.accepted))
    differences = [
        abs((a or 0) - (b or 0)) for a, b in zip(drafting.acceptance_rate, own["acceptance_rate"], strict=True)
    ]
    same = sum(
        theirs == [one.accepted for one in passes]
        for theirs, passes in zip(drafting.accepted_by_pass, ours, strict=True)
    )
    found = {
        "prompts": len(ours),
        "identical": ties.count(False),
        "near_ties": ties.count(True),
        "tie_gap": TIE_GAP[dtype],
        "same_passes": same,
        "passes": drafting.passes,
        "acceptance_length": drafting.acceptance_length,
        "acceptance_rate": drafting.acceptance_rate,
        "ours": own,
        "largest_difference": max(differences),
        "tolerance": tolerance,
        "seconds": drafting.seconds,
        "seconds_without": without.seconds,
    }
    if max(differences) > tolerance or (dtype == "float32" and same < SAME_PASSES * len(ours)):
        raise UserError(
            f"vLLM accepts {_shares(drafting.acceptance_rate)} of the drafts by position, our own decoder "
            f"{_shares(own['acceptance_rate'])} (tolerance {tolerance:g}), the same passes in {same} of {len(ours)} "
            "replies: it serves another draft than the one measured; compare layer ids, norms, RoPE and vocabulary map "
            "of its folder with the export's"
        )
    return found


def _parted_at(number: int, without: Run, drafting: Run, tie_gap: float) -> int | None:
    """Where the two replies to a prompt part at a near tie; None: they are equal. Any other difference: UserError."""
    try:
        return acceptance.parted_at(drafting.replies[number], without.replies[number], without.gaps[number], tie_gap)
    except acceptance.OtherOutput as other:
        raise UserError(
            f"vLLM: prompt {number}: with the draft it {other}, which it gives without; greedy output must not depend "
            "on the draft: report it to vLLM"
        ) from None


def _shares(rates: Sequence[float | None]) -> str:
    return " ".join("-" if rate is None else f"{rate:.3f}" for rate in rates)


def _environment() -> dict[str, str]:
    """Ours without what points Python at our packages."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")}
    return dict([KV_CACHE_GIB]) | kept | ENVIRONMENT


def _last_error(log: Path) -> str:
    """The last line of a log that names an exception."""
    lines = [line.split("]: ")[-1].strip() for line in log.read_text("utf-8", errors="replace").splitlines()]
    named = [line for line in lines if line.split(":")[0].endswith(("Error", "Exception"))]
    return (named or lines or ["no output"])[-1]
