"""What the rules ask: which run a job belongs to, where its results lie, what shapes them. No torch.

Paths carry the lineage: `results/{target}/{dataset}/{key}/{draft}`; `key` digests what a hidden
state depends on (`hidden_states.StateKey`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3lib import config as settings
from eagle3lib import (
    curation,
    engines,
    hidden_states,
    in_place,
    question_sets,
    remote,
    shards,
    sources,
    targets,
    warm_start,
)
from eagle3lib.config import RunConfig, plain
from eagle3lib.errors import UserError
from eagle3lib.lineage import code, versions

RESULTS = Path("results")
STORE = RESULTS / "store"
ENGINE = RESULTS / "engine"
ENGINE_LOGS = Path("logs") / "engine"
SOURCES = RESULTS / "store" / "sources"

# How fast or where, not what: settings that never rerun anything.
NOT_SHAPING = {
    "dataset": {"name", "conversations", "imported", "shard_size"},
    "regenerate": {"batch_size", "parts", "draft", "url"},
    "draft": {"name", "initial"},
    # Of the training some change the last bits, as another number of GPUs does; none the mathematics.
    "training": {
        *("gpus", "processes", "parallel", "recompute", "compile"),
        *("checkpoint_minutes", "trackers", "tracker_project"),
    },
    "acceptance": {"prompts", "sets", "drafts"},
    "target": {"name"},
}


@dataclass(frozen=True)
class Run:
    """One target, dataset and draft, with the identities known at parse time."""

    cfg: RunConfig
    identity: targets.TargetIdentity

    @functools.cached_property
    def key(self) -> hidden_states.StateKey:
        imported = self.cfg.dataset.imported
        return hidden_states.StateKey(
            target_fingerprint=self.identity.fingerprint,
            aux_layer_ids=tuple(targets.aux_layer_ids(self.cfg.hidden_states.aux_layer_ids, self.identity)),
            engine=f"imported from {imported.format}" if imported else self.cfg.engine.name,
            compute_dtype="as stored" if imported else self.cfg.engine.compute_dtype,
            storage_format=hidden_states.IN_PLACE if imported else self.cfg.hidden_states.storage_format,
        )

    @functools.cached_property
    def initial(self) -> str | None:
        """What `draft.initial` is: a digest of its files."""
        initial = self.cfg.draft.initial
        return warm_start.fingerprint(initial, STORE / "fingerprints") if initial else None

    @property
    def names(self) -> dict[str, str]:
        """The wildcards of this run."""
        cfg = self.cfg
        return {"target": cfg.target.name, "dataset": cfg.dataset.name, "key": self.key.short, "draft": cfg.draft.name}

    @property
    def samples_file(self) -> Path:
        """samples.parquet: there once the dataset is sharded."""
        return RESULTS / dataset_name(self.cfg) / "samples.parquet"

    @property
    def target_file(self) -> Path:
        """target.json: there once the target is prepared."""
        return RESULTS / "targets" / self.cfg.target.name / "target.json"

    def shaping(self, section: str) -> dict[str, Any]:
        """A section as plain values, less the settings that change no result: what a rule tracks as a param."""
        values = plain(getattr(self.cfg, section))
        shaping = {name: value for name, value in values.items() if name not in NOT_SHAPING.get(section, set())}
        # Which files there are is known by the inputs; how they are read is not.
        if section == "dataset" and (read_as := [one for one in values["conversations"] if isinstance(one, dict)]):
            shaping["sources"] = read_as
        return shaping

    @property
    def gpus_of_replies(self) -> int:
        """GPUs that a job of regenerate_replies holds: none of ours when a server answers."""
        return 0 if self.cfg.regenerate.url else self.cfg.engine.gpus_a_job

    def reply_shaping(self) -> dict[str, Any]:
        """All that decides a reply, beside its prompt."""
        key = self.key
        return {
            "target_fingerprint": key.target_fingerprint,
            "engine": self.cfg.engine.name,
            "compute_dtype": self.cfg.engine.compute_dtype,
            "regenerate": self.shaping("regenerate"),
            # Whose arithmetic is not known: never taken for the engine's own.
            **({"served": True} if self.cfg.regenerate.url else {}),
        }

    def draft_shaping(self) -> dict[str, Any]:
        """All that decides a draft, beside its samples."""
        # Reading others' drafts computes something only where there is one.
        modules = ["eagle3lib.training", *(["eagle3lib.foreign"] if self.initial else [])]
        return {
            "key": self.key.values(),
            "draft": self.shaping("draft"),
            "training": self.shaping("training"),
            "code": code(*modules),
            "versions": versions(*modules),
            **({"initial": self.initial} if self.initial else {}),
        }

    def vocabulary_shaping(self) -> dict[str, Any]:
        """All that decides the draft's vocabulary, beside the samples."""
        draft = self.cfg.draft
        if draft.initial and draft.initial_vocabulary == "keep":
            return {"initial": self.initial}
        return {"draft_vocab_size": draft.draft_vocab_size}

    def code(self, *modules: str) -> str:
        """Digest of `modules` and of the configured engine's."""
        return code(*modules, *engines.MODULES[self.cfg.engine.name])

    def import_shaping(self) -> dict[str, Any]:
        """All that decides what is imported: the folder, and its files by name and size."""
        imported = self.cfg.dataset.imported
        if imported is None:
            raise UserError("dataset.imported: not set; nothing is imported")
        layers = len(self.key.aux_layer_ids)
        return {
            "format": imported.format,
            "aux_layers": layers,
            "folder": imported.folder,
            "files": in_place.listing(imported),
        }

    def maker(self) -> dict[str, str]:
        """What makes a state and is not part of its identity (see `adoption`)."""
        if self.cfg.dataset.imported:
            return {"code": code("eagle3lib.in_place"), "engine_version": self.key.engine}
        return {
            "code": self.code("eagle3lib.hidden_states"),
            "engine_version": engines.installed_version(self.cfg.engine),
        }


class Plan:
    """All runs of a configuration."""

    def __init__(self, values: dict[str, Any]):
        runs = settings.load(values).expand()
        identities = {run.target: _identify(run.target) for run in runs}
        self.runs = [Run(run, identities[run.target]) for run in runs]
        for run in self.runs:
            _ = run.key  # wrong aux ids are a fault of the configuration: say so before anything runs
            question_sets.parse(run.cfg.acceptance.sets)
            if run.cfg.draft.initial:
                _ = run.initial
                warm_start.check_layer_ids(run.cfg.draft.initial, run.key.aux_layer_ids)

    @property
    def shard_size(self) -> int:
        return self.runs[0].cfg.dataset.shard_size

    @property
    def runs_by_states(self) -> list[Run]:
        """The first run of each set of hidden states: drafts beside each other share theirs."""
        return list({(dataset_name(run.cfg), run.key.short): run for run in reversed(self.runs)}.values())[::-1]

    def of(self, wildcards: Any) -> Run:
        """The run (or the first of several) that a job with these wildcards belongs to."""
        asked = {name: getattr(wildcards, name) for name in ("target", "dataset", "draft") if hasattr(wildcards, name)}
        for run in self.runs:
            if all(run.names[name] == value for name, value in asked.items()):
                return run
        raise UserError(f"no run of the config makes {asked}; check the names in the path against the config")

    def paths(self, pattern: str) -> list[str]:
        """A path pattern filled for every run, each once, in order."""
        return list(dict.fromkeys(pattern.format(**run.names) for run in self.runs))

    def comparisons(self, pattern: str) -> list[str]:
        """`paths` of the runs that name other drafts to compare with."""
        return [pattern.format(**run.names) for run in self.runs if run.cfg.acceptance.drafts]

    def source_spec(self, path: str) -> str:
        """The entry of a configuration, or the `package:` spec, whose conversations lie at `path`."""
        entries = [one.path for run in self.runs for one in run.cfg.dataset.conversations]
        entries += [entry for run in self.runs for entry in run.cfg.acceptance.prompts]
        for spec in [*sources.specs(), *filter(sources.is_fetched, entries)]:
            if str(sources.source_path(spec, SOURCES)) == path:
                return spec
        raise UserError(f"{path}: no known source of prompts lies there; known: {', '.join(sources.known())}")

    def source_code(self, path: str) -> str | None:
        """Digest of the code that makes the prompts at `path`. What lies elsewhere is fetched once, by any code."""
        return None if remote.is_remote(self.source_spec(path)) else code("eagle3lib.sources")

    def shaping(self, section: str) -> Callable[[Any], dict[str, Any]]:
        return lambda wildcards: self.of(wildcards).shaping(section)


def dataset_name(cfg: RunConfig) -> str:
    """Whom the work on replies and states is put down to in the ledger; their folder under results/, too."""
    return f"{cfg.target.name}/{cfg.dataset.name}"


def draft_name(cfg: RunConfig, key: hidden_states.StateKey) -> str:
    """Whom a training is put down to in the ledger."""
    return f"{dataset_name(cfg)}/{key.short}/{cfg.draft.name}"


def load_run(job: Any) -> RunConfig:
    """The typed sections of a script's job. Fingerprints are not taken again: a job gets them as params."""
    runs = settings.load(job.config).expand()
    asked = {n: getattr(job.wildcards, n) for n in ("target", "dataset", "draft") if hasattr(job.wildcards, n)}
    for run in runs:
        if all(getattr(run, name).name == value for name, value in asked.items()):
            return run
    raise UserError(f"no run of the config makes {asked}")


def _identify(target: settings.TargetConfig) -> targets.TargetIdentity:
    return targets.identify(target, STORE / "fingerprints" / f"{target.name}.json")


def conversation_files(entries: Sequence[str | settings.SourceConfig]) -> list[str]:
    """Local paths of `dataset.conversations` or `acceptance.prompts`; those that are fetched are made by a rule."""
    return [str(path) for path in sources.files(entries, SOURCES)]


def avoided_files(cfg: RunConfig) -> list[str]:
    """The questions of the evaluation that no conversation may hold; none unless dataset.decontaminate_words."""
    if not cfg.dataset.decontaminate_words:
        return []
    return [*conversation_files(cfg.acceptance.prompts), *set_files(cfg.acceptance.sets)]


def avoided(cfg: RunConfig) -> Iterator[curation.Question]:
    """What stands in `avoided_files`."""
    if cfg.dataset.decontaminate_words:
        yield from curation.questions(conversation_files(cfg.acceptance.prompts), cfg.acceptance, SOURCES)


def set_files(entries: list[str]) -> list[str]:
    """Local paths of `acceptance.sets`; those of packages are made by a rule."""
    return [str(path) for one in question_sets.parse(entries) for path in one.files(SOURCES)]


def draft_folders(entries: list[str]) -> list[str]:
    """The folders among `acceptance.drafts`: those under results/ are made by a rule, the others are there."""
    return [entry for entry in entries if Path(entry).is_dir() or Path(entry).parts[:1] == RESULTS.parts]


# --- after the checkpoint ----------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def _read_shards(path: str, mtime_ns: int) -> dict[str, dict]:
    return json.loads(Path(path).read_text())


def read_shards(path: str | Path) -> dict[str, dict]:
    """shards.json: shard -> {"sha256", "n_samples", "n_tokens"}."""
    return _read_shards(str(path), Path(path).stat().st_mtime_ns)


def shard_sha256(path: str | Path, shard: str) -> str | None:
    """What a shard holds, or None before the checkpoint has run."""
    try:
        return read_shards(path).get(shard, {}).get("sha256")
    except OSError:
        return None


def hidden_state_files(folder: str, sizes: dict[str, dict]) -> list[str]:
    """Every sample's `.pt` below `folder`."""
    return [
        f"{folder}/{hidden_states.slot_path(shard, slot)}"
        for shard, about in sizes.items()
        for slot in range(about["n_samples"])
    ]


def shard_kinds(shard_size: int) -> list[tuple[str, int, str]]:
    """(rule name, slots, shard's name) of the full shards and of each tail size: one rule each.

    A tail's name is written out in its paths: Snakemake then need not try the six rules of tails on each of the
    full shards' files.
    """
    kinds = [("extract_hidden_states", shard_size, "{shard}")]
    return kinds + [(f"extract_tail_{n}", n, f"tail_{n}") for n in shards.tail_sizes(shard_size)]
