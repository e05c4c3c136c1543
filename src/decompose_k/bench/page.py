"""Pieces of a page: tables that sort by their cells' keys, lists, sections, figures."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from dataclasses import dataclass

# A table of fewer lines is read whole.
_FILTERED_FROM = 8


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table: its heading, whether it holds numbers, and what the heading means."""

    heading: str
    is_number: bool = False
    hint: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: what is shown, what it is sorted by, and its class."""

    text: str
    key: float | str
    css: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A table with a name of its own on the page."""

    name: str
    columns: tuple[Column, ...]
    lines: tuple[tuple[Cell, ...], ...]

    def __str__(self) -> str:
        head = "".join(map(_heading, self.columns))
        body = "".join(f"<tr>{''.join(map(_cell, self.columns, line))}</tr>\n" for line in self.lines)
        return (
            f'{self._filter()}<div class="scroll" tabindex="0"><table id="{self.name}" class="sortable">'
            f"<thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table></div>"
        )

    def _filter(self) -> str:
        if len(self.lines) <= _FILTERED_FROM:
            return ""
        return (
            f'<input type="search" data-table="{self.name}" placeholder="filter, such as router"'
            ' aria-label="filter the table">'
        )


def text_cell(text: str, css: str = "") -> Cell:
    """A cell that is sorted by what it shows."""
    return Cell(text, text, css)


def section(title: str, body: str) -> str:
    """A part of the page under a heading."""
    return f"<section>\n<h2>{title}</h2>\n{body}\n</section>\n"


def bullets(texts: Sequence[str]) -> str:
    """A list of plain texts."""
    return f"<ul>{''.join(f'<li>{html.escape(text)}</li>' for text in texts)}</ul>"


def _heading(column: Column) -> str:
    css = " class=number" if column.is_number else ""
    hint = f" title={json.dumps(html.escape(column.hint))}" if column.hint else ""
    return f'<th scope="col"{css}{hint}><button type="button">{html.escape(column.heading)}</button></th>'


def _cell(column: Column, cell: Cell) -> str:
    classes = " ".join(name for name in ("number" if column.is_number else "", cell.css) if name)
    css = f' class="{classes}"' if classes else ""
    # A page of thousands of rows is read on a phone too: six digits of a number, and no key that is the text.
    key = f"{cell.key:.6g}" if isinstance(cell.key, float) else str(cell.key)
    data = "" if key == cell.text else f' data-key="{html.escape(key)}"'
    return f"<td{css}{data}>{html.escape(cell.text)}</td>"
