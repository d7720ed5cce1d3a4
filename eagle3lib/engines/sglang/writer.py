"""Beside the server's scheduler: packs, writes, syncs and hashes samples out of shared memory, and tells the client.

Reads a message a line, answers with the offset that is free again. Ends when its stdin does, that is with the
scheduler, once it has written all it was handed. Does not end by a signal that asks: what is whole is kept.
"""

from __future__ import annotations

import functools
import gc
import json
import mmap
import os
import signal
import socket
import sys
import time
from typing import Any

from eagle3lib.engines.sglang.requests import Request


def main() -> None:
    if os.fork():
        os._exit(0)  # see collector._start_writer
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        message = json.loads(line)
        request = Request(**message["request"])
        fault = {"fault": message["fault"]} if message["fault"] else None
        tell(request, {**(fault or write(memory, message, request)), "served": message["served"]})
        if not fault:
            print(message["offset"], flush=True)


def write(memory: mmap.mmap, message: dict[str, Any], request: Request) -> dict[str, Any]:
    """Write one sample to its `.part`; its bytes, sha256 and the seconds of its fsync, or {"fault"}, {"errno"}."""
    import torch

    from eagle3lib.engines.sglang.collector import views
    from eagle3lib.job import save_tensors

    _spare_what_is_loaded()
    dtype = getattr(torch, message["dtype"])
    ids, states = views(memory, message["offset"], message["n_states"], request.n_tokens, message["hidden_size"], dtype)
    try:
        content = _content(ids, states, message["served"], request)
        with open(request.part, "wb") as raw:
            hashing = save_tensors(content, raw)
            raw.flush()
            start = time.monotonic()
            os.fsync(raw.fileno())
        return {
            "bytes": hashing.bytes,
            "sha256": hashing.sha256.hexdigest(),
            "fsync_seconds": time.monotonic() - start,
        }
    except OSError as error:
        return {"fault": error.strerror or str(error), "errno": error.errno}
    except ValueError as error:  # not finite
        return {"fault": str(error), "unusable": True}
    finally:
        gc.collect()  # torch.save leaves its tensors in a cycle: half a gigabyte each


@functools.cache
def _spare_what_is_loaded() -> None:
    """Torch's objects out of the collector's sight: to look through them takes longer than to write a sample."""
    gc.freeze()


def _content(ids: Any, states: list[Any], served: dict[str, Any], request: Request) -> dict[str, Any]:
    from eagle3lib.hidden_states import StateKey, pack_sample

    if request.storage_format is None:
        return {"input_ids": ids.clone(), "states": states}
    layers = tuple(served["aux_layer_ids"])
    key = StateKey(served["target_fingerprint"], layers, "sglang", served["compute_dtype"], request.storage_format)
    bounds, rows = request.reply_bounds, request.last_rows
    return pack_sample(key, ids.tolist(), bounds, states, served["version"], request.code, rows)


def tell(request: Request, answer: dict[str, Any]) -> None:
    """One line to the client; one that has gone needs none: its `.part` is swept by the next."""
    try:
        with socket.create_connection((request.host, request.port), timeout=10) as connection:
            connection.sendall((json.dumps({"token": request.token, **answer}) + "\n").encode())
    except OSError as error:
        print(f"writer: {request.part}: nobody listens ({error})", file=sys.stderr)


if __name__ == "__main__":
    main()
