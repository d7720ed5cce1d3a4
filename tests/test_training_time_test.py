"""The training-time test against things written out: masks, a plain model, a slow reference, serving."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from eagle3lib import attention
from eagle3lib import training_time_test as ttt
from eagle3lib.draft_model import DraftCache, DraftModel, DraftModelConfig
from eagle3lib.training_time_test import Batch, TrainingTimeTest, position_mask, reply_index, summarise
from eagle3lib.vocab_mapping import VocabMapping

V, VD, H = 40, 20, 16
CONFIG = DraftModelConfig(
    hidden_size=H,
    intermediate_size=28,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=V,
    draft_vocab_size=VD,
    rms_norm_eps=1e-5,
    max_position_embeddings=64,
    rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
)
MAPPING = VocabMapping.from_target_ids(torch.arange(1, 40, 2), V)  # the draft knows every other token


def make_model(config=CONFIG):
    torch.manual_seed(0)
    model = DraftModel(config)
    for p in model.trainable().values():  # every term of the loss large enough to be seen
        torch.nn.init.normal_(p, 1.0 if p.ndim == 1 else 0.0, 0.3)
    return model


def make_head():
    return torch.randn(V, H, generator=torch.Generator().manual_seed(5)) * 0.7


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def head():
    return make_head()


def make_document(seed, tokens, bounds):
    g = torch.Generator().manual_seed(seed)
    return Batch.document(
        input_ids=torch.randint(0, V, (tokens,), generator=g),
        aux=torch.randn(tokens, 3 * H, generator=g),
        last=torch.randn(tokens, H, generator=g),
        replies=reply_index(bounds, tokens),
    )


def packed(test):
    documents = [make_document(1, 13, [3, 11]), make_document(2, 12, [0, 4, 4, 10])]
    return Batch.pack([test.with_target_tokens(d) for d in documents])


# --- masks written out -------------------------------------------------------------------------------------------


def rows(replies, steps, documents=None):
    masks = [position_mask(replies, i, documents) for i in range(steps)]
    return ["".join("x" if counts else "." for counts in mask) for mask in masks]


def test_mask_of_one_reply():
    """Tokens P P P R R R R R P, reply [3, 8): slot 2 has g_2 and x_3, the first reply token, and predicts x_4."""
    assert rows(reply_index([3, 8], 9), 5) == [
        "..xxxx...",
        "..xxx....",
        "..xx.....",
        "..x......",
        ".........",
    ]


def test_mask_of_two_turns():
    """U U A A A U U A A A A: replies [2, 5) and [7, 11)."""
    assert rows(reply_index([2, 5, 7, 11], 11), 3) == [
        ".xx...xxx..",
        ".x....xx...",
        "......x....",
    ]


def test_adjacent_replies_are_two():
    """Without a generation block in the template: replies [1, 4) and [4, 7) touch; no chain crosses."""
    assert rows(reply_index([1, 4, 4, 7], 7), 3) == [
        "xx.xx..",
        "x..x...",
        ".......",
    ]


def test_mask_at_the_edge_of_documents():
    """Two documents, [P R R R][R R R]: slot 3 is in the first, so it must not read x_4 of the second."""
    replies = torch.tensor([-1, 0, 0, 0, 1, 1, 1])
    documents = torch.tensor([0, 0, 0, 0, 1, 1, 1])
    assert rows(replies, 2, documents) == ["xx..x..", "x......"]


def test_reply_shorter_than_a_step_and_empty_input():
    assert rows(reply_index([0, 1], 2), 2) == ["..", ".."]
    assert rows(reply_index([], 3), 1) == ["..."]


# --- step 0 is next-token prediction -----------------------------------------------------------------------------


def plain_model(model, ids, aux):
    """A causal one-layer decoder as a textbook has it: logits of slot j from g_0..g_j and x_1..x_{j+1}."""
    w = dict(model.named_parameters())

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w[name]

    hidden = aux @ w["fc.weight"].t()
    tokens = hidden.shape[0]
    embedded = norm(w["embed_tokens.weight"][ids], "midlayer.input_layernorm.weight")
    x = torch.cat([embedded, norm(hidden, "midlayer.hidden_norm.weight")], dim=-1)
    frequency = 10000.0 ** (-torch.arange(0, 8, 2) / 8)
    angle = torch.arange(tokens)[:, None] * torch.cat([frequency, frequency])

    def heads(name, rotate):
        y = (x @ w[f"midlayer.self_attn.{name}.weight"].t()).view(tokens, -1, 8).transpose(0, 1)
        turned = torch.cat([-y[..., 4:], y[..., :4]], dim=-1)
        return y * angle.cos() + turned * angle.sin() if rotate else y

    q, k, v = heads("q_proj", True), heads("k_proj", True), heads("v_proj", False)
    k, v = k[[0, 0, 1, 1]], v[[0, 0, 1, 1]]
    scores = q @ k.transpose(1, 2) / math.sqrt(8)
    scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
    mixed = (scores.softmax(-1) @ v).transpose(0, 1).reshape(tokens, -1)
    hidden = hidden + mixed @ w["midlayer.self_attn.o_proj.weight"].t()
    y = norm(hidden, "midlayer.post_attention_layernorm.weight")
    gated = F.silu(y @ w["midlayer.mlp.gate_proj.weight"].t()) * (y @ w["midlayer.mlp.up_proj.weight"].t())
    hidden = hidden + gated @ w["midlayer.mlp.down_proj.weight"].t()
    return norm(hidden, "norm.weight") @ w["lm_head.weight"].t()


def test_step_0_is_plain_next_token_prediction(model, head):
    """All tokens in one reply: slot j predicts x_{j+2}, labels from the target's distribution after x_{j+1}."""
    test = TrainingTimeTest(model, head, MAPPING, steps=1, step_decay=0.8)
    document = test.with_target_tokens(make_document(3, 12, [0, 12]))
    loss, sums = test(document)
    logits = plain_model(model, document.input_ids[1:], document.aux[:-1])[:-1]
    full = document.last[1:-1] @ head.t()
    known = MAPPING.t2d[full.argmax(-1)]
    labels = full[:, MAPPING.t2d].softmax(-1)
    assert 0 < known.sum() < 10  # some out of vocabulary, so that this could fail
    expected = F.cross_entropy(logits[known], labels[known])
    torch.testing.assert_close(loss, expected)
    assert sums["counted"].tolist() == [known.sum().item()]
    assert sums["supervised"].tolist() == [10]


# --- the slow reference ------------------------------------------------------------------------------------------


def attend_slowly(q, keys, values):
    """One slot: q [heads, D], lists of k and v [KV heads, D]."""
    out = []
    for h in range(4):
        scores = torch.stack([(q[h] * k[h // 2]).sum() / math.sqrt(8) for k in keys])
        p = scores.softmax(0)
        out.append(sum(p[t] * values[t][h // 2] for t in range(len(keys))))
    return torch.stack(out)


def reference(model, head, batch, steps, decay):
    """Slot by slot, step by step, document by document, with all logits."""
    chains = {}  # (slot, step) -> draft logits
    start = 0
    for length in batch.lengths:
        ids, aux = batch.input_ids[start : start + length], batch.aux[start : start + length]
        fused = model.fuse(aux)
        first = [model.mix(model.embed(ids[j + 1]), fused[j]) for j in range(length - 1)]
        kv = [model.key_value(z, torch.tensor(j)) for j, z in enumerate(first)]
        for j in range(length - 1):
            hidden, keys, values = fused[j], [k for k, _ in kv[: j + 1]], [v for _, v in kv[: j + 1]]
            for i in range(steps):
                if j + 1 + i >= length:
                    break
                z = model.mix(model.embed(ids[j + 1 + i]), hidden)
                if i:
                    k, v = model.key_value(z, torch.tensor(j + i))
                    keys, values = [*keys, k], [*values, v]
                out = model.finish(hidden, attend_slowly(model.query(z, torch.tensor(j + i)), keys, values))
                hidden = model.carry(out)
                chains[start + j, i] = model.logits(hidden)
        start += length
    return loss_slowly(chains, head, batch, steps, decay)


def loss_slowly(chains, head, batch, steps, decay):
    sums = {name: [0.0] * steps for name in ("loss", "counted", "supervised", "correct", "prefix")}
    losses = [torch.zeros(()) for _ in range(steps)]
    starts = torch.cumsum(torch.tensor([0, *batch.lengths]), 0).tolist()
    for slot in range(batch.input_ids.numel()):
        end = next(e for e in starts[1:] if e > slot)
        all_right = True
        for i in range(steps):
            span = batch.replies[slot + 1 : min(slot + 3 + i, end)].tolist()
            if len(span) < 2 + i or len(set(span)) != 1 or span[0] < 0:
                break
            sums["supervised"][i] += 1
            full = head @ batch.last[slot + 1 + i]
            logits = chains[slot, i]
            right = MAPPING.target_ids[logits.argmax()] == full.argmax()
            all_right = all_right and bool(right)
            sums["prefix"][i] += all_right
            if MAPPING.t2d[full.argmax()]:
                p = full[MAPPING.t2d].softmax(0)
                losses[i] = losses[i] - (p * logits.log_softmax(0)).sum()
                sums["counted"][i] += 1
                sums["correct"][i] += bool(right)
    weights = [decay**i / sum(decay**k for k in range(steps)) for i in range(steps)]
    loss = sum(w * s / max(n, 1) for w, s, n in zip(weights, losses, sums["counted"], strict=True))
    sums["loss"] = [s.item() for s in losses]
    return loss, sums


def explicit(monkeypatch):
    monkeypatch.setattr(ttt, "merged_attention", attention.explicit_attention)


def flex(monkeypatch):
    """CUDA's path; flex_attention has no gradient on a CPU, so its mask function and blocks are written out."""
    plain = attention.View.of.__func__
    monkeypatch.setattr(attention, "BLOCK", 4)

    def of(cls, rows, lengths):
        view = plain(cls, rows, lengths)
        return dataclasses.replace(view, blocks=attention.block_mask(view)) if len(rows) else view

    monkeypatch.setattr(attention.View, "of", classmethod(of))
    monkeypatch.setattr(attention, "_flex", dense_flex)


def dense_flex(q, k, v, blocks):
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~dense_mask(blocks), float("-inf"))
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def dense_mask(blocks):
    """bool [N, T]: what flex_attention computes: of whole blocks all, of the others what the mask function says."""
    n, tokens = blocks.shape[-2:]
    size = blocks.BLOCK_SIZE[0]
    slot, token = torch.arange(n)[:, None], torch.arange(tokens)[None]
    masked, whole = (
        listed_blocks(count, index)[slot // size, token // size]
        for count, index in [
            (blocks.kv_num_blocks, blocks.kv_indices),
            (blocks.full_kv_num_blocks, blocks.full_kv_indices),
        ]
    )
    assert not (masked & whole).any()
    return whole | (masked & blocks.mask_mod(0, 0, slot, token))


def listed_blocks(count, index):
    chosen = torch.zeros(index.shape[-2:], dtype=torch.bool)
    for row, (n, listed) in enumerate(zip(count[0, 0], index[0, 0], strict=True)):
        chosen[row, listed[:n].long()] = True
    return chosen


KERNELS = {"flash": lambda monkeypatch: None, "explicit": explicit, "flex": flex}


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.trainable().items()}


def learn_a_little(model, test, batch):
    optimizer = torch.optim.Adam(model.trainable().values(), 0.02)
    for _ in range(20):
        optimizer.zero_grad()
        test(batch)[0].backward()
        optimizer.step()


def assert_training_equals_the_slow_reference(model, head):
    """4 steps, two packed documents, three replies: loss, sums and every gradient. Returns the reference's sums."""
    test = TrainingTimeTest(model, head, MAPPING, steps=4, step_decay=0.7)
    batch = packed(test)
    learn_a_little(model, test, batch)  # so that some predictions are right
    loss, sums = test(batch)
    expected, expected_sums = reference(model, head, batch, 4, 0.7)
    torch.testing.assert_close(loss, expected)
    for name, values in expected_sums.items():
        torch.testing.assert_close(sums[name].float(), torch.tensor([float(v) for v in values]), msg=name)
    ours, theirs = gradients(model, loss), gradients(model, expected)
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-4, atol=1e-5, msg=name)
    return expected_sums


@pytest.mark.parametrize("kernel", KERNELS)
def test_equals_the_slow_reference(model, head, kernel, monkeypatch):
    KERNELS[kernel](monkeypatch)
    monkeypatch.setattr(ttt, "ROWS_PER_CHUNK", 3)
    sums = assert_training_equals_the_slow_reference(model, head)
    assert 0 < sums["correct"][0] < sums["counted"][0] < sums["supervised"][0]


def assert_training_equals_serving(model, head):
    """Normed states and logits of slot j at each step are those of decoding with a cache, document 2 of a pack."""
    test = TrainingTimeTest(model, head, MAPPING, steps=4, step_decay=0.8)
    batch = packed(test)
    rows = position_mask(batch.replies, 0, batch.documents).nonzero().squeeze(1)
    unrolled = test._unroll(batch, test.plan(batch))
    start, slot = 13, 13 + 4  # within document 2, in the middle of its second reply
    cache = DraftCache()
    ids, aux = batch.input_ids[start:], batch.aux[start:]
    hidden = model.decode(ids[None, 1:6], model.fuse(aux[None, :5]), cache)[:, -1:]
    for step in range(4):
        if step:
            hidden = model.decode(ids[None, 5 + step : 6 + step], hidden, cache)
        expected = unrolled[step, (rows == slot).nonzero().item()]
        normed = hidden if model.config.norm_output else model.norm(hidden)
        torch.testing.assert_close(normed[0, 0], expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(model.logits(hidden)[0, 0], model.lm_head(expected), rtol=1e-4, atol=1e-5)


def test_training_equals_serving(model, head):
    assert_training_equals_serving(model, head)


# --- what must not matter ----------------------------------------------------------------------------------------


def test_masked_tokens_do_not_move_the_loss(head):
    torch.manual_seed(0)
    everything = VocabMapping.from_target_ids(torch.arange(V), V)
    model = DraftModel(dataclasses.replace(CONFIG, draft_vocab_size=V))
    test = TrainingTimeTest(model, head, everything, steps=3, step_decay=0.8)
    document = test.with_target_tokens(make_document(4, 14, [4, 11]))
    loss, _ = test(document)
    noise = make_document(99, 14, [4, 11])

    def changed(name, where):
        value = getattr(document, name).clone()
        value[where] = getattr(noise, name)[where]
        return test(test.with_target_tokens(dataclasses.replace(document, **{name: value})))[0]

    # The reply is x_4..x_10: what supervises are y_4..y_9; x_0 and x_10 onwards are never read by a slot that counts.
    assert torch.equal(changed("last", [0, 1, 2, 3, 10, 11, 12, 13]), loss)
    torch.testing.assert_close(changed("input_ids", [0, 10, 11, 12, 13]), loss)
    torch.testing.assert_close(changed("aux", [9, 10, 11, 12, 13]), loss)
    for name, row in [("last", 4), ("last", 9), ("input_ids", 1), ("input_ids", 9), ("aux", 0), ("aux", 8)]:
        assert abs(changed(name, [row]) - loss) > 1e-4, (name, row)


def test_packing_does_not_change_the_loss(model, head):
    test = TrainingTimeTest(model, head, MAPPING, steps=3, step_decay=0.8)
    documents = [make_document(s, n, b) for s, n, b in [(1, 9, [2, 8]), (2, 14, [0, 14]), (3, 11, [1, 5, 6, 11])]]
    documents = [test.with_target_tokens(d) for d in documents]
    loss, sums = test(Batch.pack(documents))
    weights = test.step_weights(sum(test.plan(d).counted for d in documents))
    parts = [test(d, weights) for d in documents]
    torch.testing.assert_close(sum(p for p, _ in parts), loss)
    for name in ("loss", "counted", "supervised", "correct", "prefix"):
        torch.testing.assert_close(sum(s[name] for _, s in parts), sums[name], msg=name)
    packs_of_packs = Batch.pack([Batch.pack(documents[:2]), documents[2]])
    assert torch.equal(packs_of_packs.replies, Batch.pack(documents).replies)
    assert torch.equal(test(packs_of_packs)[0], loss)


def test_zero_supervised_rows(model, head):
    test = TrainingTimeTest(model, head, MAPPING, steps=2, step_decay=0.8)
    unsupervised = make_document(1, 6, [])
    supervised = test.with_target_tokens(make_document(1, 6, [1, 6]))
    unknown = dataclasses.replace(supervised, target_tokens=supervised.target_tokens.clamp(max=0))  # 0 is not known
    for document, slots in [(unsupervised, 0), (unknown, 4)]:
        loss, sums = test(document)
        grads = gradients(model, loss)
        assert loss.item() == 0.0 and not any(g.any() for g in grads.values())
        assert sums["supervised"][0] == slots and sums["counted"][0] == 0
        assert summarise(sums, 0.8)["accuracy_of_supervised"][0] == 0.0


# --- figures -----------------------------------------------------------------------------------------------------


def test_target_tokens(model, head):
    test = TrainingTimeTest(model, head, MAPPING, steps=2, step_decay=0.8)
    document = make_document(6, 10, [3, 7])
    tokens = test.target_tokens(document)
    expected = torch.full((10,), -1)
    expected[3:6] = (document.last @ head.t()).argmax(-1)[3:6]  # y_6 would predict x_7, outside of the reply
    assert torch.equal(tokens, expected)


def test_alpha_without_gradient(model, head):
    """A draft that says what the target says overlaps by 1; alpha is the mean overlap otherwise."""
    test = TrainingTimeTest(model, head, MAPPING, steps=1, step_decay=0.8)
    document = test.with_target_tokens(make_document(3, 12, [0, 12]))
    with torch.no_grad():
        _, sums = test(document)
    logits = plain_model(model, document.input_ids[1:], document.aux[:-1])[:-1]
    full = document.last[1:-1] @ head.t()
    overlap = torch.minimum(full[:, MAPPING.t2d].softmax(-1), logits.softmax(-1)).sum(-1)
    expected = overlap[MAPPING.t2d[full.argmax(-1)]].sum().double()
    torch.testing.assert_close(sums["alpha"][0], expected, rtol=1e-5, atol=1e-5)


def test_figures_have_their_denominators():
    sums = {
        "loss": [8.0, 6.0],
        "counted": [4, 3],
        "supervised": [8, 6],
        "correct": [2, 3],
        "prefix": [2, 1],
        "alpha": [0, 0],
    }
    figures = summarise({k: torch.tensor(v, dtype=torch.float64) for k, v in sums.items()}, 0.5)
    assert figures["loss"] == pytest.approx((2.0 + 0.5 * 2.0) / 1.5)
    assert figures["accuracy_of_supervised"] == pytest.approx([2 / 8, 3 / 6])
    assert figures["accuracy_of_counted"] == pytest.approx([2 / 4, 3 / 3])
    assert figures["loss_of_counted"] == pytest.approx([8 / 4, 6 / 3])
    assert figures["prefix_of_supervised"] == pytest.approx([2 / 8, 1 / 6])
    assert figures["acceptance_length"] == pytest.approx(1 + 2 / 8 + 1 / 6)
    assert figures["counted_of_supervised"] == pytest.approx([4 / 8, 3 / 6])
    assert "alpha_of_counted" not in figures


def test_sums_by_source(model, head):
    """Of a pack of two sources: each has the sums of its own documents alone."""
    together, alone = (TrainingTimeTest(model, head, MAPPING, steps=3, step_decay=0.8, sources=n) for n in (3, None))
    documents = [make_document(1, 13, [3, 11]), make_document(2, 12, [0, 4, 4, 10]), make_document(3, 9, [1, 8])]
    documents = [together.with_target_tokens(d) for d in documents]
    sources = [2, 0, 2]
    pack = Batch.pack([dataclasses.replace(d, sources=d.sources + s) for d, s in zip(documents, sources, strict=True)])
    with torch.no_grad():
        _, sums = together(pack)
        for source, parts in [(0, documents[1:2]), (2, [documents[0], documents[2]])]:
            _, expected = alone(Batch.pack(parts))
            for name, values in expected.items():
                torch.testing.assert_close(sums[name][source], values, msg=name)
    assert not sums["supervised"][1].any()


def test_of_nothing_there_is_no_loss_but_a_gradient_for_all(model, head):
    """What a rank without a batch adds."""
    test = TrainingTimeTest(model, head, MAPPING, steps=2, step_decay=0.8)
    loss, sums = test(None)
    assert all(not g.any() for g in gradients(model, loss).values()) and not any(s.any() for s in sums.values())


def test_recomputing_changes_nothing(model, head):
    kept, again = (TrainingTimeTest(model, head, MAPPING, 4, 0.8, recompute=flag) for flag in (False, True))
    batch = packed(kept)
    expected, loss = kept(batch)[0], again(batch)[0]
    assert torch.equal(loss, expected)
    ours, theirs = gradients(model, loss), gradients(model, expected)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert saved_bytes(again, batch) < 0.7 * saved_bytes(kept, batch)


def saved_bytes(test, batch):
    """What the forward pass keeps for the backward pass, weights apart."""
    weights = {p.untyped_storage().data_ptr() for p in test.parameters()}
    seen = {}

    def pack(tensor):
        if tensor.untyped_storage().data_ptr() not in weights:
            seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        test(batch)
    return sum(seen.values())


def test_bfloat16_compute_stays_close(model, head):
    exact = TrainingTimeTest(model, head, MAPPING, steps=3, step_decay=0.8)
    rough = TrainingTimeTest(model, head, MAPPING, steps=3, step_decay=0.8, compute_dtype=torch.bfloat16)
    batch = packed(exact)
    expected, loss = exact(batch)[0], rough(batch)[0]
    torch.testing.assert_close(loss, expected, rtol=2e-2, atol=0)
    ours, theirs = gradients(model, loss), gradients(model, expected)
    for name in theirs:
        assert ours[name].dtype == torch.float32
        assert F.cosine_similarity(ours[name].flatten(), theirs[name].flatten(), dim=0) > 0.97, name
