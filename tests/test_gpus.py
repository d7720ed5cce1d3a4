"""Without a driver the release is recorded; the decisions are tested on what NVML would say."""

import pytest

from eagle3lib import gpus
from eagle3lib.config import GpusConfig
from eagle3lib.errors import UserError

CFG = GpusConfig(free_below_mib=1000, wait_seconds=0)


def device(index=0, used=10, processes=()):
    return {"index": index, "uuid": f"GPU-{index}", "used_mib": used, "total_mib": 96000, "processes": list(processes)}


def seen(*devices):
    return lambda: {"nvml": "ok", "devices": list(devices)}


def test_machine_without_nvml_is_recorded_and_goes_on():
    record = gpus.release(0, CFG)
    assert record["nvml"] == "ok" or record["nvml"].startswith("not available")


def test_free_devices_are_named(monkeypatch):
    monkeypatch.setattr(gpus, "survey", seen(device(0), device(1, used=50000)))
    assert gpus.release(1, CFG)["free"] == ["GPU-0"]


def test_a_stranger_is_named_with_pid_command_and_memory(monkeypatch):
    stranger = {"pid": 4711, "command": "ollama serve", "used_mib": 90000}
    monkeypatch.setattr(gpus, "survey", seen(device(0), device(1, 90000, [stranger])))
    with pytest.raises(UserError, match=r"1 of 2 GPUs are free, 2 needed.*GPU 1: pid 4711 \(ollama serve\), 90000 MiB"):
        gpus.release(2, CFG)


def test_memory_that_lingers_is_waited_for(monkeypatch):
    surveys = iter([seen(device(0, 50000))(), seen(device(0, 50000))(), seen(device(0, 5))()])
    monkeypatch.setattr(gpus, "survey", lambda: next(surveys))
    monkeypatch.setattr(gpus.time, "sleep", lambda _: None)
    record = gpus.release(1, GpusConfig(free_below_mib=1000, wait_seconds=60))
    assert record["free"] == ["GPU-0"]


def test_a_context_without_memory_still_holds_the_device(monkeypatch):
    monkeypatch.setattr(gpus, "survey", seen(device(0, 5, [{"pid": 1, "command": "x", "used_mib": 5}])))
    with pytest.raises(UserError, match="0 of 1"):
        gpus.release(1, CFG)


def test_fewer_gpus_than_asked_for_stops_and_says_so():
    with pytest.raises(UserError, match=r"training.gpus: 8 GPUs wanted, 4 granted.*--resources gpu=8"):
        gpus.check_granted(4, 8, "training.gpus")
    gpus.check_granted(8, 8, "training.gpus")
    gpus.check_granted(0, 0, "training.gpus")
