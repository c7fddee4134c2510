"""Rows in a file, one JSON object a line, each written as soon as it is known.

An interrupted run leaves the earlier rows, and at worst part of one, which is skipped; the next row
begins a new line.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


class JsonLines:
    """A file of rows.

    Args:
      path: the file, created with the first row if missing.

    Attributes:
      rows: those that were in the file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole = True
        self.rows: list[dict[str, Any]] = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
            try:
                self.rows.append(json.loads(line))
                self._whole = True
            except json.JSONDecodeError:
                self._whole = False

    def with_heading(self, heading: Mapping[str, Any]) -> dict[str, Any] | None:
        """The first row that was in the file and has everything in the heading."""
        return next((row for row in self.rows if heading.items() <= row.items()), None)

    def append(self, row: Mapping[str, Any]) -> None:
        """Writes a row."""
        with self._path.open("a", encoding="utf-8") as file:
            if not self._whole:
                file.write("\n")
                self._whole = True
            file.write(json.dumps(row) + "\n")


def row_of(
    lines: JsonLines | None, heading: Mapping[str, Any], make: Callable[[], Mapping[str, Any]]
) -> dict[str, Any]:
    """The row with a heading: from the file if present, else made, dated and written to it.

    Args:
      lines: the file; None to keep nothing.
      heading: what the row is about.
      make: gives its figures.
    """
    if lines is not None and (known := lines.with_heading(heading)) is not None:
        return known
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    row = {**heading, **make(), "date": today}
    if lines is not None:
        lines.append(row)
    return row
