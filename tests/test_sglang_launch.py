"""Commands and layer ids of servers, without starting one."""

from pathlib import Path

import pytest
from tiny import make_target

from eagle3lib import config, targets
from eagle3lib.config import EngineConfig
from eagle3lib.engines.sglang import launch
from eagle3lib.engines.sglang.launch import Wanted
from eagle3lib.engines.sglang.requests import Request
from eagle3lib.errors import UserError


@pytest.fixture(scope="module")
def info(tmp_path_factory):
    return targets.load_info(make_target(tmp_path_factory.mktemp("target")), "f" * 64)


def command(info, role, engine, **more):
    wanted = Wanted.of(role, engine, info, 512, trust_remote_code=False, **{"aux_layer_ids": (), **more})
    return launch.server_command(engine, wanted, 30000, "key")


def value(arguments, name):
    return arguments[arguments.index(name) + 1]


@pytest.mark.parametrize(
    ("model_type", "ours", "theirs"),
    [
        ("llama", [2, 14, 25], [1, 13, 24]),
        ("qwen3_moe", [1, 4], [0, 3]),
        ("gpt_oss", [2, 12, 21], [1, 11, 20]),
        ("deepseek_v3", [2, 30, 58], [2, 30, 58]),
        ("kimi_k2", [2, 30, 58], [2, 30, 58]),
        ("deepseek_v3", [0, 30], [0, 30]),
    ],
)
def test_layer_ids_as_sglang_takes_them(model_type, ours, theirs):
    assert launch.layer_ids(model_type, ours) == theirs


@pytest.mark.parametrize(("model_type", "ids"), [("llama", [0, 4]), ("deepseek_v3", [1, 30])])
def test_layer_ids_that_cannot_be_asked_for_are_refused(model_type, ids):
    with pytest.raises(UserError, match="hidden_states.aux_layer_ids"):
        launch.layer_ids(model_type, ids)


def test_roles_have_flags_of_their_own(info):
    engine = EngineConfig(name="sglang", gpus=8, tensor_parallel=8, compute_dtype="bfloat16")
    extract = command(info, "extract", engine, aux_layer_ids=(2, 4, 5))
    generate = command(info, "generate", engine)
    evaluate = command(info, "evaluate", engine, draft_folder="/draft", draft_steps=3)
    for one in ("--disable-radix-cache", "--disable-cuda-graph", "--enable-return-aux-hidden-states"):
        assert one in extract and one not in generate and one not in evaluate
    assert value(extract, "--return-aux-hidden-state-layer-ids") == "1"
    assert (value(evaluate, "--speculative-num-steps"), value(evaluate, "--speculative-num-draft-tokens")) == ("3", "4")
    for one in (extract, generate, evaluate):
        assert (value(one, "--tp-size"), value(one, "--dtype"), value(one, "--host")) == ("8", "bfloat16", "127.0.0.1")
        assert "--device" not in one and "dp" not in " ".join(one)


def test_a_container_stands_for_the_interpreter(info):
    engine = EngineConfig(name="sglang", gpus=8, command=["docker", "run", "--network=host", "image", "python3"])
    assert command(info, "generate", engine)[:7] == [*engine.command, "-m", "sglang.launch_server"]


def test_plugin_folder_looks_installed(tmp_path):
    launch.write_plugin(tmp_path / "plugin")
    (tmp_path / "plugin" / "old").mkdir()
    launch.write_plugin(tmp_path / "plugin")
    assert sorted(p.name for p in (tmp_path / "plugin").iterdir()) == ["eagle3lib", "eagle3lib_plugin-1.dist-info"]
    from importlib.metadata import distributions

    (found,) = distributions(name="eagle3lib-plugin", path=[str(tmp_path / "plugin")])
    assert [point.value for point in found.entry_points] == ["eagle3lib.engines.sglang.plugin:register"]


def test_request_travels_as_its_id():
    request = Request("/a/b c.part", 5, "fp8-trimmed", [1, 3], [0], "code", "127.0.0.1", 1, "token")
    assert Request.of(request.rid) == request
    assert Request.of("HEALTH_CHECK_7") is None


def test_buffer_holds_two_passes_and_two_of_the_longest(info):
    engine = EngineConfig(name="sglang", batch_tokens=64, compute_dtype="bfloat16")
    wanted = Wanted.of("extract", engine, info, 512, aux_layer_ids=(2, 4, 5), trust_remote_code=False)
    spec = launch.capture(engine, wanted, Path("/x"))
    assert spec["buffer_bytes"] == 2 * (64 + 512) * (8 + 4 * 32 * 2)


def test_settings_that_exclude_each_other_are_refused():
    with pytest.raises(UserError, match=r"engine: url: a server of your own and engine\.command exclude each other"):
        config.validate(config.Config, {**MINIMAL, "engine": {"url": "http://x", "command": ["x"]}}, "")
    with pytest.raises(UserError, match=r"regenerate\.draft: only SGLang on GPUs decodes with a draft"):
        config.validate(config.Config, {**MINIMAL, "regenerate": {"draft": "/draft"}}, "")


MINIMAL = {
    "target": {"name": "t", "model": "m"},
    "dataset": {"name": "d", "conversations": ["c.jsonl"]},
    "acceptance": {"prompts": ["p.jsonl"]},
}


def test_demos_differ_in_their_engine_only():
    import yaml

    files = [yaml.safe_load(Path(f"config/{name}.yaml").read_text()) for name in ("config", "demo-sglang")]
    for one in files:
        del one["engine"], one["dataset"]["name"]
    assert files[0] == files[1]
