"""A ``scan`` written as parts whose iterations keep what the plan says.

Every iteration runs under its own checkpoint, whose policy keeps some values by name: a ``scan``
stacks these, and its carry. A chunk is a checkpoint around a few iterations, which again form
parts. Parts follow one another. They read stacked inputs by index, inside the checkpoint: nothing
is cut up, and gradients are written where they belong. A single part is a plain ``scan``. In one,
iterations may be without that checkpoint, and have regions of their own.
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
from remat_opt import _jax_meshes
from remat_opt.device import Platform
from remat_opt.errors import PlanFileError
from remat_opt.program import bodies
from remat_opt.program.record import Equation
from remat_opt.schedule import Loop, Part
from remat_opt.transform.barriers import cotangents_together
from remat_opt.transform.equations import arrays_of
from remat_opt.transform.gradient_stacks import run_in_gradients
from remat_opt.transform.per_device import Devices
from remat_opt.transform.stacked import filled, joined


def check_loop(equation: Equation, loop: Loop) -> None:
    """Raises PlanFileError unless the parts can be those of the equation."""
    if not bodies.is_open_loop(equation):
        raise PlanFileError(
            f"The plan opens equation {loop.root}, which is not a loop that can be opened. Make "
            "the plan again."
        )
    once = not internals.at_most_communicates(equation.jax_equation)
    if once and any(part.inside or part.checkpointed for part in loop.parts):
        raise PlanFileError(
            f"The plan repeats the side effects of the loop at equation {loop.root}. Make the plan "
            "again."
        )
    length = internals.scan_of(equation.jax_equation).length
    bare = any(not part.checkpointed for part in loop.parts)
    if (
        not _fit(loop.parts, length)
        or (loop.in_gradients and any(part.inside for part in loop.parts))
        or (bare and (len(loop.parts) > 1 or loop.in_gradients))
    ):
        raise PlanFileError(
            f"The parts of the loop at equation {loop.root} of the plan do not add up to its "
            f"length, {length}. Make the plan again."
        )


def _fit(parts: Sequence[Part], length: int) -> bool:
    """Whether parts, and those of their chunks, add up."""
    return sum(part.length for part in parts) == length and all(
        part.length >= 1
        and (
            (not part.inside and (part.checkpointed or not part.kept))
            or (
                part.chunk >= 1
                and part.checkpointed
                and all(one.checkpointed for one in part.inside)
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
    platform: Platform,
    mesh: Any,
) -> list[Any]:
    """Runs a ``scan`` equation in its parts.

    Args:
      equation: the loop.
      loop: its parts.
      inputs: its inputs.
      body: gives, for a part, the function that runs one iteration, from the body's flat arguments
        to its flat outputs, and the policy of its checkpoint.
      platform: whose compiler is expected.
      mesh: the mesh that arrays are split over; None without one.

    Returns:
      Its outputs.
    """
    scan = internals.scan_of(equation.jax_equation)
    given = arrays_of(equation, inputs)
    devices = _devices(loop, given, mesh, platform)
    varying = [_jax_meshes.varying_over(internals.type_of(one)) for one in given]
    everywhere = frozenset().union(*varying)
    first = scan.constants + scan.carries
    added_up = {n for n, axes in enumerate(varying[first:]) if axes < everywhere}
    added_up |= {n - first for n in bodies.spread_by_maps(scan) if n >= first}
    whole = _Body(
        scan=scan,
        of=functools.cache(body),
        reached=functools.cache(functools.partial(bodies.reached, equation)),
        devices=devices or Devices(platform=platform),
        added_up=sorted(added_up),
    )
    plain = functools.partial(_run_plain, whole, loop.parts)
    with internals.context_of(equation.jax_equation, equation.name_stack):
        if not loop.in_gradients or devices is None:
            return plain(*given)
        parts = [
            (_checkpointed(*whole.of(part), alone=part.length <= scan.unroll), part.length)
            for part in loop.parts
        ]
        return run_in_gradients(
            scan, parts, loop.in_gradients, devices, whole.reached, plain, given
        )


def _devices(loop: Loop, inputs: Sequence[Any], mesh: Any, platform: Platform) -> Devices | None:
    """The devices that run a loop; None if it is unknown how they share its inputs.

    Args:
      loop: the loop.
      inputs: its inputs.
      mesh: the mesh of the program; None without one.
      platform: whose compiler is expected.
    """
    kinds = list(map(internals.type_of, inputs))
    if mesh is None:
        on_a_mesh = _jax_meshes.within_a_mesh() or any(map(_jax_meshes.knows_a_mesh, kinds))
        return None if loop.splits or on_a_mesh else Devices(platform=platform)
    names = {name for split in loop.splits for axis in split for name in axis}
    if (
        len(loop.splits) != len(inputs)
        or not names <= set(mesh.shape)
        or any(map(_jax_meshes.is_a_part, kinds))
    ):
        return None
    return Devices(platform=platform, mesh=mesh, splits=loop.splits)


def _run_plain(body: _Body, parts: Sequence[Part], *inputs: Any) -> list[Any]:
    """Runs a loop whose iterations leave what waits in stacks of its own."""
    first, last = body.scan.constants, body.scan.constants + body.scan.carries
    reads, carry = [*inputs[:first], *inputs[last:]], list(inputs[first:last])
    if len(parts) == 1 and not parts[0].inside:
        carry, results = _run_alike(body, parts[0], reads, carry)
    else:
        carry, results, _ = _run_parts(body, parts, reads, carry, 0)
    return [*carry, *results]


def _checkpointed(
    run: Callable[..., Any], policy: Callable[..., Any] | None, *, alone: bool
) -> Callable[..., Any]:
    """What runs one iteration or chunk under its checkpoint; alone if that is in no loop."""
    # In a loop, only the backward loop repeats what is under it.
    return jax.checkpoint(run, prevent_cse=alone, policy=policy)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """What to run.

    Attributes:
      scan: what the equation says.
      of: gives, for a part, the function that runs one iteration, and the policy of its checkpoint.
      reached: what derivatives along some inputs of the equation reach (``bodies.reached``).
      devices: the devices that run it.
      added_up: the stacked inputs, by position among them, whose gradients are added up over the
        devices of a ``shard_map``: they vary over fewer of its axes than other inputs, or one in
        the body gives the same part to several devices.
    """

    scan: internals.Scan
    of: Callable[[Part], tuple[Callable[..., list[Any]], Callable[..., Any]]]
    reached: Callable[[frozenset[int]], tuple[frozenset[int], frozenset[int]]]
    devices: Devices
    added_up: Sequence[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Turns:
    """A part as a loop whose turns, each an iteration or a chunk, are under checkpoints.

    Attributes:
      scan: what the equation says.
      count: how many turns there are.
      size: how many iterations are in one.
      turn: runs the turn whose entries begin at a position: takes everything that is read, the
        carry and the position, and returns the next carry, the stacked outputs, and what is read.
      policy: that of its checkpoint; none for a chunk.
    """

    scan: internals.Scan
    count: int
    size: int
    turn: Callable[..., tuple[list[Any], list[Any], list[Any]]]
    policy: Callable[..., Any] | None

    @property
    def unroll(self) -> int:
        """How many turns are unrolled."""
        return 1 if self.policy is None else min(self.scan.unroll, self.count)

    def checkpointed(self, turn: Callable[..., Any]) -> Callable[..., Any]:
        """A turn under its checkpoint."""
        return _checkpointed(turn, self.policy, alone=self.unroll >= self.count)

    def flat(self, made: Sequence[Any]) -> list[Any]:
        """Stacked outputs of all turns, one entry for each iteration."""
        if self.policy is not None:
            return list(made)
        return [one.reshape(self.count * self.size, *one.shape[2:]) for one in made]


def _turns(body: _Body, part: Part) -> _Turns:
    scan = body.scan
    if part.inside:
        turn = functools.partial(_run_parts, body, part.inside)
        count = part.length // part.chunk
        return _Turns(scan=scan, count=count, size=part.chunk, turn=turn, policy=None)
    run, policy = body.of(part)
    first = scan.constants + scan.carries

    def iteration(
        reads: Sequence[Any], carry: Sequence[Any], place: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        entries = [
            body.devices.entry(n, one, place)
            for n, one in enumerate(reads[scan.constants :], first)
        ]
        for n in body.added_up:
            # One array, which goes to its place in the stack. XLA for NVIDIA would put each
            # device's into another stack first, and add up all of that after the loop.
            (entries[n],) = cotangents_together(entries[n])
        outputs = run([*reads[: scan.constants], *carry, *entries])
        return outputs[: scan.carries], outputs[scan.carries :], list(reads)

    return _Turns(scan=scan, count=part.length, size=1, turn=iteration, policy=policy)


def _run_alike(
    body: _Body, part: Part, reads: Sequence[Any], carry: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """Runs all iterations of the loop, without chunks.

    Returns:
      The carry, and the stacked outputs.
    """
    scan = body.scan
    run, _ = body.of(part)
    turns = _turns(body, part)
    first = scan.constants + scan.carries

    def iteration(carry: Sequence[Any], entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        if part.checkpointed:  # without, what is made here would wait beside the stack
            entries = [body.devices.as_stored(n, one) for n, one in enumerate(entries, first)]
        outputs = run([*reads[: scan.constants], *carry, *entries])
        return outputs[: scan.carries], outputs[scan.carries :]

    return lax.scan(
        turns.checkpointed(iteration) if part.checkpointed else iteration,
        list(carry),
        list(reads[scan.constants :]),
        length=scan.length,
        reverse=scan.reverse,
        unroll=turns.unroll,
    )


def _run_parts(
    body: _Body, parts: Sequence[Part], reads: Sequence[Any], carry: Sequence[Any], place: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs iterations in parts, one after the other.

    Args:
      body: what is run.
      parts: what the iterations do.
      reads: constants and stacked inputs, for all iterations of the loop.
      carry: what the first iteration receives.
      place: position of the first stacked entry.

    Returns:
      The carry, the stacked outputs of these iterations, and what is read.
    """
    length, done = sum(part.length for part in parts), 0
    found: list[list[Any]] = []
    for part in parts:
        start = length - done - part.length if body.scan.reverse else done
        carry, made, reads = _run_some(body, _turns(body, part), reads, carry, place + start)
        found.append(made)
        done += part.length
    made = joined(found, reverse=body.scan.reverse)
    return list(carry), made, list(reads)


def _run_some(
    body: _Body, turns: _Turns, reads: Sequence[Any], carry: Sequence[Any], first: Any
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs the turns of a part.

    What is read is passed on to the next part. Its gradient comes back from there, and this part
    adds its own in place. A plain ``scan`` would sum a separate gradient in each part, as large as
    the whole. So the tangents of what is read are carried, and only they: the backward pass would
    need any carry once for each iteration.

    Args:
      body: what is run.
      turns: the part's turns.
      reads: constants and stacked inputs, for all iterations of the loop.
      carry: what the first turn receives.
      first: position of the first stacked entry.

    Returns:
      The carry, the stacked outputs of these iterations, and what is read.
    """
    scan = body.scan
    turn = turns.checkpointed(turns.turn)
    places = np.arange(0, turns.count * turns.size, turns.size, dtype=np.int32)
    loop = functools.partial(lax.scan, reverse=scan.reverse, unroll=turns.unroll)

    def step(reads: Sequence[Any], carry: Sequence[Any], place: Any) -> tuple[Any, Any]:
        carry, made, _ = turn(reads, carry, place)
        return carry, made

    @jax.custom_jvp
    def run(
        reads: list[Any], carry: list[Any], first: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        carry, made = loop(functools.partial(step, reads), carry, first + places)
        return carry, turns.flat(made), reads

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        reads, carry, first = primals
        read_places = [n for n, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]
        moved = {n if n < scan.constants else n + scan.carries for n in read_places}
        moved |= {
            scan.constants + n for n, t in enumerate(tangents[1]) if not isinstance(t, SymbolicZero)
        }
        inputs, outputs = body.reached(frozenset(moved))
        carried = [n for n in range(scan.carries) if scan.constants + n in inputs]
        stacked = [n - scan.carries for n in sorted(outputs) if n >= scan.carries]

        def step(state: Any, place: Any) -> Any:
            carry, to_carry, to_reads = state

            def along(some_reads: Sequence[Any], some_carry: Sequence[Any]) -> Any:
                carry_out, made, handed_on = turn(
                    filled(reads, read_places, some_reads),
                    filled(carry, carried, some_carry),
                    place,
                )
                return carry_out, made, [handed_on[n] for n in read_places]

            (carry_out, made, _), (to_next, to_made, to_reads) = jax.jvp(
                along,
                ([reads[n] for n in read_places], [carry[n] for n in carried]),
                (to_reads, to_carry),
            )
            # Copies, which cost nothing: ``scan`` would not carry what is only passed on.
            handed_on = [jnp.copy(one) for one in to_reads]
            state = carry_out, [to_next[n] for n in carried], handed_on
            return state, (made, [to_made[n] for n in stacked])

        start = (
            list(carry),
            [internals.instantiated(tangents[1][n], carry[n]) for n in carried],
            [tangents[0][n] for n in read_places],
        )
        (carry, to_carry, to_reads), (made, to_made) = loop(step, start, first + places)
        made, to_made = turns.flat(made), turns.flat(to_made)
        return (carry, made, reads), (
            filled(list(map(internals.zero_tangent, carry)), carried, to_carry),
            filled(list(map(internals.zero_tangent, made)), stacked, to_made),
            filled(list(map(internals.zero_tangent, reads)), read_places, to_reads),
        )

    run.defjvp(rule, symbolic_zeros=True)
    return run(list(reads), list(carry), first)
