"""Convert a GGUF model (llama family) to a Hugging Face folder, once."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from eagle3lib.errors import UserError
from eagle3lib.job import fsync_folder


def convert(gguf: Path, folder: Path) -> None:
    """Write bf16 safetensors, config and tokenizer of the dequantised model into `folder` (whole or not at all)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, quantization_config=GgufConfig(dequantize=True)
        )
    except Exception as error:
        raise UserError(f"{gguf}: cannot be converted ({type(error).__name__}: {error})") from None
    # The weights are plain tensors by now; with the quantiser attached transformers refuses to save them.
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    _mend_digits(tokenizer)
    part = folder.with_name(folder.name + ".part")
    shutil.rmtree(part, ignore_errors=True)
    model.to(torch.bfloat16).save_pretrained(part)
    tokenizer.save_pretrained(part)
    fsync_folder(part)
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(part, folder)
    fsync_folder(folder.parent)


def _mend_digits(tokenizer) -> None:
    """SmolLM2 splits numbers into single digits; GGUF does not say so and the import leaves it out."""
    from tokenizers import pre_tokenizers

    steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
