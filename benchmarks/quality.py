"""The same samples and the same CPU-seconds: whose draft is accepted longer? SpecForge 0.2.0, speculators 0.9.0, ours.

Samples, vocabulary and sizes are those of a finished run (`make demo`), whose target answers the held-out questions
(MT-bench, first turns) once. Each side trains in a process of its own (`benchmarks.quality_sides`; the peers' in
.venv-peers, `make venv-peers`) for the same CPU time on one thread, with its own start, mask, loss, optimiser and
schedule. The peers' learning rate, made for days on GPUs, is first chosen for them out of a few, by acceptance on
the run's validation samples; ours is the demo's.

The drafts are served by our own decoder on the replies of the target. Greedy speculative decoding cannot change a
reply, so the target need not run again: `acceptance.replay`; that it equals real decoding is asserted on some replies.

Last line: `quality gain=… low=…`: (acceptance length - 1) over the better peer's, mean over the seeds, and the lower
end of its 95 % interval (bootstrap over seeds and questions; goals >= 1.10 and > 1.0). Ablations stand in the table.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from benchmarks import common
from benchmarks.quality_sides import Spec, norms_of
from eagle3lib import acceptance, chat, engines, evaluation, question_sets, replay, sources, targets
from eagle3lib.config import AcceptanceConfig, EngineConfig
from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.errors import UserError
from eagle3lib.evaluation import ChainDrafter
from eagle3lib.hidden_states import load_sample, unpack
from eagle3lib.plan import STORE
from eagle3lib.vocab_mapping import VocabMapping

DRAFT_STEPS, REPLY_TOKENS = 4, 96
CHOICES = {  # what the peers' learning rate is chosen from; the first is what it comes with
    "SpecForge": [("one sample a step", 1e-4), ("one sample a step", 5e-4), ("", 5e-4), ("", 1e-3), ("", 2e-3)],
    "speculators": [("muon", 1e-3), ("muon", 3e-3), ("adamw", 5e-4), ("adamw", 1e-3)],
}
ABLATIONS = ["mask of EAGLE", "mask of speculators", "random head", "random layer", "kl", "lk"]

Answer = tuple[list[int], list[int], torch.Tensor]  # prompt, reply, aux states [prompt + reply, 3H]
Counts = list[tuple[int, int]]  # (passes, accepted) of each reply


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=".venv-peers/bin/python", help="interpreter with the peers")
    parser.add_argument("--draft", type=Path, help="an exported folder of the run; default: the first under results/")
    parser.add_argument("--budget", type=float, default=150, help="CPU-seconds of a training (150)")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--questions", type=int, default=80, help="of MT-bench (80)")
    parser.add_argument("--jobs", type=int, default=2, help="trainings side by side (2)")
    parser.add_argument("--ablations", nargs="*", default=ABLATIONS, choices=ABLATIONS)
    options = parser.parse_args()

    def run() -> None:
        if not Path(options.python).exists():
            raise UserError(f"{options.python}: not here; run `make venv-peers`, or give --python")
        with common.scratch() as folder:
            Comparison(options, folder).run()

    common.main(run)


class Comparison:
    def __init__(self, options: argparse.Namespace, folder: Path):
        self.options, self.folder = options, folder
        self.draft = common.finished_draft(options.draft)
        self.job = replay.job_of(self.draft, STORE)
        self.job.write(folder / "job.json")
        self.embedding, self.mapping = targets.load_embedding(self.job.target), VocabMapping.load(self.job.mapping)
        self.aux_layer_ids = targets.default_aux_layer_ids(self.job.target.num_hidden_layers)
        self.number = 0

    def run(self) -> None:
        engine = engines.open_engine(EngineConfig(), self.job.target.path)
        questions, validation = self._answers(engine), self._validation()
        tokens = sum(len(reply) for _, reply, _ in questions)
        print(f"{len(questions)} questions, {tokens} reply tokens; budget {self.options.budget:g} CPU-s", flush=True)
        self._check_against_decoding(engine, questions[:4])
        del engine
        chosen = {name: self._choose(name, validation) for name in CHOICES}
        ours = self._spec("eagle3lib", "", self.job.training.learning_rate)
        columns = {"eagle3lib": ours, **chosen}
        columns |= {f"eagle3lib, {change}": replace(ours, change=change) for change in self.options.ablations}
        specs = [replace(spec, seed=seed) for spec in columns.values() for seed in range(self.options.seeds)]
        found = iter(self._train(specs, questions))
        counts = {name: [next(found) for _ in range(self.options.seeds)] for name in columns}
        report(counts, sorted(chosen))

    # --- what the drafts are judged on -----------------------------------------------------------------------

    def _answers(self, engine: Any) -> list[Answer]:
        """The target's greedy replies to the questions, but for degenerate ones, with their states."""
        (mt_bench,) = question_sets.parse(["mt-bench"])
        path = sources.fetch(mt_bench.source, self.folder)
        turns = [question[0] for question in question_sets.read("mt-bench", [path], self.options.questions)]
        tokenizer = AutoTokenizer.from_pretrained(self.job.target.path)
        prompts = [chat.prompt_ids(tokenizer, turn) for turn in turns]
        replies = engine.greedy(prompts, REPLY_TOKENS)
        sound = [(p, r) for p, r in zip(prompts, replies, strict=True) if not acceptance.is_degenerate(r)]
        states = engine.extract([[*p, *r] for p, r in sound], self.aux_layer_ids)
        return [(p, r, torch.cat(s.aux, -1).float()) for (p, r), s in zip(sound, states, strict=True)]

    def _validation(self) -> list[Answer]:
        """The first replies of the run's held-out samples."""
        answers = []
        for sample in self.job.samples:
            if sample.split == "validation":
                stored, (start, end) = load_sample(sample.path), sample.reply_bounds[:2]
                ids = stored["input_ids"].tolist()
                aux = torch.cat(unpack(stored, sample.reply_bounds)[:-1], -1).float()
                answers.append((ids[:start], ids[start:end], aux[:end]))
        if not answers:
            raise UserError("dataset.validation_fraction: the run held no sample out; raise it and run again")
        return answers

    def _check_against_decoding(self, engine: Any, answers: Sequence[Answer]) -> None:
        """Replayed passes are those of real speculative decoding, on the run's own draft."""
        cfg = AcceptanceConfig(prompts=["-"], max_new_tokens=REPLY_TOKENS, draft_steps=DRAFT_STEPS)
        draft, mapping, _ = evaluation.export.load_exported(self.draft, self.embedding)
        decoder = evaluation.InProcess(engine, draft, mapping, self.aux_layer_ids, cfg, self.job.target.eos_token_ids)
        prompts = [prompt for prompt, _, _ in answers]
        for number, decoded in decoder.decode(prompts, 0.0, [0] * len(prompts)):
            replayed, real = accepted(passes_of(draft, mapping, answers[number])), accepted(decoded.passes)
            if decoded.reply == answers[number][1] and replayed != real:
                raise UserError(f"question {number}: replay accepts {replayed}, decoding {real}")

    # --- trainings -------------------------------------------------------------------------------------------

    def _spec(self, side: str, change: str, learning_rate: float) -> Spec:
        steps, job = self.job.training.ttt_steps, str(self.folder / "job.json")
        return Spec(side, job, 0, self.options.budget, learning_rate, "", steps, change)

    def _choose(self, side: str, validation: Sequence[Answer]) -> Spec:
        """The best of CHOICES at half the budget, on a seed that is not used again."""
        tried = [self._spec(side, change, rate) for change, rate in CHOICES[side]]
        short = [replace(spec, seed=1000, budget=spec.budget / 2) for spec in tried]
        lengths = [length(counts) for counts in self._train(short, validation)]
        shown = ", ".join(
            f"{s.change or 'packs'} {s.learning_rate:g}: {n:.3f}" for s, n in zip(tried, lengths, strict=True)
        )
        print(f"{side}, chosen at half the budget on validation samples: {shown}", flush=True)
        return tried[lengths.index(max(lengths))]

    def _train(self, specs: Iterable[Spec], answers: Sequence[Answer]) -> list[Counts]:
        with ThreadPoolExecutor(self.options.jobs) as pool:
            return list(pool.map(lambda spec: self._one(spec, answers), list(specs)))

    def _one(self, spec: Spec, answers: Sequence[Answer]) -> Counts:
        self.number += 1
        file = self.folder / f"{self.number}.json"
        spec = replace(spec, out=str(self.folder / f"{self.number}-done.safetensors"))
        file.write_text(json.dumps(asdict(spec)))
        python = sys.executable if spec.side == "eagle3lib" else self.options.python
        done = subprocess.run(
            [python, "-m", "benchmarks.quality_sides", str(file)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise UserError(f"{spec.side}: its training ended with {done.returncode}: {done.stderr[-1500:]}")
        config = replace(DraftModelConfig.from_target(self.job.target, self.job.draft), **norms_of(spec))
        model = DraftModel(config)
        model.load_state_dict(load_file(spec.out) | {"embed_tokens.weight": self.embedding})
        model = model.float().eval().requires_grad_(False)
        counts = []
        for answer in answers:
            taken = accepted(passes_of(model, self.mapping, answer))
            counts.append((len(taken), sum(taken)))
        about = json.loads(Path(spec.out).with_suffix(".json").read_text())
        print(
            f"{spec.side}, {spec.change or '-'}, lr {spec.learning_rate:g}, seed {spec.seed}: {about['epochs']:.1f} "
            f"epochs, acceptance length {length(counts):.4f}",
            flush=True,
        )
        return counts


def passes_of(draft: DraftModel, mapping: VocabMapping, answer: Answer) -> list[acceptance.Pass]:
    """The passes of speculative decoding on a reply that is known, drafts made as in serving."""
    prompt, reply, aux = answer
    drafter, seen = ChainDrafter(draft, mapping), 0

    def propose(ids: Sequence[int], k: int) -> list[int]:
        nonlocal seen
        if not k:
            return []
        first, seen = seen, len(ids) - 1
        return drafter.propose(ids[first + 1 :], aux[first:seen], k)

    return acceptance.replay(prompt, reply, DRAFT_STEPS, propose)


def accepted(passes: Sequence[acceptance.Pass]) -> list[int]:
    return [one.accepted for one in passes]


# --- figures ---------------------------------------------------------------------------------------------------------


def length(counts: Counts) -> float:
    passes, accepted = map(sum, zip(*counts, strict=True))
    return 1 + accepted / passes


def report(counts: dict[str, list[Counts]], peers: Sequence[str]) -> None:
    """counts: column -> seed -> reply -> (passes, accepted)."""
    values = {name: np.array(of, dtype=float) for name, of in counts.items()}  # [seeds, replies, 2]

    def gains(drafted: np.ndarray) -> np.ndarray:  # [seeds]: acceptance length - 1
        passes, taken = drafted.sum(1).T
        return np.maximum(taken / passes, 1e-6)  # a draft that nothing is accepted of has no ratio

    mean = {name: float(gains(of).mean()) for name, of in values.items()}
    better = max(peers, key=lambda name: mean[name])
    rows = []
    for name, of in values.items():
        low, high = interval(values["eagle3lib"], of, gains)
        by_seed = " ".join(f"{1 + g:.3f}" for g in gains(of))
        ratio = f"{mean['eagle3lib'] / mean[name]:.3f}"
        rows.append([name, f"{1 + mean[name]:.4f}", by_seed, ratio, f"[{low:.3f}, {high:.3f}]"])
    common.table(["side", "acceptance length", "by seed", "ours - 1 over its - 1", "95 %"], rows)
    low, _ = interval(values["eagle3lib"], values[better], gains)
    print(f"quality gain={mean['eagle3lib'] / mean[better]:.3f} low={low:.3f} peer={better}")


def interval(
    ours: np.ndarray, other: np.ndarray, gains: Callable[[np.ndarray], np.ndarray], draws: int = 2000
) -> tuple[float, float]:
    """95 % interval of the ratio of the means; questions are drawn for both alike, seeds for each."""
    random, ratios = np.random.default_rng(0), []
    n_seeds, n_replies = ours.shape[:2]
    for _ in range(draws):
        replies = random.integers(n_replies, size=n_replies)
        drawn = [gains(of[random.integers(n_seeds, size=n_seeds)][:, replies]).mean() for of in (ours, other)]
        ratios.append(drawn[0] / drawn[1])
    low, high = np.quantile(ratios, [0.025, 0.975])
    return float(low), float(high)


if __name__ == "__main__":
    main()
