"""The reference engine: the target in transformers, on a CPU or one GPU.

Departures from a plain transformers loop: passes are ragged (see ragged.py: nothing is padded), logits
are computed only for rows that choose a token, and only the states that were asked for are kept.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM

from eagle3lib.engines import Prompt, Reply, States, Temperature
from eagle3lib.engines.decoding import Decoding
from eagle3lib.engines.probe import probe
from eagle3lib.engines.ragged import ATTENTION, Piece, RaggedPass, SlotCache, common_prefix
from eagle3lib.errors import UserError

# On a CPU wider passes only drive the activations out of the cache.
CPU_ROWS = 1024

# A shorter common beginning is not worth a group of its own.
MIN_SHARED = 16

LOAD_ERRORS = (OSError, ValueError, RuntimeError, EOFError, pickle.UnpicklingError, SafetensorError)


class TransformersEngine:
    """A causal language model of transformers, for extraction, generation and speculative decoding.

    Raises UserError when the folder's weights cannot be read or do not fill the model.
    """

    name = "transformers"
    version = transformers.__version__

    def __init__(
        self,
        folder: str | Path,
        compute_dtype: str = "float32",
        device: str = "auto",
        batch_tokens: int = 2048,
        trust_remote_code: bool = False,
    ):
        self.folder, self.dtype = Path(folder), compute_dtype
        self.device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        self.batch_tokens = min(batch_tokens, CPU_ROWS) if self.device.type == "cpu" else batch_tokens
        self.model = _load(self.folder, getattr(torch, compute_dtype), trust_remote_code).to(self.device)
        if self.device.type == "cpu":
            for module in self.model.modules():
                if type(module) is torch.nn.Linear and module.bias is None:
                    module.__class__ = _NarrowLinear
        self.decoder = self.model.get_decoder()
        self.config = self.decoder.config
        self.num_hidden_layers: int = self.config.num_hidden_layers
        self.passes = 0  # of the model, so far
        self.vocab_size: int = self.model.get_input_embeddings().weight.shape[0]

    # --- extraction ----------------------------------------------------------------------------------

    def extract(self, id_lists: Sequence[Sequence[int]], aux_layer_ids: Sequence[int]) -> list[States]:
        """The states of each sequence, in the order given.

        Sequences share passes of at most `batch_tokens` rows (a longer one has its own). Returned tensors own their
        memory. Raises UserError on an empty sequence, ids outside of the vocabulary, wrong layer ids.
        """
        self._check_layers(aux_layer_ids)
        for ids in id_lists:
            self._check_ids(ids)
        states: dict[int, States] = {}
        for group, shared in _groups(id_lists):
            states |= self._extract_group({i: id_lists[i] for i in group}, shared, aux_layer_ids)
        return [states[i] for i in range(len(id_lists))]

    @torch.no_grad()
    def _extract_group(
        self, id_lists: dict[int, Sequence[int]], shared: int, aux_layer_ids: Sequence[int]
    ) -> dict[int, States]:
        """Sequences whose first `shared` tokens are the same: the first brings their states, keys and values."""
        cache = SlotCache(1) if shared else None
        prefix: list[torch.Tensor] = []  # L + 1 tensors [shared, H]
        states = {}
        for batch in _passes(id_lists, shared, self.batch_tokens):
            starts = [shared if prefix or i != batch[0] else 0 for i in batch]
            rows = [id_lists[i][start:] for i, start in zip(batch, starts, strict=True)]
            pieces = [Piece(len(ids), start) for ids, start in zip(rows, starts, strict=True)]
            with self._capture(aux_layer_ids) as captured:
                self._run(self.decoder, rows, RaggedPass(pieces, cache, device=self.device))
            parts = zip(*(t[0].split([p.length for p in pieces]) for t in captured.rows(aux_layer_ids)), strict=True)
            prefix = prefix or [tensor[0, :shared] for tensor in captured.rows(aux_layer_ids)]
            for i, start, own in zip(batch, starts, parts, strict=True):
                *aux, last = [torch.cat([head[:start], part]) for head, part in zip(prefix, own, strict=True)]
                states[i] = States(aux, last)
        return states

    def _run(
        self, module: torch.nn.Module, id_lists: Sequence[Sequence[int]], ragged: RaggedPass, **kwargs: Any
    ) -> Any:
        self.passes += 1
        ids = torch.tensor([i for ids in id_lists for i in ids], device=self.device)[None]
        _NarrowLinear.decoding = ragged.n_singles > 0
        return module(input_ids=ids, position_ids=ragged.position_ids, use_cache=False, ragged=ragged, **kwargs)

    @contextmanager
    def _capture(self, aux_layer_ids: Sequence[int]) -> Iterator[_Captured]:
        """Within, a forward leaves the input of the layers `aux_layer_ids` and the decoder's output here."""
        captured = _Captured()
        hooks = [
            self.decoder.layers[k].register_forward_pre_hook(captured.layer_hook(k), with_kwargs=True)
            for k in aux_layer_ids
        ]
        hooks.append(self.decoder.register_forward_hook(captured.decoder_hook))
        try:
            yield captured
        finally:
            for hook in hooks:
                hook.remove()

    def head(self, last: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of post-norm last hidden states [..., H]."""
        return self.model.get_output_embeddings()(last)

    # --- generation ----------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Iterable[Prompt],
        max_new_tokens: int,
        temperature: Temperature = 0.0,
        top_p: float = 1.0,
        batch_size: int = 32,
        eos_ids: Sequence[int] | None = None,
    ) -> Iterator[Reply]:
        """Replies (key, reply ids, "stop" or "length") as they end; the end-of-turn token counts as reply.

        `batch_size` replies run at once and a slot is refilled from `prompts` as soon as its reply has ended.
        Every prompt has its own stream of random numbers, from its seed: a reply does not depend on what runs
        beside it (up to the noise of the arithmetic). `eos_ids` None: those of the model.
        """
        stop = set(self.eos_ids if eos_ids is None else eos_ids)
        decoding = Decoding(self, batch_size, max_new_tokens, temperature, top_p, stop)
        waiting = iter(prompts)
        while True:
            decoding.admit(waiting)
            if not decoding.running:
                return
            yield from decoding.step()

    @property
    def eos_ids(self) -> list[int]:
        """The model's own end-of-turn tokens."""
        eos = self.model.generation_config.eos_token_id
        eos = self.config.eos_token_id if eos is None else eos
        return [] if eos is None else [eos] if isinstance(eos, int) else list(eos)

    def greedy(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, batch_size: int = 32) -> list[list[int]]:
        """Greedy replies in the order of the prompts."""
        numbered = ((i, ids, 0) for i, ids in enumerate(prompts))
        replies = {key: ids for key, ids, _ in self.generate(numbered, max_new_tokens, batch_size=batch_size)}
        return [replies[i] for i in range(len(prompts))]

    def session(self, aux_layer_ids: Sequence[int]) -> Session:
        """One sequence that grows and shrinks, with its states: for speculative decoding."""
        self._check_layers(aux_layer_ids)
        return Session(self, tuple(aux_layer_ids))

    def sessions(self, n: int, aux_layer_ids: Sequence[int]) -> Sessions:
        """`n` sequences that grow and shrink side by side, one pass for the next rows of all of them."""
        self._check_layers(aux_layer_ids)
        return Sessions(self, n, tuple(aux_layer_ids))

    # --- checks --------------------------------------------------------------------------------------

    def _check_layers(self, aux_layer_ids: Sequence[int]) -> None:
        ids = list(aux_layer_ids)
        if sorted(set(ids)) != ids or not ids or ids[0] < 0 or ids[-1] >= self.num_hidden_layers:
            raise UserError(
                f"config: hidden_states.aux_layer_ids: {ids} must be distinct, ascending and within "
                f"0..{self.num_hidden_layers - 1} for this target of {self.num_hidden_layers} layers"
            )

    def _check_ids(self, ids: Sequence[int]) -> None:
        if not len(ids):
            raise UserError("an empty sequence was given to the engine; drop the sample")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise UserError(
                f"token id {low if low < 0 else high} is outside of the target's vocabulary "
                f"(0..{self.vocab_size - 1}); tokenise with the target's own tokenizer"
            )

    def probe(self, aux_layer_ids: Sequence[int]) -> dict[str, Any]:
        """See `probe.probe`."""
        with torch.no_grad():
            return probe(self, aux_layer_ids, self.vocab_size, self.head, self.reference)

    @torch.no_grad()
    def reference(self, ids: Sequence[int]) -> list[torch.Tensor]:
        """The n + 1 hidden states [T, H] as plain transformers computes them (the last one post-norm)."""
        self.model.set_attn_implementation("sdpa")
        try:
            output = self.decoder(
                input_ids=torch.tensor([ids], device=self.device), output_hidden_states=True, use_cache=False
            )
        finally:
            self.model.set_attn_implementation(ATTENTION)
        return [tensor[0] for tensor in output.hidden_states]


class Session:
    """One sequence in the target's cache."""

    def __init__(self, engine: TransformersEngine, aux_layer_ids: tuple[int, ...]):
        self.engine, self.aux_layer_ids = engine, aux_layer_ids
        self.cache = SlotCache(1)
        self.length = 0

    @torch.no_grad()
    def forward(self, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append n tokens: logits [n, V], aux states [n, L*H] (ascending layers), last states [n, H] (post-norm)."""
        self.engine._check_ids(ids)
        ragged = RaggedPass([Piece(len(ids), self.length)], self.cache, device=self.engine.device)
        with self.engine._capture(self.aux_layer_ids) as captured:
            output = self.engine._run(self.engine.model, [ids], ragged)
        self.length += len(ids)
        *aux, last = captured.rows(self.aux_layer_ids)
        return output.logits[0], torch.cat(aux, -1)[0], last[0]

    def crop(self, length: int) -> None:
        """Forget all tokens from position `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a sequence of {self.length} tokens to {length}")
        self.length = length


class Sessions:
    """Several sequences in the target's cache, advanced in one pass."""

    def __init__(self, engine: TransformersEngine, n: int, aux_layer_ids: tuple[int, ...]):
        self.engine, self.aux_layer_ids = engine, aux_layer_ids
        self.cache = SlotCache(n)
        self.lengths = [0] * n

    @torch.no_grad()
    def forward(self, rows: Mapping[int, Sequence[int]]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Append rows to the sequences of these numbers: their logits [n, V] and aux states [n, L*H]."""
        for ids in rows.values():
            self.engine._check_ids(ids)
        pieces = [Piece(len(ids), self.lengths[slot], slot) for slot, ids in rows.items()]
        ragged = RaggedPass(pieces, self.cache, device=self.engine.device)
        with self.engine._capture(self.aux_layer_ids) as captured:
            output = self.engine._run(self.engine.model, list(rows.values()), ragged)
        sizes = [piece.length for piece in pieces]
        for slot, size in zip(rows, sizes, strict=True):
            self.lengths[slot] += size
        aux = torch.cat(captured.rows(self.aux_layer_ids)[:-1], -1)[0]
        return dict(zip(rows, zip(output.logits[0].split(sizes), aux.split(sizes), strict=True), strict=True))

    def crop(self, slot: int, length: int) -> None:
        """Forget all tokens of a sequence from position `length` on."""
        if not 0 <= length <= self.lengths[slot]:
            raise ValueError(f"cannot crop a sequence of {self.lengths[slot]} tokens to {length}")
        self.lengths[slot] = length


class _NarrowLinear(torch.nn.Linear):
    """A bias-free Linear that is fast on a CPU for the few rows of a decoding step.

    W x^T instead of x W^T: MKL then runs along the many rows of W (measured: 1.3 to 1.6 times as fast at 8 to 48 rows).
    Only in passes that decode: it rounds in another order, and a state must not depend on how wide its pass was.
    """

    decoding = False

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        rows = input.numel() // input.shape[-1]
        if not (self.decoding and 4 < rows < 64):
            return super().forward(input)
        return torch.mm(self.weight, input.reshape(rows, -1).t()).t().contiguous().view(*input.shape[:-1], -1)


class _Captured:
    """The states of one forward, each [1, N, H]."""

    def __init__(self) -> None:
        self.layers: dict[int, torch.Tensor] = {}
        self.last: torch.Tensor | None = None

    def layer_hook(self, k: int) -> Any:
        def hook(module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
            self.layers[k] = args[0] if args else kwargs["hidden_states"]

        return hook

    def decoder_hook(self, module: torch.nn.Module, args: tuple, output: Any) -> None:
        self.last = output.last_hidden_state

    def rows(self, aux_layer_ids: Sequence[int]) -> list[torch.Tensor]:
        return [*(self.layers[k] for k in aux_layer_ids), self.last]


def _groups(id_lists: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], int]]:
    """Indices of sequences, and how many first tokens they share (a system prompt): 0, or MIN_SHARED and more."""
    by_head: dict[tuple[int, ...], list[int]] = {}
    for i, ids in enumerate(id_lists):
        by_head.setdefault(tuple(ids[:MIN_SHARED]), []).append(i)
    alone = []
    for group in by_head.values():
        first = id_lists[group[0]]
        # one row at least is left to every sequence
        shared = min((common_prefix(first, id_lists[i][:-1]) for i in group), default=0)
        if len(group) > 1 and shared >= MIN_SHARED:
            yield group, shared
        else:
            alone += group
    if alone:
        yield alone, 0


def _passes(id_lists: dict[int, Sequence[int]], shared: int, rows: int) -> Iterator[list[int]]:
    """Neighbours, as many as bring at most `rows` rows together."""
    batch: list[int] = []
    total = 0
    for i, ids in id_lists.items():
        if batch and total + len(ids) - shared > rows:
            yield batch
            batch, total = [], 0
        batch.append(i)
        total += len(ids) - shared
    yield batch


def _load(folder: Path, dtype: torch.dtype, trust_remote_code: bool) -> torch.nn.Module:
    _check_files(folder)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=dtype,
            attn_implementation=ATTENTION,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
        )
    except LOAD_ERRORS as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"{folder}: the target cannot be loaded ({reason}); check its config.json or fetch it again"
        ) from None
    # transformers fills what is missing with random numbers and only warns
    for kind in ("missing_keys", "mismatched_keys"):
        if info[kind]:
            name = sorted(map(str, info[kind]))[0]
            raise UserError(f"{folder}: {kind.replace('_', ' ')} in the weights: {name}; fetch the target again")
    return model.eval()


def _check_files(folder: Path) -> None:
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"{path}: cannot be read ({error}); delete it and fetch or convert the target again"
            ) from None
