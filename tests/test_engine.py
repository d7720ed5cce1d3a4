"""The transformers engine against plain transformers, on random small models."""

import random

import pytest
import torch
from tiny import make_target
from transformers import AutoModelForCausalLM

from eagle3lib.config import EngineConfig
from eagle3lib.engines import open_engine
from eagle3lib.engines.decoding import sample
from eagle3lib.engines.probe import greedy_tokens
from eagle3lib.engines.ragged import Piece, RaggedPass, SlotCache
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError

AUX = [2, 4, 5]
LAYERS = 8


@pytest.fixture(scope="module", params=["untied", "tied"])
def folder(request, tmp_path_factory):
    return make_target(tmp_path_factory.mktemp("target"), tied=request.param == "tied", layers=LAYERS)


@pytest.fixture(scope="module")
def engine(folder):
    return TransformersEngine(folder)


@pytest.fixture(scope="module")
def plain(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def random_ids(lengths, seed=0):
    generator = random.Random(seed)
    return [[generator.randrange(320) for _ in range(n)] for n in lengths]


@torch.inference_mode()
def plain_states(model, ids, aux=AUX):
    states = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states
    return [states[k][0] for k in aux], states[-1][0]


@torch.inference_mode()
def plain_greedy(model, ids, n, eos=2):
    prompt = torch.tensor([ids])
    everything = torch.ones_like(prompt)  # else generate() takes token 0 for padding
    out = model.generate(
        prompt, attention_mask=everything, max_new_tokens=n, do_sample=False, eos_token_id=eos, pad_token_id=0
    )
    return out[0, len(ids) :].tolist()


def assert_states(states, expected):
    for got, want in zip([*states.aux, states.last], [*expected[0], expected[1]], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


# --- extraction --------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_tokens", [1, 40, 2048])
def test_states_equal_plain_transformers(engine, plain, batch_tokens, monkeypatch):
    monkeypatch.setattr(engine, "batch_tokens", batch_tokens)
    lists = random_ids([1, 30, 3, 17, 1, 64, 9, 200])
    for ids, states in zip(lists, engine.extract(lists, AUX), strict=True):
        assert_states(states, plain_states(plain, ids))


@pytest.mark.parametrize("batch_tokens", [30, 2048])
def test_states_behind_a_shared_system_prompt(engine, plain, batch_tokens, monkeypatch):
    monkeypatch.setattr(engine, "batch_tokens", batch_tokens)
    (system, other), tails = random_ids([20, 25], seed=1), random_ids([5, 40, 1, 12], seed=2)
    lists = [system + tails[0], tails[1], system + tails[1], other + tails[3], other, system, system + tails[2], other]
    for ids, states in zip(lists, engine.extract(lists, AUX), strict=True):
        assert len(states.last) == len(ids)
        assert_states(states, plain_states(plain, ids))


def test_states_own_their_memory(engine):
    for states in engine.extract(random_ids([8, 8, 8]), AUX):
        assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in [*states.aux, states.last])


def test_layer_zero_is_the_embedding(engine, plain):
    (ids,) = random_ids([12])
    (states,) = engine.extract([ids], [0, LAYERS - 1])
    torch.testing.assert_close(states.aux[0], plain.model.embed_tokens.weight[ids].detach())
    assert_states(states, plain_states(plain, ids, [0, LAYERS - 1]))


@pytest.mark.parametrize(
    ("lists", "message"),
    [([[1, 2], []], "empty sequence"), ([[1, 320]], "token id 320"), ([[1, -1]], "token id -1")],
)
def test_wrong_ids_are_refused(engine, lists, message):
    with pytest.raises(UserError, match=message):
        engine.extract(lists, AUX)
    with pytest.raises(UserError, match=message):
        engine.greedy(lists, 4)


@pytest.mark.parametrize("aux", [[2, 2, 5], [4, 2], [2, LAYERS], [-1, 2], []])
def test_wrong_layers_are_refused(engine, aux):
    with pytest.raises(UserError, match="aux_layer_ids"):
        engine.extract([[1, 2, 3]], aux)


def test_sliding_window_is_kept():
    """Rows see `window` positions at most: in a prefill, behind a shared prefix, and as single rows."""
    torch.manual_seed(0)
    n, window = 12, 4
    query, key, value = torch.randn(1, 4, n, 8), torch.randn(1, 2, n, 8), torch.randn(1, 2, n, 8)
    distance = torch.arange(n)[:, None] - torch.arange(n)
    visible = (distance >= 0) & (distance < window)
    attention = torch.nn.functional.scaled_dot_product_attention
    expected = attention(query, key, value, visible, enable_gqa=True)[0].transpose(0, 1)
    cache = SlotCache(2, positions=4)
    for start, end in [(0, 5), (5, 9), (9, 11)]:
        rows = [t[:, :, start:end] for t in (query, key, value)]
        out = RaggedPass([Piece(end - start, start)], cache).attend(0, *rows, None, window)
        torch.testing.assert_close(out[0], expected[start:end])
    rows = [t[:, :, 11:] for t in (query, key, value)]
    out = RaggedPass([], cache, singles=[11]).attend(0, *rows, None, window)
    torch.testing.assert_close(out[0], expected[11:])


# --- generation --------------------------------------------------------------------------------------


def test_refilled_greedy_equals_generate(engine, plain):
    prompts = random_ids([3, 20, 1, 7, 40, 5, 5, 11, 2, 30, 8])
    prompts += [prompts[1] + [5, 6], prompts[1] + [7]]
    eos = plain_greedy(plain, prompts[0], 8, eos=None)[5]  # a token that does come, so that lengths differ
    expected = [plain_greedy(plain, ids, 16, eos=eos) for ids in prompts]
    numbered = [(i, ids, 0) for i, ids in enumerate(prompts)]
    for batch_size in (1, 4, 64):
        replies = {k: (ids, end) for k, ids, end in engine.generate(numbered, 16, batch_size=batch_size, eos_ids=[eos])}
        assert [replies[i][0] for i in range(len(prompts))] == expected
        assert all((ids[-1] == eos) == (end == "stop") for ids, end in replies.values())
    assert "stop" in {end for _, end in replies.values()}


def test_only_decoding_takes_the_narrow_path(engine, monkeypatch):
    """A state must not depend on how many rows its pass had; W x^T rounds in another order."""
    calls = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args: calls.append(1) or mm(*args))
    engine.greedy(random_ids([4] * 8), 3)
    assert calls
    calls.clear()
    engine.extract(random_ids([9]), AUX)
    engine.session(AUX).forward([1] * 9)
    assert not calls


def test_prompts_are_read_as_slots_become_free(engine):
    taken = []

    def prompts():
        for i, ids in enumerate(random_ids([4] * 10)):
            taken.append(i)
            yield i, ids, 0

    replies = engine.generate(prompts(), 5, batch_size=3, eos_ids=[])
    next(replies)
    assert len(taken) == 3


def test_sampling_does_not_depend_on_the_batch(engine):
    prompts = [(i, ids, 100 + i) for i, ids in enumerate(random_ids([3, 20, 1, 7, 40, 5]))]

    def sampled(batch_size, **settings):
        replies = engine.generate(prompts, 12, temperature=1.0, batch_size=batch_size, eos_ids=[2], **settings)
        return {key: ids for key, ids, _ in replies}

    for settings in ({}, {"top_p": 0.8}):
        alone = sampled(1, **settings)
        assert alone == sampled(4, **settings) == sampled(6, **settings)
    assert sampled(4, top_p=1e-6) == {i: engine.greedy([ids], 12)[0] for i, ids, _ in prompts}


@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_sample_follows_the_distribution(top_p):
    """5000 draws over 400 tokens, one row with its mass on three of them; the nucleus cut by hand."""
    logits = torch.full((1, 400), -30.0)
    logits[0, [7, 300, 42]] = torch.tensor([0.5, 0.3, 0.2]).log()
    uniforms = (torch.arange(5000) + 0.5) / 5000
    counts = sample(logits.expand(5000, -1), 1.0, top_p, uniforms).bincount(minlength=400) / 5000
    kept = {7: 0.5, 300: 0.3, 42: 0.2} if top_p == 1 else {7: 0.625, 300: 0.375}
    for token, share in kept.items():
        assert counts[token] == pytest.approx(share, abs=1e-3)
    assert counts.sum() == pytest.approx(sum(float(counts[t]) for t in kept))


def test_nucleus_wider_than_the_shortcut():
    draws = sample(torch.zeros(4, 1000), 1.0, 0.9, torch.tensor([0.0, 0.5, 0.9, 0.999]))
    assert len(set(draws.tolist())) == 4


# --- session -----------------------------------------------------------------------------------------


def test_session_grows_and_shrinks(engine, plain):
    (ids,) = random_ids([40])
    session = engine.session(AUX)
    session.forward(ids[:10])
    session.forward([1, 2, 3])  # rejected drafts
    session.crop(10)
    logits, aux, last = session.forward(ids[10:14])
    expected_aux, expected_last = plain_states(plain, ids[:14])
    torch.testing.assert_close(aux, torch.cat(expected_aux, -1)[10:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, expected_last[10:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(logits, engine.head(last), rtol=1e-4, atol=1e-4)
    for i in range(14, 40):
        _, _, last = session.forward([ids[i]])
    torch.testing.assert_close(last, plain_states(plain, ids)[1][-1:], rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="crop"):
        session.crop(41)


def test_sessions_side_by_side_are_those_alone(engine, plain):
    first, second = random_ids([30, 24])
    sessions = engine.sessions(2, AUX)
    sessions.forward({0: first[:10]})
    sessions.forward({1: second[:7]})
    sessions.forward({0: [1, 2, 3], 1: second[7:9]})  # rejected drafts in one of them
    sessions.crop(0, 10)
    answers = sessions.forward({0: first[10:15], 1: second[9:10]})
    for slot, ids, rows in ((0, first[:15], slice(10, 15)), (1, second[:10], slice(9, 10))):
        logits, aux = answers[slot]
        expected_aux, expected_last = plain_states(plain, ids)
        torch.testing.assert_close(aux, torch.cat(expected_aux, -1)[rows], rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(logits, engine.head(expected_last[rows].clone()), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="crop"):
        sessions.crop(1, 11)


# --- probe -------------------------------------------------------------------------------------------


def test_probe_passes(engine):
    record = engine.probe(AUX)
    assert set(record["against_transformers"]) == {"2", "4", "5", str(LAYERS)}
    assert record["greedy_tokens"]["rows"] > 32
    assert engine.model.config._attn_implementation == "eagle3lib_ragged"


class OffByOne(TransformersEngine):
    """What an engine with another convention does: id 4 is the output of layer 4."""

    def extract(self, id_lists, aux_layer_ids):
        return super().extract(id_lists, [2, 5, 6] if list(aux_layer_ids) == AUX else aux_layer_ids)


class PreNorm(TransformersEngine):
    """Last states from before the final norm."""

    def extract(self, id_lists, aux_layer_ids):
        states = []
        norm, self.decoder.norm = self.decoder.norm, torch.nn.Identity()
        try:
            states = super().extract(id_lists, aux_layer_ids)
        finally:
            self.decoder.norm = norm
        return states


class Padded(TransformersEngine):
    """States that depend on what else is in the batch."""

    def extract(self, id_lists, aux_layer_ids):
        states = super().extract(id_lists, aux_layer_ids)
        for state in states:
            state.aux[1].mul_(len(states) ** 0.5)
        return states


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (OffByOne, r"aux layer 4 .* differs .* it is output_hidden_states\[5\]"),
        (PreNorm, r"last hidden state \(post-norm\)"),
        (Padded, "aux layer 4 of one sample differs .* batch"),
    ],
)
def test_probe_fails(folder, broken, message):
    with pytest.raises(UserError, match=message):
        broken(folder).probe(AUX)


def test_probe_compares_with_the_greedy_tokens(engine):
    (_, reply, _) = next(iter(engine.generate([(0, [5, 6, 7], 0)], 64, eos_ids=[])))
    (states,) = engine.extract([[5, 6, 7, *reply]], AUX)
    assert greedy_tokens(engine, reply, engine.head(states.last[2:-1]))["equal"] > 32
    with pytest.raises(UserError, match="before the final norm"):
        greedy_tokens(engine, reply, engine.head(states.last[1:-2]))


# --- loading -----------------------------------------------------------------------------------------


def test_weights_that_cannot_be_read(tmp_path):
    folder = make_target(tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="model.safetensors: cannot be read"):
        TransformersEngine(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="cannot be loaded"):
        TransformersEngine(folder)


def test_missing_weights_are_not_filled_with_noise(tmp_path):
    from safetensors.torch import load_file, save_file

    folder = make_target(tmp_path)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match="missing keys .*layers.3.mlp.up_proj"):
        TransformersEngine(folder)


def test_open_engine(folder):
    assert open_engine(EngineConfig(batch_tokens=64), folder).batch_tokens == 64
