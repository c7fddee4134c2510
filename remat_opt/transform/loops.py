"""A ``scan`` written as parts whose iterations keep what the plan says.

Every iteration runs under a checkpoint of its own, whose policy keeps some values by name: a
``scan`` stacks these, and what it carries. A chunk is a checkpoint round a ``scan`` of a few
iterations. Parts follow one another. What the second and later ones read of stacked inputs they
read by index, behind the checkpoint: nothing is cut up, gradients are written where they belong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from remat_opt import _jax_internals as internals
from remat_opt.errors import PlanFileError
from remat_opt.program.record import Equation
from remat_opt.schedule import Loop, Part

#: An iteration, or a chunk of them: from constants, carry and entries of what is stacked to the
#: next carry and entries of what is stacked.
_Body = Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]


def check_loop(equation: Equation, loop: Loop) -> None:
    """Raises PlanFileError unless the parts can be those of the equation."""
    if equation.operation.primitive != "scan" or equation.effects:
        raise PlanFileError(
            f"The plan opens equation {loop.root}, which is no loop that can be opened. Make the "
            "plan again."
        )
    length = internals.scan_of(equation.jax_equation).length
    fits = sum(part.length for part in loop.parts) == length
    for part in loop.parts:
        extents = (part.length, *part.chunks)
        fits &= min(extents) >= 1
        fits = fits and not any(
            left % right for left, right in zip(extents, extents[1:], strict=False)
        )
    if not fits:
        raise PlanFileError(
            f"The parts of the loop at equation {loop.root} of the plan do not add up to its "
            f"length, {length}. Make the plan again."
        )


def run_loop(
    equation: Equation,
    loop: Loop,
    inputs: Sequence[Any],
    body: Callable[[Part], tuple[Callable[..., list[Any]], Callable[..., Any]]],
) -> list[Any]:
    """Runs a ``scan`` equation in its parts.

    Args:
      equation: the loop.
      loop: its parts.
      inputs: its inputs.
      body: gives for a part the function that runs one iteration, from the body's flat arguments to
        its flat outputs, and the policy of its checkpoint.

    Returns:
      Its outputs.
    """
    scan = internals.scan_of(equation.jax_equation)
    given = [
        value if isinstance(atom, int) else internals.array_of(value, variable.aval)
        for value, atom, variable in zip(
            inputs, equation.inputs, equation.jax_equation.invars, strict=True
        )
    ]
    constants, rest = given[: scan.constants], given[scan.constants :]
    carry, stacked = rest[: scan.carries], rest[scan.carries :]
    found: list[list[Any]] = []
    done = 0
    with internals.context_of(equation.jax_equation, equation.name_stack):
        for part in loop.parts:
            start = scan.length - done - part.length if scan.reverse else done
            run, policy = body(part)
            carry, made = _run_part(
                functools.partial(_iteration, run, scan.carries),
                policy,
                part.chunks,
                scan,
                constants,
                carry,
                stacked,
                range(start, start + part.length),
                scan.length,
            )
            found.append(made)
            done += part.length
        in_order = found[::-1] if scan.reverse else found
        results = [
            parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            for parts in zip(*in_order, strict=True)
        ]
    return [*carry, *results]


def _iteration(
    run: Callable[..., list[Any]],
    carries: int,
    constants: Sequence[Any],
    carry: Sequence[Any],
    entries: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    outputs = run([*constants, *carry, *entries])
    return outputs[:carries], outputs[carries:]


def _run_part(
    iteration: _Body,
    policy: Callable[..., Any],
    chunks: Sequence[int],
    scan: internals.Scan,
    constants: Sequence[Any],
    carry: Sequence[Any],
    stacked: Sequence[Any],
    where: range,
    length: int,
) -> tuple[list[Any], list[Any]]:
    """Runs some iterations, in chunks or one by one.

    Args:
      iteration: runs one.
      policy: of its checkpoint.
      chunks: the lengths of chunks.
      scan: what the equation says.
      constants: what every iteration reads.
      carry: what the first of them is handed.
      stacked: stacked inputs.
      where: which of their entries are read.
      length: how many there are.

    Returns:
      The carry, and the stacked outputs of these iterations.
    """
    size = chunks[0] if chunks else 1
    count = len(where) // size
    body = iteration
    if chunks:

        def body(constants: Any, carry: Any, entries: Any) -> tuple[list[Any], list[Any]]:
            return _run_part(
                iteration,
                policy,
                chunks[1:],
                scan,
                constants,
                carry,
                entries,
                range(size),
                size,
            )

    # In a loop, nothing but the loop that runs backward repeats what is under the checkpoint.
    unroll = 1 if chunks else min(scan.unroll, count)
    remat = functools.partial(
        jax.checkpoint, prevent_cse=unroll >= count, policy=None if chunks else policy
    )
    if len(where) == length:

        @remat
        def whole(constants: Any, carry: Any, entries: Any) -> Any:
            return body(constants, carry, entries)

        def step(carry: Any, entries: Any) -> Any:
            return whole(constants, carry, entries)

        given: Any = list(stacked)
        if chunks:
            given = [one.reshape(count, size, *one.shape[1:]) for one in stacked]
    else:

        @remat
        def read(constants: Any, carry: Any, stacked: Any, place: Any) -> Any:
            return body(constants, carry, [_entries(one, place, size, chunks) for one in stacked])

        def step(carry: Any, place: Any) -> Any:
            return read(constants, carry, list(stacked), place)

        given = np.arange(where.start, where.stop, size, dtype=np.int32)
    carry, made = lax.scan(
        step, list(carry), given, length=count, reverse=scan.reverse, unroll=unroll
    )
    if chunks:
        made = [one.reshape(len(where), *one.shape[2:]) for one in made]
    return carry, made


def _entries(stacked: Any, place: Any, size: int, chunks: Sequence[int]) -> Any:
    """So many entries from a place on; one by itself where there are no chunks."""
    starts = (place, *[0] * (stacked.ndim - 1))
    found = lax.dynamic_slice(
        stacked, starts, (size, *stacked.shape[1:]), allow_negative_indices=False
    )
    return found if chunks else found.reshape(stacked.shape[1:])
