"""A small chat target for the end-to-end tests, trained here from Python's own documentation.

Nothing is downloaded or committed: question and answer are made of the functions of a few
standard modules and the first paragraph of their docstrings. The answers have a regular
form, so 1.6 million parameters and `STEPS` steps of one thread suffice for fluent ones
(not for true ones: it mixes the documentation up), and a draft can learn to foresee them
for questions it has not seen. No answer repeats itself much, so an n-gram drafter gains
nothing here. Eight layers, so that the default aux layers [2, n//2, n-3] are distinct.

    python -m tests.small_target FOLDER    # trains; prints its loss and CPU time
"""

from __future__ import annotations

import ast
import hashlib
import math
import random
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3lib import chat

MODULES = (
    "argparse.py",
    "calendar.py",
    "configparser.py",
    "datetime.py",
    "ipaddress.py",
    "logging/__init__.py",
    "_pydecimal.py",
    "random.py",
    "socket.py",
    "statistics.py",
    "threading.py",
    "turtle.py",
)
VOCAB_SIZE = 2048
HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 128, 320, 8
STEPS, BATCH, LEARNING_RATE = 500, 8, 4e-3
PAD = 0  # <|endoftext|>
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Documented:
    """A function or method of the standard library: dotted path inside its module, arguments, first doc line."""

    module: str
    path: str
    arguments: tuple[str, ...]
    summary: str


def documented() -> list[Documented]:
    """The documented functions of MODULES in source order."""
    found = {}
    for file in MODULES:
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        source = Path(sysconfig.get_paths()["stdlib"], file).read_text(encoding="utf-8")
        for path, node in _functions(ast.parse(source).body, ()):
            summary = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
            if 20 <= len(summary) <= 120:
                arguments = tuple(arg.arg for arg in node.args.args if arg.arg not in ("self", "cls"))
                found[module, path] = Documented(module, path, arguments, summary)
    return list(found.values())


def _functions(body: list[ast.stmt], outer: tuple[str, ...]) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, (*outer, node.name))
        elif isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield ".".join((*outer, node.name)), node


def exchanges() -> list[tuple[str, str]]:
    """(user, assistant) pairs: the question for a function, and a regular answer made of its source."""
    return [(f"What does {f.module}.{f.path} do?", _answer(f)) for f in documented()]


def _answer(f: Documented) -> str:
    owner, _, name = f.path.rpartition(".")
    kind = f"a method of the class {owner}" if owner else "a function"
    names = ", ".join(f.arguments[:-1]) + (" and " if len(f.arguments) > 1 else "") + "".join(f.arguments[-1:])
    count = f"{len(f.arguments)} argument{'s' * (len(f.arguments) > 1)}: {names}" if names else "no arguments"
    return f"{name} is {kind} in the module {f.module}. It takes {count}. Its documentation says: {f.summary}"


def small_prompts(n: int, held_out: bool = False) -> list[str]:
    """At most `n` prompts for the small target, of all modules alike; one in five is held out of the others.

    The target has learned them all: it is the draft that must not have seen the held-out ones.
    """
    by_hash = sorted((hashlib.sha256(user.encode()).digest(), user) for user, _ in exchanges())
    return [user for digest, user in by_hash if (digest[-1] % 5 == 0) == held_out][:n]


def make_small_target(folder: str | Path) -> Path:
    """Train the target and save it as a Hugging Face folder (safetensors, tokenizer, chat template)."""
    import torch
    from transformers import LlamaForCausalLM

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the recipe's result must not depend on the machine's cores
    torch.manual_seed(0)
    try:
        tokenizer = build_tokenizer([part for pair in exchanges() for part in pair])
        model = LlamaForCausalLM(model_config())
        loss = train(model, tokenizer)
    finally:
        torch.set_num_threads(threads)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"small target: {sum(p.numel() for p in model.parameters()):,} parameters, last loss {loss:.3f}")
    return Path(folder)


def build_tokenizer(texts: list[str]):
    """A byte-level BPE with ChatML's special tokens and template, as a fast transformers tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model_config():
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=INTERMEDIATE_SIZE,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=HIDDEN_SIZE // 32,
        num_key_value_heads=HIDDEN_SIZE // 64,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def train(model, tokenizer) -> float:
    """STEPS steps of AdamW, each on BATCH whole conversations; the mean loss of the last 50 steps."""
    import torch
    import torch.nn.functional as F

    batches = _batches([_conversation_ids(tokenizer, user, assistant) for user, assistant in exchanges()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    losses = []
    for step in range(STEPS):
        warm, cosine = min(1, (step + 1) / 50), 0.5 * (1 + math.cos(math.pi * step / STEPS))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * warm * max(0.02, cosine)
        ids, labels = (torch.tensor(rows) for rows in zip(*next(batches), strict=True))  # [B, T] each
        logits = model(input_ids=ids[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=PAD)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % 100 == 99:
            print(f"step {step + 1} loss {sum(losses[-50:]) / 50:.3f} cpu {time.process_time():.0f} s", flush=True)
    return sum(losses[-50:]) / 50


def _conversation_ids(tokenizer, user: str, assistant: str) -> tuple[list[int], list[int]]:
    """Ids [T] of an exchange and its labels [T]: PAD outside of the reply."""
    rendered = chat.render(tokenizer, [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}])
    [(start, end)] = rendered.reply_bounds
    ids = rendered.input_ids[:end]
    return ids, [PAD] * start + ids[start:]


def _batches(conversations: list[tuple[list[int], list[int]]]) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Endless batches of conversations of like length, padded on the right, in a new order every epoch."""
    order = random.Random(0)
    while True:
        by_length = sorted(conversations, key=lambda pair: len(pair[0]) + order.uniform(0, 20))
        batches = [by_length[i : i + BATCH] for i in range(0, len(by_length), BATCH)]
        for batch in order.sample(batches, len(batches)):
            longest = max(len(ids) for ids, _ in batch)
            yield [tuple(row + [PAD] * (longest - len(row)) for row in pair) for pair in batch]


if __name__ == "__main__":
    start = time.process_time()
    make_small_target(sys.argv[1])
    print(f"{time.process_time() - start:.0f} CPU-seconds")
