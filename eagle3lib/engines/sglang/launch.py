"""What starts a server: its command, its environment, and the folder through which SGLang finds our plugin."""

from __future__ import annotations

import functools
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eagle3lib.config import EngineConfig
from eagle3lib.errors import UserError

TESTED = ("0.5.23",)
# Nothing has to be installed beside the engine: a folder on its PYTHONPATH that looks installed.
ENTRY_POINT = "[sglang.srt.plugins]\neagle3lib = eagle3lib.engines.sglang.plugin:register\n"
METADATA = "Metadata-Version: 2.1\nName: eagle3lib-plugin\nVersion: 1\n"
# Of what decides about the server; the rest of the section is about those who ask it.
SERVER = {"python", "command", "url", "gpus", "tensor_parallel", "batch_tokens", "server_args", "environment"}
DEEPSEEK = ("deepseek", "kimi", "glm_moe_dsa")  # model types that SGLang runs with models/deepseek_v2.py


@dataclass(frozen=True)
class Wanted:
    """A server in one role: two jobs that want the same share one."""

    role: str  # "generate", "extract" or "evaluate"
    target_folder: str
    target_fingerprint: str
    model_type: str
    compute_dtype: str
    aux_layer_ids: tuple[int, ...]  # of the states that `extract` hands out
    max_tokens: int  # of a sample
    hidden_size: int
    trust_remote_code: bool
    server: dict[str, Any]  # the settings of SERVER
    draft_folder: str | None = None  # an EAGLE-3 draft to decode with
    draft_steps: int = 0

    @classmethod
    def of(cls, role: str, engine: EngineConfig, target: Any, max_tokens: int, **more: Any) -> Wanted:
        """target: a `targets.TargetInfo`."""
        return cls(
            role=role,
            target_folder=str(Path(target.path).resolve()),
            target_fingerprint=target.fingerprint,
            model_type=target.model_type,
            compute_dtype=engine.compute_dtype,
            max_tokens=max_tokens,
            hidden_size=target.hidden_size,
            server=engine.model_dump(mode="json", include=SERVER),
            **more,
        )

    def values(self) -> dict[str, Any]:
        return {**asdict(self), "aux_layer_ids": list(self.aux_layer_ids)}


def layer_ids(model_type: str, aux_layer_ids: Sequence[int]) -> list[int]:
    """Our ids (indices into transformers' output_hidden_states) as a model of this type in SGLang 0.5.23 takes them.

    Most models add one to what they are given. Deepseek's take it as it is, unless the first one is 1
    (models/deepseek_v2.py). Raises UserError for ids that cannot be asked for; the plugin checks what comes of it.
    """
    ids = list(aux_layer_ids)
    if model_type.startswith(DEEPSEEK):
        if ids[0] == 1:
            raise UserError(
                f"config: hidden_states.aux_layer_ids: {ids}: SGLang cannot hand out layer 1 first for "
                f"{model_type}; take 0 or 2"
            )
        return ids
    if ids[0] == 0:
        raise UserError(
            f"config: hidden_states.aux_layer_ids: {ids}: SGLang does not hand out the embeddings (0) of "
            f"{model_type}; take 1 or more"
        )
    return [k - 1 for k in ids]


def server_command(engine: EngineConfig, wanted: Wanted, port: int, key: str) -> list[str]:
    """The server's command line. `engine.command` stands for the interpreter: a wrapper of a container, say."""
    start = engine.command or [os.path.abspath(engine.python)]
    arguments: list[Any] = ["--model-path", wanted.target_folder, "--host", "127.0.0.1", "--port", port]
    arguments += ["--api-key", key, "--dtype", wanted.compute_dtype, "--skip-tokenizer-init"]
    arguments += ["--tp-size", engine.tensor_parallel] if engine.tensor_parallel > 1 else []
    arguments += ["--trust-remote-code"] if wanted.trust_remote_code else []
    arguments += ["--device", "cpu", "--attention-backend", "torch_native"] if not engine.gpus else []
    arguments += ["--chunked-prefill-size", engine.batch_tokens, "--max-prefill-tokens", engine.batch_tokens]
    if wanted.role == "extract":
        # A row that comes out of the prefix cache or a CUDA graph is never seen by the hook.
        ids = layer_ids(wanted.model_type, wanted.aux_layer_ids)
        arguments += ["--disable-radix-cache", "--disable-cuda-graph", "--enable-return-aux-hidden-states"]
        arguments += ["--speculative-algorithm", "EAGLE3", "--return-aux-hidden-state-layer-ids", *ids]
    elif wanted.draft_folder:
        # A chain: one candidate a step, all of them verified with the bonus token in one pass.
        steps = wanted.draft_steps
        arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", wanted.draft_folder]
        arguments += ["--speculative-num-steps", steps, "--speculative-eagle-topk", 1]
        arguments += ["--speculative-num-draft-tokens", steps + 1]
    elif not engine.gpus:
        arguments += ["--disable-cuda-graph"]
    return [*start, "-m", "sglang.launch_server", *map(str, arguments), *engine.server_args]


def server_environment(engine: EngineConfig, wanted: Wanted, folder: Path) -> dict[str, str]:
    """What is added to the environment; `folder`: of this server, with the plugin in it."""
    folder = folder.resolve()
    own = {"SGLANG_PLUGINS": "eagle3lib", "HF_HUB_OFFLINE": "1"}
    own |= {} if engine.gpus else {"SGLANG_USE_CPU_ENGINE": "1"}
    own |= engine.environment
    own["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder / "plugin"), _absolute(own.get("PYTHONPATH"))]))
    if wanted.role == "extract":
        own["EAGLE3LIB_CAPTURE"] = json.dumps(capture(engine, wanted, folder))
    return own


def shell_command(engine: EngineConfig, wanted: Wanted, folder: Path) -> str:
    """What a user types to start a server for engine.url; writes the plugin's folder that it names."""
    write_plugin(folder / "plugin")
    variable = f"${engine.key_variable}"
    environment = server_environment(engine, wanted, folder)
    settings = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    command = server_command(engine, wanted, engine.port or 30000, "KEY")
    words = [f'"{variable}"' if word == "KEY" else shlex.quote(word) for word in command]
    return f"env {' '.join(settings)} \\\n  {' '.join(words)}"


def capture(engine: EngineConfig, wanted: Wanted, folder: Path) -> dict[str, Any]:
    """What the plugin is told."""
    size = 4 if wanted.compute_dtype == "float32" else 2
    # Two passes and two of the longest: the disk may lag that much behind before the forward loop waits.
    rows = 2 * engine.batch_tokens + 2 * wanted.max_tokens
    return {
        "marker": str(folder / "plugin.ready"),
        "target_fingerprint": wanted.target_fingerprint,
        "aux_layer_ids": list(wanted.aux_layer_ids),
        "compute_dtype": wanted.compute_dtype,
        "buffer_bytes": rows * (8 + (len(wanted.aux_layer_ids) + 1) * wanted.hidden_size * size),
    }


def _absolute(path: str | None) -> str | None:
    return path and os.pathsep.join(os.path.abspath(part) for part in path.split(os.pathsep))


def write_plugin(folder: Path) -> None:
    """A copy of this package, with the entry point: a server goes on with the code that it was started with."""
    package = Path(__file__).parents[2]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
    about = folder / "eagle3lib_plugin-1.dist-info"
    about.mkdir()
    (about / "entry_points.txt").write_text(ENTRY_POINT)
    (about / "METADATA").write_text(METADATA)


def check_engine(engine: EngineConfig) -> None:
    """Refuse an interpreter without SGLang, or with an untested one, before minutes of loading."""
    if engine.command or engine.url:
        return  # asked when it runs
    if not Path(engine.python).exists():
        raise UserError(
            f"config: engine.python: {engine.python} does not exist; `make venv-sglang` makes it, or name your own"
        )
    check_version(installed_versions(engine.python).split()[1], engine)


def check_version(version: str, engine: EngineConfig) -> None:
    if version not in TESTED and not engine.allow_untested:
        raise UserError(
            f"config: engine: SGLang {version} is not one that we have tested ({', '.join(TESTED)}); install that, or "
            "set engine.allow_untested: true: the probe then decides"
        )


@functools.cache
def installed_versions(python: str) -> str:
    """ "sglang VERSION torch VERSION" of an interpreter's environment, without importing them; "none": not there."""
    code = (
        "import importlib.metadata as m\n"
        "def v(n):\n try: return m.version(n)\n except m.PackageNotFoundError: return 'none'\n"
        "print('sglang', v('sglang'), 'torch', v('torch'))"
    )
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return "sglang none torch none"
    return done.stdout.strip()
