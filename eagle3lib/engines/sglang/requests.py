"""What a client asks of the plugin: it travels as the request's id, the one thing that SGLang hands on untouched."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

PREFIX = "eagle3lib:"


@dataclass(frozen=True)
class Request:
    """One sequence whose states are to be written."""

    part: str  # absolute path of the file to write
    n_tokens: int
    storage_format: str | None  # None: the states as computed, for comparisons
    reply_bounds: list[int]
    last_rows: list[int]  # rows that a trimmed format keeps beside those of reply_bounds
    code: str  # the client's digest of it, for the file's meta
    host: str  # where the client listens for the answer, and the word that opens it
    port: int
    token: str

    @property
    def rid(self) -> str:
        return PREFIX + json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def of(cls, rid: str) -> Request | None:
        """None for a request of somebody else: warm-up, health check, generation."""
        return cls(**json.loads(rid.removeprefix(PREFIX))) if rid.startswith(PREFIX) else None


@dataclass(frozen=True)
class Served:
    """Of what the server's states are: the client compares it with what it wants."""

    target_fingerprint: str
    aux_layer_ids: list[int]
    compute_dtype: str
    version: str
