"""In every process of the server: hooks its forward pass. Found by SGLang through the entry point of our plugin folder.

Nothing of SGLang is changed. What the hook relies on is checked by `missing`, before a server is started and in it.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
from pathlib import Path
from typing import Any

from eagle3lib.engines.sglang.requests import PREFIX, Served

TARGET = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
SPEC = "EAGLE3LIB_CAPTURE"  # environment variable: a JSON object, see launch.py
FIELDS = ("rids", "input_ids", "extend_seq_lens_cpu", "extend_prefix_lens_cpu", "forward_mode")

_collector: Any = None


def register() -> None:
    """The entry point. SGLang only logs what is raised here: the marker file says that it was not."""
    if SPEC not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if lacking := missing():
        raise RuntimeError(f"eagle3lib: this SGLang lacks {', '.join(lacking)}")
    HookRegistry.register(TARGET, _after_forward, HookType.AFTER)
    Path(json.loads(os.environ[SPEC])["marker"]).touch()


def missing() -> list[str]:
    """What the plugin needs and this SGLang does not have."""
    lacking = []
    module, cls, method = TARGET.rsplit(".", 2)
    runner = getattr(importlib.import_module(module), cls, None)
    if runner is None or "forward_batch" not in inspect.signature(getattr(runner, method)).parameters:
        lacking.append(TARGET)
    batch = importlib.import_module("sglang.srt.model_executor.forward_batch_info").ForwardBatch
    lacking += [f"ForwardBatch.{name}" for name in FIELDS if name not in batch.__dataclass_fields__]
    output = importlib.import_module("sglang.srt.layers.logits_processor").LogitsProcessorOutput
    names = ("hidden_states", "last_hidden_states")
    return lacking + [f"LogitsProcessorOutput.{name}" for name in names if name not in output.__dataclass_fields__]


def _after_forward(result: Any, runner: Any, forward_batch: Any, *_: Any, **__: Any) -> None:
    rids = forward_batch.rids
    if not rids or not forward_batch.forward_mode.is_extend() or not any(rid.startswith(PREFIX) for rid in rids):
        return
    from sglang.srt.runtime_context import get_parallel

    if get_parallel().tp_rank:
        return
    output = result.logits_output
    global _collector
    if _collector is None:
        _collector = _start(runner, output.last_hidden_states)
    rows = sum(map(int, forward_batch.extend_seq_lens_cpu))
    _collector.batch(
        rids,
        [int(n) for n in forward_batch.extend_seq_lens_cpu],
        [int(n) for n in forward_batch.extend_prefix_lens_cpu],
        forward_batch.input_ids[:rows],
        output.hidden_states[:rows],
        output.last_hidden_states[:rows],
    )


def _start(runner: Any, last: Any) -> Any:
    import sglang

    from eagle3lib.engines.sglang.collector import Collector

    spec = json.loads(os.environ[SPEC])
    captured = _captured_layers(runner.model)
    if captured is not None and captured != spec["aux_layer_ids"]:
        raise RuntimeError(
            f"eagle3lib: the server captures the inputs of layers {captured}, {spec['aux_layer_ids']} are wanted"
        )
    served = Served(spec["target_fingerprint"], spec["aux_layer_ids"], spec["compute_dtype"], sglang.__version__)
    return Collector(served, last.shape[-1], last.dtype, spec["buffer_bytes"], last.device)


def _captured_layers(model: Any) -> list[int] | None:
    """Layers whose input the model hands out, where it says so (a multimodal one wraps its language model)."""
    for path in ("model", "language_model.model", "model.model", "language_model"):
        inner = model
        for name in path.split("."):
            inner = getattr(inner, name, None)
        if getattr(inner, "layers_to_capture", None):
            return [int(k) for k in inner.layers_to_capture]
    return None
