"""What a script prints must not depend on the order of hashes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def printed_with_two_seeds(script: str) -> list[str]:
    """The output of a script under two seeds of Python's hashes, in separate processes."""
    return [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[1],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("0", "31337")
    ]
