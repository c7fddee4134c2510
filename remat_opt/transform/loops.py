"""A ``scan`` written as parts whose iterations keep what the plan says.

Every iteration runs under a checkpoint of its own, whose policy keeps some values by name: a
``scan`` stacks these, and what it carries. A chunk is a checkpoint round a few iterations, which
are in parts again. Parts follow one another. What they read of stacked inputs they read by index,
behind the checkpoint: nothing is cut up, and gradients are written where they belong. One part that
is all there is is a plain ``scan``.
"""

from __future__ import annotations

import dataclasses
import functools
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
    if equation.operation.primitive != "scan" or equation.effects:
        raise PlanFileError(
            f"The plan opens equation {loop.root}, which is no loop that can be opened. Make the "
            "plan again."
        )
    length = internals.scan_of(equation.jax_equation).length
    if not _fit(loop.parts, length):
        raise PlanFileError(
            f"The parts of the loop at equation {loop.root} of the plan do not add up to its "
            f"length, {length}. Make the plan again."
        )


def _fit(parts: Sequence[Part], length: int) -> bool:
    """Whether parts, and those of their chunks, add up."""
    return sum(part.length for part in parts) == length and all(
        part.length >= 1
        and (
            not part.inside
            or (
                part.chunk >= 1
                and not part.length % part.chunk
                and not (part.kept or part.stages or part.loops)
                and _fit(part.inside, part.chunk)
            )
        )
        for part in parts
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
    with internals.context_of(equation.jax_equation, equation.name_stack):
        carry, results = _run_parts(_Body(equation, scan, body), loop.parts, reads, carry)
    return [*carry, *results]


def _iteration(
    run: Callable[..., list[Any]], scan: internals.Scan, reads: Sequence[Any], carry: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    constants, entries = reads[: scan.constants], reads[scan.constants :]
    outputs = run([*constants, *carry, *entries])
    return outputs[: scan.carries], outputs[scan.carries :]


@dataclasses.dataclass(frozen=True, slots=True)
class _Body:
    """What is run.

    Attributes:
      equation: the loop.
      scan: what it says.
      of: gives for a part what runs one iteration, and the policy of its checkpoint.
    """

    equation: Equation
    scan: internals.Scan
    of: Callable[[Part], tuple[Callable[..., list[Any]], Callable[..., Any]]]


def _run_parts(
    body: _Body, parts: Sequence[Part], reads: Sequence[Any], carry: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs iterations in parts, one after the other.

    Args:
      body: what is run.
      parts: together they have the length of what is stacked.
      reads: constants, and what is stacked.
      carry: what the first iteration is handed.

    Returns:
      The carry, and the stacked outputs.
    """
    length, done = sum(part.length for part in parts), 0
    found: list[list[Any]] = []
    for part in parts:
        start = length - done - part.length if body.scan.reverse else done
        turns = _turns(body, part)
        if part.length == length:
            return _run_all(turns, reads, carry)
        where = range(start, start + part.length)
        carry, made, reads = _run_some(body.equation, turns, reads, carry, where)
        found.append(made)
        done += part.length
    in_order = found[::-1] if body.scan.reverse else found
    return list(carry), [jnp.concatenate(made) for made in zip(*in_order, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """A part as a loop whose turns, an iteration or a chunk each, are under checkpoints.

    Attributes:
      count: how many turns there are.
      size: the length of a chunk; 0 where each turn is an iteration.
      turn: runs one: from constants with entries of what is stacked, and the carry, to the next
        carry and entries of what is stacked.
      scan: what the equation says.
    """

    count: int
    size: int
    turn: Callable[[Sequence[Any], Sequence[Any]], tuple[list[Any], list[Any]]]
    policy: Callable[..., Any] | None
    scan: internals.Scan

    @property
    def unroll(self) -> int:
        """How many turns are written out in a row."""
        return 1 if self.size else min(self.scan.unroll, self.count)

    def checkpointed(self, turn: Callable[..., Any]) -> Callable[..., Any]:
        """A turn under its checkpoint."""
        # In a loop, nothing but the loop that runs backward repeats what is under it.
        return jax.checkpoint(turn, prevent_cse=self.unroll >= self.count, policy=self.policy)


def _turns(body: _Body, part: Part) -> _Turns:
    scan = body.scan
    if part.inside:
        turn = functools.partial(_run_parts, body, part.inside)
        return _Turns(
            count=part.length // part.chunk, size=part.chunk, turn=turn, policy=None, scan=scan
        )
    run, policy = body.of(part)
    turn = functools.partial(_iteration, run, scan)
    return _Turns(count=part.length, size=0, turn=turn, policy=policy, scan=scan)


def _run_all(
    turns: _Turns, reads: Sequence[Any], carry: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs all turns, on all that is stacked.

    Returns:
      The carry, and the stacked outputs.
    """
    scan, turn = turns.scan, turns.checkpointed(turns.turn)
    constants, stacked = list(reads[: scan.constants]), list(reads[scan.constants :])
    if turns.size:
        stacked = [one.reshape(turns.count, turns.size, *one.shape[1:]) for one in stacked]
    last, made = lax.scan(
        lambda carry, entries: turn([*constants, *entries], carry),
        list(carry),
        stacked,
        length=turns.count,
        reverse=scan.reverse,
        unroll=turns.unroll,
    )
    return last, _flat(made, turns)


def _flat(made: Sequence[Any], turns: _Turns) -> list[Any]:
    """Stacked outputs of all turns, one entry for each iteration."""
    if not turns.size:
        return list(made)
    return [one.reshape(one.shape[0] * one.shape[1], *one.shape[2:]) for one in made]


def _run_some(
    equation: Equation,
    turns: _Turns,
    reads: Sequence[Any],
    carry: Sequence[Any],
    where: range,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs the turns on some entries of what is stacked.

    What is read is handed on to the next part, and its gradient comes back from there: that of this
    part is added to it, in its place. ``scan`` by itself would sum up a gradient of its own in each
    part, as large as the whole. For that the tangents of what is read are carried, and only they:
    what is carried is there once for each iteration, where the backward pass reads it.

    Returns:
      The carry, the stacked outputs of these iterations, and what is read.
    """
    scan = turns.scan

    def from_place(
        reads: Sequence[Any], carry: Sequence[Any], place: Any
    ) -> tuple[list[Any], list[Any]]:
        entries = [_entries(one, place, turns) for one in reads[scan.constants :]]
        return turns.turn([*reads[: scan.constants], *entries], carry)

    turn = turns.checkpointed(from_place)
    loop = functools.partial(
        lax.scan,
        xs=np.arange(where.start, where.stop, max(1, turns.size), dtype=np.int32),
        reverse=scan.reverse,
        unroll=turns.unroll,
    )

    @jax.custom_jvp
    def run(reads: list[Any], carry: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        carry, made = loop(lambda carry, place: turn(reads, carry, place), carry)
        return carry, _flat(made, turns), reads

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
        made, to_made = _flat(made, turns), _flat(to_made, turns)
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


def _entries(stacked: Any, place: Any, turns: _Turns) -> Any:
    """The entries that one turn reads, from a place on; one by itself where there are no chunks."""
    starts = (place, *[0] * (stacked.ndim - 1))
    sizes = (max(1, turns.size), *stacked.shape[1:])
    found = lax.dynamic_slice(stacked, starts, sizes, allow_negative_indices=False)
    return found if turns.size else found.reshape(stacked.shape[1:])
