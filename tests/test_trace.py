"""Every result is followed to its input lines, every input line to its results; of a run that Snakemake made."""

import json
import re
import shutil

import pytest

from eagle3lib import trace
from eagle3lib.lineage import file_sha256

TALK = "../inputs/talk.jsonl"


def told(workspace, path):
    """The answer, as it is printed."""
    done = workspace.ask("trace", str(path))
    assert done.returncode == 0, done.stderr
    return done.stdout


def value(text, name):
    return re.search(rf"^  {re.escape(name)} {{2,}}(.*)$", text, re.MULTILINE)[1]


def test_a_state_is_followed_to_its_line(finished):
    link = finished.states()["tail_2/0001.pt"]  # the sixth of seven
    text = told(finished, link)
    assert value(text, "input") == f"{TALK}:6 (unchanged since)"
    assert value(text, "place").endswith("hidden_states/tail_2/0001.pt")
    assert value(text, "reply") == "as in the input line"
    assert value(text, "template") == "the target's own"
    config = json.loads(finished.result("tiny/talk/*/data_config.json").read_text())
    assert value(text, "target fingerprint") == config["target_fingerprint"]
    assert value(text, "aux layers").startswith(", ".join(map(str, config["aux_layer_ids"])))
    assert value(text, "engine").startswith("transformers 5.")
    assert value(text, "sha256") == file_sha256(link)
    assert re.fullmatch(r"[0-9a-f]{12}", value(text, "code"))
    logs = re.findall(r"^  log  .*?(logs/\S+)$", text, re.MULTILINE)
    assert [log.split("/")[1] for log in logs] == ["shard_samples", "extract_hidden_states"]
    assert all((finished.run_folder / log).is_file() for log in logs)
    draft = finished.result("tiny/talk/*/draft").relative_to(finished.run_folder)
    assert re.search(rf"^  {draft} +(trained on|validated with) it +\S+ +[0-9a-f]{{32}}$", text, re.MULTILINE)


def test_a_name_in_the_store_and_a_line_tell_the_same(finished):
    link = finished.states()["tail_2/0001.pt"]
    store = next(p for p in finished.run_folder.glob("results/store/hidden_states/*/*/*.pt") if p.samefile(link))
    assert told(finished, store) == told(finished, f"{TALK}:6") == told(finished, link)
    assert told(finished, f"{finished.folder / 'inputs/talk.jsonl'}:6").count("Sample tail_2/0001.pt") == 1


def test_a_draft_names_samples_settings_and_jobs(finished):
    draft = finished.result("tiny/talk/*/draft")
    text = told(finished, draft)
    training = json.loads((draft / "training/training.json").read_text())
    assert (
        value(text, "weights sha256") == training["weights_sha256"] == file_sha256(draft / "training/model.safetensors")
    )
    assert value(text, "export/model.safetensors sha256") == file_sha256(draft / "export/model.safetensors")
    assert value(text, "training").startswith("ttt_steps 2, ")
    assert re.search(rf"^  {re.escape(TALK)} +7 +1 +7 +unchanged$", text, re.MULTILINE)
    jobs = re.findall(r"^  (\w+) +(\d+) +\S+ +logs/", text, re.MULTILINE)
    assert {"prepare_target", "shard_samples", "train_draft_model", "measure_acceptance"} < {name for name, _ in jobs}
    assert dict(jobs)["extract_hidden_states"] == "3", "the shard and its two tails"
    assert told(finished, finished.run_folder / "results/store/drafts" / training["digest"]) == text


def test_a_figure_names_its_job_and_draft(finished):
    figure = finished.result("tiny/talk/*/draft/plots/acceptance.svg")
    text = told(finished, figure)
    assert value(text, "rule") == "plot_results" and "acceptance.json" in value(text, "from")
    assert "plot_results  1" in re.sub(" +", "  ", text)
    assert told(finished, figure.parent.parent) in text.replace(*_last_job(text))


def _last_job(text):
    """The figure's own job, which the draft's list does not have."""
    return re.search(r"^  plot_results .*\n", text, re.MULTILINE)[0], ""


def test_what_stands_for_no_sample_is_traced_by_its_jobs(finished):
    text = told(finished, finished.run_folder / "results/summary.md")
    assert value(text, "rule") == "summarize" and "train_draft_model" in text


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("results/none.pt", "no job in this folder made it; give one of its results, or FILE:LINE"),
        (f"{TALK}:70", "no sample under results/ comes from it, and none was rejected"),
        (TALK, "not under "),
        ("results/tiny/talk/0123456789ab/hidden_states/00000/0070.pt", "no sample at 00000/0070.pt any more"),
    ],
)
def test_what_cannot_be_traced_is_one_line(finished, path, message):
    done = finished.ask("trace", path)
    assert done.returncode == 1 and message in done.stderr and done.stderr.count("\n") == 1


def test_changes_since_are_seen(workspace):
    talk = workspace.folder / "inputs/talk.jsonl"
    lines = talk.read_text().splitlines()
    talk.write_text("\n".join([*lines[:5], lines[5].replace(" ", "  "), *lines[6:]]) + "\n")
    assert value(told(workspace, f"{TALK}:6"), "input") == f"{TALK}:6 (changed since)"
    assert value(told(workspace, f"{TALK}:5"), "input") == f"{TALK}:5 (unchanged since)"
    assert re.search(rf"^  {re.escape(TALK)} .* changed$", told(workspace, workspace.result("tiny/talk/*/draft")), re.M)
    link = workspace.states()["tail_2/0001.pt"]
    link.unlink()
    assert "missing; `snakemake extract` makes them" in told(workspace, link)
    talk.unlink()
    assert "the file is gone" in told(workspace, f"{TALK}:6")


def test_logs_are_known_without_snakemakes_folder(workspace):
    link = next(iter(workspace.states().values()))
    before = told(workspace, link)
    shutil.rmtree(workspace.run_folder / ".snakemake")
    assert told(workspace, link) == before


def test_rejected_line_says_why(workspace):
    rejected = workspace.result("tiny/talk/rejected.jsonl")
    rejected.write_text(json.dumps({"file": TALK, "line": 9, "reason": "duplicate", "detail": "as line 2"}) + "\n")
    text = told(workspace, f"{TALK}:9")
    assert "Rejected by tiny/talk" in text
    assert (value(text, "reason"), value(text, "detail")) == ("duplicate", "as line 2")


def test_draft_of_an_earlier_dataset_is_still_known(workspace):
    """Its samples' states are the same files: by these it is found."""
    made_from = next(workspace.run_folder.glob("results/store/drafts/*/made_from.json"))
    values = json.loads(made_from.read_text())
    values["shaping"]["dataset"] = "0" * 32
    made_from.write_text(json.dumps(values))
    link = next(iter(workspace.states().values()))
    assert made_from.parent.name in told(workspace, link)
    job = made_from.with_name("job.json")
    job.write_text(job.read_text().replace(file_sha256(link), "f" * 64))
    assert "none yet" in told(workspace, link)


def test_reply_of_a_line_is_found_by_file_and_line(tmp_path):
    def row(file, line, text):
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, "reply_ids": [1], "finish": "stop", "file": file, "line": line, "sha256": "0"}

    quoting = row("b.jsonl", 3, '"file": "a.jsonl", "line": 3,')
    rows = [row("a.jsonl", 13, "thirteen"), quoting, row("a.jsonl", 3, "three")]
    (tmp_path / "replies").mkdir()
    (tmp_path / "replies/000.jsonl").write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in rows))
    where, found = trace.Dataset(tmp_path).reply("a.jsonl", 3)
    assert where.endswith("replies/000.jsonl:3") and found["messages"][0]["content"] == "three"
    assert trace.Dataset(tmp_path).reply("a.jsonl", 4) is None
