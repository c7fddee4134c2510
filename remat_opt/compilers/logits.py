"""Logits whose exponentials are only summed, as in a cross-entropy: what is held beside them.

Their cotangent is elementwise: that of the loss minus the exponentials divided by their sum. If
nothing adds to it in place, XLA for CPU computes it in each kernel that reads it, once as it is and
once transposed for the weight's gradient, and what it is computed from stays until then.
``transform`` makes it one array, which takes the place of the exponentials.

No gradient reads the loss itself, so that comes last. A ``log_softmax`` subtracts from the logits
minus the maximum of their row, which stay as long.

(2,048 rows of 32,000 float32 logits, 250 MiB, with smoothed labels: 1,369 MiB unchanged, predicted
at 620 without this; with least memory 1,321, or 827 with a cotangent of one array. With one-hot
labels 573 instead of 1,071.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from remat_opt.compilers import cpu_sums, product_sums, softmax
from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.effects import Effect, Unchanged
from remat_opt.compilers.row_gathers import is_row_gather
from remat_opt.program.record import Program

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage


def one_cotangent(program: Program, rules: Rules) -> frozenset[int]:
    """The products whose result is to have one array as its cotangent."""
    found = softmax.summed(program) if rules.has("logits_together") else ()
    return frozenset(product for product, _ in found)


def effects(storage: Storage) -> Iterator[Effect]:
    """What depends on the schedule."""
    if storage.compiler.has("logits_apart"):
        beside = _beside_kernels
    elif storage.compiler.has("rows_scattered"):
        beside = _beside_scattered
    else:
        return
    equations, readers = storage.flow.program.equations, storage.flow.program.readers()
    found = {}
    for product, shifted in softmax.summed(storage.flow.program):
        (logits,) = equations[product].outputs
        if logits in storage.vertex_of and (size := beside(storage, product, shifted, readers)):
            found[storage.vertex_of[logits]] = size
    if found:
        yield Unchanged(workspace_bytes=found)


def _beside_scattered(
    storage: Storage, product: int, shifted: int, readers: Mapping[int, Sequence[int]]
) -> int:
    """Bytes of logits and their cotangent beside what the gradient of labels is scattered into.

    XLA for NVIDIA scatters the gradient of labels' log-probabilities into an array as large as
    these. The sums of its rows are part of the cotangent, so a kernel writes that beside it, while
    it reads the logits, unless those are stored minus their maximum (``softmax``).
    """
    flow, program = storage.flow, storage.flow.program
    if (
        shifted in storage.weights_of
        or not softmax.is_subtracted_from(program, shifted, readers)
        or not softmax.is_picked_from(program, shifted, flow.maker, readers)
    ):
        return 0
    (logits,) = program.equations[product].outputs
    return 2 * storage.compiler.buffer_bytes(program.types[logits])


def _beside_kernels(
    storage: Storage, product: int, shifted: int, readers: Mapping[int, Sequence[int]]
) -> int:
    """Bytes of the arrays as large as the logits that stay beside their cotangents, on a CPU.

    Args:
      storage: what is stored.
      product: the equation that makes the logits.
      shifted: the logits minus the maximum of their row.
      readers: for each value, the equations that read it.
    """
    flow, program = storage.flow, storage.flow.program
    full = storage.compiler.buffer_bytes(program.types[shifted])
    waits = softmax.is_subtracted_from(program, shifted, readers)
    from_logits = any(
        is_row_gather(program, flow.maker, program.equations[index])
        for value in softmax.behind(program, shifted, flow.maker)
        for index in readers.get(value, ())
    )
    if from_logits or product in product_sums.biases(program):
        return waits * full
    (logits,) = program.equations[product].outputs
    is_rounded = program.types[logits].bytes < program.types[shifted].bytes
    twice = not is_rounded and cpu_sums.gradient_bytes(flow, product, storage.compiler) > 0
    picked = waits and softmax.is_picked_from(program, shifted, flow.maker, readers)
    return ((waits and not is_rounded) + twice + picked) * full
