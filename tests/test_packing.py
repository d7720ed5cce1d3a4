"""Results move as tars: each file once, checked, resumable; elsewhere the workflow finds nothing to do."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from eagle3lib import packing
from eagle3lib.errors import UserError

OTHER_UID = 54321


def results(folder: Path, states: int = 3, size: int = 2000) -> Path:
    """A small tree with the names that matter: linked states, one that no dataset links, a record, a lock."""
    root = folder / "here"
    files = {
        "results/store/records/r": json.dumps({"input": ["../talk.jsonl", "results/t/d/samples.parquet"]}),
        "results/t/d/samples.parquet": "rows",
        "results/store/drafts/abc/model": "weights",
        "results/engine/handle.json": "a key",
        "results/store/hidden_states/0123456789ab/locks/x.lock": "",
        "results/store/session.json.part": "half",
        "logs/rule/t.log": "done",
    }
    for number in range(states + 1):
        files[f"results/store/hidden_states/0123456789ab/{number:02x}/{number:02x}.pt"] = f"{number}" * size
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        os.utime(path, ns=(1_700_000_000_123_456_789, 1_700_000_000_123_456_789))
    for number in range(states):
        name = root / f"results/t/d/0123456789ab/hidden_states/0000{number % 2}/{number:04d}.pt"
        name.parent.mkdir(parents=True, exist_ok=True)
        os.link(root / f"results/store/hidden_states/0123456789ab/{number:02x}/{number:02x}.pt", name)
    return root


def tree(root: Path) -> dict[str, tuple]:
    """path -> content, mtime, number of names."""
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and not packing.LEFT_BEHIND.search(str(path.relative_to(root))):
            about = path.stat()
            found[str(path.relative_to(root))] = (path.read_bytes(), about.st_mtime_ns, about.st_nlink)
    return found


def quiet(_):
    pass


def test_every_file_travels_once_and_comes_out_the_same(tmp_path):
    root, said = results(tmp_path), []
    packing.pack(root, str(tmp_path / "dest"), 2, said.append, read_back=True)
    assert "not packed, to be brought along: ../talk.jsonl" in said
    names = {str(p.relative_to(tmp_path / "dest")) for p in (tmp_path / "dest").rglob("*.tar")}
    shards = {f"states/t/d/0123456789ab/0000{n}.tar" for n in range(2)}
    assert names == {"rest.tar", "drafts/abc.tar", "store/0123456789ab/03.tar", *shards}
    with tarfile.open(tmp_path / "dest/states/t/d/0123456789ab/00000.tar") as tar:
        assert [(m.isreg(), m.islnk()) for m in tar] == [(True, False)] * 2 + [(False, True)] * 2
    packing.unpack(str(tmp_path / "dest"), tmp_path / "there", 2, quiet)
    assert tree(tmp_path / "there") == tree(root)
    assert not (tmp_path / "there/results/engine").exists()
    said.clear()
    packing.unpack(str(tmp_path / "dest"), tmp_path / "there", 2, said.append)
    assert "8 of the files were there" in said[0] and said[0].startswith("8 files")


def test_tars_that_are_there_are_not_written_again(tmp_path):
    root, dest, said = results(tmp_path), tmp_path / "dest", []
    packing.pack(root, str(dest), 1, quiet)
    before = {p: p.stat().st_mtime_ns for p in dest.rglob("*.tar")}
    (root / "results/t/d/samples.parquet").write_text("more")
    (dest / "drafts/abc.json").unlink()
    packing.pack(root, str(dest), 1, said.append)
    changed = {p.name for p in before if p.stat().st_mtime_ns != before[p]}
    assert changed == {"rest.tar", "abc.tar"} and "3 of the tars were there" in said[0]
    packing.unpack(str(dest), tmp_path / "there", 1, quiet)
    assert tree(tmp_path / "there") == tree(root)


@pytest.mark.parametrize("where", ["content", "header", "cut off"])
def test_damaged_tar_is_named_and_the_others_are_unpacked(tmp_path, where):
    root, dest, there = results(tmp_path), tmp_path / "dest", tmp_path / "there"
    packing.pack(root, str(dest), 1, quiet)
    tar = dest / "states/t/d/0123456789ab/00000.tar"
    good = tar.read_bytes()
    bad = bytearray(good)
    bad[{"content": 1024, "header": 8, "cut off": 0}[where]] ^= 1 if where != "cut off" else 0
    tar.write_bytes(bad[:3000] if where == "cut off" else bad)
    with pytest.raises(UserError, match=r"00000\.tar: damaged"):
        packing.unpack(str(dest), there, 1, quiet)
    assert not (there / "results/t/d/0123456789ab/hidden_states/00000").exists()
    assert (there / "results/t/d/0123456789ab/hidden_states/00001/0001.pt").samefile(
        there / "results/store/hidden_states/0123456789ab/01/01.pt"
    )
    assert not list(there.rglob("*" + packing.UNPACKING))
    tar.write_bytes(good)
    packing.unpack(str(dest), there, 1, quiet)
    assert tree(there) == tree(root)


def test_read_back_finds_what_the_destination_changed(tmp_path, monkeypatch):
    root, dest = results(tmp_path), tmp_path / "dest"
    write = packing._write_bundle

    def bad_disk(*arguments):
        manifest = write(*arguments)
        path = dest / f"{arguments[2].name}.tar"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        return manifest

    monkeypatch.setattr(packing, "_write_bundle", bad_disk)
    with pytest.raises(UserError, match="rest.tar: damaged: read back"):
        packing.pack(root, str(dest), 1, quiet, read_back=True)
    assert not (dest / packing.INDEX).exists()


def test_unfinished_pack_is_refused(tmp_path):
    root, dest = results(tmp_path), tmp_path / "dest"
    packing.pack(root, str(dest), 1, quiet)
    (dest / packing.INDEX).unlink()
    with pytest.raises(UserError, match="no finished pack"):
        packing.unpack(str(dest), tmp_path / "there", 1, quiet)
    with pytest.raises(UserError, match="nothing to pack"):
        packing.pack(tmp_path / "empty", str(dest), 1, quiet)


def test_nothing_that_is_there_is_overwritten(tmp_path):
    root, dest, there = results(tmp_path), tmp_path / "dest", tmp_path / "there"
    packing.pack(root, str(dest), 1, quiet)
    (there / "results/t/d").mkdir(parents=True)
    (there / "results/t/d/samples.parquet").write_text("mine")
    with pytest.raises(UserError, match="samples.parquet: in the way"):
        packing.unpack(str(dest), there, 1, quiet)
    assert [p.read_text() for p in there.rglob("*") if p.is_file() and p.suffix != ".lock"] == ["mine"]


def test_path_that_leads_out_is_refused(tmp_path):
    root, dest = results(tmp_path), tmp_path / "dest"
    packing.pack(root, str(dest), 1, quiet)
    manifest = json.loads((dest / "rest.json").read_text())
    manifest["files"][0]["path"] = "results/../../evil"
    (dest / "rest.json").write_bytes(packing._as_json(manifest))
    index = json.loads((dest / packing.INDEX).read_text())
    index["bundles"]["rest"] = packing._digest(manifest)
    (dest / packing.INDEX).write_bytes(packing._as_json(index))
    with pytest.raises(UserError, match="'results/../../evil' does not lie under results/"):
        packing.unpack(str(dest), tmp_path / "there", 1, quiet)


def test_no_room_is_said_before_the_first_byte(tmp_path, monkeypatch):
    root, dest = results(tmp_path), tmp_path / "dest"
    monkeypatch.setattr(packing.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    with pytest.raises(UserError, match=r"no disk: .* bytes to come, 1 free; nothing was written"):
        packing.pack(root, str(dest), 1, quiet)
    assert not dest.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_disk_that_fills_up_in_the_middle(tmp_path, monkeypatch):
    """Room was there when it began; others took it."""
    root, dest = results(tmp_path, states=8, size=100_000), tmp_path / "dest"
    dest.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=600k", "tmpfs", dest], check=False)
    if done.returncode:
        pytest.skip("mounting is refused here")
    try:
        monkeypatch.setattr(packing, "_check_room", lambda *_: None)
        with pytest.raises(UserError, match="No space left on device; mend that, then run the same command again"):
            packing.pack(root, str(dest), 1, quiet)
        kept = {p: p.stat().st_ino for p in dest.rglob("*.tar")}
        assert kept and not (dest / packing.INDEX).exists() and not list(dest.rglob("*.part"))
        subprocess.run(["mount", "-o", "remount,size=4m", dest], check=True)
        packing.pack(root, str(dest), 1, quiet)
        assert all(p.stat().st_ino == inode for p, inode in kept.items())
        packing.unpack(str(dest), tmp_path / "there", 1, quiet)
        assert tree(tmp_path / "there") == tree(root)
    finally:
        subprocess.run(["umount", dest], check=True)


def test_ctrl_c_in_the_middle_keeps_what_is_finished(tmp_path):
    root, dest = results(tmp_path, states=8, size=30_000), tmp_path / "dest"
    slow = (
        # A shell's background jobs inherit an ignored SIGINT.
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "import time; from pathlib import Path; from eagle3lib import packing, errors; add = packing._add\n"
        "packing._add = lambda *a: (time.sleep(0.2), add(*a))[1]\n"
        "try: packing.pack(Path('.'), '../dest', 1, print)\n"
        "except errors.UserError as error: print(error)"
    )
    process = subprocess.Popen([sys.executable, "-c", slow], cwd=root, stdout=subprocess.PIPE, text=True)
    while len(list(dest.rglob("*.json"))) < 2:
        time.sleep(0.01)
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    said = process.communicate(timeout=60)[0]
    assert "interrupted: finished tars are kept, the same command goes on" in said and process.returncode == 0
    kept = {p: p.stat().st_ino for p in dest.rglob("*.tar")}
    assert 2 <= len(kept) < 5 and not list(dest.rglob("*.part"))
    packing.pack(root, str(dest), 1, quiet)
    assert all(p.stat().st_ino == inode for p, inode in kept.items())


def test_object_store_needs_its_package(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.fsspec", None)
    with pytest.raises(UserError, match=r"pip install eagle3lib\[s3\]"):
        packing.pack(results(tmp_path), "s3://bucket/prefix", 1, quiet)


def test_by_way_of_an_object_store(tmp_path, s3):
    root, url, said = results(tmp_path, size=7_000_000), "s3://bucket/project", []  # 7 MB a state: several parts
    packing.pack(root, url, 2, said.append, read_back=True)
    assert (s3 / "project/rest.tar").stat().st_size > 0
    packing.pack(root, url, 2, said.append)
    assert "5 of the tars were there" in said[-2]
    packing.unpack(url, tmp_path / "there", 2, quiet)
    assert tree(tmp_path / "there") == tree(root)


def test_write_to_an_object_store_that_fails_leaves_no_object(tmp_path, s3):
    place = packing._Remote("s3://bucket/project")
    with pytest.raises(OSError, match="the disk fails"), place.write("one.tar") as file:
        file.write(b"x" * 20_000_000)
        raise OSError("the disk fails")
    assert not (s3 / "project/one.tar").exists() and place.read_bytes("one.tar") is None


def test_object_store_that_cannot_be_reached_is_one_line(tmp_path, s3, monkeypatch):
    with pytest.raises(UserError, match="s3://absent/x"):
        packing.unpack("s3://absent/x", tmp_path / "there", 1, quiet)


# --- a real run ---------------------------------------------------------------------------------------


def flip_a_stored_state(workspace):
    path = next(workspace.run_folder.glob("results/store/hidden_states/*/*/*.pt"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    return path


def test_state_that_is_not_what_was_written_is_not_packed(workspace):
    path = flip_a_stored_state(workspace)
    done = workspace.ask("pack", "../dest")
    assert (
        done.returncode == 1
        and f"{path.relative_to(workspace.run_folder)}: its sha256 is not the store's" in done.stderr
    )
    assert not (workspace.folder / "dest" / packing.INDEX).exists()
    workspace.ask("verify")
    workspace.snakemake("extract")
    assert workspace.ask("pack", "../dest").returncode == 0


def test_running_workflow_is_not_packed(workspace):
    from eagle3lib import verification

    verification.begin(workspace.run_folder / "results/store")
    assert "a run is at work in this folder" in workspace.ask("pack", "../dest").stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="another uid needs root")
def test_moved_run_has_nothing_to_do_elsewhere(workspace, tmp_path):
    """Another path, another uid, another host's name, no .snakemake."""
    packed = workspace.ask("pack", str(tmp_path / "dest"))
    assert packed.returncode == 0, packed.stderr
    assert "not packed, to be brought along: ../inputs/talk.jsonl" in packed.stdout
    there = tmp_path / "elsewhere"
    (there / "run").mkdir(parents=True)
    for name in ("code", "inputs", "config.yaml"):
        (shutil.copytree if (workspace.folder / name).is_dir() else shutil.copy)(workspace.folder / name, there / name)
    moved = type(workspace)(there)
    subprocess.run(["chown", "-R", f"{OTHER_UID}:{OTHER_UID}", there], check=True)
    tmp_path.chmod(0o711)
    # It may read what root has installed, below folders of root's own; it may write nothing that is not its own.
    other = f"setpriv --reuid {OTHER_UID} --regid {OTHER_UID} --clear-groups "
    other += "--inh-caps +dac_read_search --ambient-caps +dac_read_search"
    environment = {**moved.environment, "HOME": str(there), "XDG_CACHE_HOME": str(there / "cache"), "USER": "another"}

    def as_another(command):
        script = f"hostname elsewhere 2>/dev/null; exec {other} " + " ".join(command)
        return subprocess.run(
            ["unshare", "--uts", "bash", "-c", script],
            cwd=there / "run",
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )

    unpacked = as_another([sys.executable, "-m", "eagle3lib", "unpack", str(tmp_path / "dest")])
    assert unpacked.returncode == 0, unpacked.stderr
    assert {p.stat().st_uid for p in (there / "run").rglob("*")} == {OTHER_UID}
    states = list(moved.states().values())
    assert len(states) == 7 and all(path.stat().st_nlink == 2 for path in states), "hard links are not doubled"
    dry = as_another(moved.command("--cores", "1", "--dry-run"))
    assert "Nothing to be done" in dry.stdout + dry.stderr, (dry.stdout + dry.stderr)[-3000:]
    moved.set("training.learning_rate", 3e-4)
    dry = as_another(moved.command("--cores", "1", "--dry-run"))
    assert "train_draft_model" in dry.stdout, "a changed setting is still noticed"
