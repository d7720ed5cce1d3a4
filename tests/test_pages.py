"""The report's page about the GPUs says who held what."""

from eagle3lib import pages

H200 = {"name": "H200", "total_mib": 143771, "mig": False}
STRANGER = {"pid": 17, "user": "eve", "command": "python <train>", "unit": "vllm.service", "used_mib": 69000}
RECORD = {
    "gpus": 2,
    "setting": "training.gpus",
    "bytes_each": 3 * 2**30,
    "free": ["GPU-1"],
    "waited_seconds": 2.5,
    "stopped": [],
    "nvml": "ok",
    "driver": "580.1",
    "mask": None,
    "leases": [],
    "devices": [
        {**H200, "index": 0, "uuid": "GPU-0", "used_mib": 70000, "state": "foreign", "processes": [STRANGER]},
        {**H200, "index": 1, "uuid": "GPU-1", "used_mib": 4, "state": "free", "processes": []},
        {"index": 2, "error": "GPU is lost", "state": "lost"},
    ],
}


def test_devices_and_their_holders():
    page = pages.gpu_release(RECORD)
    for text in ("2 (training.gpus), 3.0 GiB on each", "GPU-1", "2.5 s", "70,000", "143,771", "GPU is lost"):
        assert text in page
    assert "pid 17 (python &lt;train&gt;; user eve, unit vllm.service, 69000 MiB)" in page
    assert "no engine of ours was left" in page


def test_a_machine_without_gpus():
    without = {"gpus": 0, "free": [], "devices": [], "nvml": "not available: no driver", "driver": None}
    page = pages.gpu_release({**RECORD, **without})
    assert "not available: no driver" in page and "Devices" not in page and ">driver</th>" not in page
