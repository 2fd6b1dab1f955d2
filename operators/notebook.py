"""Tables of HTML, as notebooks show them for a value at the end of a cell."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def html_table(caption: str, rows: Iterable[tuple[str, object]]) -> str:
    """A table of two columns, a name and a value, below a caption. Values are shown as their text."""
    lines = "".join(
        f'<tr><th style="text-align: left">{escape(name)}</th>'
        f'<td style="text-align: left">{escape(str(value))}</td></tr>'
        for name, value in rows
    )
    head = f'<caption style="text-align: left">{escape(caption)}</caption>'
    return f"<table>{head}<tbody>{lines}</tbody></table>"


def html_columns(caption: str, titles: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    """Return a table with a title above each column, below a caption. Values are shown as their text."""
    head = "".join(f'<th style="text-align: left">{escape(title)}</th>' for title in titles)
    cells = (
        "".join(f'<td style="text-align: left">{escape(str(value))}</td>' for value in row)
        for row in rows
    )
    lines = "".join(f"<tr>{each}</tr>" for each in cells)
    above = f'<caption style="text-align: left">{escape(caption)}</caption>'
    return f"<table>{above}<thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table>"
