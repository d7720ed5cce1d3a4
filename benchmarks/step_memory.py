"""Memory of one training step at the sizes of Kimi-K2.5, on the CPU.

Forward and backward of one document of 512 tokens, all of them supervised, TTT 4, fp32 weights and gradients; the
target's embedding and head are mapped from files, as the trainer maps them. Counted is what the process holds itself
(RssAnon of /proc, every few milliseconds; pages of mapped files are the page cache's), optimiser state apart. Each
size runs in a process of its own.

Last line: `step_memory kimi_gib=… v_slope=…`: the peak (goal < 16), and the peak at four times both vocabularies over
the peak, each less its heads' own bytes (the draft's head, its gradient, the target's rows of it; goal <= 1.1), at
H 1024. Above it: what one sample takes of a GPU's memory by length, from the bytes a token that two lengths differ by,
with and without `training.recompute`. `--recompute`: these two lengths only.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from benchmarks import common

GIB = 2**30


@dataclass(frozen=True)
class Size:
    """One step: hidden size, vocabularies, width of the MLP, heads, tokens, draft steps."""

    hidden: int
    vocab: int
    draft_vocab: int
    intermediate: int
    heads: int
    tokens: int
    steps: int = 4
    recompute: bool = False

    @property
    def head_bytes(self) -> int:
        """The draft's head, its gradient, the gradient on its way, the target's rows: fp32 each."""
        return 4 * 4 * self.draft_vocab * self.hidden


KIMI = Size(7168, 163_840, 32_000, 12_288, 64, 512)
SMALL = Size(1024, 32_000, 8_000, 2_816, 16, 512)


def step(size: Size, folder: Path) -> dict[str, float]:
    """Peak bytes of a step, and seconds."""
    from eagle3lib.draft_model import DraftModel, DraftModelConfig
    from eagle3lib.training_time_test import Batch, TrainingTimeTest
    from eagle3lib.vocab_mapping import VocabMapping

    config = DraftModelConfig(
        hidden_size=size.hidden, intermediate_size=size.intermediate, num_attention_heads=size.heads,
        num_key_value_heads=size.heads, head_dim=size.hidden // size.heads, vocab_size=size.vocab,
        draft_vocab_size=size.draft_vocab, rms_norm_eps=1e-5, max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    embedding, head = (mapped(folder / name, size.vocab, size.hidden) for name in ("embedding", "head"))
    mapping = VocabMapping.from_target_ids(torch.arange(size.draft_vocab), size.vocab)
    with Peak() as peak:
        model = DraftModel(config)
        model.init_from_target(embedding, head, mapping)
        test = TrainingTimeTest(model, head, mapping, size.steps, 0.8, recompute=size.recompute)
        n = size.tokens
        states = torch.randn(n, 4 * size.hidden).to(torch.bfloat16)
        batch = Batch.document(
            torch.randint(size.vocab, (n,)), states[:, : -size.hidden], states[:, -size.hidden :], torch.zeros(n).long()
        )
        start = time.monotonic()
        loss, _ = test(test.with_target_tokens(batch))
        loss.backward()
        seconds = time.monotonic() - start
    parameters = sum(p.numel() for p in model.trainable().values())
    return {"peak": peak.bytes, "seconds": seconds, "parameters": parameters}


def mapped(path: Path, rows: int, columns: int) -> torch.Tensor:
    """bf16 [rows, columns], zeros, out of a file that takes no room."""
    with open(path, "wb") as file:
        file.truncate(2 * rows * columns)
    return torch.from_file(str(path), shared=False, size=rows * columns, dtype=torch.bfloat16).view(rows, columns)


class Peak:
    """The most anonymous memory of this process while it is entered, less that before."""

    def __enter__(self) -> Peak:
        self.bytes, self.ended = 0, threading.Event()
        self.before = self._now()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _watch(self) -> None:
        while not self.ended.wait(0.003):
            self.bytes = max(self.bytes, self._now() - self.before)

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


def measure(size: Size) -> dict[str, float]:
    """`step` in a process of its own."""
    with common.scratch() as folder:
        command = [sys.executable, "-m", "benchmarks.step_memory", "--one", json.dumps(vars(size)), str(folder)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(step(Size(**json.loads(sys.argv[2])), Path(sys.argv[3]))))
        return
    half = replace(KIMI, tokens=KIMI.tokens // 2)
    sizes = {
        "Kimi, recomputed": replace(KIMI, recompute=True),
        "Kimi, recomputed, half the tokens": replace(half, recompute=True),
    }
    if sys.argv[1:2] != ["--recompute"]:
        sizes |= {
            "Kimi": KIMI,
            "Kimi, half the tokens": half,
            "small": SMALL,
            "small, 4x the vocabularies": replace(SMALL, vocab=4 * SMALL.vocab, draft_vocab=4 * SMALL.draft_vocab),
        }
    found = {name: measure(size) for name, size in sizes.items()}
    rows = [
        [name, f"{size.tokens}", f"{one['parameters'] / 1e6:,.0f}", one["peak"] / GIB, round(one["seconds"])]
        for (name, size), one in zip(sizes.items(), found.values(), strict=True)
    ]
    common.table(["step", "tokens", "M parameters", "peak GiB", "s"], rows)
    for name in ("Kimi, recomputed", "Kimi"):
        if name in found:
            grown = found[name]["peak"] - found[f"{name}, half the tokens"]["peak"]
            print(name)
            forecast(found[name]["parameters"], grown / (KIMI.tokens // 2))
    if "Kimi" not in found:
        return
    without = [found[name]["peak"] - size.head_bytes for name, size in list(sizes.items())[-2:]]
    print(f"step_memory kimi_gib={found['Kimi']['peak'] / GIB:.2f} v_slope={without[1] / without[0]:.3f}")


def forecast(parameters: float, bytes_a_token: float) -> None:
    """One sample on a GPU: fp32 weights, gradients, two moments; bf16 embedding and head; its activations."""
    fixed = 16 * parameters + 2 * 2 * KIMI.vocab * KIMI.hidden + 2 * 4 * KIMI.draft_vocab * KIMI.hidden
    lengths = [2048, 8192, 32_768, 65_536, 131_072]
    rows = [[f"{n:,}", fixed / GIB, n * bytes_a_token / GIB, (fixed + n * bytes_a_token) / GIB] for n in lengths]
    print(f"{bytes_a_token / 2**20:.2f} MiB a token in fp32")
    common.table(["tokens of one sample", "fixed GiB", "activations GiB", "all GiB"], rows)


if __name__ == "__main__":
    main()
