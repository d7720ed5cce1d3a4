"""States of other code: kept when a few of them come out the same, refused when not, deleted never."""

import json

import pytest
import torch
from tiny import make_target

from eagle3lib import adoption, hidden_states
from eagle3lib.config import EngineConfig
from eagle3lib.engines import open_engine
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey
from eagle3lib.store import Store

KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")
OLD, NEW = {"code": "old", "engine_version": "1"}, {"code": "new", "engine_version": "1"}


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    return open_engine(EngineConfig(), make_target(tmp_path_factory.mktemp("target")))


@pytest.fixture
def store(tmp_path, engine):
    store = Store(tmp_path / "store", KEY)
    adoption.adopt(store, OLD, pytest.fail)
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        ids = torch.randint(3, 300, (15,), generator=generator).tolist()
        (states,) = engine.extract([ids], [2, 4, 5])
        store.publish(hidden_states.pack_sample(KEY, ids, [4, 15], [*states.aux, states.last], "1", "old"))
    return store


def makers(store):
    return json.loads((store.folder / "made_by.json").read_text())


def test_empty_store_takes_anyone_without_an_engine(store):
    assert [one["code"] for one in makers(store)] == ["old"]


def test_known_maker_costs_no_engine(store):
    adoption.adopt(store, OLD, pytest.fail)


def test_equal_states_are_kept_and_the_record_says_so(store, engine):
    adoption.adopt(store, NEW, lambda: engine)
    entry = makers(store)[-1]
    assert entry["code"] == "new" and len(set(entry["samples"])) == adoption.SAMPLES
    assert entry["largest_distance"] < 1e-3
    adoption.adopt(store, NEW, pytest.fail)
    adoption.adopt(store, OLD, pytest.fail)


class Wrong:
    """The engine with one of its states changed a little: not a rounding, not a disaster."""

    version = "1"

    def __init__(self, engine, layer):
        self.engine, self.layer = engine, layer

    def extract(self, id_lists, layers):
        states = self.engine.extract(id_lists, layers)
        for one in states:
            tensor = one.last if self.layer == 3 else one.aux[self.layer]
            tensor *= 1.03
        return states


@pytest.mark.parametrize(("layer", "name"), [(0, "2"), (2, "5"), (3, "last")])
def test_different_states_are_refused_with_the_layer(store, engine, layer, name):
    before = sorted(store.folder.rglob("*.pt"))
    with pytest.raises(UserError, match=rf"16 of 16 samples come out differently now \(layer {name} of sample"):
        adoption.adopt(store, NEW, lambda: Wrong(engine, layer))
    assert sorted(store.folder.rglob("*.pt")) == before
    assert [one["code"] for one in makers(store)] == ["old"]


def test_store_of_unknown_makers_is_compared_too(store, engine):
    (store.folder / "made_by.json").unlink()
    adoption.adopt(store, NEW, lambda: engine)
    assert len(makers(store)[-1]["samples"]) == adoption.SAMPLES
