"""What XLA writes about a program while compiling it, and how to get at it."""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache

from remat_opt.device import Device
from remat_opt.errors import CompileError
from remat_opt.measurement.buffers import CompiledMemory, parse_memory

#: What XLA writes about memory: the endings of three file names with a common beginning.
_DUMPED = "after_optimizations"
_ASSIGNMENT, _LIVE_RANGES = "-buffer-assignment.txt", "-live-range.txt"
_MODULE = re.compile(r"HloModule ([^\s,]+)")


@contextlib.contextmanager
def dump_folder() -> Iterator[Path]:
    """A folder for XLA to write to, removed at the end.

    JAX takes programs that it compiled before from its cache, and then nothing is written: dump
    options are not part of the cache's key. So the cache is off meanwhile. JAX checks only once
    whether it is on, hence the resets; if no cache is configured, nothing is touched.
    """
    settings = jax.config.values
    cached = bool(
        settings["jax_enable_compilation_cache"] and settings["jax_compilation_cache_dir"]
    )
    with tempfile.TemporaryDirectory(prefix="remat_opt_") as folder:
        if not cached:
            yield Path(folder)
            return
        jax.config.update("jax_enable_compilation_cache", False)
        compilation_cache.reset_cache()
        try:
            yield Path(folder)
        finally:
            jax.config.update("jax_enable_compilation_cache", True)
            compilation_cache.reset_cache()


def read_memory(text: str, folder: Path, device: Device) -> CompiledMemory:
    """What XLA wrote to ``folder`` about the program; it may also have compiled helpers.

    Args:
      text: the program's text, compiled or not, which begins with its name.
      folder: where XLA wrote to.
      device: the machine compiled for.
    """
    program = _MODULE.match(text)
    found = []
    for path in sorted(folder.rglob(f"*{_DUMPED}{_ASSIGNMENT}")):
        stem = path.name.removesuffix(_ASSIGNMENT)
        scheduled = path.with_name(f"{stem}.txt")
        live_ranges = path.with_name(stem + _LIVE_RANGES)
        if scheduled.exists() and live_ranges.exists():
            module = _MODULE.match(content := scheduled.read_text())
            if module is not None and program is not None and module[1] == program[1]:
                found.append((content, live_ranges.read_text(), path.read_text()))
    if len(found) != 1:
        raise CompileError(
            f"The compiler for {device} was to write what it decided about memory, and wrote it "
            f"for {len(found)} programs of this name rather than one.",
            device=device.name,
        )
    content, lives, assignment = found[0]
    return parse_memory(
        program=content, live_ranges=lives, assignment=assignment, device=device.name
    )
