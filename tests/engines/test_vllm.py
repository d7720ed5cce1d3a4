"""vLLM, in an environment of its own, decodes with an exported draft: same output, and our acceptance figures.

`make test-engines` runs this; `make test` does not. One chain through snakemake makes target and draft, one process of
vLLM decodes with all drafts.
"""

import json
import os
import shutil
import signal
import subprocess
import urllib.request
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from test_evaluation import PROMPTS as TRAINED_ON
from test_evaluation import export_trained_draft
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM
from workflow import ROOT, SMALL_DRAFT, continue_small

from eagle3lib import chat, evaluation, export, processes, samples, targets
from eagle3lib.config import AcceptanceConfig
from eagle3lib.consumers import openai, vllm
from eagle3lib.draft_model import VARIANTS
from eagle3lib.engines.sglang.lease import free_port
from eagle3lib.engines.transformers import TransformersEngine
from eagle3lib.errors import UserError
from eagle3lib.targets import TargetInfo

PROMPTS = 32


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A finished run: a draft of acceptance length above 1.5, trained and exported by the workflow."""
    workspace = continue_small(tmp_path_factory.mktemp("engines") / "first", [SMALL_DRAFT], PROMPTS)
    workspace.snakemake()
    return workspace


@pytest.fixture(scope="module")
def decoded(chain):
    """vLLM's runs by name, its versions, and our own passes with `draft` and `whole`."""
    draft = chain.result("small/docs/*/trained/export")
    target = TargetInfo.read(chain.result("targets/small/target.json"))
    cfg = AcceptanceConfig(prompts=["unused"], max_new_tokens=64, draft_steps=4)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [
        chat.prompt_ids(tokenizer, samples.prompt_messages(one.messages))
        for one in samples.read([str(chain.folder / "inputs/held_out.jsonl")], PROMPTS)
    ]
    drafts = {
        "without": None,
        "draft": draft,
        "shards": in_shards(draft, target, chain.folder / "shards"),
        "whole": whole_vocabulary(draft, target, chain.folder / "whole"),
        "one_below": off_by(-1, draft, chain.folder / "one_below"),
        "one_above": off_by(+1, draft, chain.folder / "one_above"),
    }
    job = vllm.Job.of(target, list(drafts.values()), prompts, cfg)
    versions, runs = vllm.decode(job, chain.folder / "vllm", ROOT / vllm.PYTHON)
    engine = TransformersEngine(target.path)
    ours = {
        name: evaluation.passes_as_engines_count(drafts[name], target, engine, prompts, cfg)
        for name in ("draft", "whole")
    }
    return dict(zip(drafts, runs, strict=True)), versions, ours


def in_shards(draft, target, folder):
    """The same draft, exported in several files."""
    config, mapping, values, weights = export.read_export(draft)
    export.export_draft(weights, config, mapping, target, values[export.LAYER_IDS], folder, shard_bytes=300_000)
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


def whole_vocabulary(draft, target, folder):
    """The same draft without a map: the tokens that it did not know have the target's own rows of the head."""
    config, mapping, values, weights = export.read_export(draft)
    head = targets.load_head(target).clone()
    head[mapping.target_ids] = weights["lm_head.weight"].to(head.dtype)
    config = replace(config, draft_vocab_size=config.vocab_size)
    export.export_draft(weights | {"lm_head.weight": head}, config, None, target, values[export.LAYER_IDS], folder)
    return folder


def off_by(shift, draft, folder):
    """The export as it would be if vLLM counted layers otherwise: -1 is how SGLang reads them."""
    shutil.copytree(draft, folder)
    values = json.loads((folder / "config.json").read_text())
    values[export.LAYER_IDS] = [k + shift for k in values[export.LAYER_IDS]]
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_decodes_as_we_do(decoded):
    runs, versions, ours = decoded
    result = vllm.compare(runs["without"], runs["draft"], ours["draft"])
    print(json.dumps(result | {"versions": versions}, indent=1))
    assert result["prompts"] == PROMPTS == result["identical"] + result["near_ties"]
    assert result["near_ties"] <= 1
    assert result["largest_difference"] <= 0.02
    assert result["same_passes"] >= 0.9 * PROMPTS
    assert result["acceptance_length"] > 1.5


def test_the_reference_is_the_target_without_a_draft(decoded):
    runs, _, _ = decoded
    assert runs["without"].passes == 0
    lengths = [len(reply) for reply in runs["without"].replies]
    assert lengths == [len(gaps) for gaps in runs["without"].gaps]
    assert max(lengths) <= 64 and sum(lengths) > 16 * PROMPTS


def test_a_draft_of_the_whole_vocabulary_needs_no_map(decoded):
    runs, _, ours = decoded
    assert vllm.compare(runs["without"], runs["whole"], ours["whole"])["acceptance_length"] > 1.5


def test_a_draft_in_shards_is_the_same_draft(decoded):
    runs, _, _ = decoded
    one, several = runs["draft"], runs["shards"]
    assert (one.replies, one.passes, one.accepted) == (several.replies, several.passes, several.accepted)


@pytest.mark.parametrize("name", ["one_below", "one_above"])
def test_layer_ids_off_by_one_are_found(decoded, name):
    """vLLM loads it without a word and its output is right; the accepted shares alone would let the second pass."""
    runs, _, ours = decoded
    assert runs[name].replies == runs["without"].replies
    with pytest.raises(UserError, match="serves another draft than the one measured"):
        vllm.compare(runs["without"], runs[name], ours["draft"])


def test_counters_and_single_replies_tell_the_same(decoded):
    run = decoded[0]["draft"]
    by_pass = [accepted for reply in run.accepted_by_pass for accepted in reply]
    assert run.passes == len(by_pass) and run.drafted == 4 * len(by_pass)
    assert run.accepted == [sum(accepted > k for accepted in by_pass) for k in range(4)]


def test_the_workflows_own_figure_is_vllms_without_what_lies_behind_the_ends(chain, decoded):
    """acceptance.json counts no draft behind a reply's end, so its passes emit the reply but for its first token."""
    own = json.loads(chain.result("small/docs/*/trained/acceptance.json").read_text())
    run = decoded[0]["draft"]
    emitted = sum(len(reply) - 1 for reply in run.replies)
    assert own["acceptance_length_all"] == pytest.approx(emitted / run.passes, abs=0.02)  # a near tie may part one
    assert own["acceptance_length_all"] <= run.acceptance_length


@contextmanager
def serving(target, draft, folder, *arguments):
    """A vLLM server on a free port of this machine; its address."""
    port = free_port()
    command = [str(ROOT / vllm.PYTHON), "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-seqs", "8", "--no-enable-prefix-caching"]
    speculative = {"method": "eagle3", "model": str(draft), "num_speculative_tokens": 4}
    command += ["--speculative-config", json.dumps(speculative), *arguments]
    environment = {
        **os.environ,
        **vllm.ENVIRONMENT,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    environment.pop("PYTHONPATH", None)
    with open(folder / "server.log", "wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        url = f"http://127.0.0.1:{port}"
        assert processes.wait_until(lambda: process.poll() is not None or answers(url), 300, 1)
        assert process.poll() is None, (folder / "server.log").read_text()[-3000:]
        yield url
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def answers(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except OSError:
        return False


@pytest.mark.long
def test_a_server_tells_our_passes_by_answer_and_by_counter(chain, tmp_path):
    """Every pass of every reply as our own decoder counts for engines; from the sums at /metrics the same by reply."""
    draft = chain.result("small/docs/*/trained/export")
    target = TargetInfo.read(chain.result("targets/small/target.json"))
    cfg = AcceptanceConfig(prompts=["unused"], sets=["mt-bench"], max_new_tokens=64, draft_steps=4)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    prompts = [
        chat.prompt_ids(tokenizer, samples.prompt_messages(one.messages))
        for one in samples.read([str(chain.folder / "inputs/held_out.jsonl")], 8)
    ]
    ours = evaluation.passes_as_engines_count(draft, target, TransformersEngine(target.path), prompts, cfg)
    arguments = ("--per-request-spec-decode-metrics", "detailed")
    with serving(target.path, draft, tmp_path, *arguments) as url:
        server = openai.Server(url, target, cfg, tokenizer)
        assert server.by_request and server.about["draft_steps"] == 4
        by_answer = dict(server.decode(prompts, 0.0, [0] * 8, 4))
        server.by_request = False
        by_counter = dict(server.decode(prompts, 0.0, [0] * 8, 4))
        sampled = dict(server.decode(prompts, 1.0, range(8), 1))
    accepted = [[one.accepted for one in by_answer[n].passes] for n in range(8)]
    same = sum(accepted[n] == [one.accepted for one in ours[n]] for n in range(8))
    print(same, accepted)
    assert same >= 7  # a near tie of the draft's own may part one
    for n in range(8):
        assert by_counter[n].reply == by_answer[n].reply
        assert sorted(one.accepted for one in by_counter[n].passes) == sorted(accepted[n])
    assert sum(sampled[n].reply != by_answer[n].reply for n in range(8)) >= 4


ROPES = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 8.0},
}


@pytest.mark.long
@pytest.mark.parametrize("rope_type", ROPES)
def test_scaled_rope_is_served_as_it_was_trained(tmp_path, rope_type):
    """On a random target; replies run to the limit of tokens. Scaling left out of the draft's config is found."""
    rope = {"rope_type": rope_type, "rope_theta": 10000.0, "original_max_position_embeddings": 32, **ROPES[rope_type]}
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.35,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, rope_parameters=rope,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path / "target")
    target, engine = targets.load_info(tmp_path / "target"), TransformersEngine(tmp_path / "target")
    export_trained_draft(tmp_path / "draft", target, engine, steps=20)
    unscaled = shutil.copytree(tmp_path / "draft", tmp_path / "unscaled")
    values = json.loads((unscaled / "config.json").read_text())
    values |= {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "rope_scaling": None}
    (unscaled / "config.json").write_text(json.dumps(values))

    prompts = torch.randint(32, (16, 12), generator=torch.Generator().manual_seed(0)).tolist()
    cfg = AcceptanceConfig(prompts=["unused"], max_new_tokens=100, draft_steps=3)
    job = vllm.Job.of(target, [None, tmp_path / "draft", unscaled], prompts, cfg)
    _, (without, draft, other) = vllm.decode(job, tmp_path / "vllm", ROOT / vllm.PYTHON)
    ours = evaluation.passes_as_engines_count(tmp_path / "draft", target, engine, prompts, cfg)
    result = vllm.compare(without, draft, ours)
    print(rope_type, result)
    assert result["identical"] + result["near_ties"] == 16 and result["acceptance_length"] > 1.05
    assert {len(reply) for reply in draft.replies} == {100}
    with pytest.raises(UserError, match="serves another draft"):
        vllm.compare(without, other, ours)


def random_target(folder, kind, config):
    torch.manual_seed(3)
    kind(config).save_pretrained(folder)
    return targets.load_info(folder), TransformersEngine(folder)


def without_norms(draft, folder):
    """The folder as it would be if an engine did not read what config.json says of norms without weights."""
    shutil.copytree(draft, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(values | {"norm_output": False, "norm_before_residual": False}))
    return folder


def served_and_measured(target, engine, drafts, folder):
    """vLLM's runs without a draft and with each, and our own passes with each, on what the drafts have learnt."""
    cfg = AcceptanceConfig(prompts=["unused"], max_new_tokens=20, draft_steps=3)
    job = vllm.Job.of(target, [None, *drafts], TRAINED_ON, cfg)
    _, (without, *runs) = vllm.decode(job, folder, ROOT / vllm.PYTHON)
    ours = [evaluation.passes_as_engines_count(draft, target, engine, TRAINED_ON, cfg) for draft in drafts]
    return without, runs, ours


@pytest.mark.long
def test_variants_are_served_as_they_were_trained(tmp_path):
    config = LlamaConfig(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, max_position_embeddings=256, initializer_range=0.35,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    target, engine = random_target(tmp_path / "target", LlamaForCausalLM, config)
    drafts = []
    for name, norms in VARIANTS.items():
        export_trained_draft(tmp_path / name, target, engine, steps=40, **norms)
        drafts.append(tmp_path / name)
    silent = [without_norms(draft, tmp_path / f"{draft.name}-silent") for draft in drafts[1:]]
    without, runs, ours = served_and_measured(target, engine, [*drafts, *silent], tmp_path / "vllm")
    for name, run, own in zip(VARIANTS, runs, ours, strict=False):
        result = vllm.compare(without, run, own)
        print(name, result)
        assert result["identical"] + result["near_ties"] == len(TRAINED_ON) and result["acceptance_length"] > 1.5
    for run, own in zip(runs[len(drafts) :], ours[1:], strict=False):  # each flag is read: without, another draft
        with pytest.raises(UserError, match="serves another draft"):
            vllm.compare(without, run, own)


@pytest.mark.long
def test_latent_attention_is_served_as_it_was_trained(tmp_path):
    """A DeepSeek of dense layers, with YaRN like all of them; vLLM's CPU kernel takes no other sizes of the latent.

    Without YaRN vLLM 0.32 on a CPU answers otherwise than transformers, with a draft or without.
    """
    rope = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
    rope |= {"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0}
    sizes = {"q_lora_rank": 24, "kv_lora_rank": 512, "qk_nope_head_dim": 16, "qk_rope_head_dim": 64, "v_head_dim": 32}
    config = DeepseekV3Config(
        vocab_size=32, hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=2,
        num_key_value_heads=2, first_k_dense_replace=6, max_position_embeddings=256, initializer_range=0.2,
        tie_word_embeddings=False, bos_token_id=0, eos_token_id=None, num_mtp_layers=0, rope_parameters=rope, **sizes,
    )  # fmt: skip
    target, engine = random_target(tmp_path / "target", DeepseekV3ForCausalLM, config)
    drafts = []
    for name in ("eagle3", "eagle3.1"):
        export_trained_draft(tmp_path / name, target, engine, 20, (2, 3, 4), **VARIANTS[name], **sizes)
        drafts.append(tmp_path / name)
    without, runs, ours = served_and_measured(target, engine, drafts, tmp_path / "vllm")
    for run, own in zip(runs, ours, strict=True):
        result = vllm.compare(without, run, own)
        print(result)
        assert result["identical"] + result["near_ties"] == len(TRAINED_ON) and result["acceptance_length"] > 1.5
