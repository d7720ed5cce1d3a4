"""A tokenizer whose ids can be read: a word, a blank or a sign is a token, and what it is told is a control token.

A sequence of ids and what is supervised of it is written as one line: tokens with a blank between them, `␣` for a
blank, `⏎` for a newline, regions in ⟦ ⟧.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PIECE = r"\w+|\s|[^\w\s]"
SIGNS = {" ": "␣", "\n": "⏎"}


def word_tokenizer(
    texts: Iterable[str], special: Sequence[str], plain: Sequence[str] = (), bos: str | None = None, eos: str = ""
) -> PreTrainedTokenizerFast:
    """Of the words of `texts`; control tokens are `special`, and `plain` are single tokens that count as text."""
    words = sorted({piece for text in texts for piece in re.findall(PIECE, text)})
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(["<unk>", *words])}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(PIECE), "isolated")
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos)


def written(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int], bounds: Sequence[tuple[int, int]]) -> str:
    """The ids and their regions as a line (above)."""
    tokens = [SIGNS.get(token, token) for token in tokenizer.convert_ids_to_tokens(ids)]
    opened, closed = {start for start, _ in bounds}, {end for _, end in bounds}
    signs = []
    for position, token in enumerate(tokens):
        signs += ["⟦"] * (position in opened) + [token] + ["⟧"] * (position + 1 in closed)
    return " ".join(signs)


def read(tokenizer: PreTrainedTokenizerFast, line: str) -> tuple[list[int], list[tuple[int, int]]]:
    """What `written` wrote: ids and bounds."""
    ids, bounds, start = [], [], 0
    back = {sign: token for token, sign in SIGNS.items()}
    for sign in line.split():
        if sign == "⟦":
            start = len(ids)
        elif sign == "⟧":
            bounds.append((start, len(ids)))
        else:
            ids.append(tokenizer.convert_tokens_to_ids(back.get(sign, sign)))
    return ids, bounds
