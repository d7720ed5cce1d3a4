"""`python -m eagle3lib`: questions about results that need no workflow run. Nothing is changed unless it says so."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eagle3lib import config, ledger, monitor, overview, sources, verification, why
from eagle3lib.errors import UserError
from eagle3lib.plan import ENGINE, RESULTS, STORE, Plan

DEFAULT_CONFIG = "config/config.yaml"


def main() -> int:
    arguments = _parser().parse_args()
    try:
        return arguments.command(arguments) or 0
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # `… | head`
        return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m eagle3lib", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable, about: str, configured: bool = False) -> argparse.ArgumentParser:
        one = commands.add_parser(name, help=about, description=about)
        one.set_defaults(command=command)
        if configured:
            one.add_argument("--configfile", default=DEFAULT_CONFIG, help=f"as for snakemake ({DEFAULT_CONFIG})")
        return one

    add("missing", _missing, "which samples have no hidden states yet, and what they will take", configured=True)
    one = add("status", _status, "how the run in this folder goes, or how the last one ended; from any shell or node")
    one.add_argument("--json", action="store_true", help="all of it, as results/status/run.json")
    one = add("why", _why, "why a file would be made (again): the chain of jobs, causes first", configured=True)
    one.add_argument("file", help="a path under results/")
    one.add_argument("--options", default="", help="further options for snakemake, as one string")
    about = "what a state, a draft, a figure or any other result came from; what became of an input line"
    one = add("trace", _trace, about)
    one.add_argument("path", help="a path under results/, or FILE:LINE of an input file")
    _show_arguments(add("show", _show, "a sample as text, with the tokens that supervise in colour"))
    one = add("verify", _verify, "read every byte of the store; bad files go to quarantine and are made again")
    one.add_argument("keys", nargs="*", help="only these keys (folders of results/store/hidden_states)")
    one = add("gc", _gc, "what the configuration no longer uses; --delete frees it", configured=True)
    one.add_argument("--delete", nargs="+", metavar="NAME", help="names out of the list, or: all")
    _moving(add)
    one = add("confirm", _confirm, "yes, make that finished work again (the refused plan names the TOKEN)")
    one.add_argument("token")
    about = "the command that starts an SGLang server with our plugin, for engine.url"
    one = add("engine-command", _engine_command, about, configured=True)
    one.add_argument("--role", choices=("generate", "extract"), default="extract", help="what it is for")
    _judging(add)
    about = "what is supervised of standard conversations under a chat template, or why it is refused"
    _template_arguments(add("template", _template, about))
    about = "is this machine fit for it: driver, GPUs, packages, target, disk, limits; a line and a remedy each"
    add("doctor", _doctor, about, configured=True)
    about = "five samples through the whole configured way, before the long run: replies to exported draft"
    one = add("canary", _canary, about, configured=True)
    one.add_argument("--options", default="", help="further options for snakemake, as one string")
    add("sources", _sources, "prompts that come in packages, for dataset.conversations")
    add("schema", _schema, "the JSON schema of the configuration")
    add("keys", _keys, "every key of the configuration, as a Markdown table")
    return parser


def _judging(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands about exported drafts."""
    one = add("replay", _replay, "is an exported draft served as it was trained? on held-out samples of its training")
    one.add_argument("draft", help="the exported folder: results/…/export")
    one.add_argument("--samples", type=int, default=16, help="at most so many (16)")
    one = add("check", _check, "is any EAGLE-3 draft what its folder says? names the likely cause of low acceptance")
    one.add_argument("draft", help="its folder")
    one.add_argument("target", help="a folder, or a hub id whose files are here")
    one.add_argument("prompts", nargs="+", help="as acceptance.prompts")
    one.add_argument("--max-prompts", type=int, default=16, help="use the first so many (16)")
    one.add_argument("--max-new-tokens", type=int, default=64, help="longest reply in tokens (64)")
    about = "drafts of any origin on question sets: acceptance, by position and context, tokens/s, compared"
    _bench_arguments(add("bench", _bench, about))
    one = add("push", _push, "an exported draft to the Hugging Face hub; without --yes it only says what would be sent")
    one.add_argument("draft", help="the exported folder: results/…/export")
    one.add_argument("repo", help="org/name")
    one.add_argument("--yes", action="store_true", help="send it")
    one.add_argument("--public", action="store_true", help="into a public repository (default: private)")


def _template_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument("target", help="a folder, or a hub id whose files are here: its tokenizer")
    one.add_argument("--template", metavar="FILE", help="as dataset.chat_template (the target's own)")
    one.add_argument("--option", nargs="*", default=[], metavar="NAME=VALUE", help="as dataset.chat_template_options")
    one.add_argument("--train-on", choices=("all", "last"), default="all", help="as dataset.train_on (all)")
    one.add_argument("--without-reasoning", action="store_true", help="as dataset.train_on_reasoning: false")
    one.add_argument("--trust-remote-code", action="store_true", help="as target.trust_remote_code")


def _show_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument("sample", help="a shard, as 00000, with its slot; a .pt; or the beginning of a sample id")
    one.add_argument("slot", nargs="?", type=int, help="the place in the shard, from 0")


def _moving(add: Callable[..., argparse.ArgumentParser]) -> None:
    """Commands that take results elsewhere, or mend them after that."""
    one = add("pack", _pack, "all results as tar files, to move them: a tar a shard, checked, resumable")
    one.add_argument("destination", help="a folder, or a URL that fsspec knows (s3://bucket/prefix)")
    one.add_argument("--jobs", type=int, default=os.cpu_count(), help="tars at once (as many as cores)")
    one.add_argument("--read-back", action="store_true", help="read every tar again when all are written")
    one = add("unpack", _unpack, "the results that were packed, in this folder; nothing that is there is overwritten")
    one.add_argument("source", help="what `pack` wrote to")
    one.add_argument("--jobs", type=int, default=os.cpu_count(), help="tars at once (as many as cores)")
    about = "a dataset's states in the layout of another trainer: speculators 0.9 or SpecForge"
    one = add("export-dataset", _export_dataset, about)
    one.add_argument("states", type=Path, help="results/TARGET/DATASET/KEY")
    one.add_argument("destination", type=Path, help="a folder")
    one.add_argument("--format", choices=("speculators", "specforge"), required=True)
    one.add_argument("--jobs", type=int, default=os.cpu_count(), help="samples at once (as many as cores)")
    add("relink", _relink, "make links again of states that a copy without -H has doubled")
    one = add("crate", _crate, "a finished run as an RO-Crate: results/ro-crate-metadata.json")
    one.add_argument("--workflow", type=Path, default=Path(__file__).parents[1], help="the folder of its Snakefile")
    one.add_argument("--licence", metavar="URL", help="of the results, as https://spdx.org/licenses/CC-BY-4.0")


def _bench_arguments(one: argparse.ArgumentParser) -> None:
    one.add_argument("target", help="a folder, or a hub id whose files are here")
    one.add_argument("drafts", nargs="+", help="folders, hub ids, or http://… of servers that decode with one")
    one.add_argument("--sets", nargs="+", default=["mt-bench", "humaneval", "asdiv"], help="as acceptance.sets")
    one.add_argument("--temperatures", nargs="+", type=float, default=[0.0], help="0: greedy (0)")
    one.add_argument("--batches", nargs="+", type=int, default=[], help="tokens/s at so many replies at once")
    for option, default in (("max-prompts", 80), ("max-new-tokens", 128), ("draft-steps", 4), ("seed", 0)):
        one.add_argument(f"--{option}", type=int, default=default, help=f"as in acceptance ({default})")
    one.add_argument("--draft-sampling", choices=("greedy", "sampled"), default="greedy", help="as in acceptance")
    one.add_argument("--without", metavar="URL", help="a server without a draft, for tokens/s")
    one.add_argument("--out", metavar="FILE", help="the figures as JSON, replies' counts included")


def _plan(arguments: argparse.Namespace) -> Plan:
    return Plan(_values(arguments))


def _values(arguments: argparse.Namespace) -> dict[str, Any]:
    import yaml

    try:
        return yaml.safe_load(Path(arguments.configfile).read_text("utf-8")) or {}
    except FileNotFoundError:
        raise UserError(f"{arguments.configfile}: no such file; name yours with --configfile") from None
    except yaml.YAMLError as error:
        raise UserError(f"{arguments.configfile}: not YAML: {str(error).splitlines()[-1].strip()}") from None


def _missing(arguments: argparse.Namespace) -> None:
    print(overview.missing(_plan(arguments)), end="")


def _status(arguments: argparse.Namespace) -> int:
    return monitor.main(arguments.json)


def _why(arguments: argparse.Namespace) -> None:
    print(why.explain(arguments.file, arguments.configfile, shlex.split(arguments.options)), end="")


def _trace(arguments: argparse.Namespace) -> None:
    from eagle3lib import tables, trace

    print(tables.as_text(trace.trace(arguments.path)), end="")


def _show(arguments: argparse.Namespace) -> None:
    from eagle3lib import inspection

    for dataset, sample in inspection.find(arguments.sample, arguments.slot):
        print(inspection.as_text(inspection.tokenizer_of(dataset), sample, sys.stdout.isatty()))


def _verify(arguments: argparse.Namespace) -> int:
    report = verification.verify(verification.everything(STORE, arguments.keys or None))
    print(report)
    return 1 if report.bad or report.files < report.of_files else 0


def _gc(arguments: argparse.Namespace) -> None:
    overview.gc(_plan(arguments), arguments.delete, print)


def _pack(arguments: argparse.Namespace) -> None:
    from eagle3lib import packing

    packing.pack(Path(), arguments.destination, arguments.jobs, print, arguments.read_back)


def _unpack(arguments: argparse.Namespace) -> None:
    from eagle3lib import packing

    packing.unpack(arguments.source, Path(), arguments.jobs, print)


def _export_dataset(arguments: argparse.Namespace) -> None:
    from eagle3lib import dataset_export
    from eagle3lib.targets import TargetInfo

    states = arguments.states
    target = TargetInfo.read(states.parents[1].parent / "targets" / states.parents[1].name / "target.json")
    counts = dataset_export.export(states, target, arguments.destination, arguments.format, arguments.jobs)
    print(
        f"{counts['samples']:,} samples in {arguments.destination}: {counts['train']:,} to train on, then "
        f"{counts['validation']:,} to validate with"
    )


def _relink(_: argparse.Namespace) -> int:
    from eagle3lib import links

    return int(links.relink(RESULTS, print) > 0)


def _crate(arguments: argparse.Namespace) -> None:
    from eagle3lib import crate

    print(crate.write(arguments.workflow, arguments.licence))


def _confirm(arguments: argparse.Namespace) -> None:
    ledger.confirm(STORE, arguments.token)
    print(f"confirmed {arguments.token}; run the same command again")


def _engine_command(arguments: argparse.Namespace) -> None:
    from eagle3lib import engine_job
    from eagle3lib.engines.sglang import launch
    from eagle3lib.targets import TargetInfo

    run = _plan(arguments).runs[0]
    if not run.target_file.exists():
        raise UserError(f"{run.target_file}: not there yet; `snakemake {run.target_file}` makes it")
    layers = run.key.aux_layer_ids if arguments.role == "extract" else ()
    wanted = engine_job.wanted(run.cfg, TargetInfo.read(run.target_file), arguments.role, layers)
    print(launch.shell_command(run.cfg.engine, wanted, ENGINE / "attached"))


def _replay(arguments: argparse.Namespace) -> None:
    from eagle3lib import engines, replay

    job = replay.job_of(arguments.draft, STORE)
    engine = engines.open_engine(config.EngineConfig(), job.target.path)
    print(replay.describe(replay.replay(arguments.draft, job, engine, arguments.samples)))


def _check(arguments: argparse.Namespace) -> int:
    from transformers import AutoTokenizer

    from eagle3lib import chat, diagnosis, engines, samples

    target = diagnosis.find_target(arguments.target)
    tokenizer = AutoTokenizer.from_pretrained(target.path)
    conversations = samples.fit(samples.read(arguments.prompts, arguments.max_prompts))
    prompts = [chat.prompt_ids(tokenizer, samples.prompt_messages(one.messages)) for one in conversations]
    engine = engines.open_engine(config.EngineConfig(), target.path)
    result = diagnosis.check(arguments.draft, target, engine, prompts, arguments.max_new_tokens)
    print(diagnosis.describe(result))
    return 1 if result["cause"] else 0


def _template(arguments: argparse.Namespace) -> None:
    import yaml
    from transformers import AutoTokenizer

    from eagle3lib import diagnosis, template_check

    path = diagnosis.find_target(arguments.target).path
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=arguments.trust_remote_code)
    pairs = (option.partition("=") for option in arguments.option)
    options = {name: yaml.safe_load(value) for name, _, value in pairs}
    reasoning = not arguments.without_reasoning
    lines = template_check.describe(tokenizer, arguments.template, arguments.train_on, reasoning, options)
    print("\n".join(lines))


def _bench(arguments: argparse.Namespace) -> None:
    from dataclasses import replace

    from transformers import AutoTokenizer

    from eagle3lib import bench, comparison, diagnosis, engines, lineage, plan, question_sets, targets
    from eagle3lib.job import write_json

    values = vars(arguments)
    settings = {name: values[name] for name in config.AcceptanceConfig.model_fields if name in values}
    cfg = config.validate(config.AcceptanceConfig, {**settings, "prompts": ["unused"]}, "bench: ")
    for one in question_sets.parse(cfg.sets):
        if one.source:
            sources.fetch(one.source, plan.SOURCES)
    identity = targets.identify(config.TargetConfig(name="target", model=arguments.target))
    target = replace(diagnosis.find_target(arguments.target), fingerprint=identity.fingerprint)
    measured = list(
        bench.measure_all(
            cfg.drafts,
            bench.Speaker(AutoTokenizer.from_pretrained(target.path), target),
            bench.read_sets(cfg, plan.SOURCES),
            cfg,
            lambda _: engines.open_engine(config.EngineConfig(), target.path),
            STORE / "acceptance",
            [lineage.code("eagle3lib.bench"), lineage.versions("eagle3lib.bench")],
            os.environ.get(config.EngineConfig().key_variable, ""),
            arguments.without,
        )
    )
    print(comparison.describe(measured), end="")
    if arguments.out:
        write_json(arguments.out, {"measured": measured, "comparison": comparison.result(measured)})


def _push(arguments: argparse.Namespace) -> None:
    from eagle3lib import hub

    hub.push(arguments.draft, arguments.repo, arguments.yes, arguments.public)


def _doctor(arguments: argparse.Namespace) -> int:
    from eagle3lib import doctor

    failed = False
    for line in doctor.examine(_plan(arguments)):
        print(line, flush=True)
        failed |= line.status == "fail"
    return int(failed)


def _canary(arguments: argparse.Namespace) -> None:
    from eagle3lib import canary

    print(canary.send(_values(arguments), shlex.split(arguments.options)))


def _sources(_: argparse.Namespace) -> None:
    from eagle3lib import question_sets

    print("".join(f"{spec:<44} {about}\n" for spec, about in sources.known().items()))
    print("question sets, for acceptance.sets:")
    print("".join(f"{name:<44} {about}\n" for name, about in question_sets.known().items()), end="")


def _schema(_: argparse.Namespace) -> None:
    print(config.schema(), end="")


def _keys(_: argparse.Namespace) -> None:
    lines = []
    for name, field in config.RunConfig.model_fields.items():
        section: type[config.Section] = field.annotation  # type: ignore[assignment]
        lines += [f"\n## `{name}`", f"{section.__doc__}\n", "| key | default | meaning |", "| --- | --- | --- |"]
        for key, value in section.model_fields.items():
            default = "(required)" if value.is_required() else f"`{value.default}`"
            lines.append(f"| `{name}.{key}` | {default} | {value.description} |")
    print("\n".join(lines).strip())


if __name__ == "__main__":
    sys.exit(main())
