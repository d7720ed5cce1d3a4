"""Tables of facts: as text for a terminal, as one HTML page that needs nothing beside itself for the report."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NUMBER = re.compile(r"[-+]?[\d,.]+( ?(%|[kMGT]i?B|B|s|h|min))?|-|")
WHOLE = 24  # a cell of so many characters is not broken into lines

STYLE = """
body { font: 15px/1.45 system-ui, "DejaVu Sans", sans-serif; color: #1a1a1a; background: #fff; margin: 24px 32px; }
h1 { font-size: 1.4em; margin: 0 0 .2em; }
h2 { font-size: 1.05em; margin: 1.8em 0 .4em; }
p { color: #555; margin: .2em 0 .6em; max-width: 60em; }
div { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: 4px 18px 4px 0; text-align: left; vertical-align: top; border-bottom: 1px solid #e2e2e2; }
th { font-weight: 600; color: #444; }
thead th { border-bottom: 2px solid #999; }
tbody th { white-space: nowrap; }
td { overflow-wrap: anywhere; }
tbody .whole { white-space: nowrap; }
.n { text-align: right; font-variant-numeric: tabular-nums; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid #ccc; padding-left: 14px; color: #555; }
.text b { font-weight: normal; color: #004d36; background: #d8f0e6; }
"""


@dataclass(frozen=True)
class Table:
    """Rows under a header; without one, names with their values. Every cell is the text that is shown."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()
    note: str = ""


@dataclass(frozen=True)
class Text:
    """A running text in pieces, some of them marked."""

    title: str
    pieces: Sequence[tuple[str, bool]]
    note: str = ""


def facts(title: str, values: dict[str, object], note: str = "") -> Table:
    """Names with their values, less those that are not known (None)."""
    return Table(title, [(name, str(value)) for name, value in values.items() if value is not None], note=note)


def as_text(tables: Iterable[Table]) -> str:
    """Columns by blanks, a blank line between tables."""
    return "\n".join(map(_text, tables))


def _text(table: Table) -> str:
    rows = [*([table.header] if table.header else []), *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    cells = [[f"{cell:<{width}}" for cell, width in zip(row, [*widths, 0], strict=True)] for row in rows]
    lines = [table.title, *(f"  {'  '.join(row)}".rstrip() for row in cells)]
    return "\n".join([*lines, *([f"  {table.note}"] if table.note else []), ""])


def as_page(title: str, tables: Iterable[Table | Text], about: str = "") -> str:
    """A whole HTML document."""
    about = f"<p>{html.escape(about)}</p>\n" if about else ""
    body = "\n".join(map(_html, tables))
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"/><title>{html.escape(title)}</title>\n'
        f"<style>{STYLE}</style></head>\n<body>\n<h1>{html.escape(title)}</h1>\n{about}{body}\n</body>\n</html>\n"
    )


def _html(table: Table | Text) -> str:
    if isinstance(table, Text):
        pieces = (f"<b>{html.escape(text)}</b>" if marked else html.escape(text) for text, marked in table.pieces)
        return f'<h2>{html.escape(table.title)}</h2>\n{_note(table.note)}<div class="text">{"".join(pieces)}</div>'
    numeric = [bool(table.header) and all(map(NUMBER.fullmatch, column)) for column in zip(*table.rows, strict=True)]
    heads = zip(table.header, numeric or [False] * len(table.header), strict=True) if table.header else []
    head = "".join(_cell("th", name, number) for name, number in heads)
    return (
        f"<h2>{html.escape(table.title)}</h2>\n{_note(table.note)}<div><table>\n"
        + (f"<thead><tr>{head}</tr></thead>\n" if head else "")
        + "".join(_row(row, numeric, not table.header) for row in table.rows)
        + "</table></div>"
    )


def _note(note: str) -> str:
    return f"<p>{html.escape(note)}</p>\n" if note else ""


def _row(row: Sequence[str], numeric: Sequence[bool], named: bool) -> str:
    """named: the first cell is the name of the others."""
    cells = [
        _cell("th" if named and not i else "td", cell, number)
        for i, (cell, number) in enumerate(zip(row, numeric, strict=True))
    ]
    return f"<tr>{''.join(cells)}</tr>\n"


def _cell(tag: str, text: str, number: bool) -> str:
    kinds = [name for name, holds in (("n", number), ("whole", len(text) <= WHOLE)) if holds]
    return f'<{tag} class="{" ".join(kinds)}">{html.escape(text)}</{tag}>'
