"""Rows and facts as text and as HTML, and what goes round them, from plain data only.

The markup carries its style inline and takes text colours from the page round it, so that it is
legible in light and dark notebooks. The same data give the same characters.
"""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence

_FONT = "font-family:system-ui,sans-serif;font-size:13px"
_CELL = "padding:2px 10px 2px 0;vertical-align:top;border:none;background:transparent"
_RULE = "border-bottom:1px solid rgba(128,128,128,0.5)"


def escape(text: str) -> str:
    """Text as it may stand in HTML, attributes included."""
    return html.escape(text, quote=True)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of text under headings.

    Attributes:
      headings: one per column.
      rows: the cells, as many in each row as there are headings.
      align: ``l`` or ``r`` for each column.
      title: stands above the table, or "".
      footer: stands below the table, or "".
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    title: str = ""
    footer: str = ""

    def __post_init__(self) -> None:
        widths = {len(self.headings), len(self.align), *map(len, self.rows)}
        if len(widths) != 1:
            raise ValueError(
                f"The table {self.title!r} has {len(self.headings)} headings, {len(self.align)} "
                f"alignments and rows of {sorted(set(map(len, self.rows)))} cells."
            )

    def text(self) -> str:
        """The table as aligned lines."""
        lines = [self.headings, *self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

        def line(cells: Sequence[str]) -> str:
            return "  ".join(
                cell.rjust(width) if side == "r" else cell.ljust(width)
                for cell, width, side in zip(cells, widths, self.align, strict=True)
            ).rstrip()

        rule = "  ".join("-" * width for width in widths)
        body = [line(self.headings), rule, *map(line, self.rows)]
        return "\n".join(filter(None, [self.title, *body, self.footer]))

    def html(self) -> str:
        """The table as an HTML element."""
        sides = ["right" if side == "r" else "left" for side in self.align]
        head = "".join(
            f'<th scope="col" style="{_CELL};{_RULE};text-align:{side}">{escape(cell)}</th>'
            for cell, side in zip(self.headings, sides, strict=True)
        )
        body = "".join(
            "<tr>"
            + "".join(
                f'<td style="{_CELL};text-align:{side};{_NUMERIC if side == "right" else _WRAP}">'
                f"{escape(cell)}</td>"
                for cell, side in zip(row, sides, strict=True)
            )
            + "</tr>"
            for row in self.rows
        )
        caption = (
            f'<caption style="caption-side:top;text-align:left;font-weight:600;'
            f'padding:8px 0 4px;color:inherit">{escape(self.title)}</caption>'
            if self.title
            else ""
        )
        footer = f'<div style="opacity:0.75">{escape(self.footer)}</div>' if self.footer else ""
        return (
            f'<table style="{_FONT};border-collapse:collapse;border:none;margin:0;color:inherit">'
            f"{caption}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{footer}"
        )


_NUMERIC = "white-space:nowrap;font-variant-numeric:tabular-nums"
_WRAP = "overflow-wrap:break-word"


def facts_text(facts: Sequence[tuple[str, str]]) -> str:
    """Pairs of a word and what is said of it, as aligned lines."""
    width = max((len(word) for word, _ in facts), default=0)
    return "\n".join(f"{word.ljust(width)}  {said}" for word, said in facts)


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Pairs of a word and what is said of it, as an HTML table without headings."""
    rows = "".join(
        f'<tr><th scope="row" style="{_CELL};text-align:left;font-weight:400;opacity:0.75;'
        f'white-space:nowrap">{escape(word)}</th>'
        f'<td style="{_CELL};text-align:left">{escape(said)}</td></tr>'
        for word, said in facts
    )
    return (
        f'<table style="{_FONT};border-collapse:collapse;border:none;margin:0;color:inherit">'
        f"<tbody>{rows}</tbody></table>"
    )


def section(title: str, *parts: str) -> str:
    """HTML parts one below the other, under a title; what a notebook shows."""
    inside = "".join(f'<div style="margin:0 0 10px">{part}</div>' for part in parts if part)
    heading = f'<div style="font-size:15px;font-weight:600;margin:0 0 6px">{escape(title)}</div>'
    return f'<div style="{_FONT};line-height:1.4;color:inherit">{heading}{inside}</div>'


def page(title: str, body: str) -> str:
    """A whole HTML document around a part; follows the reader's choice of light or dark."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{max-width:80em;margin:2em auto;padding:0 1em}"
        f"</style></head><body>{body}</body></html>\n"
    )
