"""A random Llama and a byte-level tokenizer, small enough to make in every test."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    raw.train_from_iterator(["the quick brown fox jumps over the lazy dog"] * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = CHATML
    return tokenizer


def make_target(folder: Path, seed: int = 0, layers: int = 8, hidden: int = 32, tied: bool = False) -> Path:
    """A Hugging Face folder with random weights; aux ids 2, 4, 5."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=320, hidden_size=hidden, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=512, tie_word_embeddings=tied, initializer_range=0.2,
        bos_token_id=0, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_conversations(path: Path, n: int, words: int = 6) -> Path:
    """`n` different conversations of one turn."""
    generator = torch.Generator().manual_seed(7)
    stock = "the quick brown fox jumps over a lazy dog and then it sleeps for an hour or two".split()
    with open(path, "w") as file:
        for i in range(n):
            picks = torch.randint(len(stock), (2, words), generator=generator).tolist()
            user, reply = (" ".join(stock[k] for k in row) for row in picks)
            messages = [{"role": "user", "content": f"{i}: {user}"}, {"role": "assistant", "content": reply}]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path
