"""The shell of a page: style, script and data around a part, and a document around those.

Both files are in ``assets``. Everything is under the class ``remat-opt``, so that nothing else on a
notebook's page changes, and nothing has an identifier, so that one page can hold several parts.
"""

from __future__ import annotations

import functools
from pathlib import Path

from remat_opt.view.report import escape

_ASSETS = Path(__file__).with_name("assets")


def part(body: str, data: str = "") -> str:
    """A part of a page with its style and, if it has data, its script.

    Args:
      body: HTML.
      data: JSON that the script reads.
    """
    script = ""
    if data:
        # "</script>" and "<!--" in a text must not end the element.
        held = data.replace("<", "\\u003c")
        script = (
            f'<script type="application/json" class="ro-data">{held}</script>'
            f"<script>{_asset('plan.js')}</script>"
        )
    return f'<div class="remat-opt"><style>{_asset("plan.css")}</style>{body}{script}</div>'


def document(title: str, body: str) -> str:
    """A whole HTML document around a part; it follows the reader's choice of light or dark."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title>"
        "<style>:root{color-scheme:light dark}body{margin:0 auto;max-width:76rem;padding:1rem;"
        "background:#fff}@media (prefers-color-scheme:dark){body{background:#16191d}}</style>"
        f"</head><body>{body}</body></html>\n"
    )


@functools.cache
def _asset(name: str) -> str:
    return (_ASSETS / name).read_text(encoding="utf-8").strip()
