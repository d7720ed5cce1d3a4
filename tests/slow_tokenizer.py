"""A tokenizer without offsets, as Kimi's is: pure Python around the same tokens."""

from __future__ import annotations

from transformers import AddedToken, PreTrainedTokenizer


class SlowTokenizer(PreTrainedTokenizer):
    """The tokens of a byte-level fast tokenizer, found by its core and known by nothing else."""

    def __init__(self, fast):
        self.core = fast.backend_tokenizer
        added = {
            i: AddedToken(str(t), special=t.special, normalized=False) for i, t in fast.added_tokens_decoder.items()
        }
        named = {key: str(value) for key, value in fast.special_tokens_map.items() if isinstance(value, str)}
        super().__init__(added_tokens_decoder=added, chat_template=fast.chat_template, **named)

    @property
    def vocab_size(self):
        return self.core.get_vocab_size(with_added_tokens=False)

    def get_vocab(self):
        return self.core.get_vocab()

    def _tokenize(self, text, **kwargs):
        return self.core.encode(text, add_special_tokens=False).tokens

    def _convert_token_to_id(self, token):
        return self.core.token_to_id(token)

    def _convert_id_to_token(self, index):
        return self.core.id_to_token(index)

    def convert_tokens_to_string(self, tokens):
        return self.core.decoder.decode(tokens)
