"""The finished draft as one folder that SGLang 0.5.23 and vLLM 0.32 both load.

- `config.json`: a Llama config (latent attention: DeepSeek-V2's) whose RoPE and `max_position_embeddings` are the
  target's. Norms beyond EAGLE-3's by the keys of `draft_model.NORMS`; SGLang reads all but norm_before_residual.
- `model.safetensors`: `midlayer.*` (q, k, v take 2H), `fc.weight` [H, L*H], `norm.weight`, `lm_head.weight` [Vd, H];
  `fc_norm.{i}.weight` [H] or `input_norm.weight` [L*H] where the variant has them;
  above `SHARD_BYTES` several files and `model.safetensors.index.json`, as transformers writes them.
- `d2t` int64 [Vd] (offsets: target id = i + d2t[i]) and `t2d` bool [V]; left out when Vd == V.
- `embed_tokens` is left out: both engines share the target's embedding with the draft.
- Layer ids, ours being k: `eagle_aux_hidden_state_layer_ids` = k is what vLLM reads (first),
  the same key inside `eagle_config` = k - 1 is what SGLang reads; see `sglang_layer_ids`.
- `README.md`: the model card. Same input, same bytes.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoConfig

from eagle3lib import __version__, targets
from eagle3lib.draft_model import NORMS, DraftModel, DraftModelConfig, rotary_frequencies
from eagle3lib.errors import UserError
from eagle3lib.job import fsync_folder, write_json, write_text
from eagle3lib.targets import TargetInfo
from eagle3lib.vocab_mapping import VocabMapping

# Names of the architecture, and of the config's class in transformers. vLLM 0.32 takes a draft of type deepseek_v3 for
# the target's own MTP layers; deepseek_v2 has the same attention and is let through.
LLAMA, LATENT = ("LlamaForCausalLMEagle3", "llama"), ("Eagle3DeepseekV2ForCausalLM", "deepseek_v2")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
LIKE_DEEPSEEK = ("deepseek", "kimi")
MAP_NAMES = ("d2t", "t2d")
CONFIG, WEIGHTS, INDEX, CARD_FILE = "config.json", "model.safetensors", "model.safetensors.index.json", "README.md"
SHARD_BYTES = 5 * 10**9  # the hub's own limit for a file that loads well
AGAIN = "export the draft again (snakemake export_draft_model)"


def export_draft(
    weights: Mapping[str, Tensor],
    config: DraftModelConfig,
    mapping: VocabMapping | None,
    target: TargetInfo,
    aux_layer_ids: Sequence[int],
    folder: str | os.PathLike,
    metadata: Mapping[str, Any] | None = None,
    dtype: str = "bfloat16",
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write the folder whole or not at all (`.part`, then renamed), and read it back (`check_export`).

    weights: by the names of `DraftModel.trainable()`; `embed_tokens.weight` is dropped.
    mapping may be None only when Vd == V. dtype: how the weights are stored.
    metadata: for the model card; `lineage` and `target_model` name where the draft comes from,
    `metrics` is a dict of figures. Raises UserError for weights that must not be served.
    """
    tensors = _checked_weights(weights, config, mapping)
    tensors = {name: t.to(getattr(torch, dtype)).contiguous() for name, t in tensors.items()}
    if mapping is not None and not mapping.is_full:
        tensors |= {"d2t": mapping.d2t, "t2d": mapping.t2d}
    metadata = dict(metadata or {})
    with _folder_write(Path(folder)) as part:
        write_json(part / CONFIG, serving_config(config, target, aux_layer_ids, metadata, dtype))
        _write_weights(part, tensors, shard_bytes)
        write_text(part / CARD_FILE, model_card(config, target, aux_layer_ids, metadata, dtype))
        check_export(part, target, aux_layer_ids)


def serving_config(
    config: DraftModelConfig,
    target: TargetInfo,
    aux_layer_ids: Sequence[int],
    metadata: Mapping[str, Any],
    dtype: str,
) -> dict[str, Any]:
    """What `config.json` says."""
    rope = dict(config.rope_parameters)
    eos = target.eos_token_ids
    architecture, model_type = LATENT if config.latent else LLAMA
    values = config.to_dict()
    values |= {
        "architectures": [architecture],
        "model_type": model_type,
        "num_hidden_layers": 1,
        "target_hidden_size": target.hidden_size,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
        "dtype": dtype,
        "bos_token_id": target.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        # rope_parameters is the name since transformers 5; these are the older names of the same values.
        "rope_theta": rope.get("rope_theta"),
        "rope_scaling": rope if rope.get("rope_type", "default") != "default" else None,
        LAYER_IDS: list(aux_layer_ids),
        "eagle_config": {LAYER_IDS: sglang_layer_ids(aux_layer_ids, target.model_type), "use_aux_hidden_state": True},
        "eagle3lib": {
            "version": __version__,
            "variant": config.variant,
            "target_fingerprint": target.fingerprint,
            "lineage": metadata.get("lineage"),
        },
    }
    if metadata.get("initial"):
        values["eagle3lib"]["initial"] = metadata["initial"]
    return values


def sglang_layer_ids(aux_layer_ids: Sequence[int], model_type: str) -> list[int]:
    """Our ids in SGLang's convention: it adds one to what it reads.

    Its deepseek_v2 model (Kimi too) adds one only when the first id it reads is 1
    (sglang#25454); a first id of ours that is 1 cannot be said to it.
    """
    if not model_type.startswith(LIKE_DEEPSEEK) or aux_layer_ids[0] == 2:
        return [k - 1 for k in aux_layer_ids]
    if aux_layer_ids[0] == 1:
        raise UserError(
            f"config: hidden_states.aux_layer_ids: SGLang cannot take {list(aux_layer_ids)} for a {model_type} target "
            "(a first id of 1 is read as 2 there, sglang#25454); choose another first id"
        )
    return list(aux_layer_ids)


def from_sglang_layer_ids(ids: Sequence[int], model_type: str) -> list[int]:
    """The inverse of `sglang_layer_ids`."""
    if model_type.startswith(LIKE_DEEPSEEK) and ids[0] != 1:
        return list(ids)
    return [k + 1 for k in ids]


def check_export(folder: str | os.PathLike, target: TargetInfo, aux_layer_ids: Sequence[int] | None = None) -> None:
    """Read an exported folder back and hold it against its target; raises UserError naming file and key.

    Checked: names, shapes and finiteness of the weights, the vocabulary map, both conventions
    of the layer ids, sizes, `max_position_embeddings` and the RoPE frequencies of the target (those of a draft that
    started from another one may be its own).
    """
    path = Path(folder) / CONFIG
    config, _, values, _ = read_export(folder)
    _check_layer_ids(path, values, target, aux_layer_ids)
    warm = bool((values.get("eagle3lib") or {}).get("initial"))
    for key, expected in {
        "architectures": [(LATENT if config.latent else LLAMA)[0]],
        "model_type": (LATENT if config.latent else LLAMA)[1],
        "vocab_size": target.vocab_size,
        "target_hidden_size": target.hidden_size,
        "hidden_size": target.hidden_size,
        "max_position_embeddings": config.max_position_embeddings if warm else target.max_position_embeddings,
        "num_aux_hidden_states": len(values[LAYER_IDS]),
        "tie_word_embeddings": False,
    }.items():
        _check_key(path, key, values.get(key), expected)
    _check_rope(path, config, config if warm else target)


def read_export(
    folder: str | os.PathLike,
) -> tuple[DraftModelConfig, VocabMapping, dict[str, Any], dict[str, Tensor]]:
    """Shape of the draft, its vocabulary mapping, the values of config.json and the weights without the embedding.

    Raises UserError, naming file and key, for a folder that is not whole: what can be seen without the target.
    """
    folder = Path(folder)
    values, config = _read_config(folder / CONFIG)
    tensors = read_weights(folder)
    mapping = _mapping_of(folder, config, tensors)
    return config, mapping, values, checked_shapes(tensors, config, str(_weights_name(folder)), AGAIN)


def served_files(folder: str | os.PathLike) -> list[Path]:
    """What an engine reads of an exported folder: the weights and config.json."""
    folder = Path(folder)
    index = [folder / INDEX] if (folder / INDEX).exists() else []
    return [*_weight_files(folder), *index, folder / CONFIG]


def load_exported(
    folder: str | os.PathLike, embedding: Tensor, dtype: torch.dtype = torch.float32
) -> tuple[DraftModel, VocabMapping, dict[str, Any]]:
    """The draft as an engine would see it, its vocabulary mapping and the values of its config.json.

    embedding: the target's input embedding [V, H] (`targets.load_embedding`), which the folder
    does not hold. dtype: arithmetic of the draft. Raises UserError for a folder that is not whole.
    """
    config, mapping, values, weights = read_export(folder)
    expected = (config.vocab_size, config.hidden_size)
    if tuple(embedding.shape) != expected:
        raise UserError(
            f"{Path(folder) / CONFIG}: vocab_size, hidden_size: the draft expects an embedding of {list(expected)}, "
            f"the target has {list(embedding.shape)}; use the target that the draft was trained for"
        )
    model = DraftModel(config)
    model.load_state_dict(weights | {"embed_tokens.weight": embedding})
    return model.to(dtype).eval().requires_grad_(False), mapping, values


# --- checks ------------------------------------------------------------------------------------------


def _checked_weights(
    weights: Mapping[str, Tensor], config: DraftModelConfig, mapping: VocabMapping | None
) -> dict[str, Tensor]:
    """The weights to export, on the CPU; refuses what an engine would load and serve wrongly."""
    if mapping is None and config.draft_vocab_size != config.vocab_size:
        raise UserError(
            f"export: draft_vocab_size {config.draft_vocab_size} of {config.vocab_size} without a vocabulary mapping: "
            "an engine would read its ids as the target's first ones; give the mapping of the training"
        )
    if mapping is not None and (mapping.draft_vocab_size, mapping.vocab_size) != (
        config.draft_vocab_size,
        config.vocab_size,
    ):
        raise UserError(
            f"export: the vocabulary mapping is {mapping.draft_vocab_size} of {mapping.vocab_size}, the draft "
            f"{config.draft_vocab_size} of {config.vocab_size}; give the mapping of the training"
        )
    plain = {name: t.detach().cpu() for name, t in weights.items() if name != "embed_tokens.weight"}
    return checked_shapes(plain, config, "export", "export the weights of a finished training")


def checked_shapes(
    tensors: Mapping[str, Tensor], config: DraftModelConfig, where: str, remedy: str
) -> dict[str, Tensor]:
    """The draft's own weights among `tensors`; UserError for a missing, strange, misshapen or non-finite one."""
    expected = _expected_shapes(config)
    given = {name: t for name, t in tensors.items() if name not in MAP_NAMES}
    for name in sorted(expected.keys() ^ given.keys()):
        raise UserError(f"{where}: {name}: {'missing' if name in expected else 'not a weight of the draft'}; {remedy}")
    for name, shape in expected.items():
        if given[name].shape != shape:
            raise UserError(f"{where}: {name}: shape {list(given[name].shape)} instead of {list(shape)}; {remedy}")
        if not given[name].isfinite().all():
            raise UserError(f"{where}: {name}: holds NaN or infinity; {remedy}")
    return given


def _expected_shapes(config: DraftModelConfig) -> dict[str, torch.Size]:
    """By name; taken from a model that holds no memory (its RoPE has no weights, and cannot be made that way)."""
    plain_rope = replace(config, rope_parameters={"rope_type": "default", "rope_theta": 1.0})
    with torch.device("meta"):
        return {name: p.shape for name, p in DraftModel(plain_rope).trainable().items()}


def _check_layer_ids(
    path: Path, values: Mapping[str, Any], target: TargetInfo, aux_layer_ids: Sequence[int] | None
) -> None:
    ids: Any = values.get(LAYER_IDS)
    ascending = isinstance(ids, list) and bool(ids) and sorted(set(ids)) == ids
    if not ascending or not 0 <= ids[0] <= ids[-1] < target.num_hidden_layers:
        raise UserError(
            f"{path}: {LAYER_IDS}: {ids} must be distinct, ascending and within 0..{target.num_hidden_layers - 1}; "
            f"{AGAIN}"
        )
    if aux_layer_ids is not None:
        _check_key(path, LAYER_IDS, ids, list(aux_layer_ids))
    inner = (values.get("eagle_config") or {}).get(LAYER_IDS)
    _check_key(path, f"eagle_config.{LAYER_IDS}", inner, sglang_layer_ids(ids, target.model_type))


def _check_rope(path: Path, config: DraftModelConfig, target: TargetInfo | DraftModelConfig) -> None:
    """As we read the file, and as transformers (and so the engines) read it; a warm-started draft's is its own."""
    as_read = AutoConfig.from_pretrained(path.parent).rope_parameters
    wanted = replace(
        config, rope_parameters=target.rope_parameters, max_position_embeddings=target.max_position_embeddings
    )
    frequencies, scaling = rotary_frequencies(wanted)
    for reading in (config, replace(config, rope_parameters=dict(as_read or {}))):
        found, found_scaling = rotary_frequencies(reading)
        if not torch.equal(found, frequencies) or found_scaling != scaling:
            raise UserError(
                f"{path}: rope_parameters: {reading.rope_parameters} give other frequencies than the target's "
                f"{target.rope_parameters}; {AGAIN}"
            )


def _check_key(path: Path, key: str, found: Any, expected: Any) -> None:
    if found != expected:
        raise UserError(f"{path}: {key}: {found!r} instead of {expected!r}; {AGAIN}")


# --- reading and writing -----------------------------------------------------------------------------


def _read_config(path: Path) -> tuple[dict[str, Any], DraftModelConfig]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values, DraftModelConfig.from_dict(values)
    except FileNotFoundError:
        raise UserError(f"{path}: missing; {AGAIN}") from None
    except (ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{path}: not the config of a draft ({error}); {AGAIN}") from None


def _write_weights(folder: Path, tensors: Mapping[str, Tensor], shard_bytes: int) -> None:
    """One file, or several with an index where they exceed `shard_bytes`."""
    split = split_torch_state_dict_into_shards(dict(tensors), max_shard_size=shard_bytes)
    for file, names in split.filename_to_tensors.items():
        safetensors.torch.save_file({n: tensors[n] for n in names}, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        write_json(folder / INDEX, {"metadata": split.metadata, "weight_map": split.tensor_to_filename})


def read_weights(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        try:
            tensors |= safetensors.torch.load_file(path)
        except FileNotFoundError:
            raise UserError(f"{path}: missing; {AGAIN}") from None
        except SafetensorError as error:
            raise UserError(f"{path}: cannot be read ({error}); {AGAIN}") from None
    return tensors


def _weight_files(folder: Path) -> list[Path]:
    index = folder / INDEX
    if not index.exists():
        return [folder / WEIGHTS]
    try:
        return [folder / file for file in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index}: not an index of weights ({error!r}); {AGAIN}") from None


def _weights_name(folder: Path) -> Path:
    """The file to name when a tensor is wrong."""
    return folder / (INDEX if (folder / INDEX).exists() else WEIGHTS)


def _mapping_of(folder: Path, config: DraftModelConfig, tensors: Mapping[str, Tensor]) -> VocabMapping:
    """The mapping in the weights; the identity where Vd == V."""
    path = _weights_name(folder)
    if config.draft_vocab_size == config.vocab_size and not any(name in tensors for name in MAP_NAMES):
        return VocabMapping.from_target_ids(torch.arange(config.vocab_size), config.vocab_size)
    for name in MAP_NAMES:
        if name not in tensors:
            raise UserError(f"{path}: {name}: missing, though only part of the vocabulary is drafted; {AGAIN}")
    try:
        mapping = VocabMapping(t2d=tensors["t2d"], d2t=tensors["d2t"])
    except (ValueError, RuntimeError) as error:
        raise UserError(f"{path}: d2t, t2d: {error}; {AGAIN}") from None
    if (mapping.draft_vocab_size, mapping.vocab_size) != (config.draft_vocab_size, config.vocab_size):
        raise UserError(
            f"{path}: d2t, t2d: {mapping.draft_vocab_size} of {mapping.vocab_size} tokens, config.json says "
            f"{config.draft_vocab_size} of {config.vocab_size}; {AGAIN}"
        )
    return mapping


@contextmanager
def _folder_write(folder: Path) -> Iterator[Path]:
    """A folder that appears under its name whole or not at all; one that stood there is replaced."""
    part, old = folder.with_name(folder.name + ".part"), folder.with_name(folder.name + ".old")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    try:
        yield part
        for path in part.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        fsync_folder(part)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
        fsync_folder(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        raise


# --- the model card ----------------------------------------------------------------------------------

CARD = """\
---
{base_model}library_name: eagle3lib
pipeline_tag: text-generation
tags: [eagle3, speculative-decoding]
---
# {title}

An EAGLE-3 draft model: it proposes tokens, the target checks several of them in one pass, and the output stays the
target's. It works with this target only.

| | |
|---|---|
{facts}

## Serving

`.` is this folder; the name of a repository that it was pushed to does as well.

SGLang:

```
python -m sglang.launch_server --model-path {served} --speculative-algorithm EAGLE3 \\
    --speculative-draft-model-path . --speculative-num-steps 3 --speculative-eagle-topk 1 \\
    --speculative-num-draft-tokens 4
```

vLLM:

```
vllm serve {served} \\
    --speculative-config '{{"method": "eagle3", "model": ".", "num_speculative_tokens": 3}}'
```

Made by eagle3lib {version}. The embedding is the target's and not in this folder. `d2t` holds offsets: target id =
i + d2t[i].
"""


def model_card(
    config: DraftModelConfig,
    target: TargetInfo,
    aux_layer_ids: Sequence[int],
    metadata: Mapping[str, Any],
    dtype: str,
) -> str:
    """The text of `README.md`."""
    target_model = metadata.get("target_model") or target.path
    facts = {
        "target": f"`{target_model}` (fingerprint `{target.fingerprint}`)",
        "lineage": f"`{metadata.get('lineage')}`",
        "aux layers": f"{list(aux_layer_ids)}, indices into transformers' output_hidden_states",
        "draft vocabulary": f"{config.draft_vocab_size:,} of {config.vocab_size:,} tokens",
        "weights": f"{dtype}, one decoder layer of hidden size {config.hidden_size}",
    }
    if metadata.get("initial"):
        facts["started from"] = f"a draft whose files digest to `{metadata['initial']}`"
    if config.latent:
        facts["attention"] = "latent (MLA), of the target's sizes"
    if config.variant != "eagle3":
        facts["norms"] = ", ".join(name for name in NORMS if getattr(config, name))
    if config.norm_before_residual:
        facts["serving"] = "vLLM only: SGLang 0.5.23 does not read norm_before_residual"
    named = ("target_model", "lineage", "metrics", "name", "initial")
    facts |= {key: value for key, value in metadata.items() if key not in named}
    facts |= {name: _figure(value) for name, value in (metadata.get("metrics") or {}).items()}
    return CARD.format(
        # The hub refuses a card whose base_model is a path.
        base_model=f"base_model: {target_model}\n" if targets.is_hub_id(target_model) else "",
        # An engine loads a hub id or a folder: not what our config calls a package, nor a path relative to the run.
        served=target_model if targets.is_hub_id(target_model) else Path(target.path).resolve(),
        title=metadata.get("name") or "EAGLE-3 draft",
        facts="\n".join(f"| {key} | {value} |" for key, value in facts.items()),
        version=__version__,
    )


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return ", ".join(map(_figure, value)) if isinstance(value, list | tuple) else str(value)
