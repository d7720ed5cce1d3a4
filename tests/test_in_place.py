"""Hidden states of other tools: read where they lie, scanned, proven to be the target's, referred to."""

import gzip
import io
import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny import make_target

from eagle3lib import in_place
from eagle3lib.config import EngineConfig, ImportedConfig
from eagle3lib.dataset_export import Speculators
from eagle3lib.engines.imported import Imported
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import IN_PLACE, StateKey, content_fault, load_sample, sample_bytes, sample_id
from eagle3lib.in_place import POST_NORM, PRE_NORM
from eagle3lib.loader import Documents, Sample
from eagle3lib.shards import Sample as Shared
from eagle3lib.store import Store
from eagle3lib.targets import load_info

LAYERS = [2, 4, 5]
FORMATS = ("specforge", "speculators", "speculators-old")


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A target whose final norm has weights of its own: only then do the two readings differ in more than length."""
    folder = make_target(tmp_path_factory.mktemp("target") / "target")
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(32, generator=torch.Generator().manual_seed(3)) * 2 + 0.2)
    model.save_pretrained(folder)
    return load_info(folder, "fingerprint")


@pytest.fixture(scope="module")
def engine(target):
    return TransformersEngine(target.path, "float32")


@pytest.fixture(scope="module")
def samples(engine):
    """ids, mask, and the target's own states [T, H]: aux layers, last before and after its norm. Greedy replies."""
    generator, found = torch.Generator().manual_seed(1), []
    norm_inputs = []
    hook = engine.decoder.norm.register_forward_pre_hook(lambda _, args: norm_inputs.append(args[0]))
    for _ in range(3):
        prompt = torch.randint(5, 320, (6,), generator=generator).tolist()
        ((_, reply, _),) = engine.generate([(0, prompt, 0)], 12, eos_ids=())
        ids = prompt + reply
        norm_inputs.clear()
        states = [state.float() for state in engine.reference(ids)]
        before = norm_inputs[-1].reshape(-1, 32)[-len(ids) :].float()
        mask = [0] * len(prompt) + [1] * len(reply)
        found.append((ids, mask, [states[k] for k in LAYERS], before, states[-1]))
    hook.remove()
    return found


def write(folder: Path, form: str, samples, target, dtype=torch.bfloat16, layers=None) -> ImportedConfig:
    """The samples as `form` lays them out; speculators' last state is from before the norm."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (ids, mask, own, before, after) in enumerate(samples):
        aux = [state.to(dtype) for state in (own if layers is None else layers[number])]
        if form == "specforge":
            content = {
                "input_ids": torch.tensor(ids),
                "loss_mask": torch.tensor(mask),
                "aux_hidden_state": torch.cat(aux, -1)[None],
                "hidden_state": after.to(dtype)[None],
            }
            path = folder / "rows_0-2000" / f"data_{number}.ckpt"
            path.parent.mkdir(exist_ok=True)
            torch.save(content, path)
            if number == 1:
                path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
                path.unlink()
        elif form == "speculators":
            (folder / "hidden_states").mkdir(exist_ok=True)
            states = torch.stack([*aux, before.to(dtype)], 1)
            path = folder / f"hidden_states/hs_{number}.safetensors"
            save_file({"hidden_states": states, "token_ids": torch.tensor(ids)}, path)
        else:
            content = {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor(mask)}
            torch.save({**content, "hidden_states": [*aux, after.to(dtype)]}, folder / f"data_{number}.pt")
    if form == "speculators":
        Speculators(folder, target).finish([one[0] for one in samples], [one[1] for one in samples])
    return ImportedConfig(format=form, folder=str(folder))


def scan(imported, tmp_path, layers=3):
    out = tmp_path / "imported.jsonl"
    counts = in_place.scan(imported, layers, tmp_path / "progress.jsonl", out, 2)
    return counts, list(in_place.imported_lines(out)), out


def key_of(form: str) -> StateKey:
    return StateKey("fingerprint", tuple(LAYERS), f"imported from {form}", "as stored", IN_PLACE)


def stand_in(imported, lines, target, fits=True):
    one = Imported(imported, lines, target, EngineConfig(), False)
    one._fits = fits
    return one


@pytest.mark.parametrize("fits", [True, False], ids=["with the target", "without"])
@pytest.mark.parametrize("form", FORMATS)
def test_states_come_out_as_the_target_has_them(tmp_path, samples, target, form, fits):
    imported = write(tmp_path / "theirs", form, samples, target)
    before = {p: (p.read_bytes(), p.stat().st_mtime_ns) for p in (tmp_path / "theirs").rglob("*") if p.is_file()}
    counts, lines, out = scan(imported, tmp_path)
    assert (counts["files"], counts["bad"]) == (3, 0)
    assert [(line["input_ids"], line["reply_bounds"]) for line in lines] == [(ids, [6, 18]) for ids, *_ in samples]
    one = stand_in(imported, out, target, fits)
    record = one.probe(LAYERS)
    assert record["last"] == (PRE_NORM if form == "speculators" else POST_NORM)
    assert record["agreement"] > 0.9, "greedy replies: the head chooses what comes next"
    store = Store(tmp_path / "store", key_of(form))
    store.prepare()
    for line, (ids, _, aux, _, after) in zip(lines, samples, strict=True):
        origin = {"file": line["file"], "line": 0, "sha256": line["sha256"]}
        content = one.refer(store.key, Shared(sample_id(ids), ids, [6, 18], origin), "code", record)
        written = store.publish(content)
        assert written["bytes"] < 8000 and written["bytes"] < sample_bytes(len(ids), 32, 3)
        stored = load_sample(store.path(written["sample_id"]))
        assert content_fault(stored) is None
        for state, wanted in zip(stored["hidden_states"], [*aux, after], strict=True):
            assert state.dtype == torch.bfloat16 and (state.float() - wanted).norm() < 0.01 * wanted.norm()
    assert all(p.read_bytes() == data and p.stat().st_mtime_ns == when for p, (data, when) in before.items())


def test_wrong_layers_are_named(tmp_path, samples, target, engine):
    layers = [[engine.reference(ids)[k] for k in (3, 5, 6)] for ids, *_ in samples]
    imported = write(tmp_path / "theirs", "specforge", samples, target, layers=layers)
    *_, out = scan(imported, tmp_path)
    with pytest.raises(
        UserError, match=r"its layers are \[3, 5, 6\], not \[2, 4, 5\]; set hidden_states.aux_layer_ids"
    ):
        stand_in(imported, out, target).probe(LAYERS)


def test_states_of_another_target_are_refused(tmp_path, samples, target):
    other = load_info(make_target(tmp_path / "other", seed=9), "another")
    imported = write(tmp_path / "theirs", "speculators-old", samples, target)
    *_, out = scan(imported, tmp_path)
    with pytest.raises(UserError, match="aux state 0 is none of the target's"):
        stand_in(imported, out, other).probe(LAYERS)
    with pytest.raises(UserError, match="chooses .* of the replies' tokens.*Are the states this target's"):
        stand_in(imported, out, other, fits=False).probe(LAYERS)
    narrow = load_info(make_target(tmp_path / "narrow", hidden=64), "narrow")
    with pytest.raises(UserError, match="states of size 32, the target's are 64"):
        stand_in(imported, out, narrow).probe(LAYERS)


def test_configured_norm_is_held_against_what_is_found(tmp_path, samples, target):
    imported = write(tmp_path / "theirs", "specforge", samples, target).model_copy(update={"last": PRE_NORM})
    *_, out = scan(imported, tmp_path)
    with pytest.raises(UserError, match="dataset.imported.last: pre-norm, but the probe finds post-norm"):
        stand_in(imported, out, target).probe(LAYERS)


def damage(folder: Path, form: str) -> dict[str, str]:
    """One file of each kind of fault -> what must be said."""
    paths = sorted(p for p in folder.rglob("*") if in_place.NAMES[form].fullmatch(p.name))
    said = {}
    os.truncate(paths[0], paths[0].stat().st_size // 2)
    said[paths[0].name] = "cannot be read"
    if form == "speculators":
        from safetensors.torch import load_file

        content = load_file(paths[1])
        content["token_ids"][3] += 1
        save_file(content, paths[1])
        said[paths[1].name] = "its token ids are not those of row 1 of the table"
    else:
        data = paths[1].read_bytes()
        content = torch.load(io.BytesIO(gzip.decompress(data) if paths[1].suffix == ".gz" else data))
        states = content["hidden_states"][1] if form == "speculators-old" else content["aux_hidden_state"]
        states.view(-1)[7] = float("nan")
        file = io.BytesIO()
        torch.save(content, file)
        paths[1].write_bytes(gzip.compress(file.getvalue()) if paths[1].suffix == ".gz" else file.getvalue())
        said[paths[1].name] = "holds values that are not finite"
    return said


@pytest.mark.parametrize("form", FORMATS)
def test_bad_files_are_listed_and_the_others_kept(tmp_path, samples, target, form, capsys):
    imported = write(tmp_path / "theirs", form, samples, target)
    said = damage(tmp_path / "theirs", form)
    counts, lines, _ = scan(imported, tmp_path)
    assert (counts["files"], counts["bad"]) == (3, 2)
    assert ["fault" in line for line in lines] == [True, True, False]
    faults = {Path(line["file"]).name: line["fault"] for line in lines if "fault" in line}
    assert all(what in faults[name] for name, what in said.items()), faults
    told = capsys.readouterr().out
    assert all(name in told for name in said)


def test_scan_goes_on_where_it_was_killed(tmp_path, samples, target, monkeypatch):
    imported = write(tmp_path / "theirs", "speculators-old", samples, target)
    read, calls = in_place.read, []

    def dies(path, *rest):
        calls.append(path)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return read(path, *rest)

    monkeypatch.setattr(in_place, "read", dies)
    with pytest.raises(KeyboardInterrupt):
        in_place.scan(imported, 3, tmp_path / "progress.jsonl", tmp_path / "out.jsonl", 1)
    assert not (tmp_path / "out.jsonl").exists()
    done = [json.loads(line)["file"] for line in (tmp_path / "progress.jsonl").read_text().splitlines()]
    calls.clear()
    monkeypatch.setattr(in_place, "read", lambda path, *rest: (calls.append(str(path)), read(path, *rest))[1])
    assert scan(imported, tmp_path)[0]["files"] == 3
    assert done and not set(calls) & set(done) and len(calls) == 3 - len(done)


def test_folder_without_such_files_and_all_bad_are_said(tmp_path, samples, target):
    write(tmp_path / "theirs", "specforge", samples, target)
    with pytest.raises(UserError, match="holds no file that speculators-old wrote"):
        in_place.files(ImportedConfig(format="speculators-old", folder=str(tmp_path / "theirs")))
    imported = ImportedConfig(format="specforge", folder=str(tmp_path / "theirs"))
    with pytest.raises(UserError, match=r"aux states 96 wide, not 2 x 32.*none of the 3 files can be used"):
        scan(imported, tmp_path, layers=2)


def referred(tmp_path, samples, target, n_tokens=None):
    """A published reference to the first sample, of its first `n_tokens`."""
    imported = write(tmp_path / "theirs", "specforge", samples, target)
    _, lines, out = scan(imported, tmp_path)
    one, ids = stand_in(imported, out, target), samples[0][0][:n_tokens]
    store = Store(tmp_path / "store", key_of("specforge"))
    store.prepare()
    origin = {"file": lines[0]["file"], "line": 0, "sha256": lines[0]["sha256"]}
    shared = Shared(sample_id(ids), ids, [6, len(ids)], origin)
    record = store.publish(one.refer(store.key, shared, "code", {"last": POST_NORM}))
    return store, record, Path(lines[0]["file"]), len(ids)


def test_truncated_sample_is_the_beginning_of_its_file(tmp_path, samples, target):
    store, record, _, n = referred(tmp_path, samples, target, n_tokens=10)
    stored = load_sample(store.path(record["sample_id"]))
    assert n == 10 and content_fault(stored) is None
    assert torch.equal(stored["hidden_states"][-1], samples[0][4][:10].bfloat16())


def test_file_that_is_gone_or_grew_is_found_at_the_quick_check(tmp_path, samples, target):
    store, record, file, _ = referred(tmp_path, samples, target)
    assert store.find(record["sample_id"])
    os.rename(file, file.with_name("away"))
    with pytest.raises(UserError, match=r"data_0.ckpt, which cannot be read .*put it back"):
        load_sample(store.path(record["sample_id"]))
    assert store.find(record["sample_id"]) is None, "nothing to link"


def test_flipped_bit_is_found_by_the_full_check_and_the_file_is_left(tmp_path, samples, target):
    store, record, file, n = referred(tmp_path, samples, target)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    path = store.path(record["sample_id"])
    documents = Documents([Sample(str(path), n, (6, n), "train", record["sha256"])], 3, target.hidden_size)
    with pytest.raises(UserError, match="which is not what was imported any more"):
        documents.read(0)
    assert store.find(record["sample_id"], full=True) is None
    assert file.read_bytes() == bytes(data) and not path.exists()


def test_no_second_copy_and_no_conversion_from_it():
    from eagle3lib.hidden_states import FORMATS, convertible

    assert not any(convertible(a, b) for a in (IN_PLACE, *FORMATS) for b in (IN_PLACE, *FORMATS) if IN_PLACE in (a, b))
    assert sample_bytes(2000, 7168, 3, IN_PLACE) < 40_000
    assert asdict(key_of("specforge"))["storage_format"] == IN_PLACE
