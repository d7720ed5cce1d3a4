"""Names of stored files: hard links, reflinks or symbolic links as the filesystems allow; mended after a plain copy;
stores of other projects are linked to and never changed."""

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eagle3lib import hidden_states, links, store, verification
from eagle3lib.config import StorageConfig
from eagle3lib.errors import UserError
from eagle3lib.extraction import _share
from eagle3lib.hidden_states import StateKey
from eagle3lib.job import file_lock, write_json
from eagle3lib.shards import Sample
from eagle3lib.store import Store, link, set_aside, shared_stores

KEY = StateKey("fingerprint", (2, 4, 5), "transformers", "float32", "bf16")
OTHER_UID = 54321
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def content(ids):
    generator = torch.Generator().manual_seed(sum(ids))
    states = [torch.randn(len(ids), 8, generator=generator) for _ in range(4)]
    return hidden_states.pack_sample(KEY, ids, [1, len(ids)], states, "5.19.0", "code")


def project(folder: Path, n: int = 3) -> tuple[Store, list[Path], list[dict]]:
    """results/ with `n` samples, linked in one dataset: the store, the names, the records."""
    one = Store(folder / "results/store", KEY)
    one.prepare()
    records = [one.publish(content([5, 6, 7, 8 + number])) for number in range(n)]
    shard = folder / f"results/t/d/{KEY.short}/hidden_states/00000"
    names = [shard / f"{slot:04d}.pt" for slot in range(n)]
    for record, name in zip(records, names, strict=True):
        link(one.path(record["sample_id"]), name)
    rows = [
        {"slot": slot, "n_tokens": 4, **{k: r[k] for k in ("sample_id", "bytes", "sha256")}}
        for slot, r in enumerate(records)
    ]
    write_json(shard / "manifest.json", {"key": KEY.short, "samples": rows})
    return one, names, records


@pytest.fixture
def other_disk(tmp_path):
    """A second filesystem."""
    folder = tmp_path / "other"
    folder.mkdir()
    if (
        os.geteuid()
        or subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], check=False).returncode
    ):
        pytest.skip("mounting is refused here")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def copied(source: Path, to: Path) -> Path:
    """As `cp -r`, `rsync -a` or an object store do: every name a file of its own."""
    shutil.copytree(source, to)
    return to


# --- one name more ------------------------------------------------------------------------------------


def test_name_on_another_filesystem_is_a_symbolic_link(tmp_path, other_disk):
    source = tmp_path / "a.pt"
    source.write_text("states")
    link(source, other_disk / "deep/0000.pt")
    link(source, other_disk / "deep/0000.pt")
    assert os.readlink(other_disk / "deep/0000.pt") == str(source) and not list(other_disk.rglob("*.part"))


@pytest.mark.parametrize("number", [errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP])
def test_refused_hard_link_becomes_another_kind_of_link(tmp_path, monkeypatch, number):
    source, name = tmp_path / "a.pt", tmp_path / "b.pt"
    source.write_text("states")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(number, "refused")))
    link(source, name)
    assert name.read_text() == "states" and not list(tmp_path.glob("*.part"))


def test_filesystem_without_any_links_is_one_line(tmp_path, monkeypatch):
    source = tmp_path / "a.pt"
    source.write_text("states")
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "Operation not permitted")))
    monkeypatch.setattr(store, "_reflink", lambda *_: (_ for _ in ()).throw(OSError(errno.EOPNOTSUPP, "no")))
    monkeypatch.setattr(Path, "symlink_to", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "not permitted")))
    with pytest.raises(
        UserError, match=r"b.pt: cannot be a hard link to .*a.pt \(Operation not permitted\), nor a reflink"
    ):
        link(source, tmp_path / "b.pt")


@needs_root
def test_reflink_shares_blocks_where_hard_links_are_refused(tmp_path, monkeypatch):
    if not shutil.which("mkfs.btrfs"):
        pytest.skip("no mkfs.btrfs")
    image, mounted = tmp_path / "image", tmp_path / "btrfs"
    mounted.mkdir()
    image.touch()
    os.truncate(image, 150 << 20)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True, capture_output=True)
    if subprocess.run(["mount", "-o", "loop", image, mounted], check=False).returncode:
        pytest.skip("mounting is refused here")
    try:
        source = mounted / "a.pt"
        source.write_bytes(os.urandom(8 << 20))
        os.sync()
        before = shutil.disk_usage(mounted).used
        monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError(errno.EPERM, "refused")))
        link(source, mounted / "b.pt")
        os.sync()
        name = mounted / "b.pt"
        assert not name.is_symlink() and name.stat().st_ino != source.stat().st_ino
        assert name.read_bytes() == source.read_bytes() and name.stat().st_mtime_ns == source.stat().st_mtime_ns
        assert shutil.disk_usage(mounted).used - before < 4 << 20
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_bad_file_behind_symbolic_names_is_set_aside_and_they_go(tmp_path, other_disk):
    """results/store on a disk of its own."""
    (tmp_path / "results").mkdir()
    (tmp_path / "results/store").symlink_to(other_disk)
    one, names, records = project(tmp_path)
    assert all(name.is_symlink() for name in names)
    assert set_aside(names[0], "bad") and not names[0].is_symlink() and names[1].exists()
    assert (one.root / "quarantine" / KEY.short / f"{records[0]['sample_id']}.pt").exists()
    os.truncate(names[1], 10)
    assert one.find(records[1]["sample_id"]) is None and not names[1].is_symlink() and names[2].exists()


# --- relink -------------------------------------------------------------------------------------------


def relink(results: Path) -> tuple[int, list[str]]:
    said: list[str] = []
    return links.relink(results, said.append), said


def test_copy_without_hard_links_is_counted_and_mended(tmp_path):
    _, names, records = project(tmp_path / "here")
    assert links.doubled_bytes(tmp_path / "here/results", KEY.short) == 0
    results = copied(tmp_path / "here/results", tmp_path / "there/results")
    assert links.doubled_bytes(results, KEY.short) == sum(r["bytes"] for r in records)
    bad, said = relink(results)
    assert not bad and said[-1].startswith(
        f"3 states and 0 files of drafts linked again, {sum(r['bytes'] for r in records):,}"
    )
    assert links.doubled_bytes(results, KEY.short) == 0
    there = Store(results / "store", KEY)
    for name, record in zip(names, records, strict=True):
        mine = results / name.relative_to(tmp_path / "here/results")
        assert mine.samefile(there.path(record["sample_id"])) and there.fault(record["sample_id"], full=True) is None
    assert relink(results)[1][-1].startswith("0 states")


def test_relink_keeps_the_whole_one_of_two(tmp_path):
    _, names, records = project(tmp_path / "here")
    results = copied(tmp_path / "here/results", tmp_path / "there/results")
    there = Store(results / "store", KEY)
    mine = [results / name.relative_to(tmp_path / "here/results") for name in names]
    flip(there.path(records[0]["sample_id"]))  # the name is whole
    there.path(records[1]["sample_id"]).unlink()  # the store has lost it
    flip(there.path(records[2]["sample_id"]))  # neither is
    flip(mine[2])
    bad, said = relink(results)
    assert bad == 1 and f"{mine[2]}: neither it nor the store has the manifest's bytes" in said[0]
    fresh = Store(results / "store", KEY)
    for name, record in list(zip(mine, records, strict=True))[:2]:
        assert name.samefile(fresh.path(record["sample_id"])) and fresh.find(record["sample_id"], full=True)
    assert (results / "store/quarantine" / KEY.short / f"{records[0]['sample_id']}.pt").exists()


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_trained_draft_is_linked_again(tmp_path):
    folder, stored = tmp_path / "results/t/d/k/draft/training", tmp_path / "results/store/drafts/abc"
    for where in (folder, stored):
        where.mkdir(parents=True)
        (where / "training.json").write_text('{"digest": "abc"}')
        (where / "model.safetensors").write_text("weights")
        (where / "metrics.jsonl").write_text("other" if where == folder else "lines")
    assert "2 files of drafts" in relink(tmp_path / "results")[1][-1]
    assert (folder / "model.safetensors").samefile(stored / "model.safetensors")
    assert (folder / "metrics.jsonl").read_text() == "other"


# --- shared stores ------------------------------------------------------------------------------------


def sample_of(record: dict, ids) -> Sample:
    return Sample(record["sample_id"], ids, [1, len(ids)], {})


@pytest.fixture
def shared(tmp_path):
    """Another project's store, and ours that takes from it: theirs, records, ours, the setting."""
    theirs, _, records = project(tmp_path / "theirs")
    ours = Store(tmp_path / "ours/results/store", KEY)
    ours.prepare()
    return theirs, records, ours, StorageConfig(shared_stores=[str(theirs.root)])


def tree(root: Path) -> dict[Path, tuple]:
    return {p: (p.read_bytes(), p.stat().st_mtime_ns, p.stat().st_nlink) for p in root.rglob("*") if p.is_file()}


def test_what_another_project_has_is_linked_not_made(shared, tmp_path):
    theirs, records, ours, storage = shared
    before = tree(theirs.root)
    wanted = [sample_of(record, [5, 6, 7, 8 + number]) for number, record in enumerate(records)]
    found = _share([*wanted, Sample("f" * 64, [1], [0, 1], {})], ours, storage)
    assert set(found) == {record["sample_id"] for record in records}
    reopened = Store(ours.root, KEY)
    for record in records:
        path = reopened.path(record["sample_id"])
        assert path.is_symlink() and reopened.find(record["sample_id"], full=True)["sha256"] == record["sha256"]
        name = tmp_path / f"ours/results/t/d/{KEY.short}/hidden_states/00000/{record['sample_id'][:4]}.pt"
        link(path, name)
        assert Path(os.readlink(name)) == theirs.path(record["sample_id"]).resolve(), (
            "a link to the file, not to a link"
        )
    assert len(list(reopened.records())) == 3 and tree(theirs.root) == before


def test_bad_shared_file_is_left_alone_and_not_taken_again(shared):
    theirs, records, ours, storage = shared
    wanted = [sample_of(record, [5, 6, 7, 8 + number]) for number, record in enumerate(records)]
    _share(wanted, ours, storage)
    sample = records[0]["sample_id"]
    flip(theirs.path(sample))
    before = tree(theirs.root)
    report = verification.verify(verification.everything(ours.root))
    assert [reason for _, reason in report.bad] == ["its sha256 is not the manifest's"]
    assert tree(theirs.root) == before, "never quarantined by us"
    assert not ours.path(sample).is_symlink() and not list((ours.root / "quarantine").rglob("*.pt"))
    assert set(_share(wanted[:1], Store(ours.root, KEY), storage)) == set(), "it is known to be bad"
    record = Store(ours.root, KEY).publish(content([5, 6, 7, 8]))
    assert not ours.path(sample).is_symlink() and record["sha256"] == records[0]["sha256"]
    assert set(_share(wanted[1:], Store(ours.root, KEY), storage)) == {r["sample_id"] for r in records[1:]}


def test_shared_store_that_went_away_is_missing_not_an_error(shared):
    theirs, records, ours, storage = shared
    wanted = [sample_of(record, [5, 6, 7, 8 + number]) for number, record in enumerate(records)]
    _share(wanted, ours, storage)
    shutil.rmtree(theirs.root / "hidden_states")
    assert Store(ours.root, KEY).find(records[0]["sample_id"]) is None
    with pytest.raises(UserError, match=r"storage.shared_stores: .* has no hidden_states/"):
        shared_stores(storage.shared_stores, KEY)


# Run as another user, who may read everything and write only what is theirs.
AS_ANOTHER = """
import json, os, sys
from pathlib import Path
from eagle3lib.config import StorageConfig
from eagle3lib.extraction import _share
from eagle3lib.hidden_states import StateKey
from eagle3lib.shards import Sample
from eagle3lib.store import Store, link
theirs, results, key = Path(sys.argv[1]), Path(sys.argv[2]), StateKey.of(json.loads(sys.argv[3]))
ours = Store(results / "store", key)
ours.prepare()
samples = [Sample(r["sample_id"], [1], [0, 1], {}) for r in Store(theirs, key).records()]
found = _share(samples, ours, StorageConfig(shared_stores=[str(theirs)]))
name = results / "t/d" / key.short / "hidden_states/00000/0000.pt"
link(ours.path(samples[0].sample_id), name)
direct = results / "direct.pt"
link(Store(theirs, key).path(samples[0].sample_id), direct)
os.utime(name, follow_symlinks=False)  # as Snakemake does after every job
try:
    os.link(Store(theirs, key).path(samples[0].sample_id), results / "hard.pt")
    refused = None
except OSError as error:
    refused = error.errno
ours.quarantine(ours.path(samples[1].sample_id), "a test")
print(json.dumps({"uid": os.getuid(), "found": len(found), "name": os.readlink(name),
    "direct": os.path.islink(direct), "hard": refused}))
"""


@needs_root
def test_store_of_another_user(shared, tmp_path):
    """fs.protected_hardlinks: whoever may not write a file may not give it another name."""
    if Path("/proc/sys/fs/protected_hardlinks").read_text().strip() != "1":
        pytest.skip("fs.protected_hardlinks is off")
    theirs, records, _, _ = shared
    before = tree(theirs.root)
    results = tmp_path / "another/results"
    (results / "store").mkdir(parents=True)
    subprocess.run(["chown", "-R", f"{OTHER_UID}:{OTHER_UID}", tmp_path / "another"], check=True)
    tmp_path.chmod(0o711)
    command = ["setpriv", "--reuid", str(OTHER_UID), "--regid", str(OTHER_UID), "--clear-groups"]
    command += [
        "--inh-caps",
        "+dac_read_search",
        "--ambient-caps",
        "+dac_read_search",
        sys.executable,
        "-c",
        AS_ANOTHER,
    ]
    environment = {**os.environ, "HOME": str(tmp_path / "another")}
    done = subprocess.run(
        [*command, str(theirs.root), str(results), json.dumps(KEY.values())],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert (said["uid"], said["found"], said["hard"]) == (OTHER_UID, len(records), errno.EPERM)
    assert Path(said["name"]).parent.parent == theirs.folder.resolve() and said["direct"]
    assert tree(theirs.root) == before


# --- locks --------------------------------------------------------------------------------------------


def test_lock_says_who_holds_it_and_where(tmp_path, capsys):
    path = tmp_path / "locks/a.lock"
    holder = (
        f"import time; from eagle3lib.job import file_lock\nwith file_lock({str(path)!r}): print('held', flush=True); "
        "time.sleep(1)"
    )
    process = subprocess.Popen([sys.executable, "-c", holder], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    with file_lock(path):
        assert path.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
    assert f"waiting for {path}, held by process {process.pid} on {socket.gethostname()}" in capsys.readouterr().out
    process.communicate()


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_filesystem_without_locks_is_refused(tmp_path, monkeypatch, number):
    monkeypatch.setattr("fcntl.flock", lambda *_: (_ for _ in ()).throw(OSError(number, "No locks available")))
    with (
        pytest.raises(UserError, match=r"a.lock: this filesystem has no locks \(No locks available\)"),
        file_lock(tmp_path / "a.lock"),
    ):
        pass
