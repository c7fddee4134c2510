"""Rows and facts as text and as HTML, with their surroundings, from plain data only.

The markup carries its style inline and takes text colours from the surrounding page, so that it is
legible in light and dark notebooks. The same data gives the same characters.
"""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
import textwrap
from collections.abc import Sequence

#: Characters of a line if the terminal's width is unknown.
WIDTH = 120

_FONT = "font-family:system-ui,sans-serif;font-size:13px"
_CELL = "padding:2px 10px 2px 0;vertical-align:top;border:none;background:transparent"
_RULE = "border-bottom:1px solid rgba(128,128,128,0.5)"


def columns() -> int:
    """How many characters a line of the terminal has."""
    return shutil.get_terminal_size((WIDTH, 0)).columns


def wrapped(lines: Sequence[str], width: int) -> list[str]:
    """The lines, with those longer than the width broken."""
    return [part for line in lines for part in textwrap.wrap(line, width) or [""]]


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
      title: goes above the table, or "".
      footer: goes below the table, or "".
      prose: whether the last column holds sentences: these are broken, while words are cut.
      spare: headings of the columns that are left out, one after the other, as long as lines are
        too long.
    """

    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    align: str
    title: str = ""
    footer: str = ""
    prose: bool = False
    spare: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        widths = {len(self.headings), len(self.align), *map(len, self.rows)}
        if len(widths) != 1:
            raise ValueError(
                f"The table {self.title!r} has {len(self.headings)} headings, {len(self.align)} "
                f"alignments and rows of {sorted(set(map(len, self.rows)))} cells."
            )

    def text(self, width: int | None = None) -> str:
        """The table as aligned lines.

        Args:
          width: that of the terminal, in characters: spare columns are left out, then the longest
            columns of words are cut until the table fits, unless that leaves next to nothing. None
            cuts nothing.
        """
        widths = [max(map(len, column)) for column in zip(self.headings, *self.rows, strict=True)]
        if width is not None and self.spare and _line_width(widths) > width:
            return self.without(self.spare[0]).text(width)
        rows = [self.headings, *self.rows]
        if width is not None:
            widths = _narrowed(widths, self, width)
            if self.prose:
                rows = [one for row in rows for one in _broken(row, widths[-1])]
        lines = [
            [_cut(cell, most) for cell, most in zip(cells, widths, strict=True)] for cells in rows
        ]

        def line(cells: Sequence[str]) -> str:
            return "  ".join(
                cell.rjust(width) if side == "r" else cell.ljust(width)
                for cell, width, side in zip(cells, widths, self.align, strict=True)
            ).rstrip()

        rule = "  ".join("-" * width for width in widths)
        body = [line(lines[0]), rule, *map(line, lines[1:])]
        footer = [self.footer] if width is None else textwrap.wrap(self.footer, width)
        return "\n".join(filter(None, [self.title, *body, *footer]))

    def without(self, heading: str) -> Table:
        """The table without one of its columns."""
        kept = [n for n, one in enumerate(self.headings) if one != heading]
        return dataclasses.replace(
            self,
            headings=tuple(self.headings[n] for n in kept),
            rows=tuple(tuple(cells[n] for n in kept) for cells in self.rows),
            align="".join(self.align[n] for n in kept),
            spare=tuple(one for one in self.spare if one != heading),
        )

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


#: The end of a value's title.
_EXTENTS = re.compile(r", (?:\d[\dx]*|scalar) \w+$")
#: No column of words is cut below this.
_FEWEST = 12
#: What goes between two columns.
_GAP = 2


def _line_width(widths: Sequence[int]) -> int:
    return sum(widths) + _GAP * (len(widths) - 1)


def _narrowed(widths: Sequence[int], table: Table, width: int) -> list[int]:
    """Column widths that fit into a line, as far as columns of words can shrink.

    The user's source lines are cut last: they are how a value is found.
    """
    found = list(widths)
    over = _line_width(found) - width
    while over > 0:
        words = [n for n, side in enumerate(table.align) if side == "l" and found[n] > _FEWEST]
        if not words:
            break
        longest = max(words, key=lambda n: (table.headings[n] != "source", found[n]))
        found[longest] -= 1
        over -= 1
    return found


def _broken(cells: Sequence[str], width: int) -> list[tuple[str, ...]]:
    """A row with its last cell broken into lines, each in a separate row."""
    lines = textwrap.wrap(cells[-1], width) or [""]
    blank = ("",) * (len(cells) - 1)
    return [(*(blank if n else cells[:-1]), line) for n, line in enumerate(lines)]


def _cut(text: str, most: int) -> str:
    """The text without its extents or its middle if it is too long: both ends identify it.

    >>> _cut("ResNet/stage_1/block_2/Conv_0", 16)
    'ResNet.../Conv_0'
    >>> _cut("relu of Block_3/BatchNorm_0, 64x112x112x96 float32", 40)
    'relu of Block_3/BatchNorm_0...'
    """
    if len(text) <= most:
        return text
    if (extents := _EXTENTS.search(text)) is not None:
        text = f"{text[: extents.start()]}..."
        return text if len(text) <= most else _cut(text.removesuffix("..."), most)
    end = (most - 3 + 1) // 2
    return f"{text[: most - 3 - end]}...{text[len(text) - end :]}"


_NUMERIC = "white-space:nowrap;font-variant-numeric:tabular-nums"
_WRAP = "overflow-wrap:break-word"


def facts_text(facts: Sequence[tuple[str, str]], width: int | None = None) -> str:
    """Pairs of a word and what is said about it, as aligned lines.

    Args:
      facts: the pairs.
      width: that of the terminal, in characters, at which to break lines; None breaks none.
    """
    margin = max((len(word) for word, _ in facts), default=0) + _GAP
    lines = []
    for word, said in facts:
        parts = [said]
        if width is not None:
            room = max(width - margin, 2 * _FEWEST)
            parts = textwrap.wrap(said, room, break_on_hyphens=False) or [""]
        lines += [
            f"{first.ljust(margin)}{part}"
            for first, part in zip([word, *[""] * (len(parts) - 1)], parts, strict=True)
        ]
    return "\n".join(lines)


def facts_html(facts: Sequence[tuple[str, str]]) -> str:
    """Pairs of a word and what is said about it, as an HTML table without headings."""
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
    """HTML parts one below the other, under a title, as shown in a notebook."""
    inside = "".join(
        f'<div style="margin:0 0 10px;overflow-x:auto">{part}</div>' for part in parts if part
    )
    heading = f'<div style="font-size:15px;font-weight:600;margin:0 0 6px">{escape(title)}</div>'
    return f'<div style="{_FONT};line-height:1.4;color:inherit">{heading}{inside}</div>'
