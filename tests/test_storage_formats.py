"""fp8 and trimmed files: how exact, how large, what they are made from, and that training cannot tell a trimmed one."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pandas as pd
import pytest
import torch
from test_extraction import KEY, ROOMY, Counting, shard, target  # noqa: F401 - fixtures

from eagle3lib import extraction, hidden_states, overview, targets
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import FORMATS, convertible, pack_sample, supervising_rows, unpack
from eagle3lib.job import save_tensors
from eagle3lib.lineage import file_sha256
from eagle3lib.store import Store
from eagle3lib.training_time_test import Batch, position_mask, reply_index

BOUNDS = [3, 9, 9, 12, 20, 21, 25, 40]
IDS = list(range(100, 140))


def states(hidden=64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(len(IDS), hidden, generator=generator) * 10.0**scale for scale in (-3, 0, 1, 2)]
    rows[1][5] = 0  # a row of zeros has no largest value
    return rows


def packed(form, bounds=BOUNDS, **more):
    return pack_sample(replace(KEY, storage_format=form), IDS, bounds, states(), "v", "c", **more)


def test_key_of_a_store_that_exists_stays_what_it_was():
    assert KEY.short == "54f5e73c3cd4"
    assert len({replace(KEY, storage_format=form).short for form in FORMATS}) == len(FORMATS)


def test_fp8_is_as_exact_as_three_bits_of_mantissa():
    for got, wanted in zip(unpack(packed("fp8")), states(), strict=True):
        largest = wanted.abs().amax(dim=-1, keepdim=True)
        error = (got.float() - wanted).abs()
        # half a step of e4m3 (2**-4), or of its smallest numbers; and bf16 on top
        assert (error <= wanted.abs() * (2**-4 + 2**-8) + largest / 448 * 2**-9).all()


def test_trimmed_rows_are_those_that_training_reads():
    """Held against the trainer's own mask, at every number of draft steps."""
    replies = reply_index(BOUNDS, len(IDS))
    read = set()
    for step in range(16):
        read |= {j + 1 + step for j in position_mask(replies, step).nonzero().squeeze(1).tolist()}
    assert supervising_rows(BOUNDS) == sorted(read)
    assert hidden_states.n_supervising(BOUNDS) == len(read)


@pytest.mark.parametrize("form", ["bf16-trimmed", "fp8-trimmed"])
def test_trimming_loses_nothing_in_the_rows_it_keeps(form):
    whole, trimmed = unpack(packed(form.removesuffix("-trimmed"))), unpack(packed(form), BOUNDS)
    rows = supervising_rows(BOUNDS)
    assert all(torch.equal(a, b) for a, b in zip(whole[:-1], trimmed[:-1], strict=True))
    assert torch.equal(whole[-1][rows], trimmed[-1][rows])
    left_out = sorted(set(range(len(IDS))) - set(rows))
    assert not trimmed[-1][left_out].any()


def test_row_that_was_left_out_is_never_handed_out_as_zeros():
    assert unpack(packed("bf16-trimmed"), [3, 9])
    with pytest.raises(UserError, match="2 rows of its last state are missing under this mask"):
        unpack(packed("bf16-trimmed"), [3, 9, 13, 16])
    assert unpack(packed("bf16-trimmed", more_rows=[13, 14]), [3, 9, 13, 16])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("tokens", [40, 700])
def test_forecast_is_within_one_percent_of_the_file(tmp_path, form, tokens):
    store = Store(tmp_path / "store", replace(KEY, storage_format=form))
    store.prepare()
    bounds = [tokens // 3, tokens]
    rows = [torch.randn(tokens, 1024) for _ in range(4)]
    record = store.publish(pack_sample(store.key, list(range(tokens)), bounds, rows, "v", "c"))
    kept = hidden_states.n_supervising(bounds)
    assert hidden_states.sample_bytes(tokens, 1024, 3, form, kept) == pytest.approx(record["bytes"], rel=0.01)
    assert store.find(record["sample_id"], full=True)


def test_half_the_bytes_at_the_headline_width():
    sizes = {form: hidden_states.sample_bytes(2353, 7168, 3, form, int(0.6 * 2353)) for form in FORMATS}
    assert sizes["fp8"] <= 0.51 * sizes["bf16"]
    assert sizes["fp8-trimmed"] <= 0.5 * sizes["bf16"]


def test_conversions_go_from_exact_to_small():
    assert {a for a in FORMATS if convertible(a, "fp8-trimmed")} == {"bf16", "fp8", "bf16-trimmed"}
    assert {a for a in FORMATS if convertible(a, "fp8")} == {"bf16"}
    assert {a for a in FORMATS if convertible(a, "bf16-trimmed")} == {"bf16"}
    assert not [a for a in FORMATS if convertible(a, "bf16")]


def run(shard, target, form, engine):  # noqa: F811
    root = shard.parent
    outputs = [root / form / f"{slot:04d}.pt" for slot in range(4)]
    store = Store(root / "store", replace(KEY, storage_format=form))
    info = targets.load_info(target)
    manifest = root / form / "manifest.json"
    return outputs, extraction.extract_shard(shard, outputs, manifest, store, engine, "code", info, ROOMY, "t/d")


@pytest.mark.parametrize("form", ["fp8", "bf16-trimmed", "fp8-trimmed"])
def test_other_formats_are_converted_without_the_target(shard, target, form):  # noqa: F811
    exact, _ = run(shard, target, "bf16", Counting(target))
    outputs, counts = run(shard, target, form, pytest.fail)
    assert counts == {"found": 0, "converted": 4, "computed": 0}
    for a, b in zip(map(hidden_states.load_sample, exact), map(hidden_states.load_sample, outputs), strict=True):
        assert (a["meta"]["code"], b["meta"]["storage_format"]) == (b["meta"]["code"], form)
        wanted = pack_sample(replace(KEY, storage_format=form), a["input_ids"].tolist(), [4, len(a["input_ids"])],
                             unpack(a), "v", "c")  # fmt: skip
        assert all(torch.equal(x, y) for x, y in zip(unpack(wanted), unpack(b), strict=True))


def test_damaged_source_is_not_converted(shard, target):  # noqa: F811
    exact, _ = run(shard, target, "bf16", Counting(target))
    data = bytearray(exact[1].read_bytes())
    data[-1500] ^= 8
    exact[1].write_bytes(data)
    _, counts = run(shard, target, "fp8", Counting(target))
    assert counts == {"found": 0, "converted": 3, "computed": 1}


def test_wider_mask_makes_its_samples_anew_and_keeps_the_rows_of_both(shard, target):  # noqa: F811
    text = shard.read_text()
    run(shard, target, "bf16-trimmed", Counting(target))
    lines = text.splitlines()
    lines[1] = lines[1].replace('"reply_bounds": [4, 30]', '"reply_bounds": [1, 20]')
    shard.write_text("\n".join(lines) + "\n")
    assert rows_missing(shard) == ["  shard 00000: 1 lack rows of their last state under this mask: 0001"]
    outputs, counts = run(shard, target, "bf16-trimmed", Counting(target))
    assert rows_missing(shard) == []
    assert counts == {"found": 3, "converted": 0, "computed": 1}
    assert hidden_states.load_sample(outputs[1])["last_rows"].tolist() == list(range(1, 29))
    shard.write_text(text)
    assert run(shard, target, "bf16-trimmed", pytest.fail)[1] == {"found": 4, "converted": 0, "computed": 0}


def rows_missing(file):
    """What `python -m eagle3lib missing` says of the samples as the shard has them now."""
    table = pd.DataFrame([json.loads(line) for line in file.read_text().splitlines()])
    table = table.drop(columns="origin").assign(shard="00000", slot=range(len(table)))
    table.to_parquet(file.with_suffix(".parquet"))
    key = replace(KEY, storage_format="bf16-trimmed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(overview, "STORE", file.parent / "store")
        return list(overview._rows_missing(SimpleNamespace(key=key, samples_file=file.with_suffix(".parquet"))))


@pytest.mark.parametrize("rows", [[], [0], [3, 4, 5, 9, 11, 12]])
def test_stretches_of_rows(rows):
    kept = hidden_states.stretches(rows)
    assert [row for start, end in hidden_states.pairs(kept) for row in range(start, end)] == rows
    assert not hidden_states.covers(kept, [5, 8, 20, 22])


def test_batch_of_a_trimmed_sample_supervises_the_same(tmp_path):
    """What the trainer counts and compares with is bit-equal from a whole and a trimmed file."""
    replies = reply_index(BOUNDS, len(IDS))
    made = []
    for form in ("bf16", "bf16-trimmed"):
        parts = unpack(packed(form), BOUNDS)
        made.append(Batch.document(torch.tensor(IDS), torch.cat(parts[:-1], dim=-1), parts[-1], replies))
    rows = position_mask(replies, 0).nonzero().squeeze(1) + 1
    assert torch.equal(made[0].last[rows], made[1].last[rows]) and torch.equal(made[0].aux, made[1].aux)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_values_that_are_not_finite_are_seen(dtype):
    values = torch.randn(50, 8)
    assert hidden_states.finite(values.to(dtype)) and hidden_states.finite(values[:0].to(dtype))
    bad = [float("nan")] + ([] if dtype == torch.float8_e4m3fn else [float("inf"), -float("inf")])
    for value in bad:
        spoiled = values.clone()
        spoiled[31, 5] = value
        assert not hidden_states.finite(spoiled.to(dtype))


def test_large_samples_are_hashed_as_they_are_written(tmp_path):
    with open(tmp_path / "large.pt", "wb") as file:
        hashing = save_tensors([torch.randn(2**20), torch.randn(2**18)], file)
    assert hashing.sha256.hexdigest() == file_sha256(tmp_path / "large.pt")
    assert hashing.bytes == (tmp_path / "large.pt").stat().st_size
