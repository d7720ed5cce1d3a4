"""`push` against a stand-in of the hub: a local HTTP server, the real client."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from huggingface_hub import constants
from test_export import edit_weights, write

from eagle3lib import hub
from eagle3lib.errors import UserError

REPO = "org/draft"


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a push asks for. `repos`: name -> {"private", "files"}; `asked`: "METHOD path"."""

    repos: dict
    asked: list
    refuses = False

    def do_GET(self):
        self.asked.append(f"GET {self.path.split('?')[0]}")
        if self.refuses:
            return self.answer({"error": "Repository not found"}, 404)
        repo = self.repos[REPO]
        if "/tree/" in self.path:
            files = [{"type": "file", "path": name, "size": 1, "oid": "0" * 40} for name in repo["files"]]
            return self.answer(files)
        return self.answer(
            {"id": REPO, "private": repo["private"], "siblings": [{"rfilename": n} for n in repo["files"]]}
        )

    def do_POST(self):
        self.asked.append(f"POST {self.path.split('?')[0]}")
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.refuses:
            return self.answer({"error": "You don't have the rights"}, 403)
        if self.path == "/api/repos/create":
            known, wanted = REPO in self.repos, json.loads(body)
            assert f"{wanted['organization']}/{wanted['name']}" == REPO
            self.repos.setdefault(REPO, {"private": wanted["visibility"] == "private", "files": {}})
            return self.answer({"url": f"{self.url}/{REPO}"}, 409 if known else 200)
        if self.path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        if "/preupload/" in self.path:
            files = [
                {"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        assert "/commit/" in self.path, self.path
        for line in body.splitlines():
            step = json.loads(line)
            if step["key"] == "file":
                self.repos[REPO]["files"][step["value"]["path"]] = base64.b64decode(step["value"]["content"])
            elif step["key"] == "deletedFile":
                del self.repos[REPO]["files"][step["value"]["path"]]
        return self.answer({"commitUrl": f"{self.url}/{REPO}/commit/1", "commitOid": "1" * 40, "success": True})

    def answer(self, value, status=200):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def stand_in(monkeypatch):
    """The server's handler; the client is pointed at it where it keeps what it read from the environment at import."""
    handler = type("Handler", (Hub,), {"repos": {}, "asked": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    handler.url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", handler.url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_none")
    yield handler
    server.shutdown()


def test_says_what_it_would_send_and_sends_nothing(tmp_path):
    write(tmp_path / "draft", metadata={"target_model": "/home/me/models/tiny"})
    said = []
    hub.push(tmp_path / "draft", REPO, say=said.append)
    assert said[0] == f"to {REPO} (private):" and said[-1] == "nothing was sent; --yes sends it"
    for path in (tmp_path / "draft").iterdir():
        assert f"  {path.name:<36} {path.stat().st_size:>15,} bytes" in said
    assert any("names /home/me/models/tiny, which exists here only" in line for line in said)


def test_sends_into_a_private_repository_and_replaces_weights_there(tmp_path, stand_in):
    write(tmp_path / "one")
    (tmp_path / "one" / "notes.txt").write_text("mine")
    said = []
    hub.push(tmp_path / "one", REPO, yes=True, say=said.append)
    assert said[-1] == f"sent: {stand_in.url}/{REPO}/commit/1"
    assert stand_in.repos[REPO]["private"] is True
    names = ("README.md", "config.json", "model.safetensors")
    assert stand_in.repos[REPO]["files"] == {name: (tmp_path / "one" / name).read_bytes() for name in names}
    stand_in.repos[REPO]["files"]["figure.png"] = b"theirs"
    write(tmp_path / "shards", shard_bytes=2500)
    hub.push(tmp_path / "shards", REPO, yes=True)
    found = stand_in.repos[REPO]["files"].keys()
    assert found == {path.name for path in (tmp_path / "shards").iterdir()} | {"figure.png"}


def test_nothing_becomes_public_unasked(tmp_path, stand_in):
    write(tmp_path / "draft")
    hub.push(tmp_path / "draft", REPO, yes=True, public=True)
    assert stand_in.repos[REPO]["private"] is False and stand_in.repos[REPO]["files"]
    stand_in.repos[REPO]["files"] = {}
    with pytest.raises(UserError, match=f"{REPO} exists and is public"):
        hub.push(tmp_path / "draft", REPO, yes=True)
    assert stand_in.repos[REPO]["files"] == {}


def test_refusals_name_a_remedy(tmp_path, stand_in, monkeypatch):
    write(tmp_path / "draft")
    stand_in.refuses = True
    with pytest.raises(UserError, match="403 Forbidden.*check the name, the network and that HF_TOKEN may write there"):
        hub.push(tmp_path / "draft", REPO, yes=True)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    with pytest.raises(UserError, match="ConnectError.*check the name, the network"):
        hub.push(tmp_path / "draft", REPO, yes=True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set; unset it"):
        hub.push(tmp_path / "draft", REPO, yes=True)


def test_the_command_says_it_only(tmp_path):
    write(tmp_path / "draft")
    command = [sys.executable, "-m", "eagle3lib", "push", str(tmp_path / "draft"), REPO]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("nothing was sent; --yes sends it\n")


@pytest.mark.parametrize(
    ("spoil", "repo", "says"),
    [
        (lambda f: edit_weights(f, lambda t: t.pop("d2t")), REPO, "d2t: missing"),
        (lambda f: (f / "README.md").unlink(), REPO, "README.md: missing"),
        (lambda f: None, "a/b/c", "push: 'a/b/c': .*; give org/name"),
    ],
)
def test_what_is_not_whole_is_not_pushed(tmp_path, spoil, repo, says):
    write(tmp_path / "draft")
    spoil(tmp_path / "draft")
    with pytest.raises(UserError, match=says):
        hub.push(tmp_path / "draft", repo)
