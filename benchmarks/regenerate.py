"""Regeneration against the raw decode rate at the same batch.

raw: `batch` replies decoded side by side from the end of their prompts, none ends, none is refilled, and the
prefill is not counted. regenerate: prompts in, replies out, as `regenerate_replies` does it: with prefill,
refilling, and the last replies running alone. Both advance in turns on one thread; reply tokens per
CPU-second over the whole run. `--plain` adds transformers' generate() on batches of like prompts.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import common
from eagle3lib import chat
from eagle3lib.engines.decoding import Decoding
from eagle3lib.engines.transformers import TransformersEngine

TURN_TOKENS, RAW_TURN_TOKENS = 512, 128  # of a side's turn, about; raw decoding is steady, a sample of it is enough


def run(args: argparse.Namespace) -> None:
    folder = common.check_target(args.target)
    engine = TransformersEngine(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = make_prompts(tokenizer, args.prompts, args.seed)
    raw, ours = common.Stopwatch(), common.Stopwatch()
    raw_decoding = RawDecoding(engine, prompts[: args.batch_size], args.max_new_tokens)
    numbered = ((i, ids, 0) for i, ids in enumerate(prompts))
    replies = engine.generate(numbered, args.max_new_tokens, batch_size=args.batch_size)
    lengths: list[int] = []
    raw_passes = engine.passes
    while take_turn(ours, replies, lengths):
        raw_passes += raw_decoding.turn(raw)
    rows = [
        ["raw decoding", sum(raw.tokens), round(raw.rate), 1.0],
        ["regenerate", sum(ours.tokens), round(ours.rate), ours.rate / raw.rate],
    ]
    if args.plain:
        plain = plain_generate(folder, prompts[: 2 * args.batch_size], args, tokenizer)
        rows.append(["generate()", sum(plain.tokens), round(plain.rate), plain.rate / raw.rate])
    common.table(["side", "reply tokens", "tok/s", "ratio"], rows)
    occupancy = sum(lengths) / (engine.passes - raw_passes) / args.batch_size
    mean_prompt, mean_reply = sum(map(len, prompts)) / len(prompts), sum(lengths) / len(lengths)
    print(
        f"regenerate ratio={ours.rate / raw.rate:.2f} batch={args.batch_size} occupancy={occupancy:.2f} "
        f"prompts={len(prompts)} prompt_tokens={mean_prompt:.0f} reply_tokens={mean_reply:.0f} goal>=0.85"
    )


def make_prompts(tokenizer: Any, n: int, seed: int) -> list[list[int]]:
    """Questions that are answered at different lengths, none twice, in the chat template."""
    asks = ["Explain how {} works.", "What is {}?", "Write a short poem about {}.", "List three facts about {}.",
            "In one word: is {} big or small?", "Why do people care about {}?", "Tell me a story about {} and {}.",
            "Name the colour of {}.", "How would you teach {} to a child who already knows {}?"]  # fmt: skip
    topics = ["a river", "music", "the moon", "a bicycle", "bread", "the heart", "a violin", "democracy", "an engine",
              "the internet", "a volcano", "chess", "the ocean", "a clock", "paper", "a bridge", "glass", "a library",
              "electricity", "winter", "a garden"]  # fmt: skip
    generator = random.Random(seed)
    questions: dict[str, None] = {}
    while len(questions) < min(n, len(asks) * len(topics)):
        questions[generator.choice(asks).format(*generator.sample(topics, 2))] = None
    return [chat.prompt_ids(tokenizer, [{"role": "user", "content": q}]) for q in questions]


class RawDecoding:
    """A full batch that decodes on and on: at `max_new_tokens` all replies go back to their first token."""

    def __init__(self, engine: TransformersEngine, prompts: list[list[int]], max_new_tokens: int):
        self.decoding = Decoding(engine, len(prompts), 2 * max_new_tokens + len(prompts), 0.0, 1.0, set())
        self.max_new_tokens = max_new_tokens
        waiting = iter([(i, p, 0) for i, p in enumerate(prompts)])
        while len(self.decoding.running) < len(prompts):
            self.decoding.admit(waiting)
            self._step()
        self._rewind()

    def turn(self, watch: common.Stopwatch) -> int:
        """A few steps; how many."""
        steps = -(-RAW_TURN_TOKENS // self.decoding.slots)
        with watch.round() as done:
            for _ in range(steps):
                self._step()
                done(self.decoding.slots)
        if len(self.decoding.running[0].reply) >= self.max_new_tokens:
            self._rewind()
        return steps

    def _step(self) -> None:
        assert not list(self.decoding.step()), "none ends"

    def _rewind(self) -> None:
        for running in self.decoding.running:
            del running.reply[1:]


def take_turn(watch: common.Stopwatch, replies: Iterator[Any], lengths: list[int]) -> int:
    """Replies worth a turn; 0 when there are no more."""
    tokens = 0
    with watch.round() as done:
        for _, reply, _ in replies:
            lengths.append(len(reply))
            done(len(reply))
            tokens += len(reply)
            if tokens >= TURN_TOKENS:
                break
    return tokens


@torch.no_grad()
def plain_generate(
    folder: Path, prompts: list[list[int]], args: argparse.Namespace, tokenizer: Any
) -> common.Stopwatch:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer.padding_side = "left"
    prompts = sorted(prompts, key=len)
    watch = common.Stopwatch()
    for start in range(0, len(prompts), args.batch_size):
        batch = tokenizer.pad({"input_ids": prompts[start : start + args.batch_size]}, return_tensors="pt")
        with watch.round() as done:
            out = model.generate(**batch, max_new_tokens=args.max_new_tokens, do_sample=False)
            for row in out[:, batch["input_ids"].shape[1] :].tolist():
                done(next((i + 1 for i, token in enumerate(row) if token == tokenizer.eos_token_id), len(row)))
    return watch


def _arguments() -> argparse.Namespace:
    parser = common.parser(Path(__file__).stem)
    parser.add_argument("--prompts", type=int, default=160, help="prompts to answer")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--plain", action="store_true", help="measure transformers' generate() too")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    common.main(lambda: run(arguments))
