"""What the cost tests share: jaxpr equations as Operations, and the compiler's own count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import pytest

from remat_opt.costs import cost
from remat_opt.operation import Operation
from remat_opt.program.tracing import operation
from tests.kernels import USERS_KERNELS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """FLOPs and transcendentals of a function."""

    flops: int
    transcendentals: int


def _operations(fn: Callable[..., Any], *args: Any) -> list[Operation]:
    return [operation(equation) for equation in jax.make_jaxpr(fn)(*args).jaxpr.eqns]


def _counts(analysis: Any) -> Counts:
    # A count of zero is left out of the analysis.
    return Counts(
        flops=int(analysis.get("flops", 0)),
        transcendentals=int(analysis.get("transcendentals", 0)),
    )


def _ours(fn: Callable[..., Any], *args: Any) -> Counts:
    costs = [cost(operation) for operation in _operations(fn, *args)]
    return Counts(
        flops=sum(each.flops for each in costs),
        transcendentals=sum(each.transcendentals for each in costs),
    )


def _compiled(fn: Callable[..., Any], *args: Any) -> Counts:
    compiled = jax.jit(fn, compiler_options=USERS_KERNELS).lower(*args).compile()
    return _counts(compiled.cost_analysis())


def _unexpanded(fn: Callable[..., Any], *args: Any) -> Counts:
    return _counts(jax.jit(fn).trace(*args).lower(lowering_platforms=("tpu",)).cost_analysis())


@pytest.fixture
def operations() -> Callable[..., list[Operation]]:
    """(fn, *args) -> the equations of fn as Operations."""
    return _operations


@pytest.fixture
def only() -> Callable[..., Operation]:
    """(fn, *args) -> the one equation that fn is."""

    def only_operation(fn: Callable[..., Any], *args: Any) -> Operation:
        (operation,) = _operations(fn, *args)
        return operation

    return only_operation


@pytest.fixture
def ours() -> Callable[..., Counts]:
    """(fn, *args) -> what remat_opt.costs counts."""
    return _ours


@pytest.fixture
def compiled() -> Callable[..., Counts]:
    """(fn, *args) -> what the CPU compiler counts in the program it made."""
    return _compiled


@pytest.fixture
def unexpanded() -> Callable[..., Counts]:
    """(fn, *args) -> what the compiler counts before CPU expands operations without a kernel.

    Lowered for TPU, which keeps the most operations whole; nothing is compiled.
    """
    return _unexpanded
