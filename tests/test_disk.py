"""Room on the volume: plans are refused with the numbers, writers stop before the reserve."""

import pytest

from eagle3lib import disk
from eagle3lib.config import StorageConfig
from eagle3lib.errors import UserError

PLAN = {"bytes_to_come": 1000, "bytes_stored": 500, "bytes_free": 1600}


def test_plan_that_fits_passes():
    disk.check_plan(PLAN, StorageConfig(reserve_bytes=600, limit_bytes=1500))


def test_plan_into_the_reserve_is_refused_with_what_to_free():
    with pytest.raises(UserError, match="no disk: 1,000 bytes .* 1,600 free .*601.* free 1 bytes"):
        disk.check_plan(PLAN, StorageConfig(reserve_bytes=601))


def test_limit_is_held_against_all_that_the_store_holds():
    with pytest.raises(UserError, match="no disk: 1,500 bytes of hidden states in all .* allows 1,499"):
        disk.check_plan(PLAN, StorageConfig(reserve_bytes=0, limit_bytes=1499))


def test_free_command_is_believed_over_statvfs(tmp_path):
    asked = disk.Disk(tmp_path, StorageConfig(reserve_bytes=100, free_command="echo 1100"))
    assert asked.free() == 1100
    asked.check_room(600)
    with pytest.raises(UserError, match="no disk: 600 bytes to be written next, 500 free"):
        asked.check_room(600)  # what was written since the answer is taken off it


def test_statvfs_is_believed_when_it_says_less(tmp_path):
    assert disk.Disk(tmp_path, StorageConfig(free_command="echo 99999999999999999")).free() < 99999999999999999


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("echo much", "must print one number.*code 0 and 'much'"),
        ("echo none >&2; exit 3", "code 3 and 'none'"),
    ],
)
def test_wrong_free_command_is_named(command, message):
    with pytest.raises(UserError, match=f"storage.free_command: .*{message}"):
        disk.ask_free_bytes(command)


def test_hung_free_command_does_not_hang_the_run(monkeypatch):
    monkeypatch.setattr(disk, "COMMAND_SECONDS", 0.1)
    with pytest.raises(UserError, match="no answer within"):
        disk.ask_free_bytes("sleep 60")


def test_vanished_folder_is_said_so(tmp_path):
    with pytest.raises(UserError, match="gone while it was in use"):
        disk.Disk(tmp_path / "nowhere", StorageConfig()).free()


def test_stalling_volume_ends_the_job(tmp_path):
    one = disk.Disk(tmp_path, StorageConfig(max_fsync_seconds=5))
    one.check_fsync(4.9)
    with pytest.raises(UserError, match="fsync took 6 s, storage.max_fsync_seconds is 5"):
        one.check_fsync(6.1)


def test_table_tells_where_the_free_bytes_come_from():
    plan = {
        "samples": 3,
        "tokens": 9,
        "bytes_all": 2**41,
        "samples_to_come": 1,
        "bytes_other_keys": 7,
        "bytes_doubled": 0,
        **PLAN,
    }
    text = disk.table(plan, StorageConfig(free_command="ceph df"))
    assert "free (storage.free_command)" in text and "(2.00 TiB)" in text
