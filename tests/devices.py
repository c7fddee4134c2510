"""Marks for tests that compile for a device whose compiler may not be installed."""

from __future__ import annotations

import importlib.util

import pytest


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
