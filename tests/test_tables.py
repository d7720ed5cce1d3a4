"""The same tables as text and as a page."""

import xml.etree.ElementTree as ElementTree

from eagle3lib.tables import Table, as_page, as_text, facts

NUMBERS = Table("Sizes", [("a<b", "1,024", "12.5 %"), ("c", "7", "-")], ("name", "count", "share"), "a note")


def test_text_has_columns():
    assert as_text([NUMBERS, facts("About", {"name": "x", "where": None, "n": 3})]) == (
        "Sizes\n"
        "  name  count  share\n"
        "  a<b   1,024  12.5 %\n"
        "  c     7      -\n"
        "  a note\n"
        "\n"
        "About\n"
        "  name  x\n"
        "  n     3\n"
    )


def test_page_escapes_and_aligns_numbers():
    page = as_page("A & B", [NUMBERS, facts("About", {"n": 3}), Table("Empty", [], ("one", "two"))])
    tree = ElementTree.fromstring(page.removeprefix("<!doctype html>"))
    assert [h.text for h in tree.iter("h1")] == ["A & B"]
    assert [h.text for h in tree.iter("h2")] == ["Sizes", "About", "Empty"]
    cells = {cell.text: cell.get("class") for cell in tree.iter("td")}
    numbers = {"1,024", "12.5 %", "7", "-"}
    assert {text for text, kind in cells.items() if "n" in kind.split()} == numbers
    assert cells.keys() == {*numbers, "a<b", "c", "3"}, "names are heads of their rows where there is no header"
    assert "http" not in page and "src=" not in page
