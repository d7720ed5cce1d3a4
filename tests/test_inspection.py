"""`show` and the report's page of a dataset: the text of a sample, and which of it supervises."""

from __future__ import annotations

import json
from dataclasses import asdict

import pandas
import pytest
from tiny import make_target, write_conversations

from eagle3lib import __main__, inspection, pages, shards, targets
from eagle3lib.config import DatasetConfig, TargetConfig
from eagle3lib.errors import UserError


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A folder with results/tiny/talk of 14 samples in shards of 8."""
    folder = tmp_path_factory.mktemp("inspection")
    model = make_target(folder / "target", layers=4)
    path = write_conversations(folder / "talk.jsonl", 13)
    turns = [{"role": role, "content": f"{role} <b> {i}"} for i in range(2) for role in ("user", "assistant")]
    path.write_text(json.dumps({"messages": turns}) + "\n" + path.read_text())
    return folder, model, path


@pytest.fixture(autouse=True)
def there(results, tmp_path, monkeypatch):
    from transformers import AutoTokenizer

    _, model, path = results
    monkeypatch.chdir(tmp_path)
    dataset = DatasetConfig(name="talk", conversations=[str(path)], shard_size=8)
    out = tmp_path / "results/tiny/talk"
    shards.shard_samples([path], AutoTokenizer.from_pretrained(model), dataset, out, vocab_size=320)
    target, info = TargetConfig(name="tiny", model=str(model)), tmp_path / "results/targets/tiny/target.json"
    targets.prepare(target, targets.identify(target).fingerprint, info, info.parent / "model", tmp_path / "sources")
    return out


@pytest.fixture
def show(capsys, monkeypatch):
    def run(*arguments) -> str:
        monkeypatch.setattr("sys.argv", ["eagle3lib", "show", *map(str, arguments)])
        assert __main__.main() == 0
        return capsys.readouterr().out

    return run


def test_a_sample_by_its_shard_and_slot(results, show):
    said = show("00000", 0)
    first, _, text = said.split("\n", 2)
    assert "2 replies" in first and first.endswith(f"{results[2]}:1")
    assert text.count("[[") == text.count("]]") == 2
    assert "<|im_start|>assistant\n[[assistant <b> 0<|im_end|>]]\n<|im_start|>user\nuser <b> 1<|im_end|>" in text


def test_every_way_to_name_a_sample(there, show):
    identity = shards.read_shard(there / "shards/00000.jsonl")[3].sample_id
    named = [
        ("00000", 3),
        (there / "shards/00000.jsonl", 3),
        (there / "0123456789ab/hidden_states/00000", 3),
        (there / "0123456789ab/hidden_states/00000/0003.pt",),
        (identity,),
        (identity[:10],),
        (f"results/store/hidden_states/key/{identity[:2]}/{identity}.pt",),
    ]
    shown = {show(*one) for one in named}
    assert len(shown) == 1 and shown.pop().startswith(identity)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("00007", 0), "00007: no shard of a dataset under results/"),
        (("00000", 8), "holds 8 samples, so slots 0 to 7, not 8"),
        (("nothing",), "nothing: no sample under results/ has that id"),
        (("",), "14 samples begin so; give more of the id"),
    ],
)
def test_what_is_not_there(arguments, said):
    with pytest.raises(UserError, match=said):
        inspection.find(*arguments)


def test_colours(there):
    sample = shards.read_shard(there / "shards/00000.jsonl")[0]
    text = inspection.as_text(inspection.tokenizer_of(there), sample, coloured=True)
    assert "\x1b[32massistant <b> 0<|im_end|>\x1b[0m" in text and "[[" not in text


def test_parts_are_the_whole_text_and_what_supervises(there):
    tokenizer = inspection.tokenizer_of(there)
    for sample in shards.read_shard(there / "shards/00000.jsonl"):
        parts = list(inspection.parts(tokenizer, sample))
        assert "".join(text for text, _ in parts) == tokenizer.decode(sample.input_ids)
        assert sum(supervised for _, supervised in parts) == len(sample.reply_bounds) // 2


def test_page_of_the_dataset(there):
    page = pages.dataset(there)
    assert page.count('<div class="text">') == 10
    assert "<b>assistant &lt;b&gt; 0&lt;|im_end|&gt;</b>" in page or "assistant &lt;b&gt; 0" not in page
    assert "Sources" in page and "talk.jsonl" in page and "Lengths" in page
    assert page == pages.dataset(there), "the same samples every time"
    samples = inspection.drawn(there, pandas.read_parquet(there / "samples.parquet"), 10)
    assert len({json.dumps(asdict(one)) for one in samples}) == 10
