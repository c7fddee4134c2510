"""What the compiler has said, on file: an interrupted run continues where it was.

For some devices a single program takes a quarter of an hour to compile. The key is the program
itself, so a change of this package that leaves a program as it is costs no compiling.
"""

from __future__ import annotations

import hashlib
import json
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from benchmarks.json_lines import JsonLines
from remat_opt.device import get_device
from remat_opt.measurement.compilation import Measurement

#: The packages that compilers come in, by platform; that for CPU comes with JAX.
_COMPILERS = {"cuda": "jax-cuda13-pjrt", "tpu": "libtpu"}


def compiler_version(device: str) -> dict[str, str]:
    """Name and version of the package that compiles for a device, if it has a separate one."""
    package = _COMPILERS.get(get_device(device).platform)
    try:
        return {package: version(package)} if package is not None else {}
    except PackageNotFoundError:
        return {}


class Kept:
    """Measurements by program and device, each written as soon as it is known.

    Args:
      path: a file of ``json_lines``.
    """

    def __init__(self, path: Path) -> None:
        self._lines = JsonLines(path)
        self._known = {
            row["key"]: Measurement.from_dict(row["measurement"]) for row in self._lines.rows
        }

    @staticmethod
    def key(device: str, gradient: Any, arguments: tuple[Any, ...]) -> str:
        """What distinguishes programs, and compilers.

        Args:
          device: name of the device compiled for.
          gradient: a function.
          arguments: its arguments, or their shapes.
        """
        # Functions are shown by their memory address; what they compute is shown beside them. So is
        # what a policy chose: under another name it makes the same program.
        text = str(jax.make_jaxpr(gradient)(*arguments))
        text = re.sub(r" at 0x[0-9a-f]+|policy=.*", "", text)
        said = json.dumps([device, jax.__version__, compiler_version(device), text])
        return hashlib.sha256(said.encode()).hexdigest()

    def get(self, key: str) -> Measurement | None:
        """What is known about a program."""
        return self._known.get(key)

    def put(self, key: str, found: Measurement) -> None:
        """Keeps what the compiler has said."""
        self._known[key] = found
        self._lines.append({"key": key, "measurement": found.to_dict()})
