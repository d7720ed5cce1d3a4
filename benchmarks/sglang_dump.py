"""What dumping costs a SGLang server: its prefill with and without, and its writer against the raw disk.

- prefill_ratio: tokens/s of one real server, samples written against the same samples only prefilled, in turns.
- writer_ratio: the plugin's own path (collector, shared memory, writer process) with Kimi-sized samples (H 7168, four
  states, 8,192 tokens, 470 MB) against a plain loop that hashes, writes and syncs the same bytes, in turns.
- p99_delay: how much longer the slowest of 96 forward passes takes when its states are dumped, as a share: passes of
  2,048 rows that spend their time in matrix products of one thread, at the headline's rate (4.6 TiB in ten hours).
"""

from __future__ import annotations

import hashlib
import os
import statistics
import time
from pathlib import Path

import torch

from benchmarks import common
from eagle3lib import targets
from eagle3lib.config import EngineConfig
from eagle3lib.engines import File
from eagle3lib.engines.sglang import lease
from eagle3lib.engines.sglang.client import SGLangEngine, _Answers
from eagle3lib.engines.sglang.collector import Collector
from eagle3lib.engines.sglang.launch import Wanted
from eagle3lib.engines.sglang.requests import Request, Served

HIDDEN, AUX, TOKENS, PASS = 7168, [2, 30, 58], 8192, 2048
BYTES_PER_SECOND = 4.6 * 2**40 / 36_000
SHIMS = Path(__file__).parents[1] / "tests" / "engines" / "cpu_shims"


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--python", default=".venv-sglang/bin/python", help="interpreter with SGLang")
    parser.add_argument("--folder", type=Path, default=Path("results"), help="where samples are written")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()

    def run() -> None:
        folder = common.check_target(options.target)
        with common.scratch(options.folder) as scratch:
            prefill = prefill_ratio(folder, scratch, options.python, options.rounds)
            writer = writer_ratio(scratch, options.rounds)
            delay = p99_delay(scratch)
        print(f"sglang_dump prefill_ratio={prefill:.3f} writer_ratio={writer:.3f} p99_delay={delay:.3f}")

    common.main(run)


# --- a server ----------------------------------------------------------------------------------------


def prefill_ratio(target: Path, scratch: Path, python: str, rounds: int) -> float:
    info = targets.load_info(target, "f" * 64)
    engine = EngineConfig(
        name="sglang",
        python=python,
        environment={"PYTHONPATH": str(SHIMS)},
        server_args=["--mem-fraction-static", "0.2", "--max-total-tokens", "16384"],
    )
    wanted = Wanted.of("extract", engine, info, 512, aux_layer_ids=(2, 15, 27), trust_remote_code=False)
    server = SGLangEngine(scratch / "engine", scratch / "logs", engine, wanted, info)
    generator = torch.Generator().manual_seed(0)
    rates: dict[str, list[float]] = {"written": [], "prefilled": []}
    try:
        for number in range(rounds + 1):
            lengths = torch.randint(100, 400, (12,), generator=generator).tolist()
            sequences = [torch.randint(3, info.vocab_size, (n,), generator=generator).tolist() for n in lengths]
            files = [File(ids, scratch / f"{i}.part", "bf16", [1, len(ids)]) for i, ids in enumerate(sequences)]
            for name, side in (
                ("written", lambda f=files: list(server.write(f))),
                ("prefilled", lambda s=sequences: server.greedy(s, 1)),
            ):
                start = time.monotonic()
                side()
                if number:  # the first round warms up
                    rates[name].append(sum(lengths) / (time.monotonic() - start))
    finally:
        server.close()
        lease.release(scratch / "engine", 20)
    common.table(["prefill", "tokens/s"], [[name, statistics.median(values)] for name, values in rates.items()])
    return statistics.median(a / b for a, b in zip(rates["written"], rates["prefilled"], strict=True))


# --- the writer --------------------------------------------------------------------------------------


class Feeder:
    """The plugin's path, fed with passes of one Kimi-sized sample after the other."""

    def __init__(self, scratch: Path):
        self.scratch, self.answers = scratch, _Answers()
        served = Served("f" * 64, AUX, "bfloat16", "0.5.23")
        room = 4 * TOKENS * (8 + (len(AUX) + 1) * HIDDEN * 2)
        self.collector = Collector(served, HIDDEN, torch.bfloat16, room, torch.device("cpu"))
        self.ids = torch.arange(TOKENS)
        self.aux = torch.randn(PASS, len(AUX) * HIDDEN).to(torch.bfloat16)
        self.last = torch.randn(PASS, HIDDEN).to(torch.bfloat16)

    def sample(self, name: str):
        host, port = self.answers.address
        request = Request(
            str(self.scratch / f"{name}.part"), TOKENS, "bf16", [0, TOKENS], [], "", host=host, port=port, token=name
        )
        return request, self.answers.expect(name)

    def forward(self, request: Request, start: int) -> None:
        ids = self.ids[start : start + PASS]
        self.collector.batch([request.rid], [PASS], [start], ids, self.aux, self.last)


def writer_ratio(scratch: Path, rounds: int) -> float:
    feeder = Feeder(scratch)
    rates: dict[str, list[float]] = {"plugin": [], "raw": []}
    size, samples = 0, 3
    for number in range(rounds + 1):
        start, futures = time.monotonic(), []
        for i in range(samples):
            request, future = feeder.sample(f"{number}-{i}")
            futures.append(future)
            for row in range(0, TOKENS, PASS):
                feeder.forward(request, row)
        size = sum(future.result(timeout=600)["bytes"] for future in futures)
        written = size / (time.monotonic() - start) / 1e6
        raw = raw_write(scratch / "raw", size // samples, samples)
        if number:
            rates["plugin"].append(written)
            rates["raw"].append(raw)
        for part in scratch.glob("*.part"):
            part.unlink()
    common.table(["writer", "MB/s"], [[name, statistics.median(values)] for name, values in rates.items()])
    return statistics.median(a / b for a, b in zip(rates["plugin"], rates["raw"], strict=True))


def raw_write(path: Path, n_bytes: int, times: int, chunk: int = 2**23) -> float:
    """MB/s of hashing, writing and syncing files one after the other."""
    data = os.urandom(chunk)
    start = time.monotonic()
    for _ in range(times):
        digest, left = hashlib.sha256(), n_bytes
        with open(path, "wb") as file:
            while left:
                piece = data[: min(left, chunk)]
                digest.update(piece)
                file.write(piece)
                left -= len(piece)
            os.fsync(file.fileno())
    seconds = time.monotonic() - start
    path.unlink()
    return n_bytes * times / seconds / 1e6


def p99_delay(scratch: Path, passes: int = 96) -> float:
    """One thread computes, as a scheduler's does; copies are another thread's, the rest is the writer's."""
    feeder = Feeder(scratch)
    a = torch.randn(1024, 1024)
    start = time.monotonic()
    for _ in range(20):
        a @ a
    seconds_a_pass = PASS * (len(AUX) + 1) * HIDDEN * 2 / BYTES_PER_SECOND
    products = round(seconds_a_pass / ((time.monotonic() - start) / 20))
    seconds: dict[bool, list[float]] = {True: [], False: []}
    futures = []
    for dump in (False, True) * 2:
        for number in range(passes // 2):
            if dump and number % (TOKENS // PASS) == 0:
                request, future = feeder.sample(f"delay-{len(futures)}")
                futures.append(future)
            start = time.monotonic()
            for _ in range(products):
                a @ a
            if dump:
                feeder.forward(request, number % (TOKENS // PASS) * PASS)
            seconds[dump].append(time.monotonic() - start)
    p99 = {dump: sorted(values)[int(0.99 * passes) - 1] for dump, values in seconds.items()}
    rows = [[name, statistics.median(seconds[d]), p99[d]] for name, d in (("not dumped", False), ("dumped", True))]
    common.table(["forward pass", "median s", "p99 s"], rows)
    for future in futures:
        future.result(timeout=600)
    return p99[True] / p99[False] - 1


if __name__ == "__main__":
    main()
