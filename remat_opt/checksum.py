"""The checksum that files of plans, and of what was learnt, carry."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def checksum_of(body: Any) -> str:
    """The SHA-256 of plain data, whatever its spacing and the order of its keys."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
