"""A real SGLang server on a CPU: right values, and nothing lost when it dies, hangs, changes or is told to end.

`make test-engines`. Servers cost most of a minute each: tests share one where they can, in the order of this file.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
from pathlib import Path

import psutil
import pytest
import torch
from tiny import make_target

from eagle3lib import extraction, hidden_states, processes, targets
from eagle3lib.config import EngineConfig, StorageConfig
from eagle3lib.engines import File
from eagle3lib.engines.served import Api, ServedEngine
from eagle3lib.engines.sglang import lease
from eagle3lib.engines.sglang.client import SGLangEngine
from eagle3lib.engines.sglang.launch import Wanted
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError
from eagle3lib.hidden_states import StateKey, content_fault, load_sample, unpack
from eagle3lib.store import Store

ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("SGLANG_PYTHON", ROOT / ".venv-sglang/bin/python"))
AUX = (2, 4, 5)
# Chunks of 64 tokens: most samples come in several passes, and several in one.
ENGINE = {
    "name": "sglang",
    "python": str(PYTHON),
    "batch_tokens": 64,
    "environment": {"PYTHONPATH": str(Path(__file__).parent / "cpu_shims")},
    "server_args": ["--mem-fraction-static", "0.1", "--max-total-tokens", "4096"],
    "idle_seconds": 300,
    "grace_seconds": 20,
}

pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason=f"{PYTHON}: `make venv-sglang` makes it")


class World:
    """A small target and a results folder with, at most, one server."""

    def __init__(self, folder):
        self.folder = folder
        self.engine_folder = folder / "engine"
        self.target = make_target(folder / "target")
        self.info = targets.load_info(self.target, "f" * 64)
        self.reference = TransformersEngine(self.target)

    def open(self, role="extract", aux=AUX, **changes):
        engine = EngineConfig(**{**ENGINE, **changes})
        layers = aux if role == "extract" else ()
        wanted = Wanted.of(role, engine, self.info, 512, aux_layer_ids=layers, trust_remote_code=False)
        return SGLangEngine(self.engine_folder, self.folder / "logs", engine, wanted, self.info)

    def sequences(self, *lengths, seed=1):
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in lengths]

    def handle(self):
        return lease.read_handle(self.engine_folder)

    def server(self):
        return processes.session(self.handle()["keeper"])

    def scheduler(self):
        return next(p for p in self.server() if "sglang::sch" in p.name())


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    world = World(tmp_path_factory.mktemp("world"))
    yield world
    lease.release(world.engine_folder, 20)


@pytest.fixture
def engine(world):
    engine = world.open()
    yield engine
    engine.close()


def assert_right(world, ids, states, tolerance=1e-4):
    expected = world.reference.reference(ids)
    for mine, true in zip([*states.aux, states.last], [*(expected[k] for k in AUX), expected[-1]], strict=True):
        assert (mine - true).abs().max() <= tolerance


def files(world, sequences, folder, **more):
    folder.mkdir(exist_ok=True)
    return [File(ids, folder / f"{i}.part", None, **more) for i, ids in enumerate(sequences)]


def test_states_are_those_of_transformers(world, engine):
    sequences = world.sequences(300, 5, 64, 65, 128, 1, 200, 63)
    for ids, states in zip(sequences, engine.extract(sequences, AUX), strict=True):
        assert_right(world, ids, states)


def test_probe_passes_and_a_shard_is_extracted(world, engine, tmp_path):
    """The same samples as from the transformers engine, found by the next job, probed once."""
    rows = [
        {"sample_id": hidden_states.sample_id(ids), "input_ids": ids, "reply_bounds": [1, len(ids)], "origin": {}}
        for ids in world.sequences(30, 5, 90, 64, 7)
    ]
    shard = tmp_path / "00000.jsonl"
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def extract(name, storage_format, open_engine):
        key = StateKey("f" * 64, AUX, name, "float32", storage_format)
        outputs = [tmp_path / key.short / f"{slot:04d}.pt" for slot in range(len(rows))]
        manifest = tmp_path / key.short / "manifest.json"
        store = Store(tmp_path / "store", key)
        storage = StorageConfig(reserve_bytes=0)
        counts = extraction.extract_shard(
            shard, outputs, manifest, store, open_engine, "code", world.info, storage, "t/d"
        )
        return outputs, counts, store

    theirs, *_ = extract("transformers", "bf16", lambda: world.reference)
    # trimmed first: from bf16 it would be converted, without asking the server
    for storage_format, limit in (("fp8-trimmed", 0.05), ("bf16", 2**-8)):
        mine, counts, store = extract("sglang", storage_format, lambda: engine)
        assert counts == {"found": 0, "converted": 0, "computed": 5}
        for a, b in zip(mine, theirs, strict=True):
            assert content_fault(load_sample(a)) is None
            for x, y in zip(unpack(load_sample(a)), unpack(load_sample(b)), strict=True):
                kept = x.abs().sum(-1) > 0  # trimmed rows are zeros
                assert (x - y).float()[kept].norm() <= limit * y.float()[kept].norm()
        assert not list(store.folder.rglob("*.part"))
    probes = [json.loads(path.read_text()) for path in store.folder.glob("probe-sglang-0.5.23.json")]
    assert len(probes) == 1 and probes[0]["greedy_tokens"]["rows"] > 32
    assert max(probes[0]["against_transformers"].values()) < 1e-4
    _, counts, _ = extract("sglang", "bf16", None)
    assert counts["found"] == 5


def test_error_of_the_disk_reaches_the_job(world, engine, tmp_path):
    one = File(world.sequences(5)[0], tmp_path / "absent" / "1.part", "bf16")
    with pytest.raises(FileNotFoundError, match="absent"):
        list(engine.write([one]))


def test_key_is_required(world, engine):
    for key in ("", "another"):
        with pytest.raises(urllib.error.HTTPError, match="401"):
            lease.post({**world.handle(), "key": key}, "/generate", {"input_ids": [3]}, 30)
    assert world.handle()["key"] not in Path(world.handle()["log"]).read_text().splitlines()[0]
    for name in ("spec.json", "server.json"):
        assert (world.engine_folder / name).stat().st_mode & 0o077 == 0


def test_jobs_share_the_server(world, engine):
    other = world.open()
    assert other.lease.handle["id"] == engine.lease.handle["id"]
    other.close()


def test_server_of_the_user_is_used_and_left_alone(world, engine, monkeypatch):
    handle = world.handle()
    with pytest.raises(UserError, match="put its --api-key into the environment variable EAGLE3LIB_ENGINE_KEY"):
        world.open(url=handle["url"])
    monkeypatch.setenv("EAGLE3LIB_ENGINE_KEY", handle["key"])
    attached = world.open(url=handle["url"])
    (ids,) = world.sequences(40, seed=5)
    assert_right(world, ids, attached.extract([ids], AUX)[0])
    other_layers = world.open(url=handle["url"], aux=(1, 2, 3))
    with pytest.raises(UserError, match=r"aux_layer_ids \[2, 4, 5\], the config asks for \[1, 2, 3\]"):
        other_layers.extract([ids], (1, 2, 3))
    attached.close()
    assert processes.alive(handle["keeper"])
    with pytest.raises(UserError, match=r"nothing answers at http://127\.0\.0\.1:9 .* engine-command"):
        world.open(url="http://127.0.0.1:9")


def test_crash_in_the_middle_of_a_shard(world, engine, tmp_path):
    """SIGKILL to the scheduler: a new server goes on, every sample is there and right."""
    sequences = world.sequences(*[20 + i for i in range(60)], seed=2)
    first = world.handle()

    def killing():
        for i, file in enumerate(files(world, sequences, tmp_path)):
            if i == 40:
                world.scheduler().kill()
            yield file

    done = {file.part: answer for file, answer in engine.write(killing())}
    assert len(done) == 60
    assert world.handle()["id"] != first["id"] and not processes.session(first["keeper"])
    for i in (0, 39, 40, 59):
        stored = torch.load(tmp_path / f"{i}.part", weights_only=True)["states"]
        expected = world.reference.reference(sequences[i])
        assert (stored[-1] - expected[-1]).abs().max() <= 1e-4


@pytest.mark.long
def test_hung_server_is_replaced(world, tmp_path):
    """SIGSTOP to the scheduler: it holds its port and says nothing."""
    engine = world.open(request_seconds=20)
    first = world.handle()
    world.scheduler().suspend()
    (ids,) = world.sequences(50, seed=3)
    assert_right(world, ids, engine.extract([ids], AUX)[0])
    assert world.handle()["id"] != first["id"] and not processes.session(first["keeper"])
    engine.close()


def test_told_to_end_it_loses_nothing(world, engine, tmp_path):
    """SIGTERM while thirty requests run: all are answered, all files whole. Then it does not start again by itself."""
    engine.engine = engine.lease.engine = engine.engine.model_copy(update={"restarts": 0, "requests_in_flight": 30})
    sequences = world.sequences(*[300] * 30, seed=4)
    accepted = threading.Event()

    def end_it():
        accepted.wait(60)
        os.kill(world.handle()["keeper"]["pid"], signal.SIGTERM)

    threading.Thread(target=end_it).start()
    answers = {}
    for file, answer in engine.write(files(world, sequences, tmp_path)):
        accepted.set()  # one is done, the others are in the server
        answers[file.part] = answer
    assert len(answers) == 30
    for part, answer in answers.items():
        assert part.stat().st_size == answer["bytes"]
    assert processes.wait_until(lambda: not world.server(), 30)
    with pytest.raises(UserError, match=r"the SGLang server failed 1 times .* which ends:\n"):
        engine.extract(sequences[:1], AUX)


@pytest.mark.long
def test_generation_in_a_role_of_its_own(world):
    engine = world.open("generate")
    prompts = world.sequences(9, 30, 17, seed=6)
    assert engine.greedy(prompts, 12) == world.reference.greedy(prompts, 12)
    end_of_turn = engine.greedy(prompts[:1], 3)[0][2]
    ((_, stopped, reason),) = engine.generate([(0, prompts[0], 0)], 40, eos_ids=[end_of_turn])
    assert (len(stopped), reason) == (3, "stop")  # the end-of-turn token counts as reply
    sampled = {key: ids for key, ids, _ in engine.generate([(i, p, i) for i, p in enumerate(prompts)], 8, 1.0)}
    assert set(sampled) == {0, 1, 2} and all(len(ids) <= 8 for ids in sampled.values())
    engine.close()
    # as by a kill -9 of every process of ours: a stale handle is left, and perhaps an orphan
    psutil.Process(world.handle()["keeper"]["pid"]).kill()


@pytest.mark.long
def test_a_server_that_is_not_ours_answers_prompts_with_token_ids(world, tmp_path):
    """Started as its users start it; asked through its OpenAI-compatible side (`regenerate.url`)."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(world.target), "--port", str(port)]
    command += ["--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--disable-cuda-graph"]
    environment = {**os.environ, **ENGINE["environment"], "SGLANG_USE_CPU_ENGINE": "1"}
    with open(tmp_path / "log", "w") as log:
        server = subprocess.Popen(
            [*command, *ENGINE["server_args"]], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        assert processes.wait_until(lambda: server.poll() is not None or answers(url), 600)
        served = ServedEngine(url, world.info)
        prompts = world.sequences(9, 30, 17, seed=6)
        numbered = [(i, ids, i) for i, ids in enumerate(prompts)]
        replies = {i: (ids, finish) for i, ids, finish in served.generate(numbered, 12)}
        expected = world.reference.greedy(prompts, 12)
        ends = ["stop" if ids[-1] in world.info.eos_token_ids else "length" for ids in expected]
        assert [replies[i] for i in range(3)] == list(zip(expected, ends, strict=True))
        end_of_turn = expected[0][2]
        ((_, stopped, finish),) = served.generate(numbered[:1], 40, eos_ids=[end_of_turn])
        assert (stopped, finish) == (expected[0][:3], "stop")  # the end-of-turn token counts as reply
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def answers(url):
    try:
        return bool(Api(url).model)
    except UserError:
        return False


@pytest.mark.long
def test_orphan_is_ended_and_two_ranks_give_the_same_states(world):
    """The next run in another role finds the orphan by its handle. Tensor-parallel: only rank 0 writes, once."""
    orphan = world.handle()["keeper"]
    arguments = [*ENGINE["server_args"], "--tp-size", "2"]
    environment = {**ENGINE["environment"], "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    engine = world.open(server_args=arguments, environment=environment, idle_seconds=3)
    assert not processes.session(orphan)
    sequences = world.sequences(100, 5, 33, seed=7)
    for ids, states in zip(sequences, engine.extract(sequences, AUX), strict=True):
        assert_right(world, ids, states)
    server = world.handle()["keeper"]
    engine.close()
    # nobody uses it any more
    assert processes.wait_until(lambda: not lease.running(world.engine_folder), 60)
    assert not processes.session(server)


@pytest.mark.long
def test_server_without_the_plugin_is_refused(world):
    with pytest.raises(UserError, match="runs without our plugin"):
        world.open(environment={**ENGINE["environment"], "SGLANG_PLUGINS": "none"})
    assert lease.read_handle(world.engine_folder) is None


def test_nothing_is_left(world):
    assert lease.release(world.engine_folder, 20) == []
    assert not [p for p in psutil.process_iter() if str(world.folder) in " ".join(_command(p))]


def _command(process):
    try:
        return process.cmdline()
    except psutil.Error:
        return []


# --- without a server ------------------------------------------------------------------------------------


def test_port_that_is_taken_is_named(world):
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UserError, match=rf"engine\.port: {port} cannot be had .*held by pid {os.getpid()} "):
            world.open(port=port)


def test_environment_without_sglang_is_refused(world):
    with pytest.raises(UserError, match=r"SGLang none is not one that we have tested \(0\.5\.23\)"):
        world.open(python=sys.executable)
    with pytest.raises(UserError, match=r"engine\.python: /nowhere/python does not exist; `make venv-sglang`"):
        world.open(python="/nowhere/python")
