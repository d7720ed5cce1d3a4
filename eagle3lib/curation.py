"""Which conversations are left out before anything is computed: near copies, and the questions of the evaluation.

Near copies: MinHash over sequences of five words; of conversations whose Jaccard similarity is at least
dataset.near_duplicates the first stays. So none of them is on both sides of the validation split. Questions of the
evaluation: by dataset.decontaminate_words in a row. A word is a run of letters and digits, or one character of a script
that is written without spaces.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from eagle3lib import question_sets, samples
from eagle3lib.config import AcceptanceConfig, DatasetConfig
from eagle3lib.errors import UserError
from eagle3lib.samples import Conversation

SHINGLE = 5  # words
PERMUTATIONS = 128
LOOKED_AT = 300  # characters of a text that its language is told by
UNSPACED = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")

Question = tuple[str, str]
"""Where a question of the evaluation stands, and its text."""


def words(text: str) -> list[str]:
    return WORD.findall(text.lower())


def questions(files: Sequence[str | Path], cfg: AcceptanceConfig, folder: str | Path) -> Iterator[Question]:
    """What users say in acceptance.prompts (`files`) and in acceptance.sets (those of packages under `folder`)."""
    for one in samples.read(files):
        yield from ((f"{one.file}:{one.line}", m["content"]) for m in one.messages if m["role"] == "user")
    for of_set in question_sets.parse(cfg.sets):
        for number, question in enumerate(question_sets.read(of_set.name, of_set.files(folder)), 1):
            said = (message for turn in question for message in turn if message["role"] == "user")
            yield from ((f"{of_set.label} question {number}", message["content"]) for message in said)


class Curator:
    """Marks as unfit what is not to be learnt from. One pass over one stream: it remembers what came before.

    prompts_only: the replies are the target's own and still to come, so only what is asked is compared.
    Raises UserError when a library is missing that the settings need.
    """

    def __init__(self, dataset: DatasetConfig, asked: Iterable[Question] = (), prompts_only: bool = False):
        self.prompts_only = prompts_only
        self.copies = _NearCopies(dataset.near_duplicates, dataset.seed) if dataset.near_duplicates else None
        self.contamination = _Contamination(dataset.decontaminate_words, asked) if dataset.decontaminate_words else None

    def curate(self, conversations: Iterable[Conversation]) -> Iterator[Conversation]:
        """The same conversations, those to be left out with their reason in `unfit`."""
        for one in conversations:
            reason = None if one.unfit else self._reason(one)
            yield replace(one, unfit=reason) if reason else one

    def _reason(self, one: Conversation) -> tuple[str, str] | None:
        if self.contamination and (found := self.contamination.find(one)):
            return "contaminated", f"shares words with {found}"
        asked = replace(one, messages=samples.prompt_messages(one.messages)) if self.prompts_only else one
        text = samples.words(asked)
        if self.copies and (found := self.copies.find(text, f"{one.file}:{one.line}")):
            return "near_duplicate", found
        return None


class _Contamination:
    """Word sequences of the evaluation's questions."""

    def __init__(self, length: int, asked: Iterable[Question]):
        self.length = length
        self.sequences: dict[tuple[str, ...], str] = {}
        self.short: dict[tuple[str, ...], str] = {}
        for where, text in asked:
            said = words(text)
            if len(said) < length:
                self.short.setdefault(tuple(said), where)
            for sequence in _sequences(said, length):
                self.sequences.setdefault(sequence, where)

    def find(self, one: Conversation) -> str | None:
        """Where the question stands that this conversation holds."""
        texts = [one.text] if one.text is not None else [m["content"] for m in one.messages]
        for said in map(words, texts):
            if (where := self.short.get(tuple(said))) is not None:
                return where
            for sequence in _sequences(said, self.length):
                if (where := self.sequences.get(sequence)) is not None:
                    return where
        return None


def _sequences(said: Sequence[str], length: int) -> Iterator[tuple[str, ...]]:
    return zip(*(said[i:] for i in range(length)), strict=False)


class _NearCopies:
    """Sketches of all conversations so far: about 2 kB each."""

    def __init__(self, threshold: float, seed: int):
        if importlib.util.find_spec("datasketch") is None:
            raise UserError("dataset.near_duplicates: needs datasketch; pip install 'eagle3lib[curation]'")
        from datasketch import MinHash, MinHashLSH

        self.threshold = threshold
        self.empty = MinHash(num_perm=PERMUTATIONS, seed=seed % 2**32)
        self.index = MinHashLSH(threshold=threshold, num_perm=PERMUTATIONS)
        self.sketches: list[tuple[Any, str]] = []

    def find(self, text: str, where: str) -> str | None:
        """What a text is a near copy of; it is remembered when it is none."""
        said = words(text)
        if not said:
            return None
        shingles = {" ".join(sequence).encode() for sequence in _sequences(said, SHINGLE)} or {" ".join(said).encode()}
        sketch = self.empty.copy()
        sketch.update_batch(sorted(shingles))
        alike = [(sketch.jaccard(self.sketches[i][0]), -i) for i in self.index.query(sketch)]
        similarity, number = max(alike, default=(0.0, 0))
        if similarity >= self.threshold:
            return f"{similarity:.0%} of its words as in {self.sketches[-number][1]}"
        self.index.insert(len(self.sketches), sketch, check_duplication=False)
        self.sketches.append((sketch, where))
        return None


def language(text: str) -> str:
    """The likeliest language of a text (ISO 639-1), by its first characters; "-" without a letter."""
    if importlib.util.find_spec("py3langid") is None:
        raise UserError("dataset.count_languages: needs py3langid; pip install 'eagle3lib[curation]'")
    import py3langid

    shown = text[:LOOKED_AT]
    return str(py3langid.classify(shown)[0]) if any(map(str.isalpha, shown)) else "-"
