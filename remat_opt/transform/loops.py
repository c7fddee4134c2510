"""A ``scan`` written as parts whose iterations keep what the plan says.

Every iteration runs under a checkpoint of its own, whose policy keeps some values by name: a
``scan`` stacks these, and what it carries. A chunk is a checkpoint round a ``scan`` of a few
iterations. Parts follow one another. What the second and later ones read of stacked inputs they
read by index, behind the checkpoint: nothing is cut up, gradients are written where they belong.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from remat_opt import _jax_internals as internals
from remat_opt.errors import PlanFileError
from remat_opt.program import bodies
from remat_opt.program.record import Equation
from remat_opt.schedule import Loop, Part


def check_loop(equation: Equation, loop: Loop) -> None:
    """Raises PlanFileError unless the parts can be those of the equation."""
    if equation.operation.primitive != "scan" or equation.once:
        raise PlanFileError(
            f"The plan opens equation {loop.root}, which is no loop that can be opened. Make the "
            "plan again."
        )
    length = internals.scan_of(equation.jax_equation).length
    fits = sum(part.length for part in loop.parts) == length
    for part in loop.parts:
        extents = (part.length, *part.chunks)
        fits &= min(extents) >= 1
        fits = fits and not any(left % right for left, right in itertools.pairwise(extents))
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
    reads, carry = (
        [*given[: scan.constants], *given[scan.constants + scan.carries :]],
        given[scan.constants : scan.constants + scan.carries],
    )
    found: list[list[Any]] = []
    done = 0
    with internals.context_of(equation.jax_equation, equation.name_stack):
        for part in loop.parts:
            start = scan.length - done - part.length if scan.reverse else done
            run, policy = body(part)
            iterations = _Iterations(
                body=functools.partial(_iteration, run, scan),
                policy=policy,
                chunks=part.chunks,
                scan=scan,
            )
            if part.length == scan.length:
                carry, made = _run_all(iterations, reads, carry, scan.length)
            else:
                where = range(start, start + part.length)
                carry, made, reads = _run_some(equation, iterations, reads, carry, where)
            found.append(made)
            done += part.length
        in_order = found[::-1] if scan.reverse else found
        results = [
            parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            for parts in zip(*in_order, strict=True)
        ]
    return [*carry, *results]


def _iteration(
    run: Callable[..., list[Any]], scan: internals.Scan, reads: Sequence[Any], carry: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    constants, entries = reads[: scan.constants], reads[scan.constants :]
    outputs = run([*constants, *carry, *entries])
    return outputs[: scan.carries], outputs[scan.carries :]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Iterations:
    """How to run iterations.

    Attributes:
      body: runs one: from constants with entries of what is stacked, and the carry, to the next
        carry and entries of what is stacked.
      policy: of its checkpoint.
      chunks: the lengths of chunks.
      scan: what the equation says.
    """

    body: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    policy: Callable[..., Any]
    chunks: tuple[int, ...]
    scan: internals.Scan

    @property
    def size(self) -> int:
        """How many run in one turn of the outermost loop."""
        return self.chunks[0] if self.chunks else 1

    def unroll(self, count: int) -> int:
        """How many of so many turns are written out in a row."""
        return 1 if self.chunks else min(self.scan.unroll, count)

    def turn(self, reads: Sequence[Any], carry: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Runs one turn: an iteration, or a chunk of them."""
        if not self.chunks:
            return self.body(reads, carry)
        inside = dataclasses.replace(self, chunks=self.chunks[1:])
        return _run_all(inside, reads, carry, self.size)

    def checkpointed(self, turn: Callable[..., Any], count: int) -> Callable[..., Any]:
        """A turn under its checkpoint, where there are so many."""
        return jax.checkpoint(
            turn,
            # In a loop, nothing but the loop that runs backward repeats what is under it.
            prevent_cse=self.unroll(count) >= count,
            policy=None if self.chunks else self.policy,
        )


def _run_all(
    iterations: _Iterations, reads: Sequence[Any], carry: Sequence[Any], length: int
) -> tuple[list[Any], list[Any]]:
    """Runs an iteration for all entries of what is stacked.

    Returns:
      The carry, and the stacked outputs.
    """
    scan, size = iterations.scan, iterations.size
    count = length // size
    turn = iterations.checkpointed(iterations.turn, count)
    constants, stacked = list(reads[: scan.constants]), list(reads[scan.constants :])
    if iterations.chunks:
        stacked = [one.reshape(count, size, *one.shape[1:]) for one in stacked]
    last, made = lax.scan(
        lambda carry, entries: turn([*constants, *entries], carry),
        list(carry),
        stacked,
        length=count,
        reverse=scan.reverse,
        unroll=iterations.unroll(count),
    )
    return last, _flat(made, iterations)


def _flat(made: Sequence[Any], iterations: _Iterations) -> list[Any]:
    """Stacked outputs of all turns, one entry for each iteration."""
    if not iterations.chunks:
        return list(made)
    return [one.reshape(one.shape[0] * one.shape[1], *one.shape[2:]) for one in made]


def _run_some(
    equation: Equation,
    iterations: _Iterations,
    reads: Sequence[Any],
    carry: Sequence[Any],
    where: range,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs an iteration for some entries of what is stacked.

    What is read is handed on to the next part, and its gradient comes back from there: that of this
    part is added to it, in its place. ``scan`` by itself would sum up a gradient of its own in each
    part, as large as the whole. For that the tangents of what is read are carried, and only they:
    what is carried is there once for each iteration, where the backward pass reads it.

    Returns:
      The carry, the stacked outputs of these iterations, and what is read.
    """
    scan, size = iterations.scan, iterations.size
    count = len(where) // size

    def from_place(
        reads: Sequence[Any], carry: Sequence[Any], place: Any
    ) -> tuple[list[Any], list[Any]]:
        entries = [_entries(one, place, iterations) for one in reads[scan.constants :]]
        return iterations.turn([*reads[: scan.constants], *entries], carry)

    turn = iterations.checkpointed(from_place, count)
    loop = functools.partial(
        lax.scan,
        xs=np.arange(where.start, where.stop, size, dtype=np.int32),
        reverse=scan.reverse,
        unroll=iterations.unroll(count),
    )

    @jax.custom_jvp
    def run(reads: list[Any], carry: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        carry, made = loop(lambda carry, place: turn(reads, carry, place), carry)
        return carry, _flat(made, iterations), reads

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        reads, carry = primals
        read_places = [n for n, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]
        moved = {n if n < scan.constants else n + scan.carries for n in read_places}
        moved |= {
            scan.constants + n for n, t in enumerate(tangents[1]) if not isinstance(t, SymbolicZero)
        }
        inputs, outputs = bodies.reached(equation, moved)
        carried = [n for n in range(scan.carries) if scan.constants + n in inputs]
        stacked = [n - scan.carries for n in sorted(outputs) if n >= scan.carries]

        def step(state: Any, place: Any) -> Any:
            carry, to_carry, to_reads = state

            def along(some_reads: Sequence[Any], some_carry: Sequence[Any]) -> Any:
                return turn(
                    _filled(reads, read_places, some_reads),
                    _filled(carry, carried, some_carry),
                    place,
                )

            (carry_out, made), (to_next, to_made) = jax.jvp(
                along,
                ([reads[n] for n in read_places], [carry[n] for n in carried]),
                (to_reads, to_carry),
            )
            # Copies, which cost nothing: what is only handed on, ``scan`` would not carry.
            handed_on = [jnp.copy(one) for one in to_reads]
            state = carry_out, [to_next[n] for n in carried], handed_on
            return state, (made, [to_made[n] for n in stacked])

        start = (
            list(carry),
            [internals.instantiated(tangents[1][n], carry[n]) for n in carried],
            [tangents[0][n] for n in read_places],
        )
        (carry, to_carry, to_reads), (made, to_made) = loop(step, start)
        made, to_made = _flat(made, iterations), _flat(to_made, iterations)
        return (carry, made, reads), (
            _filled(list(map(internals.zero_tangent, carry)), carried, to_carry),
            _filled(list(map(internals.zero_tangent, made)), stacked, to_made),
            _filled(list(map(internals.zero_tangent, reads)), read_places, to_reads),
        )

    run.defjvp(rule, symbolic_zeros=True)
    return run(list(reads), list(carry))


def _filled(values: Sequence[Any], places: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with others in some places."""
    found = list(values)
    for place, value in zip(places, others, strict=True):
        found[place] = value
    return found


def _entries(stacked: Any, place: Any, iterations: _Iterations) -> Any:
    """The entries that one turn reads, from a place on; one by itself where there are no chunks."""
    starts = (place, *[np.int32(0)] * (stacked.ndim - 1))
    sizes = (iterations.size, *stacked.shape[1:])
    found = lax.dynamic_slice(stacked, starts, sizes, allow_negative_indices=False)
    return found if iterations.chunks else found.reshape(stacked.shape[1:])
