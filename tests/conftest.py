"""What all tests share: the CPU as JAX's platform, and the same draws on every run."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from importlib.metadata import version
from unittest import mock

# Before anything imports jax: a test must not use an accelerator it happens to find.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of the time to compile for CPU is LLVM's work on kernels. Unoptimised they run slower, but
# XLA's own passes, and so memory and FLOPs, are those that users get. Kernels of one program go to
# LLVM as one module, not as 32: to make these takes longer than to compile them. With JAX 0.10, its
# older way to generate kernels takes half of the rest; it rounds and counts otherwise (kernels.py).
# Settings that already exist come later and win. Eight devices, for meshes; what is not sharded
# runs on the first.
os.environ["XLA_FLAGS"] = " ".join(
    [
        "--xla_backend_optimization_level=0",
        "--xla_llvm_disable_expensive_passes=true",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_force_host_platform_device_count=8",
        *["--xla_cpu_use_fusion_emitters=false"] * version("jaxlib").startswith("0.10."),
        os.environ.get("XLA_FLAGS", ""),
    ]
).strip()

# Tables are as wide as the terminal.
os.environ["COLUMNS"] = "120"

import hypothesis
import pytest

from remat_opt import planning
from remat_opt.recent import Recent
from remat_opt.solvers import local_search

#: How many programs stay planned; a user's process keeps fewer.
_SWEEPS = 200
#: Those of fast tests that do not care how good a plan is.
_QUICK: Recent = Recent(_SWEEPS)

# Derandomised, so that a run is decided by the code alone. To hunt for new examples:
# HYPOTHESIS_PROFILE=hunt pytest tests/solvers
hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "hunt", parent=hypothesis.settings.get_profile("ci"), derandomize=False
)
#: Fewer, for all tests that do not say how many.
hypothesis.settings.register_profile(
    "fast", parent=hypothesis.settings.get_profile("ci"), max_examples=30
)


def pytest_configure(config: pytest.Config) -> None:
    """The fast tests draw fewer examples than all tests together."""
    usual = "fast" if config.option.markexpr == "not slow" else "ci"
    hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", usual))


def pytest_collection_finish() -> None:
    """What several tests plan is planned once.

    Imported modules stay: they need not be searched for garbage again and again.
    """
    planning._sweeps = Recent(_SWEEPS)
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


#: Larger programs than this are not searched thoroughly in fast tests.
QUICK_SMALL = 6


@pytest.fixture
def quick_search(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fast tests search programs of 7 to 12 vertices as larger ones: thoroughly takes longer.

    For modules that ask whether any plan is right, not whether it is the best.
    """
    if request.node.get_closest_marker("slow"):
        yield
        return
    with (
        mock.patch.object(local_search, "SMALL", QUICK_SMALL),
        mock.patch.object(planning, "_sweeps", _QUICK),
    ):
        yield
