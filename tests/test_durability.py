"""What is finished stays finished: lost records, damaged files, changed settings, a disk that fills up."""

import json
import re
import shutil
from collections import Counter

from workflow import TINY_SAMPLES, TRAINING

N = TINY_SAMPLES


def stored(workspace, name="00000/0002.pt"):
    """The file in the store that a sample is a link to."""
    inode = workspace.states()[name].stat().st_ino
    return next(
        p for p in workspace.run_folder.glob("results/store/hidden_states/*/*/*.pt") if p.stat().st_ino == inode
    )


def names_and_files(workspace):
    links = workspace.run_folder.glob("results/tiny/talk/*/hidden_states/*/*.pt")
    return len(list(links)), len(list(workspace.run_folder.glob("results/store/hidden_states/*/*/*.pt")))


def test_loss_of_snakemakes_folder_reruns_nothing_and_hides_no_change(workspace):
    shutil.rmtree(workspace.run_folder / ".snakemake")
    assert workspace.planned() == Counter()
    shutil.rmtree(workspace.run_folder / ".snakemake")
    workspace.set("training.learning_rate", 2e-4)
    assert workspace.planned() == Counter(TRAINING)


def test_damage_of_an_unclean_end_is_found_before_the_next_run(workspace):
    session = workspace.run_folder / "results/store/session.json"
    assert not session.exists(), "a run that ends in order says so"
    session.write_text(json.dumps({"host": "another", "boot": "another", "pid": 1, "started": "1"}))
    for mark in workspace.run_folder.glob("results/store/hidden_states/*/synced.json"):
        mark.unlink()
    path = stored(workspace)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    workspace.clear_logs()
    weights = workspace.result("tiny/talk/*/draft/training/model.safetensors").stat().st_ino
    assert "ended uncleanly" not in workspace.snakemake("--dry-run").stderr
    done = workspace.snakemake()
    assert "The last run ended uncleanly: 7 samples are hashed" in done.stderr
    assert "1 bad, quarantined" in done.stderr
    assert workspace.computed() == 1 and len(workspace.states()) == N
    assert list(workspace.run_folder.glob("results/store/quarantine/*/*.pt"))
    assert workspace.result("tiny/talk/*/draft/training/model.safetensors").stat().st_ino == weights


def test_relinked_sample_trains_and_measures_nothing_again(workspace):
    kept = {p: p.stat().st_mtime_ns for p in workspace.run_folder.glob("results/store/acceptance/*")}
    acceptance = workspace.result("tiny/talk/*/draft/acceptance.json").stat().st_ino
    workspace.states()["00000/0002.pt"].unlink()
    workspace.clear_logs()
    workspace.snakemake()
    assert workspace.computed() == 0
    assert "found in" in workspace.result("../logs/train_draft_model/tiny/talk/*/draft.log").read_text()
    assert set(workspace.run_folder.glob("results/store/acceptance/*")) == set(kept) and len(kept) == 1
    assert workspace.result("tiny/talk/*/draft/acceptance.json").stat().st_ino == acceptance


def test_missing_samples_are_told_by_shard(workspace):
    assert "nothing missing, 7 samples" in workspace.ask("missing").stdout
    for slot in (1, 2):
        workspace.states()[f"00000/{slot:04d}.pt"].unlink()
    stored(workspace, "tail_1/0000.pt").unlink()
    workspace.states()["tail_1/0000.pt"].unlink()
    for text in (workspace.ask("missing").stdout, workspace.snakemake("--dry-run").stderr):
        assert "shard 00000: 2 of 4 missing: 0001, 0002" in text
        assert "shard tail_1: all 1 missing" in text
        assert "3 of 7 samples missing; 2 of them are in the store and only linked" in text
        assert re.search(r"to compute: 1 samples, \d+ tokens, [\d,]+ B, \d+\.\d h at the measured", text)
    shutil.rmtree(workspace.result("tiny/talk/*/hidden_states"))
    assert "shards 00000 to tail_1: all 7 missing" in workspace.ask("missing").stdout
    workspace.result("tiny/talk/shards.json").unlink()
    assert "not sharded yet" in workspace.ask("missing").stdout


def test_why_names_the_setting(workspace):
    export = str(workspace.result("tiny/talk/*/draft/export").relative_to(workspace.run_folder))
    assert "is there, and nothing that shapes it has changed" in workspace.ask("why", export).stdout
    workspace.set("training.learning_rate", 2e-4)
    workspace.states()["00000/0002.pt"].unlink()
    text = workspace.ask("why", export).stdout
    assert "training.learning_rate: 0.0001 -> 0.0002" in text
    state = str(workspace.result("tiny/talk/*/hidden_states")).split("run/")[1] + "/00000/0002.pt"
    assert "missing output files: " + state in workspace.ask("why", state).stdout
    failed = workspace.ask("why", "results/no/such/file")
    assert failed.returncode == 1 and "error: results/no/such/file: MissingRuleException" in failed.stderr


def refused(workspace):
    done = workspace.snakemake(check=False)
    text = done.stdout + done.stderr
    assert done.returncode, text[-2000:]
    return text, re.search(r"python -m eagle3lib confirm (\w+)", text)[1]


def test_dear_training_is_not_made_again_unasked(workspace):
    workspace.set("storage.confirm_above_hours", 0)
    assert workspace.planned() == Counter(), "a limit is no setting that shapes anything"
    workspace.set("training.learning_rate", 2e-4)
    text, token = refused(workspace)
    assert "training.learning_rate: 0.0001 -> 0.0002: 7 samples' training of the draft" in text
    weights = workspace.result("tiny/talk/*/draft/training/model.safetensors")
    assert weights.exists(), "refused before anything is deleted"
    assert workspace.planned() == Counter(TRAINING), "a dry run shows the plan and says what a run would ask"
    workspace.ask("confirm", token)
    workspace.snakemake("train")
    workspace.set("training.learning_rate", 1e-4)
    workspace.snakemake("train")  # both drafts are finished now: nothing is made again by going back


def test_dear_states_are_not_made_again_unasked(workspace):
    workspace.set("storage.confirm_above_hours", 0)
    workspace.set("hidden_states.aux_layer_ids", [1, 3, 6])
    text, token = refused(workspace)
    assert "aux_layer_ids: [2, 4, 5] -> [1, 3, 6]: 7 samples' hidden states that are finished" in text
    workspace.ask("confirm", token)
    workspace.snakemake("extract")
    assert names_and_files(workspace) == (2 * N, 2 * N)
    listed = workspace.ask("gc").stdout
    assert "7 samples; target_fingerprint" in listed and "nothing was deleted" in listed
    assert names_and_files(workspace) == (2 * N, 2 * N)
    old = next(line.split(":")[0] for line in listed.splitlines() if "[2, 4, 5]" in line)
    assert f"deleted {old}" in workspace.ask("gc", "--delete", old).stdout
    assert names_and_files(workspace) == (N, N)
    assert "nothing missing" in workspace.ask("missing").stdout


def test_states_of_other_code_are_compared_not_thrown_away(workspace):
    path = workspace.code / "eagle3lib/engines/transformers.py"
    path.write_text(path.read_text() + "\nADDED = 1\n")
    workspace.clear_logs()
    assert workspace.planned()["adopt_hidden_states"] == 1
    workspace.snakemake("extract")
    assert workspace.computed() == 0
    makers = json.loads(workspace.result("tiny/talk/*/made_by.json").read_text())
    assert len(makers) == 2 and len(makers[1]["samples"]) == N and makers[1]["largest_distance"] < 1e-3


def test_full_volume_is_refused_before_the_first_byte(workspace):
    shutil.rmtree(workspace.result("store/hidden_states"))
    shutil.rmtree(workspace.result("tiny/talk/*/hidden_states"))
    workspace.set("storage.free_command", "echo 1000")
    done = workspace.snakemake("extract", check=False)
    assert done.returncode and "no disk: " in done.stdout + done.stderr
    assert not list(workspace.run_folder.glob("results/store/hidden_states/*/*/*.pt"))
    assert workspace.result("tiny/talk/*/storage_plan.json").exists(), "refused before any job"


def test_volume_that_fills_up_while_running_ends_the_job_and_the_next_run_goes_on(workspace):
    """The plan passed; then somebody else takes the room after the first samples."""
    shutil.rmtree(workspace.result("store/hidden_states"))
    shutil.rmtree(workspace.result("tiny/talk/*/hidden_states"))
    workspace.result("tiny/talk/*/storage_plan.json").unlink()
    # Room for the first two who ask (the start of the run, plan_storage), none for the jobs.
    count = "n=$(cat ../asked 2>/dev/null || echo 0); echo $((n + 1)) > ../asked"
    workspace.set("storage.free_command", f"{count}; test $n -ge 2 && echo 1000 || echo 999999999")
    done = workspace.snakemake("extract", check=False)
    text = done.stdout + done.stderr
    assert done.returncode and "no disk: " in text and "free (storage.free_command)" in text
    workspace.set("storage.free_command", None)
    workspace.snakemake("extract")
    assert len(workspace.states()) == N and not list(workspace.run_folder.rglob("*.part"))


def test_verify_and_the_next_run_mend_the_store(workspace):
    path = stored(workspace)
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    workspace.clear_logs()
    assert workspace.planned() == Counter()
    done = workspace.ask("verify")
    assert done.returncode == 1 and "7 files" in done.stdout and "1 bad" in done.stdout
    assert "shard 00000: 1 of 4 missing: 0002" in workspace.ask("missing").stdout
    workspace.snakemake("extract")
    assert workspace.computed() == 1
    assert workspace.ask("verify").returncode == 0


def test_trainer_sets_a_damaged_sample_aside_and_the_next_run_goes_on(workspace):
    path = stored(workspace)
    data = bytearray(path.read_bytes())
    data[-2000] ^= 1
    path.write_bytes(data)
    workspace.set("training.learning_rate", 2e-4)
    done = workspace.snakemake("train", check=False)
    assert done.returncode and "moved to quarantine, then run the same command again" in done.stdout + done.stderr
    assert len(workspace.states()) == N - 1 and not path.exists()
    workspace.clear_logs()
    workspace.snakemake("train")
    assert workspace.computed() == 1
