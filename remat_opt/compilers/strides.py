"""Slices with strides on TPU, as the two halves of an associative scan.

They are no part of the kernels that read them: within tiles, along either of the last two axes,
such a slice is an array (``strides_stored``). Nor is what puts its cotangent back between zeros:
each is an array as large as what was sliced, until all are added up (``strides_spread``). Gated
linear recurrences, layers of ``f32[8,1024,512]`` by ``lax.associative_scan``, were predicted 29 to
53 % too small.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from remat_opt.compilers.compiler import Compiler
from remat_opt.operation import Operation
from remat_opt.program.dataflow import Dataflow

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage


def stored(flow: Dataflow, compiler: Compiler) -> set[int]:
    """The slices that are stored."""
    if not compiler.has("strides_stored"):
        return set()
    return {
        value
        for equation in flow.program.equations
        if any(stride > 1 for stride in of(equation.operation)[-2:])
        for value in equation.outputs
    }


def spread(storage: Storage) -> Iterator[tuple[int, int]]:
    """For vertices that are sliced with strides more than once, the bytes of further cotangents."""
    if not storage.compiler.has("strides_spread"):
        return
    flow = storage.flow
    active = flow.linearization.active_values
    times = Counter(
        flow.source[value]
        for equation in flow.program.equations
        if any(stride > 1 for stride in of(equation.operation))
        and active.issuperset(equation.outputs)
        for value in equation.value_inputs
    )
    for value, count in times.items():
        if count > 1 and value in storage.vertex_of:
            yield storage.vertex_of[value], (count - 1) * storage.cotangent_bytes([value])


def of(operation: Operation) -> tuple[int, ...]:
    """The strides of a slice; none for anything else."""
    if operation.primitive != "slice":
        return ()
    return tuple(operation.params["strides"] or ())
