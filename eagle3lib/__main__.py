"""`python -m eagle3lib`: questions that need no workflow run."""

from __future__ import annotations

import argparse

from eagle3lib import config, sources


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eagle3lib", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("sources", help="prompts that come in packages, for dataset.conversations")
    commands.add_parser("schema", help="the JSON schema of the configuration")
    commands.add_parser("keys", help="every key of the configuration, as a Markdown table")
    arguments = parser.parse_args()
    print({"sources": _sources, "schema": config.schema, "keys": _keys}[arguments.command](), end="")


def _sources() -> str:
    return "".join(f"{spec:<44} {about}\n" for spec, about in sources.known().items())


def _keys() -> str:
    lines = []
    for name, field in config.RunConfig.model_fields.items():
        section: type[config.Section] = field.annotation  # type: ignore[assignment]
        lines += [f"\n## `{name}`", f"{section.__doc__}\n", "| key | default | meaning |", "| --- | --- | --- |"]
        for key, value in section.model_fields.items():
            default = "(required)" if value.is_required() else f"`{value.default}`"
            lines.append(f"| `{name}.{key}` | {default} | {value.description} |")
    return "\n".join(lines).strip() + "\n"


if __name__ == "__main__":
    main()
