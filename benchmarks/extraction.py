"""Extraction against the naive loop: one sample at a time through transformers, output_hidden_states=True.

Both take the same samples in turns, on one thread; tokens per CPU-second, median ratio over the rounds.
Lengths: prompts of the target's chat template around ~25 words, replies of ~90 tokens (log-normal, at most 320).
"""

from __future__ import annotations

import argparse
import random
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks import common
from eagle3lib import chat, targets
from eagle3lib.engines.transformers import TransformersEngine


def run(args: argparse.Namespace) -> None:
    folder = common.check_target(args.target)
    engine = TransformersEngine(folder)
    naive = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    aux = targets.default_aux_layer_ids(engine.num_hidden_layers)
    chats = conversations(AutoTokenizer.from_pretrained(folder), args.samples, args.seed)
    rows, ratios = [], []
    for name, samples in [("chat samples", chats), ("nothing shared", without_shared_beginning(chats, args.seed))]:
        sides = {
            "naive": partial(naive_extract, naive, samples, aux),
            "engine": partial(engine_extract, engine, samples, aux),
        }
        watches = common.in_turns(sides, args.rounds)
        ratios.append(common.median_ratio(watches["engine"], watches["naive"]))
        lengths = sorted(map(len, samples))
        shape = f"{lengths[0]}/{lengths[len(lengths) // 2]}/{lengths[-1]}"
        rows.append([name, shape, round(watches["naive"].rate), round(watches["engine"].rate), ratios[-1]])
    common.table(["samples", "tokens min/median/max", "naive tok/s", "engine tok/s", "ratio"], rows)
    print(f"extraction ratio={ratios[0]:.2f} nothing_shared={ratios[1]:.2f} tokens={sum(map(len, chats))} goal>=1.5")


def conversations(tokenizer: Any, n: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    samples = []
    for _ in range(n):
        user = common.text(generator, common.length(generator, 25, 0.7, 200))
        prompt = chat.prompt_ids(tokenizer, [{"role": "user", "content": user}])
        samples.append(prompt + reply(generator, common.length(generator, 90, 0.8, 320), len(tokenizer)))
    return sorted(samples, key=len)


def reply(generator: random.Random, n: int, vocab_size: int) -> list[int]:
    return [generator.randrange(vocab_size) for _ in range(n)]


def without_shared_beginning(samples: list[list[int]], seed: int) -> list[list[int]]:
    """The same lengths, other first tokens: what is left of the ratio where no system prompt is shared."""
    generator = random.Random(seed)
    return [generator.sample(ids, len(ids)) for ids in samples]


@torch.no_grad()
def naive_extract(model: torch.nn.Module, samples: list[list[int]], aux: list[int]) -> int:
    kept = []
    for ids in samples:
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        kept.append([*(states[k][0] for k in aux), states[-1][0]])
    return sum(len(states[-1]) for states in kept)


def engine_extract(engine: TransformersEngine, samples: list[list[int]], aux: list[int]) -> int:
    return sum(len(states.last) for states in engine.extract(samples, aux))


def _arguments() -> argparse.Namespace:
    parser = common.parser(Path(__file__).stem)
    parser.add_argument("--samples", type=int, default=16, help="samples a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of both sides")
    return parser.parse_args()


if __name__ == "__main__":
    arguments = _arguments()
    common.main(lambda: run(arguments))
