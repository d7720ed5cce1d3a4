"""Stands in for a SGLang server in `benchmarks.scale`: its times and its crashes, no model.

What a job of ours asks of a server is answered as SGLang with our plugin answers it: /health, /server_info, /generate.
Requests are taken in turn and go through passes of --chunked-prefill-size tokens that take as long as the target's
would (they are slept through); the rows of a pass, random ones, go to the plugin's own collector, and so through shared
memory and the writer to the disk. STAND_IN, a JSON object in the environment: "tokens_per_second", "log" (a line a
second: what it was busy with, see `Engine.times`), "crash_every" (samples; 0: never) and "load_seconds".
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

VERSION = "0.5.23"


@dataclass
class Asked:
    """One request on its way through the passes."""

    rid: str
    ids: list[int]
    done: int = 0
    ended: threading.Event = field(default_factory=threading.Event)


class Engine:
    """The scheduler: one thread, pass by pass."""

    def __init__(self, collector: Any, pass_tokens: int, spec: dict[str, Any]):
        import torch

        self.collector, self.pass_tokens, self.spec = collector, pass_tokens, spec
        self.waiting: queue.Queue[Asked] = queue.Queue()
        hidden, states = collector.hidden_size, collector.n_states
        self.aux = torch.randn(pass_tokens, (states - 1) * hidden).to(collector.dtype)
        self.last = torch.randn(pass_tokens, hidden).to(collector.dtype)
        # Seconds since the first request: in passes, for want of requests, and for want of room or time of the writer.
        self.times = {"busy": 0.0, "client": 0.0, "writer": 0.0}
        self.samples = self.tokens = 0
        self.first = self.last_end = 0.0

    def run(self) -> None:
        """Sleeps to the time at which a pass ends in a schedule without gaps: what a sleep is late is not lost."""
        running: list[Asked] = []
        free = time.monotonic()
        while True:
            running += self._taken(block=not running)
            now = time.monotonic()
            if not self.first:
                self.first = free = now
            if now - free > 0.05 * self._seconds(self.pass_tokens):
                self.times["client"] += now - free
                free = now
            ids, lengths, prefixes, those = self._next(running)
            seconds = self._seconds(len(ids))
            free += seconds
            time.sleep(max(0.0, free - time.monotonic()))
            self.times["busy"] += seconds
            start = time.monotonic()
            self._collect(those, lengths, prefixes, ids)
            waited = time.monotonic() - start
            if waited > 0.01:  # the copying itself is the forward loop's own
                self.times["writer"] += waited
                free += waited
            running = [one for one in running if not one.ended.is_set()]
            self.last_end = time.monotonic()

    def _taken(self, block: bool) -> list[Asked]:
        taken = [self.waiting.get()] if block else []
        while True:
            try:
                taken.append(self.waiting.get_nowait())
            except queue.Empty:
                return taken

    def _next(self, running: list[Asked]) -> tuple[list[int], list[int], list[int], list[Asked]]:
        """Ids of one pass, and whose they are: chunks, first come first served."""
        ids: list[int] = []
        lengths, prefixes, those = [], [], []
        for one in running:
            room = self.pass_tokens - len(ids)
            if not room:
                break
            chunk = one.ids[one.done : one.done + room]
            ids += chunk
            lengths.append(len(chunk))
            prefixes.append(one.done)
            those.append(one)
        return ids, lengths, prefixes, those

    def _seconds(self, tokens: int) -> float:
        return tokens / self.spec["tokens_per_second"]

    def _collect(self, those: list[Asked], lengths: list[int], prefixes: list[int], ids: list[int]) -> None:
        import torch

        n = len(ids)
        rids = [one.rid for one in those]
        self.collector.batch(rids, lengths, prefixes, torch.tensor(ids), self.aux[:n], self.last[:n])
        self.tokens += n
        for one, length in zip(those, lengths, strict=True):
            one.done += length
            if one.done == len(one.ids):
                self.samples += 1
                one.ended.set()
                if self.spec["crash_every"] and self.samples == self.spec["crash_every"]:
                    self.log("crash")
                    os.kill(os.getpid(), signal.SIGKILL)

    def log(self, event: str = "running") -> None:
        about = {"event": event, "pid": os.getpid(), "first": self.first, "last": self.last_end, **self.times}
        with open(self.spec["log"], "a") as file:
            file.write(json.dumps({**about, "samples": self.samples, "tokens": self.tokens}) + "\n")


def handler(engine: Engine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer({"version": VERSION} if self.path == "/server_info" else {})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            one = Asked(body["rid"], body["input_ids"])
            engine.waiting.put(one)
            one.ended.wait()
            self._answer({"output_ids": [0], "meta_info": {"finish_reason": {"type": "length"}}})

        def _answer(self, value: dict[str, Any]) -> None:
            data = json.dumps(value).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """No line a request."""

    return Handler


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    import torch

    from eagle3lib.engines.sglang.collector import Collector
    from eagle3lib.engines.sglang.requests import Served

    parser = argparse.ArgumentParser()
    for name, kind in (("--model-path", Path), ("--port", int), ("--chunked-prefill-size", int)):
        parser.add_argument(name, type=kind, required=True)
    options, _ = parser.parse_known_args()
    spec, capture = json.loads(os.environ["STAND_IN"]), json.loads(os.environ["EAGLE3LIB_CAPTURE"])
    torch.set_num_threads(1)
    hidden = json.loads((options.model_path / "config.json").read_text())["hidden_size"]
    served = Served(capture["target_fingerprint"], capture["aux_layer_ids"], capture["compute_dtype"], VERSION)
    dtype = getattr(torch, capture["compute_dtype"])
    collector = Collector(served, hidden, dtype, capture["buffer_bytes"], torch.device("cpu"))
    engine = Engine(collector, options.chunked_prefill_size, spec)
    time.sleep(spec["load_seconds"])
    Path(capture["marker"]).touch()
    threading.Thread(target=engine.run, daemon=True).start()
    server = Server(("127.0.0.1", options.port), handler(engine))
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
    threading.Thread(target=_log_each_second, args=(engine,), daemon=True).start()
    server.serve_forever()
    engine.log("ended")


def _log_each_second(engine: Engine) -> None:
    while True:
        time.sleep(1)
        if engine.first:
            engine.log()


if __name__ == "__main__":
    main()
