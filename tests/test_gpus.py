"""Who holds the GPUs, and who of us may: the real pynvml on a library that says what each test tells it to."""

import getpass
import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest
from nvml_stub import Refused, answer, give_back

from eagle3lib import gpus, processes
from eagle3lib.config import GpusConfig
from eagle3lib.errors import UserError
from eagle3lib.job import started

GONE = 2**22 + 1  # above any pid_max


@pytest.fixture
def stranger():
    """A process that is not ours."""
    process = subprocess.Popen(["sleep", "600"])
    yield process.pid
    process.kill()
    process.wait()


@pytest.fixture
def begin(nvml):
    """begin(what, …): as `nvml.ask`, in a process of its own and not waited for."""
    begun = []

    def start(*question, **options):
        begun.append(nvml.start())
        nvml.put(begun[-1], *question, **options)
        return begun[-1]

    yield start
    for process in begun:
        process.kill()
        process.communicate()


def handles(nvml):
    """Handle files, once the last lease of `nvml.ask` has been given back."""
    nvml.ask("survey")
    return sorted((nvml.folder / "store" / "gpus" / socket.gethostname()).glob("*.json"))


# --- free or not -------------------------------------------------------------------------------------------------


def test_a_survey_names_what_there_is(nvml, stranger):
    nvml.say([{}, {"used": 500, "mig": 1, "processes": [(stranger, 400)]}, {"rc": 15}])
    seen = nvml.ask("survey")
    assert (seen["nvml"], seen["driver"]) == ("ok", "999.99")
    free, split, lost = seen["devices"]
    assert free == {
        "index": 0, "uuid": "GPU-0", "name": "Stub GPU", "capability": [9, 0], "used_mib": 10,
        "total_mib": 96000, "mig": False, "processes": [],
    }  # fmt: skip
    assert split["mig"] and split["used_mib"] == 500
    about = {"pid": stranger, "user": getpass.getuser(), "command": "sleep 600", "unit": None, "stop": None}
    assert split["processes"] == [about | {"used_mib": 400}]
    assert lost == {"index": 2, "error": "GPU is lost"}


def test_free_devices_are_proved_and_recorded(nvml, stranger):
    nvml.say([{}, {"used": 50000, "processes": [(stranger, 50000)]}, {}])
    record = nvml.ask("release", 2)
    assert (record["gpus"], record["free"]) == (2, ["GPU-0", "GPU-2"])
    assert [d["state"] for d in record["devices"]] == ["free", "foreign", "free"]


def test_a_stranger_is_named_and_left_alone(nvml, stranger):
    nvml.say([{}, {"used": 90000, "processes": [(stranger, 89000)]}])
    with pytest.raises(Refused) as refused:
        nvml.ask("release", 2)
    assert str(refused.value) == (
        f"training.gpus: 1 of 2 GPUs are free, 2 needed, after 0 s; GPU 1: pid {stranger} (sleep 600; user "
        f"{getpass.getuser()}, 89000 MiB), 90000 MiB used in all. have {getpass.getuser()} end pid {stranger}; then "
        "run the same command again"
    )
    os.kill(stranger, 0)


def test_a_service_is_stopped_by_its_unit():
    process = {"pid": 7, "user": "ollama", "command": "ollama serve", "used_mib": 9, "ours": False}
    process |= gpus.unit_of("0::/system.slice/ollama.service\n")
    device = {"index": 1, "uuid": "GPU-1", "used_mib": 10, "total_mib": 99, "mig": False, "processes": [process]}
    seen = {"mask": None, "leases": [], "devices": [{**device, "state": "foreign"}]}
    message = gpus.busy(seen, gpus.Need(1, "training.gpus"), 5)
    assert "pid 7 (ollama serve; user ollama, unit ollama.service, 9 MiB)" in message
    assert "`sudo systemctl stop ollama.service`" in message


@pytest.mark.parametrize(
    ("cgroups", "unit", "stop"),
    [
        ("0::/system.slice/ollama.service\n", "ollama.service", "sudo systemctl stop ollama.service"),
        ("9:name=systemd:/system.slice/a.service\n1:cpu:/\n0::/\n", "a.service", "sudo systemctl stop a.service"),
        (
            "0::/user.slice/user-7.slice/user@7.service/app.slice/b.service\n",
            "b.service",
            "systemctl --user stop b.service",
        ),
        ("0::/user.slice/user-7.slice/user@7.service/init.scope\n", None, None),
        ("0::/user.slice/user-7.slice/session-3.scope\n", None, None),
        ("0::/\n", None, None),
    ],
)
def test_the_unit_of_a_process(cgroups, unit, stop):
    assert gpus.unit_of(cgroups) == ({"unit": unit, "stop": stop} if unit else {})


def test_a_stranger_may_be_waited_for(nvml, stranger, begin):
    busy, free = [{"used": 90000, "processes": [(stranger, 90000)]}], [{}]
    nvml.say(busy)
    waiting = begin("release", 1, wait_seconds=100, foreign="wait")
    time.sleep(gpus.GRACE_SECONDS + 1)  # with `fail` it would be over now
    nvml.say(free)
    assert answer(waiting)["free"] == ["GPU-0"]


def test_a_stranger_is_not_waited_for_otherwise(nvml, stranger):
    nvml.say([{"used": 90000, "processes": [(stranger, 90000)]}])
    with pytest.raises(Refused, match="after 5 s"):
        nvml.ask("release", 1, wait_seconds=1000)


def test_a_stranger_is_ignored_where_it_leaves_room(nvml, stranger):
    nvml.say([{"used": 90000, "processes": [(stranger, 90000)]}])
    assert nvml.ask("release", 1, foreign="ignore", bytes_each=6000 * gpus.MIB)["free"] == ["GPU-0"]
    with pytest.raises(Refused, match="0 of 1 GPUs are free"):
        nvml.ask("release", 1, foreign="ignore", bytes_each=6001 * gpus.MIB)


def test_memory_that_lingers_is_waited_for(nvml, begin):
    nvml.say([{"used": 50000, "processes": [(GONE, 50000)]}])
    waiting = begin("release", 1, wait_seconds=100)
    time.sleep(1)
    nvml.say([{"used": 50000}])  # the process is gone from NVML, too; its memory is not
    time.sleep(1)
    assert waiting.poll() is None
    nvml.say([{"used": 999}])
    record = answer(waiting)
    assert record["free"] == ["GPU-0"] and record["waited_seconds"] > 0


def test_a_zombie_has_ended(nvml):
    """Killed, and its parent has not heard yet: a driver may list it for a while."""
    process = subprocess.Popen(["sleep", "600"])
    process.kill()
    while started(process.pid):
        time.sleep(0.01)
    nvml.say([{"used": 50000, "processes": [(process.pid, 50000)]}])
    with pytest.raises(Refused, match=f"pid {process.pid} .it has ended"):
        nvml.ask("release", 1)
    process.wait()


def test_memory_that_stays_is_told(nvml):
    nvml.say([{"used": 1000}, {"used": 20, "processes": [(GONE, 10)]}])
    with pytest.raises(Refused) as refused:
        nvml.ask("release", 1)
    assert "GPU 0: no process, 1000 MiB used in all" in str(refused.value)
    assert f"GPU 1: pid {GONE} (it has ended, or is of another container or user, 10 MiB)" in str(refused.value)
    assert "`sudo fuser -v /dev/nvidia0`" in str(refused.value)


def test_a_driver_that_is_missing(nvml):
    nvml.say([{}], driver=9)
    record = nvml.ask("release", 0)
    assert record["nvml"] == "not available: Driver Not Loaded" and record["devices"] == []
    with pytest.raises(
        Refused, match=r"training.gpus: 2 GPUs needed, but NVML is not available: Driver Not Loaded; .*"
    ):
        nvml.ask("release", 2)
    with pytest.raises(Refused, match="Driver Not Loaded"):
        nvml.ask("lease", 2)


def test_a_library_that_is_missing(nvml, tmp_path):
    (tmp_path / "libnvidia-ml.so.1").touch()  # hides one that the machine may have
    process = nvml.start(LD_LIBRARY_PATH=str(tmp_path))
    nvml.put(process, "release", 0)
    assert answer(process)["nvml"] == "not available: NVML Shared Library Not Found"
    nvml.put(process, "release", 1)
    with pytest.raises(Refused, match="NVML Shared Library Not Found.*`nvidia-smi` must work"):
        answer(process)
    process.communicate()


def test_a_gpu_that_is_lost(nvml):
    nvml.say([{"rc": 15}, {}])
    assert nvml.ask("release", 1)["free"] == ["GPU-1"]
    with pytest.raises(Refused, match="1 of 2 GPUs are free.*GPU 0: GPU is lost. `dmesg | grep Xid`.*reboot"):
        nvml.ask("release", 2)


def test_a_gpu_that_is_split(nvml):
    nvml.say([{}, {"mig": 1}])
    with pytest.raises(Refused, match="GPU 1: split into parts.*`sudo nvidia-smi -i 1 -mig 0`"):
        nvml.ask("release", 2)


def test_more_than_there_are(nvml):
    nvml.say([{}])
    with pytest.raises(Refused, match="1 of 1 GPUs are free, 2 needed, after 0 s. lower training.gpus;"):
        nvml.ask("release", 2)


# --- leases ------------------------------------------------------------------------------------------------------


def test_two_trainings_at_the_same_time_get_four_each(nvml, begin):
    nvml.say([{}] * 8)
    jobs = [begin("lease", 4), begin("lease", 4)]
    got = [answer(job) for job in jobs]
    assert sorted(got[0]["uuids"] + got[1]["uuids"]) == [f"GPU-{n}" for n in range(8)]
    for one in got:
        assert one["child"] == ",".join(one["uuids"])  # what a child's CUDA would see
    for job in jobs:
        job.communicate()  # the end of stdin gives back, too
    assert handles(nvml) == []


def test_no_device_is_given_twice(nvml, begin):
    """Four that ask at the same moment, five times."""
    nvml.say([{}] * 4)
    jobs = [begin("survey") for _ in range(4)]
    for job in jobs:
        answer(job)  # it has started
    for _ in range(5):
        for job in jobs:
            nvml.put(job, "lease", 1)
        assert sorted(answer(job)["uuids"][0] for job in jobs) == ["GPU-0", "GPU-1", "GPU-2", "GPU-3"]
        for job in jobs:
            give_back(job)
            nvml.put(job, "survey")
            answer(job)  # it has been given back


def test_ours_is_busy_not_foreign(nvml, begin):
    """The holder's own process, and what it started, on two devices; a third one leased, nothing on it yet."""
    nvml.say([{}, {}, {}, {}])
    holder = begin("lease", 3)
    answer(holder)
    nvml.say([{"used": 50000, "processes": [(holder.pid, 50000)]}, {}, {}, {}])
    record = nvml.ask("release", 4)  # all four can be had, in time
    assert [d["state"] for d in record["devices"]] == ["ours", "ours", "ours", "free"]
    with pytest.raises(
        Refused, match=rf"ours, 50000 MiB\), leased by pid {holder.pid} \(a test\).*wait until that job"
    ):
        nvml.ask("lease", 2)


def test_a_lease_waits_for_one_that_ends(nvml, begin):
    nvml.say([{}, {}])
    first = begin("lease", 2)
    answer(first)
    second = begin("lease", 1, wait_seconds=100)
    time.sleep(1)
    assert second.poll() is None
    give_back(first)
    assert answer(second)["uuids"] == ["GPU-0"]


def test_a_worker_that_outlives_its_training_is_ours(nvml, begin):
    """`kill -9` of a training: a rank that still writes its checkpoint is waited for."""
    nvml.say([{}])
    holder = begin("lease", 1)
    environment = nvml.environment | {"EAGLE3LIB_GPU_LEASES": str(nvml.folder / "store/gpus" / socket.gethostname())}
    worker = subprocess.Popen(["sleep", "600"], env=environment)
    answer(holder)
    nvml.say([{"used": 5000, "processes": [(worker.pid, 5000)]}])
    holder.kill()
    holder.wait()
    assert nvml.ask("release", 1)["devices"][0]["state"] == "ours"
    with pytest.raises(Refused, match=rf"pid {worker.pid} \(sleep 600; ours, 5000 MiB\)"):
        nvml.ask("lease", 1)
    worker.kill()
    worker.wait()
    with pytest.raises(Refused, match=f"pid {worker.pid} .it has ended"):
        nvml.ask("release", 1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_lease_ends_with_its_process_however_that_ends(nvml, begin, number):
    nvml.say([{}])
    holder = begin("lease", 1)
    answer(holder)
    holder.send_signal(number)
    holder.wait(60)
    assert nvml.ask("release", 1)["free"] == ["GPU-0"]
    assert handles(nvml) == []


@pytest.mark.parametrize("other", [{"pid": GONE}, {"started": "1"}, {"boot_id": "an earlier one"}], ids=str)
def test_stale_handles_are_swept(nvml, other):
    """A pid that is gone, one that is somebody else's by now, one of before the reboot."""
    nvml.say([{}, {}])
    handle = {**processes.identity(os.getpid()), "uuids": ["GPU-1"], "purpose": "of old"}
    path = nvml.folder / "store" / "gpus" / socket.gethostname() / "GPU-1.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(handle))
    with pytest.raises(Refused, match="leased by pid .* \\(of old\\)"):
        nvml.ask("lease", 2)
    path.write_text(json.dumps(handle | other))
    assert nvml.ask("lease", 1)["uuids"] == ["GPU-0"]
    assert handles(nvml) == []


def test_without_need_nothing_is_taken(nvml):
    nvml.say([], driver=9)
    assert nvml.ask("lease", 0) == {"uuids": [], "child": ""}
    assert nvml.ask("lease", 0, mask="3") == {"uuids": [], "child": "3"}
    assert not (nvml.folder / "store").exists()


# --- masks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", ["2,3", "GPU-2,GPU-3", " 3 , GPU-2", "2,3,-1,0"])
def test_a_mask_is_respected(nvml, stranger, mask):
    """Slurm's or the user's: devices outside are not looked at, and never used."""
    nvml.say([{"used": 90000, "processes": [(stranger, 90000)]}, {}, {}, {}])
    assert sorted(nvml.ask("lease", 2, mask=mask)["uuids"]) == ["GPU-2", "GPU-3"]
    with pytest.raises(Refused, match=f"2 of 2 GPUs that CUDA_VISIBLE_DEVICES={mask} leaves are free, 3 needed"):
        nvml.ask("lease", 3, mask=mask)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("7", "CUDA_VISIBLE_DEVICES: '7' names 0 GPUs of this machine"),
        ("GPU-", "CUDA_VISIBLE_DEVICES: 'GPU-' names 2 GPUs of this machine"),
        ("MIG-GPU-0/1/0", "is a part of a GPU"),
        ("", "0 of 0 GPUs that CUDA_VISIBLE_DEVICES= leaves are free"),
    ],
)
def test_a_mask_that_leaves_nothing_is_told(nvml, mask, message):
    nvml.say([{}, {}])
    with pytest.raises(Refused, match=message):
        nvml.ask("lease", 1, mask=mask)


def test_fewer_gpus_than_asked_for_stops_and_says_so():
    with pytest.raises(UserError, match=r"training.gpus: 8 GPUs wanted, 4 granted.*--resources gpu=8"):
        gpus.check_granted(4, 8, "training.gpus")
    gpus.check_granted(8, 8, "training.gpus")
    gpus.check_granted(0, 0, "training.gpus")


def test_the_last_line_of_a_run(nvml, stranger):
    nvml.say([{"used": 12, "processes": [(stranger, 2)]}, {"rc": 15}])
    command = [sys.executable, "-c", "from eagle3lib import gpus; print(gpus.summary())"]
    done = subprocess.run(command, env=nvml.environment, capture_output=True, text=True, check=True)
    assert done.stdout == "0: 12 MiB, 1 processes, 1: GPU is lost\n"


def test_a_device_is_free_below_the_configured_memory_only():
    device = {"index": 0, "uuid": "GPU-0", "used_mib": 1024, "total_mib": 9000, "mig": False, "processes": []}
    assert gpus.state(device, [], GpusConfig(free_below_mib=1025), 0) == "free"
    assert gpus.state(device, [], GpusConfig(free_below_mib=1024), 0) == "lingering"
    assert gpus.state(device, ["GPU-0"], GpusConfig(free_below_mib=1025), 0) == "ours"
