"""One side of `benchmarks.peers`, in a process of its own: a training step for each line read, its CPU time written.

python -m benchmarks.peer_sides SIDE SIZES: the fields of `Sizes` as JSON. Everything that a side is given comes out of
one seed (`Case`): the target's head, the draft's first weights, the samples.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from eagle3lib.draft_model import DraftModel, DraftModelConfig
from eagle3lib.processes import end_with_parent
from eagle3lib.training_time_test import Batch, TrainingTimeTest, reply_index
from eagle3lib.vocab_mapping import VocabMapping

TOKENS, STEPS, DECAY, SAMPLES = 512, 3, 0.8, 2
Step = Callable[[], dict[str, Any]]  # forward, backward; losses by step, as ours, and the CPU-seconds of extras
ROPE = {"rope_type": "default", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Sizes:
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocab: int
    draft_vocab: int
    head_dim: int = 64
    eps: float = 1e-6

    def config(self) -> DraftModelConfig:
        return DraftModelConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            rms_norm_eps=self.eps,
            max_position_embeddings=2048,
            rope_parameters=ROPE,
        )


def reply(share: float) -> tuple[int, int]:
    """[start, end) of what is supervised in each sample: the last `share` of it."""
    return round(TOKENS * (1 - share)), TOKENS


class Case:
    """Target, draft and samples of one size. All target tokens are draft tokens: the most work that a loss can be."""

    def __init__(self, sizes: Sizes):
        torch.manual_seed(0)
        self.sizes = sizes
        vocab, hidden = sizes.vocab, sizes.hidden
        self.mapping = VocabMapping.from_target_ids(torch.randperm(vocab)[: sizes.draft_vocab], vocab)
        self.head = torch.randn(vocab, hidden) / math.sqrt(hidden)
        self.draft = DraftModel(sizes.config())
        self.draft.init_from_target(self.draft.embed_tokens.weight, self.head, self.mapping)
        self.samples = [self._sample() for _ in range(SAMPLES)]

    def _sample(self) -> tuple[Tensor, Tensor, Tensor]:
        """ids [T], aux states [T, 3H], last state [T, H], which a final norm with weights of one leaves as it is."""
        hidden = self.sizes.hidden
        ids = torch.randint(self.sizes.vocab, (TOKENS,))
        says = self.mapping.target_ids[torch.randint(self.sizes.draft_vocab, (TOKENS,))]
        last = F.rms_norm(self.head[says] * math.sqrt(hidden) / 2 + torch.randn(TOKENS, hidden), (hidden,))
        return ids, torch.randn(TOKENS, 3 * hidden), last

    def shifted(self, number: int, share: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """As both peers shift a sample: g_j, x_(j+1), y_(j+1), and which targets count: those that count for us.

        hidden [1, T-1, 3H], ids [1, T-1], last [1, T-1, H], mask bool [1, T-1].
        """
        ids, aux, last = self.samples[number]
        start, end = reply(share)
        mask = torch.zeros(1, TOKENS - 1, dtype=torch.bool)
        mask[:, max(start - 1, 0) : end - 2] = True
        return aux[None, :-1], ids[None, 1:], last[None, 1:], mask


def llama_config(config: DraftModelConfig) -> Any:
    """One layer of it, as both peers take their sizes."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        vocab_size=config.vocab_size,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=config.rope_parameters,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )


class Ours:
    def __init__(self, case: Case):
        self.case, self.model = case, case.draft
        self.test = TrainingTimeTest(self.model, case.head, case.mapping, STEPS, DECAY)

    def prepare(self, number: int, share: float) -> Step:
        document = Batch.document(*self.case.samples[number], reply_index(reply(share), TOKENS))
        start = time.process_time()
        batch = self.test.with_target_tokens(document)
        once = time.process_time() - start

        def step() -> dict[str, Any]:
            loss, sums = self.test(batch)
            loss.backward()
            return {"losses": (sums["loss"] / sums["counted"]).tolist(), "once_a_sample": once}

        return step


class Timed:
    """A function of a peer, with the CPU time spent in it."""

    def __init__(self, module: Any, name: str):
        self.function, self.seconds = getattr(module, name), 0.0
        setattr(module, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        start = time.process_time()
        result = self.function(*args, **kwargs)
        self.seconds += time.process_time() - start
        return result

    def take(self) -> float:
        seconds, self.seconds = self.seconds, 0.0
        return seconds


class SpecForge:
    """Offline training with `compact_teacher`; its loss without Triton, by its own reference."""

    def __init__(self, case: Case):
        from specforge.algorithms.eagle3 import model as eagle3
        from specforge.core import compact_teacher, loss
        from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3

        class Reference:
            apply = staticmethod(loss._compute_loss)

        eagle3.LogSoftmaxLoss = Reference
        self.case = case
        self.full_vocabulary = Timed(compact_teacher, "tiled_logsumexp_argmax")
        self.acceptance = Timed(eagle3, "compute_acceptance_rate")
        config = llama_config(case.draft.config)
        config.draft_vocab_size = case.sizes.draft_vocab
        self.model = LlamaForCausalLMEagle3(config, attention_backend="sdpa").float()
        mapping = {"t2d": case.mapping.t2d, "d2t": case.mapping.d2t}
        self.model.load_state_dict(case.draft.state_dict() | mapping, strict=False, assign=True)
        self.model.freeze_embedding()
        self.trainer = eagle3.OnlineEagle3Model(self.model, length=STEPS, attention_backend="sdpa")

    def prepare(self, number: int, share: float) -> Step:
        hidden, ids, last, mask = self.case.shifted(number, share)

        def step() -> dict[str, Any]:
            losses = self.trainer(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                target=None,
                loss_mask=mask[..., None].float(),
                hidden_states=hidden,
                target_hidden_for_compact=last,
                target_head_weight=self.case.head,
            )[0]
            sum(DECAY**i * loss for i, loss in enumerate(losses)).backward()
            counted = [int(mask[:, i:].sum()) for i in range(STEPS)]  # theirs are means over all rows
            return {
                "losses": [loss.item() * ids.numel() / n for loss, n in zip(losses, counted, strict=True)],
                "full_vocabulary": self.full_vocabulary.take(),
                "acceptance": self.acceptance.take(),
            }

        return step


def speculators_model(config: DraftModelConfig, steps: int, **norms: bool) -> Any:
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3.config import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    layer = llama_config(config)
    layer._attn_implementation = "sdpa"  # on a CPU as fast as "eager"; flex_attention has no backward there
    return Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=config.draft_vocab_size,
            eagle_aux_hidden_state_layer_ids=[1, 2, 3],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=[]),
            ),
            **norms,
        )
    )


class Speculators:
    """Its head is frozen as it comes; here it is trained as the others'."""

    def __init__(self, case: Case):
        from speculators.models.eagle3.core import Eagle3DraftModel

        self.case = case
        norms = {"norm_before_residual": False, "norm_before_fc": False, "norm_output": False}
        self.model = speculators_model(case.draft.config, STEPS, **norms).float()
        weights = {name.replace("midlayer.", "layers.0."): w for name, w in case.draft.state_dict().items()}
        weights |= {"t2d": case.mapping.t2d, "d2t": case.mapping.d2t}
        weights["verifier_lm_head.weight"] = case.head[case.mapping.target_ids]
        weights["verifier_norm.weight"] = torch.ones(case.sizes.hidden)
        self.model.load_state_dict(weights, assign=True)
        self.model.lm_head.weight.requires_grad_(True)
        self.kwargs = Eagle3DraftModel.get_trainer_kwargs(
            ttt_steps=STEPS, ttt_step_loss_decay=DECAY, loss_fn="kl_div", loss_implementation="eager"
        )[0]

    def prepare(self, number: int, share: float) -> Step:
        hidden, ids, last, mask = self.case.shifted(number, share)
        p = (last[0] @ self.case.head[self.case.mapping.target_ids].t()).log_softmax(-1)
        entropy = -(p.exp() * p).sum(-1)  # theirs is a divergence

        def step() -> dict[str, Any]:
            _, loss, metrics = self.model(
                hidden_states=hidden,
                input_ids=ids,
                document_ids=torch.zeros_like(ids),
                loss_mask=mask,
                position_ids=torch.arange(1, TOKENS)[None],
                verifier_last_hidden_states=last,
                **self.kwargs,
            )
            loss.backward()
            divergences = [float(metrics[f"loss_{i}_sum"]) / DECAY**i for i in range(STEPS)]
            return {"losses": [d + float(entropy[i:][mask[0, i:]].mean()) for i, d in enumerate(divergences)]}

        return step


SIDES: dict[str, Callable[[Case], Any]] = {"ours": Ours, "specforge": SpecForge, "speculators": Speculators}


def main() -> None:
    end_with_parent()
    name, sizes = sys.argv[1], Sizes(**json.loads(sys.argv[2]))
    answers, sys.stdout = sys.stdout, sys.stderr  # libraries print
    torch.set_num_threads(1)
    side = SIDES[name](Case(sizes))
    model: nn.Module = side.model
    about = {
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "blas": next(line.strip(" -") for line in torch.__config__.show().splitlines() if "Math Kernel" in line),
    }
    print(json.dumps(about), file=answers, flush=True)
    prepare = cache(side.prepare)
    for line in sys.stdin:
        request = json.loads(line)
        model.lm_head.weight.requires_grad_(request.pop("train_head", True))
        step = prepare(**request)
        model.zero_grad(set_to_none=True)
        start = time.process_time()
        answer = step()
        answer["seconds"] = time.process_time() - start
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
