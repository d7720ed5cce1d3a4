"""`python -m eagle3lib`: questions about results that need no workflow run. Nothing is changed unless it says so."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from eagle3lib import config, ledger, overview, sources, verification, why
from eagle3lib.errors import UserError
from eagle3lib.plan import STORE, Plan

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
    one = add("why", _why, "why a file would be made (again): the chain of jobs, causes first", configured=True)
    one.add_argument("file", help="a path under results/")
    one.add_argument("--options", default="", help="further options for snakemake, as one string")
    one = add("verify", _verify, "read every byte of the store; bad files go to quarantine and are made again")
    one.add_argument("keys", nargs="*", help="only these keys (folders of results/store/hidden_states)")
    one = add("gc", _gc, "what the configuration no longer uses; --delete frees it", configured=True)
    one.add_argument("--delete", nargs="+", metavar="NAME", help="names out of the list, or: all")
    one = add("confirm", _confirm, "yes, make that finished work again (the refused plan names the TOKEN)")
    one.add_argument("token")
    about = "is this machine fit for it: driver, GPUs, packages, target, disk, limits; a line and a remedy each"
    add("doctor", _doctor, about, configured=True)
    add("sources", _sources, "prompts that come in packages, for dataset.conversations")
    add("schema", _schema, "the JSON schema of the configuration")
    add("keys", _keys, "every key of the configuration, as a Markdown table")
    return parser


def _plan(arguments: argparse.Namespace) -> Plan:
    import yaml

    try:
        return Plan(yaml.safe_load(Path(arguments.configfile).read_text("utf-8")) or {})
    except FileNotFoundError:
        raise UserError(f"{arguments.configfile}: no such file; name yours with --configfile") from None
    except yaml.YAMLError as error:
        raise UserError(f"{arguments.configfile}: not YAML: {str(error).splitlines()[-1].strip()}") from None


def _missing(arguments: argparse.Namespace) -> None:
    print(overview.missing(_plan(arguments)), end="")


def _why(arguments: argparse.Namespace) -> None:
    print(why.explain(arguments.file, arguments.configfile, shlex.split(arguments.options)), end="")


def _verify(arguments: argparse.Namespace) -> int:
    report = verification.verify(verification.everything(STORE, arguments.keys or None))
    print(report)
    return 1 if report.bad or report.files < report.of_files else 0


def _gc(arguments: argparse.Namespace) -> None:
    overview.gc(_plan(arguments), arguments.delete, print)


def _confirm(arguments: argparse.Namespace) -> None:
    ledger.confirm(STORE, arguments.token)
    print(f"confirmed {arguments.token}; run the same command again")


def _doctor(arguments: argparse.Namespace) -> int:
    from eagle3lib import doctor

    failed = False
    for line in doctor.examine(_plan(arguments)):
        print(line, flush=True)
        failed |= line.status == "fail"
    return int(failed)


def _sources(_: argparse.Namespace) -> None:
    print("".join(f"{spec:<44} {about}\n" for spec, about in sources.known().items()), end="")


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
