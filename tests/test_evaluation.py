"""Speculative decoding from an exported folder: the output is the target's, the drafts a slow reference's."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from eagle3lib import evaluation, export, targets
from eagle3lib.acceptance import Pass
from eagle3lib.config import AcceptanceConfig
from eagle3lib.draft_model import DraftCache, DraftModel, DraftModelConfig
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError
from eagle3lib.vocab_mapping import VocabMapping

V = H = 32
AUX = [1, 2, 3]
EOS = 20
PROMPTS = [[3, 9, 4], [1], [30, 2, 2, 7, 11, 5, 19, 0], [12, 13]]


def save_target(folder, seed, eos=EOS):
    """A random Llama of four layers, wide enough in its weights that its replies are not one token."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=H,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        initializer_range=0.35,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=eos,
    )
    model = LlamaForCausalLM(config)
    return model, lambda: model.save_pretrained(folder)


def make_random_target(folder, eos=None):
    save_target(folder, 3, eos)[1]()
    return targets.load_info(folder), TransformersEngine(folder)


def make_counting_target(folder):
    """A target that says x + 1 after x, by hand: states are one-hot embeddings, the head shifts them."""
    model, save = save_target(folder, 0)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        model.lm_head.weight.copy_(torch.eye(V).roll(1, 0))
    save()
    return targets.load_info(folder), TransformersEngine(folder)


def draft_config(info, draft_vocab_size):
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    names += ("vocab_size", "rms_norm_eps", "max_position_embeddings", "rope_parameters", "hidden_act")
    return DraftModelConfig(**{name: getattr(info, name) for name in names}, draft_vocab_size=draft_vocab_size)


def export_random_draft(folder, info, draft_vocab_size=24, seed=5):
    torch.manual_seed(seed)
    model = DraftModel(draft_config(info, draft_vocab_size))
    for parameter in model.trainable().values():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.3)
    mapping = VocabMapping.from_target_ids(torch.randperm(V)[:draft_vocab_size], V)
    export.export_draft(model.state_dict(), model.config, mapping, info, AUX, folder, dtype="float32")


def export_trained_draft(folder, info, engine, steps=10, aux=AUX, **changes):
    """A draft that a few steps on the target's own replies have made right now and then."""
    torch.manual_seed(6)
    config = replace(draft_config(info, 28), **changes)
    model, mapping = DraftModel(config), VocabMapping.from_target_ids(torch.randperm(V)[:28], V)
    model.init_from_target(targets.load_embedding(info), targets.load_head(info), mapping)
    replies = engine.greedy(PROMPTS, 20)
    optimizer = torch.optim.Adam(model.trainable().values(), lr=1e-2)
    for _ in range(steps):
        for prompt, reply in zip(PROMPTS, replies, strict=True):
            ids = torch.tensor([prompt + reply])
            (states,) = engine.extract(ids.tolist(), aux)
            hidden = model.fuse(torch.cat(states.aux, -1)[None, :-2])
            loss = torch.zeros(())
            for step in range(2):  # then once more on its own hidden states
                hidden = model.decode(ids[:, 1 + step : -1], hidden[:, : hidden.shape[1] - step], DraftCache())
                wanted = mapping.to_draft(ids[0, 2 + step :])
                loss = loss + torch.nn.functional.cross_entropy(model.logits(hidden)[0], wanted, ignore_index=-1)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    export.export_draft(model.state_dict(), config, mapping, info, aux, folder, dtype="float32")


def export_counting_draft(folder, info, chain=True, without=()):
    """Knows that x + 1 follows x. Its hidden state is one-hot; with `chain` the MLP moves it on by one at each step."""
    kept = torch.tensor([i for i in range(V) if i not in without])
    config = replace(draft_config(info, len(kept)), intermediate_size=V)
    model = DraftModel(config)
    eye = torch.eye(V)
    with torch.no_grad():
        for parameter in model.trainable().values():
            parameter.zero_() if parameter.ndim == 2 else parameter.fill_(1.0)
        model.fc.weight[:, :H] = eye
        big, norm = 10.0, H**0.5  # a one-hot's norm is sqrt(H); silu(big * sqrt(H)) is its argument
        model.midlayer.mlp.gate_proj.weight.copy_(big * eye)
        model.midlayer.mlp.up_proj.weight.copy_(eye)
        if chain:
            model.midlayer.mlp.down_proj.weight.copy_((eye.roll(1, 0) - eye) / (big * norm * norm))
        # The first draft from g_j is x_j + 2, and the first hidden state has been moved by one already.
        model.lm_head.weight.copy_(eye.roll(1 if chain else 2, 0)[kept])
    mapping = VocabMapping.from_target_ids(kept, V)
    export.export_draft(model.state_dict(), config, mapping, info, AUX, folder, dtype="float32")


def settings(**changes):
    values = {"prompts": ["unused"], "max_new_tokens": 16, "draft_steps": 4} | changes
    return AcceptanceConfig(**values)


@pytest.fixture(scope="module")
def random_target(tmp_path_factory):
    return make_random_target(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def trained_draft(tmp_path_factory, random_target):
    folder = tmp_path_factory.mktemp("trained") / "draft"
    export_trained_draft(folder, *random_target)
    return folder


@pytest.fixture(scope="module")
def counting_target(tmp_path_factory):
    return make_counting_target(tmp_path_factory.mktemp("counting"))


@pytest.mark.parametrize("draft_steps", [1, 2, 5])
def test_random_draft_leaves_the_output_as_it_is(tmp_path, random_target, draft_steps):
    info, engine = random_target
    export_random_draft(tmp_path / "draft", info)
    cfg = settings(draft_steps=draft_steps, max_new_tokens=24)
    result = evaluation.measure_acceptance(tmp_path / "draft", info, engine, PROMPTS, cfg)
    assert [r["reply"] for r in result["per_prompt"]] == engine.greedy(PROMPTS, 24)
    assert result["identical"] == len(PROMPTS) and result["near_ties"] == 0
    for record in result["per_prompt"]:
        assert record["reply_tokens"] == 24 == 1 + record["passes"] + record["accepted"]
    assert result["passes"] == sum(r["passes"] for r in result["per_prompt"] if not r["degenerate"])
    assert len(result["drafted"]) == draft_steps


def test_perfect_chain_accepts_every_draft(tmp_path, counting_target):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    result = evaluation.measure_acceptance(
        tmp_path / "draft", info, engine, [[21], [25, 5]], settings(max_new_tokens=11)
    )
    assert [r["reply"] for r in result["per_prompt"]] == [[*range(22, 32), 0], list(range(6, 17))]
    assert result["acceptance_length"] == 5.0 and result["acceptance_rate"] == [1.0] * 4
    assert (result["passes"], result["tokens"], result["drafted"]) == (4, 20, [4] * 4)
    assert result["ngram"]["acceptance_length"] == 1.0  # nothing is ever said twice


def test_a_chain_that_stands_still_gets_one_draft_through(tmp_path, counting_target):
    """Its second draft is wrong always: the chain reads its own hidden state, not the target's."""
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info, chain=False)
    result = evaluation.measure_acceptance(tmp_path / "draft", info, engine, [[21]], settings(max_new_tokens=11))
    assert result["acceptance_length"] == 2.0
    assert result["acceptance_rate"] == [1.0, 0.0, 0.0, 0.0]
    assert result["passes"] == 5


def test_a_token_outside_of_the_draft_vocabulary_ends_the_chain(tmp_path, counting_target):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info, without=[25])
    result = evaluation.measure_acceptance(tmp_path / "draft", info, engine, [[21]], settings(max_new_tokens=11))
    # 22 | 23 24 +25 | 26 27 28 29 +30 | 31 0 at the limit
    assert result["per_prompt"][0]["reply"] == [*range(22, 32), 0]
    assert (result["passes"], result["accepted"], result["drafted"]) == (3, [3, 2, 1, 1], [3, 2, 2, 2])


def test_end_of_turn_among_accepted_drafts_stops_the_reply(tmp_path, counting_target):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    result = evaluation.measure_acceptance(
        tmp_path / "draft", info, engine, [[EOS - 4], [EOS - 1], [EOS - 2]], settings(max_new_tokens=16)
    )
    assert [r["reply"] for r in result["per_prompt"]] == [[17, 18, 19, 20], [20], [19, 20]]
    assert [r["passes"] for r in result["per_prompt"]] == [1, 0, 1]
    assert [r["accepted"] for r in result["per_prompt"]] == [2, 0, 0]


def test_engines_count_what_is_drafted_behind_the_end(tmp_path, counting_target):
    """Every chain is accepted whole: past the end of turn, past the limit (1 + 5 + 5 tokens where 9 are allowed)."""
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    passes = evaluation.passes_as_engines_count(
        tmp_path / "draft", info, engine, [[EOS - 4], [EOS - 1], [21]], settings(max_new_tokens=9)
    )
    assert passes == [[Pass(4, 4)], [], [Pass(4, 4)] * 2]


@pytest.mark.parametrize("limit", [2, 3, 6, 7, 8])
def test_limit_cuts_inside_of_a_chain(tmp_path, counting_target, limit):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    result = evaluation.measure_acceptance(tmp_path / "draft", info, engine, [[21]], settings(max_new_tokens=limit))
    assert result["per_prompt"][0]["reply"] == [i % V for i in range(22, 22 + limit)]
    assert result["tokens"] == limit - 1


def slow_drafts(engine, draft, mapping, ids, k):
    """The drafts after `ids`, everything computed anew and nothing cached: states by `extract`, one call a draft."""
    (states,) = engine.extract([ids[:-1]], AUX)
    hidden = draft.fuse(torch.cat(states.aux, -1)[None])
    tokens, drafts = list(ids[1:]), []
    for _ in range(k):
        out = draft.decode(torch.tensor([tokens]), hidden, DraftCache())[:, -1:]
        drafts.append(int(mapping.to_target(draft.logits(out)[0, -1].argmax())))
        hidden, tokens = torch.cat([hidden, out], 1), [*tokens, drafts[-1]]
    return drafts


@pytest.mark.parametrize("prompt", PROMPTS)
def test_drafts_equal_those_recomputed_from_scratch(trained_draft, random_target, prompt):
    info, engine = random_target
    draft, mapping, values = export.load_exported(trained_draft, targets.load_embedding(info))
    sessions = evaluation.Sessions(engine, 1, values["eagle_aux_hidden_state_layer_ids"])
    cfg = settings(draft_steps=3, max_new_tokens=20)
    one = evaluation.Speculation(0, evaluation.ChainDrafter(draft, mapping), prompt, cfg, stop_ids=[])
    assert list(evaluation.speculate(sessions, [one], 1)) == [one]
    decoded, done = one.decoded, 1
    with torch.inference_mode():
        for drafts, one in zip(decoded.drafts, decoded.passes, strict=True):
            ids = prompt + decoded.reply[:done]
            k = min(3, 20 - done - 1)
            assert drafts == (slow_drafts(engine, draft, mapping, ids, k) if k else [])
            done += 1 + one.accepted
    assert done == len(decoded.reply) == 20
    assert sessions.sessions[0].length == len(prompt) + 19  # refused drafts left nothing behind


def test_a_few_steps_of_training_raise_acceptance_and_not_the_output(trained_draft, random_target):
    info, engine = random_target
    cfg = settings(draft_steps=3, max_new_tokens=20)
    result = evaluation.measure_acceptance(trained_draft, info, engine, PROMPTS, cfg)
    assert [r["reply"] for r in result["per_prompt"]] == engine.greedy(PROMPTS, 20)
    assert 1.5 < result["acceptance_length_all"] < 4.0
    assert all(0 < rate < 1 for rate in result["acceptance_rate"])  # both ways through a pass are walked


def test_degenerate_replies_are_counted_and_left_out(tmp_path, counting_target):
    """After 32 tokens the counting target repeats itself: 57 4-grams, 32 of them distinct."""
    info, engine = counting_target
    engine.model.generation_config.eos_token_id = []
    export_counting_draft(tmp_path / "draft", info)
    info = replace(info, eos_token_ids=[])
    try:
        long = evaluation.measure_acceptance(tmp_path / "draft", info, engine, [[21]], settings(max_new_tokens=60))
    finally:
        engine.model.generation_config.eos_token_id = EOS
    assert (long["degenerate"], long["passes"], long["acceptance_length"]) == (1, 0, None)
    assert long["acceptance_length_all"] > 4.5
    assert long["ngram"]["acceptance_length_all"] > 1.3
    assert "1 degenerate" in evaluation.describe(long)


def test_result_is_plain_and_says_its_formula(tmp_path, counting_target):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    result = evaluation.measure_acceptance(
        tmp_path / "draft", info, engine, [[21], [22], [23]], settings(max_prompts=2, max_new_tokens=11)
    )
    assert json.loads(json.dumps(result)) == result
    assert result["prompts"] == 2 == len(result["per_prompt"])
    assert result["ngram_acceptance_length"] == result["ngram"]["acceptance_length"] == 1.0
    shown = evaluation.describe(result)
    assert "acceptance_length 5.000" in shown and "n-gram baseline" in shown and result["formula"] in shown


def decoded_with(reply, gaps):
    return evaluation.Decoded(reply, gaps)


def test_only_near_ties_excuse_another_output():
    same = evaluation.compare_with_reference(0, decoded_with([5, 6], [1.0, 1.0]), [5, 6], 1e-3)
    tie = evaluation.compare_with_reference(0, decoded_with([5, 6, 7], [1.0, 1e-4, 1.0]), [5, 9, 1], 1e-3)
    assert same is None and tie == 1
    for reply, reference in ([[5, 6], [5, 9]], [[5], [5, 9]], [[5, 6], [5]]):
        with pytest.raises(UserError, match="prompt 3: .* at reply token 1"):
            evaluation.compare_with_reference(3, decoded_with(reply, [1.0] * len(reply)), reference, 1e-3)


def test_an_engine_whose_session_differs_from_its_batches_is_found(tmp_path, counting_target):
    """Here the batched generation ends at another token than the target's own end of turn."""
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    with pytest.raises(UserError, match="disagree"):
        other = replace(info, eos_token_ids=[18])
        evaluation.measure_acceptance(tmp_path / "draft", other, engine, [[EOS - 4]], settings())


@pytest.mark.parametrize(
    ("prompts", "says"),
    [
        ([], "there are none"),
        ([[3], []], "prompt 1: empty"),
        ([[V]], "token ids outside"),
        ([[1] * 60], "exceed the target's 64 positions"),
    ],
)
def test_bad_prompts(tmp_path, counting_target, prompts, says):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", info)
    with pytest.raises(UserError, match=says):
        evaluation.measure_acceptance(tmp_path / "draft", info, engine, prompts, settings())


def test_draft_of_another_target_is_refused(tmp_path, counting_target):
    info, engine = counting_target
    export_counting_draft(tmp_path / "draft", replace(info, max_position_embeddings=128))
    with pytest.raises(UserError, match="max_position_embeddings"):
        evaluation.measure_acceptance(tmp_path / "draft", info, engine, [[1]], settings())
