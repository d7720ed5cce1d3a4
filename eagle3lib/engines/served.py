"""Replies of any OpenAI-compatible server of the target; and how such a server is spoken to."""

from __future__ import annotations

import json
import time
import urllib.error
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from eagle3lib.engines import Prompt, Reply, Temperature, http, of_prompt
from eagle3lib.errors import UserError, one_line
from eagle3lib.job import in_flight
from eagle3lib.targets import TargetInfo

SECONDS = 3600.0  # for one answer
PAUSES = (1.0, 4.0, 16.0)  # seconds before a request is made again
TOO_MANY_REQUESTS = 429
ALL_REFUSED = 8  # so many refusals before the first reply: it is the server, not the prompts


class Refused(UserError):
    """An answer with an error status."""

    def __init__(self, said: str, status: int):
        super().__init__(said)
        self.status = status


class Api:
    """A server at `url` (with or without /v1 at the end); key: its API key."""

    def __init__(self, url: str, key: str = ""):
        self.url, self.key = url.rstrip("/").removesuffix("/v1"), key

    def json(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The answer to a POST of `body`, or to a GET. Raises Refused, or UserError for no answer or none in JSON."""
        text = self.text(path, body)
        try:
            return json.loads(text)
        except ValueError:
            raise UserError(
                f"{self.url}{path}: answers no JSON ({text[:100]!r}); is it an OpenAI-compatible server?"
            ) from None

    def text(self, path: str, body: dict[str, Any] | None = None) -> str:
        url = f"{self.url}{path}"
        try:
            return http.ask(url, body, self.key, SECONDS)
        except urllib.error.HTTPError as error:
            said = one_line(error.read().decode(errors="replace"), 300)
            raise Refused(
                f"{url}: answers {error.code}: {said}; check its flags and EAGLE3LIB_ENGINE_KEY", error.code
            ) from None
        except OSError as error:
            raise UserError(f"{url}: cannot be reached ({error}); start the server, or correct the address") from None

    @property
    def model(self) -> str:
        """What it serves, by its own name."""
        return self.json("/v1/models")["data"][0]["id"]


def token_ids(choice: dict[str, Any], tokenizer: Any) -> list[int]:
    """A completion's token ids: as the server returns them, or else of its text."""
    if choice.get("token_ids") is not None:
        return list(choice["token_ids"])
    return list(tokenizer(choice["text"], add_special_tokens=False)["input_ids"])


class ServedEngine:
    """An `engines.Speaker`. Raises UserError for a server that cannot be reached.

    `batch_size` requests are under way at once, and a further one is made when one of them has ended. A request that
    fails is made again; one that is refused for good ends as "error: " and what the server says, and where all of the
    first few are, UserError says so.
    """

    def __init__(self, url: str, target: TargetInfo, key: str = "", pauses: Sequence[float] = PAUSES):
        self.api, self.target, self.pauses = Api(url, key), target, pauses
        self.name = self.api.model
        self._tokenizer: Any = None

    @property
    def tokenizer(self) -> Any:
        if self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(self.target.path)
        return self._tokenizer

    def generate(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        temperature: Temperature = 0.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        eos_ids: Sequence[int] | None = None,
    ) -> Iterator[Reply]:
        """Replies (key, reply ids, "stop", "length" or "error: …") as they end, with the end-of-turn token."""
        stop = list(self.target.eos_token_ids if eos_ids is None else eos_ids)
        shared = {"max_tokens": max_new_tokens, "top_p": top_p, "stop_token_ids": stop}

        def answer(prompt: Prompt) -> Reply:
            key, ids, seed = prompt
            own = {"prompt": list(ids), "temperature": of_prompt(temperature, key), "seed": seed % 2**31}
            try:
                got = self._patiently(shared | own)
            except Refused as error:
                return key, [], f"error: {error}"
            return key, *self._reply(got["choices"][0], stop)

        refused, replied = 0, False
        for future, _ in in_flight(answer, prompts, batch_size):
            key, ids, finish = future.result()
            failed = finish.startswith("error")
            refused, replied = refused + failed, replied or not failed
            if refused == ALL_REFUSED and not replied:
                raise UserError(f"{self.api.url}: refuses every prompt; the last one: {finish}")
            yield key, ids, finish

    def _reply(self, choice: dict[str, Any], stop: Sequence[int]) -> tuple[list[int], str]:
        ids, finish = token_ids(choice, self.tokenizer), choice["finish_reason"]
        if finish not in ("stop", "length"):
            return [], f"error: the reply ended by {finish!r}"
        if finish == "stop" and stop and (not ids or ids[-1] not in stop):
            ids.append(stop[0])  # servers of text leave it out
        return ids, finish

    def _patiently(self, body: dict[str, Any]) -> dict[str, Any]:
        asked = {"model": self.name, "return_token_ids": True, **body}
        for pause in (*self.pauses, None):
            try:
                return self.api.json("/v1/completions", asked)
            except UserError as error:
                for_good = isinstance(error, Refused) and error.status < 500 and error.status != TOO_MANY_REQUESTS
                if pause is None or for_good:
                    raise
                time.sleep(pause)
        raise AssertionError("the last try returns or raises")
