"""SGLang as an `Engine`: asks the server; hidden states come back as files that it has written, never over HTTP."""

from __future__ import annotations

import json
import secrets
import socketserver
import threading
import time
import urllib.error
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from eagle3lib.config import EngineConfig, GpusConfig
from eagle3lib.engines import File, Prompt, Reply, States, Temperature, fits, of_prompt
from eagle3lib.engines.probe import probe
from eagle3lib.engines.sglang.launch import Wanted
from eagle3lib.engines.sglang.lease import Handle, Lease, post
from eagle3lib.engines.sglang.requests import Request
from eagle3lib.errors import UserError
from eagle3lib.job import clock, in_flight
from eagle3lib.targets import TargetInfo, load_head

Drafted = tuple[int, list[int], list[int]]


class SGLangEngine:
    """A server of `Wanted.role`, shared with the other jobs of this results folder."""

    name = "sglang"

    def __init__(
        self,
        folder: Path,
        logs: Path,
        engine: EngineConfig,
        wanted: Wanted,
        target: TargetInfo,
        gpus: GpusConfig | None = None,
    ):
        self.engine, self.wanted, self.target = engine, wanted, target
        self.folder = folder
        self.dtype = wanted.compute_dtype
        self.answers = _Answers()
        self.running: set[str] = set()  # requests for replies
        self.lease = Lease(folder, logs, engine, wanted, gpus)
        self.version = self.lease.version

    def close(self) -> None:
        """Give the server up: it ends when nobody else uses it."""
        self.lease.close()
        self.answers.close()

    # --- extraction ----------------------------------------------------------------------------------

    def write(self, files: Iterable[File]) -> Iterator[tuple[File, dict[str, Any] | ValueError]]:
        """Have the server write files; as each is there: (file, {"bytes", "sha256", "fsync_seconds"}).

        `requests_in_flight` at once; `files` is read as they end. A ValueError stands for states that are not finite.
        Raises OSError where the server could not write (its errno), UserError when it fails too often.
        """
        for future, file in in_flight(self._write, files, self.engine.requests_in_flight):
            yield file, future.result()

    def _write(self, file: File) -> dict[str, Any] | ValueError:
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}

        def ask(handle: Handle) -> dict[str, Any]:
            token = secrets.token_hex(8)
            answer = self.answers.expect(token)
            host, port = self.answers.address
            request = Request(
                part=str(file.part),
                n_tokens=len(file.input_ids),
                storage_format=file.storage_format,
                reply_bounds=list(file.reply_bounds),
                last_rows=list(file.last_rows),
                code=file.code,
                host=host,
                port=port,
                token=token,
            )
            body = {"input_ids": list(file.input_ids), "rid": request.rid, "sampling_params": sampling}
            try:
                with clock.during("engine"):
                    post(handle, "/generate", body, self.engine.request_seconds)
            except OSError:
                # What was whole when the server ended, its writer still writes.
                with suppress(FutureTimeout):
                    return answer.result(timeout=2)
                raise
            with clock.during("writer"):
                return self._answer(answer, handle)

        answer = self._ask(ask)
        self._check_served(answer["served"])
        if answer.get("unusable"):
            return ValueError(answer["fault"])
        if "errno" in answer:
            raise OSError(answer["errno"], answer["fault"], str(file.part))
        if "fault" in answer:
            raise UserError(f"engine sglang: {file.part.name}: {answer['fault']}")
        return answer

    def _answer(self, answer: Future, handle: Handle) -> dict[str, Any]:
        """The writer's word, while the server lives: one that dies between pass and writer takes a sample along."""
        end = time.monotonic() + self.engine.request_seconds
        while time.monotonic() < end:
            alive = self.lease.alive(handle)
            with suppress(FutureTimeout):
                return answer.result(timeout=2)
            if not alive:
                raise ConnectionError("it ended before it had written a sample")
        raise ConnectionError(f"it has not written a sample in {self.engine.request_seconds:.0f} s")

    def _check_served(self, served: dict[str, Any]) -> None:
        """The server that a user has started may be of something else."""
        mine = self.wanted.values()
        for name in ("target_fingerprint", "aux_layer_ids", "compute_dtype"):
            if served[name] != mine[name]:
                raise UserError(
                    f"the SGLang server hands out states with {name} {served[name]}, the config asks for {mine[name]}; "
                    "start it with the command that `python -m eagle3lib engine-command` prints"
                )

    def extract(self, id_lists: Sequence[Sequence[int]], aux_layer_ids: Sequence[int]) -> list[States]:
        """The states of each sequence as computed: for the probe and comparisons, by way of files."""
        assert list(aux_layer_ids) == list(self.wanted.aux_layer_ids)
        scratch = self.folder.resolve() / "scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        files = [File(ids, scratch / f"{secrets.token_hex(8)}.part", None) for ids in id_lists]
        states = {}
        try:
            for file, answer in self.write(files):
                if isinstance(answer, ValueError):
                    raise answer
                stored = torch.load(file.part, weights_only=True)
                if stored["input_ids"].tolist() != list(file.input_ids):
                    raise UserError("the SGLang server hands out states of other token ids than those it was given")
                states[file.part] = States([*stored["states"][:-1]], stored["states"][-1])
        finally:
            for file in files:
                file.part.unlink(missing_ok=True)
        return [states[file.part] for file in files]

    def probe(self, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
        """See `probe.probe`. The reference is a plain transformers' pass on the CPU, where memory allows it."""
        weight = load_head(self.target).float()
        reference = self._reference() if fits(Path(self.target.path)) else None
        vocab = self.target.vocab_size
        return probe(self, aux_layer_ids, vocab, lambda last: last.float() @ weight.T, reference)

    def _reference(self) -> Callable[[list[int]], Sequence[torch.Tensor]]:
        from eagle3lib.engines.transformers import TransformersEngine

        dtype, trust = self.dtype, self.wanted.trust_remote_code
        return TransformersEngine(self.target.path, dtype, device="cpu", trust_remote_code=trust).reference

    # --- generation ----------------------------------------------------------------------------------

    def decode_with_draft(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        temperature: float = 0.0,
        seeds: Sequence[int] = (),
        at_once: int | None = None,
    ) -> Iterator[Drafted]:
        """Replies (number of the prompt, reply ids, n) as they end; n[k]: verification passes that accepted k drafts,
        as SGLang counts: the pass that ends a reply whole."""
        sampling = self._sampling(max_new_tokens, self.target.eos_token_ids) | {"temperature": temperature}

        def answer(numbered: tuple[int, Sequence[int]]) -> Drafted:
            number, ids = numbered
            own = {"sampling_seed": seeds[number] % 2**31} if temperature > 0 else {}
            got = self._reply(ids, sampling | own)
            # A reply of one token has seen no verification, and SGLang then says nothing of it.
            return number, list(got["output_ids"]), list(got["meta_info"].get("spec_correct_drafts_histogram", []))

        for future, _ in in_flight(answer, enumerate(prompts), at_once or self.engine.requests_in_flight):
            yield future.result()

    def generate(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        temperature: Temperature = 0.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        eos_ids: Sequence[int] | None = None,
    ) -> Iterator[Reply]:
        """Replies (key, reply ids, "stop" or "length") as they end; the end-of-turn token counts as reply."""
        stop = self.target.eos_token_ids if eos_ids is None else list(eos_ids)
        sampling = self._sampling(max_new_tokens, stop) | {"top_p": top_p}

        def answer(prompt: Prompt) -> Reply:
            key, ids, seed = prompt
            # A stream of random numbers of its own; SGLang heeds it with --enable-deterministic-inference.
            own: dict[str, Any] = {"temperature": of_prompt(temperature, key)}
            own |= {"sampling_seed": seed % 2**31} if own["temperature"] > 0 else {}
            got = self._reply(ids, sampling | own)
            return key, list(got["output_ids"]), got["meta_info"]["finish_reason"]["type"]

        try:
            for future, _ in in_flight(answer, prompts, batch_size):
                yield future.result()
        finally:
            for rid in list(self.running):  # nobody waits for these any more
                with suppress(OSError):
                    post(self.lease.handle, "/abort_request", {"rid": rid}, 10)

    @staticmethod
    def _sampling(max_new_tokens: int, stop: Sequence[int]) -> dict[str, Any]:
        return {
            "max_new_tokens": max_new_tokens,
            "temperature": 0.0,
            **({"stop_token_ids": list(stop)} if stop else {"ignore_eos": True}),
        }

    def _reply(self, ids: Sequence[int], sampling: dict[str, Any]) -> dict[str, Any]:
        """The server's answer to one prompt; one that did not end in order is refused."""

        def ask(handle: Handle) -> dict[str, Any]:
            rid = f"generate-{secrets.token_hex(8)}"
            self.running.add(rid)
            try:
                body = {"input_ids": list(ids), "rid": rid, "sampling_params": sampling}
                return post(handle, "/generate", body, self.engine.request_seconds)
            finally:
                self.running.discard(rid)

        got = self._ask(ask)
        reason = got["meta_info"]["finish_reason"]
        if reason["type"] not in ("stop", "length"):
            raise UserError(f"engine sglang: a reply ended by {reason['type']!r}: {reason}")
        return got

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int) -> list[list[int]]:
        """Greedy replies in the order of the prompts."""
        numbered = ((i, ids, 0) for i, ids in enumerate(prompts))
        replies = {key: ids for key, ids, _ in self.generate(numbered, max_new_tokens)}
        return [replies[i] for i in range(len(prompts))]

    # --- requests ------------------------------------------------------------------------------------

    def _ask(self, ask: Callable[[Handle], dict[str, Any]]) -> dict[str, Any]:
        """Ask until a server answers: a dead or hung one is replaced. Raises UserError for what it refuses."""
        while True:
            handle = self.lease.handle
            try:
                answer = ask(handle)
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise UserError(f"the SGLang server refuses: {error.code} {_text(error)}") from None
                self.lease.replace(handle, f"it answers {error.code}: {_text(error)}")
            except (OSError, FutureTimeout, json.JSONDecodeError) as error:
                self.lease.replace(handle, f"it does not answer ({str(error) or type(error).__name__})")
            else:
                self.lease.worked()
                return answer


def _text(error: urllib.error.HTTPError) -> str:
    return error.read().decode(errors="replace")[:500]


class _Answers:
    """Where the server's writer tells that a file is there: a line of JSON with the token of the request."""

    def __init__(self) -> None:
        self.expected: dict[str, Future] = {}
        answers = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                with suppress(ValueError, KeyError, OSError):
                    answer = json.loads(self.rfile.readline())
                    answers.expected.pop(answer.pop("token")).set_result(answer)

        self.server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.server.server_address[:2]
        return str(host), int(port)

    def expect(self, token: str) -> Future:
        self.expected[token] = Future()
        return self.expected[token]

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
