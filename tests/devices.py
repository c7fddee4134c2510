"""Marks for tests that compile for a device whose compiler may not be installed."""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator

import jax
import pytest


@contextlib.contextmanager
def quick_compiles() -> Iterator[None]:
    """Here and in new processes, XLA for TPU takes a fraction of the time.

    It then leaves vector memory alone: only for tests that look at no temporaries on a TPU.
    """
    name, value = "jax_optimization_level", "O1"
    before = getattr(jax.config, name)
    jax.config.update(name, value)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(name.upper(), value)
            yield
    finally:
        jax.config.update(name, before)


def _installed(*names: str) -> bool:
    return any(_finds(name) for name in names)


def _finds(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


needs_libtpu = pytest.mark.skipif(
    not _installed("libtpu"), reason="libtpu is not installed: pip install 'remat_opt[tpu]'"
)
needs_cuda_plugin = pytest.mark.skipif(
    not _installed("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"),
    reason="no CUDA plug-in of JAX is installed: pip install 'remat_opt[cuda]'",
)
