"""A plan for the eye: a table in a terminal, a page in a notebook. From plain data only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def text(plan: Mapping[str, Any]) -> str:
    return f"Plan({plan['function']})"


def html(plan: Mapping[str, Any]) -> str:
    return f"<pre>{text(plan)}</pre>"
