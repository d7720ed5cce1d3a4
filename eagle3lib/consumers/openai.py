"""Any OpenAI-compatible server that decodes with a draft, asked for completions of token ids.

What was accepted comes from the answers where they tell: SGLang's `sglext.spec_tokens_details` (asked for by
`return_spec_tokens_details`), vLLM's `metrics.speculative_decoding` (a server with `--per-request-spec-decode-metrics
detailed`). Other vLLM servers tell only sums over all requests, at /metrics: then one request is made at a time, and
what the counters grew by is its own; so nobody else may use the server meanwhile. Both count the pass in which a reply
ends whole.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from eagle3lib import acceptance
from eagle3lib.config import AcceptanceConfig
from eagle3lib.engines.served import Api, token_ids
from eagle3lib.errors import UserError
from eagle3lib.evaluation import Decoded, chain_of
from eagle3lib.targets import TargetInfo

SETTLED = 10.0  # seconds that counters may lag behind an answer
COUNTER = re.compile(
    r"^vllm:spec_decode_num_(drafts|accepted_tokens_per_pos)_total(?:\{([^}]*)\})? (\S+)$", re.MULTILINE
)


def is_url(entry: str) -> bool:
    return entry.startswith(("http://", "https://"))


class Server:
    """A server at `url`, and optionally one without a draft at `without`, for tokens/s. An `evaluation.Decoder`.

    tokenizer: to read a reply of a server that hands out no token ids. key: its API key. Raises UserError for a server
    that cannot be reached, refuses a request, or tells nowhere what it accepted.
    """

    def __init__(
        self,
        url: str,
        target: TargetInfo,
        cfg: AcceptanceConfig,
        tokenizer: Any = None,
        key: str = "",
        without: str | None = None,
    ):
        self.api, self.without = Api(url, key), Api(without, key) if without else None
        self.url = self.api.url
        self.target, self.cfg, self.tokenizer = target, cfg, tokenizer
        self.model = self.api.model
        trial = self._complete(self.api, [0, 0], 0.0, 0, {"max_tokens": 8, "ignore_eos": True, "stop_token_ids": []})
        self.by_request = details(trial) is not None
        if not self.by_request and self._counters() is None:
            raise UserError(
                f"{self.url}: tells nowhere what it accepted; start it with a draft (vLLM: with "
                "--per-request-spec-decode-metrics detailed; SGLang: 0.5.19 or later)"
            )
        self.about = self._chain(trial) | {
            "measured_by": f"{self.url} ({self.model}), {'each answer' if self.by_request else '/metrics'}",
            "draft_sampling": "the server's",
        }

    # --- decoding ------------------------------------------------------------------------------------

    def decode(
        self, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int
    ) -> Iterator[tuple[int, Decoded]]:
        """As `evaluation.Decoder`; one at a time where only sums are told."""
        if self.by_request:
            for number, answer in self._all(self.api, prompts, temperature, seeds, at_once):
                told = details(answer)
                yield number, self._decoded(answer, *(([], True) if told is None else told))
            return
        for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
            before = self._counters() or {}
            answer = self._complete(self.api, prompt, temperature, seed)
            yield number, self._decoded(answer, self._histogram(before, answer), False)

    def plain(
        self, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int
    ) -> Iterator[tuple[int, list[int]]] | None:
        if self.without is None:
            return None
        answers = self._all(self.without, prompts, temperature, seeds, at_once)
        return ((number, self._ids(answer)) for number, answer in answers)

    def _decoded(self, answer: dict[str, Any], accepted: Sequence[int], ordered: bool) -> Decoded:
        steps = self.about["draft_steps"]
        if ordered:
            passes = [acceptance.Pass(steps, one) for one in accepted]
        else:
            passes = acceptance.of_histogram(accepted, steps)
        return Decoded(self._ids(answer), passes=passes, ordered=ordered)

    def _ids(self, answer: dict[str, Any]) -> list[int]:
        return token_ids(answer["choices"][0], self.tokenizer)

    def _all(
        self, api: Api, prompts: Sequence[Sequence[int]], temperature: float, seeds: Sequence[int], at_once: int
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        with ThreadPoolExecutor(at_once) as pool:
            work = {
                pool.submit(self._complete, api, prompt, temperature, seed): number
                for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True))
            }
            try:
                for future in as_completed(work):
                    yield work[future], future.result()
            finally:
                pool.shutdown(cancel_futures=True)

    def _complete(
        self, api: Api, prompt: Sequence[int], temperature: float, seed: int, more: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": self.cfg.max_new_tokens,
            "temperature": temperature,
            "seed": seed % 2**31,
            "stop_token_ids": list(self.target.eos_token_ids),
            "return_token_ids": True,
            "return_spec_tokens_details": True,
        }
        return api.json("/v1/completions", body | dict(more or {}))

    # --- what was accepted ---------------------------------------------------------------------------

    def _chain(self, trial: dict[str, Any]) -> dict[str, Any]:
        """The three numbers of the table's head, from whatever tells them."""
        try:
            told = self.api.json("/get_server_info")
            found = {
                "draft_steps": told["speculative_num_steps"],
                "topk": told["speculative_eagle_topk"],
                "draft_tokens": told["speculative_num_draft_tokens"],
            }
            if found["draft_steps"]:
                return found
        except (UserError, KeyError, TypeError):
            pass
        inner = ((trial.get("metrics") or {}).get("speculative_decoding")) or {}
        steps = inner.get("num_spec_tokens") or len((self._counters() or {}).get("accepted", []))
        return chain_of(int(steps) or self.cfg.draft_steps)

    def _counters(self) -> dict[str, Any] | None:
        """vLLM's sums: {"passes", "accepted" by position}; None where the server has none."""
        try:
            text = self.api.text("/metrics")
        except UserError:
            return None
        return counters(text)

    def _histogram(self, before: dict[str, Any], answer: dict[str, Any]) -> list[int]:
        """How many passes of the one request since `before` accepted k drafts; counters are waited for until they
        account for the reply's tokens."""
        tokens, end = len(self._ids(answer)), time.monotonic() + SETTLED
        while True:
            now = self._counters() or {"passes": 0, "accepted": []}
            past = [*before.get("accepted", []), *[0] * len(now["accepted"])]
            accepted = [b - a for a, b in zip(past, now["accepted"], strict=False)]
            passes = now["passes"] - before.get("passes", 0)
            if 1 + passes + sum(accepted) >= tokens:
                return acceptance.histogram(passes, accepted)
            if time.monotonic() > end:
                raise UserError(
                    f"{self.url}/metrics: accounts for {1 + passes + sum(accepted)} of a reply's {tokens} tokens; does "
                    "every replica answer there? start vLLM with --per-request-spec-decode-metrics detailed instead"
                )
            time.sleep(0.05)


def details(answer: dict[str, Any]) -> tuple[list[int], bool] | None:
    """Of an answer: (drafts accepted in each pass, True), or (passes that accepted k drafts, False); None: it tells
    nothing. A reply of one token has had no pass, and servers may then leave everything out."""
    vllm = (answer.get("metrics") or {}).get("speculative_decoding")
    if vllm:
        if vllm.get("per_step_accepted") is not None:
            return list(vllm["per_step_accepted"]), True
        return list(vllm["acceptance_histogram"]), False
    sglang = (answer.get("sglext") or {}).get("spec_tokens_details")
    if sglang:
        return list(sglang["spec_correct_drafts_histogram"]), False
    return None


def counters(text: str) -> dict[str, Any] | None:
    """vLLM's counters in a Prometheus text, summed over its engines."""
    passes, accepted, found = 0, dict[int, int](), False
    for name, labels, value in COUNTER.findall(text):
        found = True
        if name == "drafts":
            passes += int(float(value))
        else:
            place = re.search(r'position="(\d+)"', labels)
            if place:
                accepted[int(place[1])] = accepted.get(int(place[1]), 0) + int(float(value))
    return {"passes": passes, "accepted": [accepted[k] for k in sorted(accepted)]} if found else None
