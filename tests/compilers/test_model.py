"""The room's interface: what a program, and a schedule of it, is expected to take."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from remat_opt.compilers.model import computes_nothing
from remat_opt.program import tracing
from remat_opt.program.record import Program
from tests.compiler_graphs import (
    W,
    X,
    graph_of,
)


def test_what_is_assumed_or_estimated_is_told() -> None:
    def loss(w, x):
        y = jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x * w[0])
        return jnp.sum(y)

    _, found, _ = graph_of(loss, W, X)
    assert found.assumed == ("pure_callback",)
    assert found.estimated_flops_share > 0


def test_programs_that_compute_nothing_are_recognised() -> None:
    def trace(fn: Callable[..., Any]) -> Program:
        return tracing.trace(fn, jnp.ones((1, 1)))

    assert computes_nothing(trace(lambda x: x))
    assert computes_nothing(trace(lambda x: x.reshape(()).T))
    assert not computes_nothing(trace(jnp.sin))
