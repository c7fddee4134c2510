"""The checksum in plan files and files of what was learnt."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def checksum_of(body: Any) -> str:
    """The SHA-256 of plain data, independent of spacing and key order."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
