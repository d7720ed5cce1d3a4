"""Change X: exactly these samples are computed anew (design.md section 3). By `make test-durability`: minutes."""

from test_workflow import ALL_EXTRACTION, EXTRACT, N, code_of_extraction, run_extract, target_weights


def test_code_of_extraction_reruns_its_jobs_and_computes_nothing(workspace):
    code_of_extraction(workspace)
    planned = workspace.planned()
    assert {name: planned[name] for name in EXTRACT} == {name: ALL_EXTRACTION[name] for name in EXTRACT}
    assert run_extract(workspace) == 0


def test_one_line_changed_and_one_inserted_compute_these_two(workspace):
    path = workspace.folder / "inputs/talk.jsonl"
    lines = path.read_text().splitlines()
    lines[5] = lines[5].replace("5: ", "five: ")
    lines.insert(3, lines[3].replace("3: ", "three and a half: "))
    path.write_text("\n".join(lines) + "\n")
    assert run_extract(workspace) == 2
    assert len(workspace.states()) == N + 1


def test_another_shard_size_computes_nothing(workspace):
    workspace.set("dataset.shard_size", 8)
    assert run_extract(workspace) == 0


def test_other_weights_of_the_target_compute_everything(workspace):
    target_weights(workspace)
    assert workspace.planned()["prepare_target"] == 1
    assert run_extract(workspace) == N
