"""How much of a GPU a training step uses: Kimi-K2.5's sizes, synthetic states, packs of 8,192 tokens. Needs a GPU.

One process, bf16 compute with fp32 masters, AdamW included; documents of realistic lengths, 60 % supervised. Model FLOP
are those of `eagle3lib.speed.floor_flop` (no attention, no recomputation).

Last line: `gpu_step mfu=… gemm_share=… tokens_per_second=… gib=…`: FLOP/s over the card's peak (goal >= 0.40), over the
measured rate of a square product, and the most memory that tensors took. `--small --device cpu` tries the script.
"""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass, field

import torch

from benchmarks import common
from eagle3lib import compilation, parallel, speed
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.training_time_test import Batch, Plan, TrainingTimeTest, reply_index
from eagle3lib.vocab_mapping import VocabMapping

STEPS, DECAY, SUPERVISED = 4, 0.8, 0.6


@dataclass(frozen=True)
class Size:
    """Hidden size, vocabularies, width of the MLP, heads, tokens of a pack."""

    hidden: int
    vocab: int
    draft_vocab: int
    intermediate: int
    heads: int
    tokens: int
    rope: dict = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 50_000.0})

    @property
    def config(self) -> DraftModelConfig:
        return DraftModelConfig(
            hidden_size=self.hidden, intermediate_size=self.intermediate, num_attention_heads=self.heads,
            num_key_value_heads=self.heads, head_dim=self.hidden // self.heads, vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab, rms_norm_eps=1e-5, max_position_embeddings=262_144,
            rope_parameters=self.rope,
        )  # fmt: skip


KIMI = Size(7168, 163_840, 32_000, 12_288, 64, 8192)
SMALL = Size(64, 500, 100, 96, 4, 256)


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--peak", type=float, default=989.0, help="the card's dense bf16 TFLOP/s")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--recompute", action="store_true", help="training.recompute")
    parser.add_argument("--compile", action="store_true", help="training.compile")
    parser.add_argument("--small", action="store_true", help="tiny sizes: only to try the script")
    options = parser.parse_args()

    def run() -> None:
        device, size = torch.device(options.device), SMALL if options.small else KIMI
        if device.type == "cuda" and not torch.cuda.is_available():
            raise UserError("gpu_step: torch sees no GPU; docs/gpu.md says which build of torch to install")
        with torch.device(device):
            model = DraftModel(size.config)
            head = torch.randn(size.vocab, size.hidden).to(torch.bfloat16)
        mapping = VocabMapping.from_target_ids(torch.arange(size.draft_vocab), size.vocab)
        model.init_from_target(head, head, VocabMapping(mapping.t2d.to(device), mapping.d2t.to(device)))
        if options.compile:
            compilation.check()
            compilation.compile_parts(model)
        test = TrainingTimeTest(model, head, mapping, STEPS, DECAY, torch.bfloat16, recompute=options.recompute)
        batch, plan = make(size, test, device, random.Random(options.seed))
        seconds = measure(test, batch, plan, options.steps)
        slots = [row.sum().item() for row in plan.supervised]
        flop = speed.floor_flop(size.config, size.tokens, slots, plan.counted.tolist())
        rate, each = speed.matmul_rate(device, torch.bfloat16, 0.5), statistics.median(seconds)
        print(f"{model.config.variant}, {sum(p.numel() for p in model.trainable().values()) / 1e6:,.0f} M parameters")
        print(f"{slots} slots by step, {flop / 1e12:,.1f} TFLOP, {each * 1e3:,.1f} ms")
        print(f"square product: {rate / 1e12:,.1f} TFLOP/s")
        print(
            f"gpu_step mfu={flop / each / options.peak / 1e12:.3f} gemm_share={flop / each / rate:.3f} "
            f"tokens_per_second={size.tokens / each:.0f} gib={speed.peak_memory(device) / 2**30:.1f}"
        )

    common.main(run)


def make(size: Size, test: TrainingTimeTest, device: torch.device, rng: random.Random) -> tuple[Batch, Plan]:
    """A full pack of random documents; the target's argmax is in the draft vocabulary, as most are."""
    documents, left = [], size.tokens
    while left:
        n = min(left, common.length(rng, size.tokens / 4, 0.75, size.tokens))
        states = torch.randn(n, 4 * size.hidden).to(torch.bfloat16)
        documents.append(
            Batch.document(
                torch.randint(size.vocab, (n,)),
                states[:, : -size.hidden],
                states[:, -size.hidden :],
                reply_index([round(n * (1 - SUPERVISED)), n], n),
                torch.randint(size.draft_vocab, (n,)),
            )
        )
        left -= n
    batch = Batch.pack(documents)
    return batch.to(device), test.plan(batch).to(device)


def measure(test: TrainingTimeTest, batch: Batch, plan: Plan, steps: int) -> list[float]:
    """Seconds of each step but the first three, which warm up."""
    spread = parallel.Spread(test)
    optimizer = torch.optim.AdamW(spread.parameters.values(), lr=1e-5, fused=True)
    weights, seconds = test.step_weights(plan.counted), []
    for _ in range(steps + 3):
        start = speed.now(batch.aux.device)
        spread.backward([(batch, plan)], weights)
        spread.clip(0.5)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(speed.now(batch.aux.device) - start)
    return seconds[3:]


if __name__ == "__main__":
    main()
