"""One request to a server of a target."""

from __future__ import annotations

import json
import urllib.request
from typing import Any


def ask(url: str, body: Any = None, key: str = "", timeout: float | None = None) -> str:
    """The text that answers a POST of `body` as JSON, or a GET. key: the server's API key; timeout in seconds.

    Raises OSError; for an error status urllib's HTTPError, which is one. No proxy of the environment is asked: a server
    of ours is on this machine or in this cluster.
    """
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=timeout) as response:
        return response.read().decode()
