"""A ``scan`` that keeps what waits for its backward pass in the stacks of its gradients.

The gradient of a stacked input is a stack as well, which the backward pass fills from the last
iteration to the first. Until then the entry of an iteration is free: what that iteration keeps
waits there, if it fits. The backward pass reads it, and writes the gradient in its place. So both
together take no more than the gradient does.

JAX's own derivative of a ``scan`` has separate stacks, so that the derivative is written here: the
linear function of an iteration as JAX makes it, with what it holds sorted into what the loop reads
anyway and what must wait, and both loops over it. What has no place in a gradient has a stack.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero

from remat_opt import _jax_internals as internals
from remat_opt.compilers import tiles
from remat_opt.gradient_places import Piece, Place, lines_of, places
from remat_opt.schedule import Split
from remat_opt.transform.per_device import Devices
from remat_opt.transform.stacked import entry_of, filled, joined

#: Runs an iteration: flat arguments of the body to flat outputs.
Iteration = Callable[[Sequence[Any]], list[Any]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Read:
    """Something that the linear function of an iteration reads.

    Attributes:
      argument: the position of the argument of the body that it is, if the loop reads that anyway.
      pieces: else its pieces, which wait in gradients, or in the next of the part's own stacks;
        none if it waits there as it is.
      kind: the type of one device's part.
      split: how it is split over devices.
    """

    argument: int | None
    pieces: Sequence[Piece]
    kind: Any
    split: Split

    @property
    def in_gradients(self) -> bool:
        """Whether some of it waits in gradients."""
        return any(piece.place is not None for piece in self.pieces)

    @property
    def apart(self) -> bool:
        """Whether it waits as it is in a stack of the part."""
        return self.argument is None and not self.pieces

    def split_of(self, piece: Piece) -> Split:
        """How a piece is split: a device's lines lie one after the other, and so do devices."""
        if piece.lines == lines_of(self.kind):
            return self.split
        return (tuple(name for axis in self.split for name in axis),)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Turn:
    """The iterations of a part.

    Attributes:
      run: runs one.
      first: the position of the first entry that they read.
      length: how many there are.
      structure: that of the linear function of one, once known.
      reads: what that reads, once known.
    """

    run: Iteration
    first: int
    length: int
    structure: Any = None
    reads: list[_Read] = dataclasses.field(default_factory=list)

    @property
    def packed(self) -> list[_Read]:
        """What of that is cut into pieces."""
        return [read for read in self.reads if read.pieces]

    @property
    def own(self) -> list[Split]:
        """How pieces are split that wait in stacks of the part."""
        return [
            read.split_of(piece)
            for read in self.packed
            for piece in read.pieces
            if piece.place is None
        ]

    @property
    def stacks(self) -> int:
        """How many stacks of its own it has: of pieces, and then of what waits as it is."""
        return len(self.own) + sum(read.apart for read in self.reads)


def run_in_gradients(
    scan: internals.Scan,
    parts: Sequence[tuple[Iteration, int]],
    hosts: Sequence[int],
    devices: Devices,
    reached: Callable[[frozenset[int]], tuple[frozenset[int], frozenset[int]]],
    plain: Callable[..., Sequence[Any]],
    inputs: Sequence[Any],
) -> list[Any]:
    """Runs a ``scan``.

    Args:
      scan: what its equation says.
      parts: in order of execution, what runs an iteration, under its checkpoint, and how many.
      hosts: positions, among the stacked inputs, of those whose gradients take what waits.
      devices: the devices that it runs on.
      reached: what derivatives along some of the inputs reach (``bodies.reached``).
      plain: runs the loop as well, with stacks of its own; takes all inputs. Derivatives in forward
        mode, and of derivatives, are taken of it.
      inputs: constants, carry and stacked inputs.

    Returns:
      The carry, and the stacked outputs.
    """
    count, first = len(inputs), scan.constants + scan.carries
    # Each device must have a part of every entry.
    hosts = [
        n - first
        for n in range(first, count)
        if n - first in hosts
        and not any(devices.split(n)[:1])
        and devices.part(internals.type_of(inputs[n]), devices.split(n)) is not None
    ]

    @jax.custom_jvp
    def run(*inputs: Any) -> list[Any]:
        return list(plain(*inputs))

    def rule(inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        given = {n for n, one in enumerate(tangents) if not isinstance(one, SymbolicZero)}
        loop = _Loop(scan, parts, hosts, devices, *reached(frozenset(given)))

        def along(inputs: Sequence[Any], moved: Sequence[Any]) -> list[Any]:
            outputs = plain(*filled(inputs, loop.moved, moved))
            return [outputs[n] for n in loop.reached]

        def forward_in_plain(kept: Sequence[Any], tangents: Sequence[Any]) -> Sequence[Any]:
            moved = [kept[n] for n in loop.moved]
            of_moved = functools.partial(along, kept[:count])
            made: Sequence[Any] = jax.jvp(of_moved, (moved,), (list(tangents),))[1]
            return made

        def backward_in_plain(*given: Any) -> Sequence[Any]:
            inputs, cotangents = given[:count], given[len(given) - len(loop.reached) :]
            _, back = jax.vjp(functools.partial(along, inputs), [inputs[n] for n in loop.moved])
            found: Sequence[Any] = back(list(cotangents))[0]
            return found

        forward = _with_derivative_of(plain, loop.forward)
        backward = _with_derivative_of(backward_in_plain, loop.backward)
        found = forward(*inputs)
        outputs = list(found[: len(found) - loop.waiting])
        to_outputs = internals.call_linear(
            forward_in_plain,
            lambda kept, cotangents: backward(*kept, *cotangents),
            [*inputs, *found[len(outputs) :]],
            [internals.instantiated(tangents[n], inputs[n]) for n in loop.moved],
            [outputs[n] for n in loop.reached],
        )
        none = [internals.zero_tangent(one) for one in outputs]
        return outputs, filled(none, loop.reached, to_outputs)

    run.defjvp(rule, symbolic_zeros=True)
    return run(*inputs)


def _with_derivative_of(
    plain: Callable[..., Sequence[Any]], run: Callable[..., Sequence[Any]]
) -> Callable[..., Sequence[Any]]:
    """A function with the derivative of another one, whose outputs are the first of its own.

    The others have none.
    """
    found = jax.custom_jvp(run)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        outputs = found(*primals)
        moved = list(internals.jvp_of_varying(plain, primals, tangents))
        return outputs, moved + [internals.zero_tangent(one) for one in outputs[len(moved) :]]

    found.defjvp(rule, symbolic_zeros=True)
    return found


class _Loop:
    """A loop in parts, and its derivative along some inputs.

    What iterations keep is found out as the forward pass is traced, so that this comes first.

    Attributes:
      scan: what its equation says.
      turns: its parts, in order of execution.
      devices: the devices that it runs on.
      moved: the positions of the inputs along which there are derivatives, ascending.
      reached: likewise of the outputs that these reach.
      first: the position of the first stacked input.
      constants: those of ``moved`` that are constants.
      carried: likewise carried.
      stacked: likewise stacked.
      hosts: those of ``stacked`` whose gradients take what waits.
    """

    def __init__(
        self,
        scan: internals.Scan,
        parts: Sequence[tuple[Iteration, int]],
        hosts: Sequence[int],
        devices: Devices,
        moved: Set[int],
        reached: Set[int],
    ) -> None:
        self.scan = scan
        self.turns: list[_Turn] = []
        self.devices = devices
        self.moved, self.reached = sorted(moved), sorted(reached)
        self.first = scan.constants + scan.carries
        self.constants = [n for n in self.moved if n < scan.constants]
        self.carried = [n for n in self.moved if scan.constants <= n < self.first]
        self.stacked = [n for n in self.moved if n >= self.first]
        self.hosts = [n for n in self.stacked if n - self.first in set(hosts)]
        done = 0
        for run, length in parts:
            first = scan.length - done - length if scan.reverse else done
            self.turns.append(_Turn(run=run, first=first, length=length))
            done += length

    @property
    def _of_hosts(self) -> list[Split]:
        """How the stacks of gradients are split that take what waits."""
        return [self.devices.split(n) for n in self.hosts]

    @property
    def _places(self) -> list[int]:
        """The places of ``hosts`` among ``stacked``."""
        return [self.stacked.index(n) for n in self.hosts]

    @property
    def waiting(self) -> int:
        """How many stacks wait between both passes."""
        return len(self.hosts) + sum(turn.stacks for turn in self.turns)

    def forward(self, *inputs: Any) -> list[Any]:
        """Runs all iterations, and keeps what waits for their backward steps.

        Returns:
          The carry, and the stacked outputs; what waits beside gradients, part by part; and the
          stacks of gradients that take the rest.
        """
        scan = self.scan
        carry = list(inputs[scan.constants : self.first])
        # Without a carry the inputs tell the loop from others.
        (after, *_) = [*carry, *inputs]
        gradients = [self._like(n, inputs[n], after) for n in self.hosts]
        made, stacks = [], []
        for turn in self.turns:
            step = functools.partial(self._step, turn, inputs)
            (carry, gradients), (entries, waiting) = self._over(turn, step, (carry, gradients))
            made.append(entries)
            stacks.extend(waiting)
        return [*carry, *joined(made, reverse=scan.reverse), *stacks, *gradients]

    def _step(self, turn: _Turn, inputs: Sequence[Any], state: Any, place: Any) -> Any:
        """An iteration of the forward pass."""
        carry, gradients = state
        entries = [self.devices.entry(n, inputs[n], place) for n in range(self.first, len(inputs))]
        if turn.length == 1:
            # To a compiler this is no loop, and it would round a whole stack for one entry.
            entries = internals.barrier(*entries)
        arguments = [*inputs[: self.scan.constants], *carry, *entries]
        outputs, linear = self._linearized(turn, arguments)
        held, turn.structure = jax.tree.flatten(linear)
        turn.reads = self._reads(turn, arguments, held)
        put = self.devices.alone(
            functools.partial(_put_all, turn.packed),
            (self._of_hosts, [read.split for read in turn.packed], ()),
            [self._of_hosts, turn.own],
        )
        reads = list(zip(held, turn.reads, strict=True))
        packed = [value for value, read in reads if read.pieces]
        gradients, own = put(gradients, packed, place)
        carries, apart = self.scan.carries, [value for value, read in reads if read.apart]
        return (outputs[:carries], gradients), (outputs[carries:], [*own, *apart])

    def _linearized(self, turn: _Turn, arguments: Sequence[Any]) -> tuple[list[Any], Any]:
        """The outputs of an iteration, and its linear function, a tree of what it reads."""

        def along(*moved: Any) -> tuple[list[Any], list[Any]]:
            outputs = turn.run(filled(arguments, self.moved, moved))
            return [outputs[n] for n in self.reached], outputs

        at = [arguments[n] for n in self.moved]
        _, linear, outputs = jax.linearize(along, *at, has_aux=True)
        return outputs, linear

    def _reads(self, turn: _Turn, arguments: Sequence[Any], held: Sequence[Any]) -> list[_Read]:
        """What the linear function of an iteration reads.

        Args:
          turn: runs the iteration.
          arguments: its arguments.
          held: what is read.
        """
        # What is carried has another value in each iteration: it waits like what is made.
        read_anyway = {
            id(one): n
            for n, one in enumerate(arguments)
            if not self.scan.constants <= n < self.first
        }
        kinds = [internals.type_of(one) for one in held]
        splits: Sequence[Split | None] = [()] * len(held)
        if self.devices.mesh is not None:
            given = [self.devices.split(n)[n >= self.first :] for n in range(len(arguments))]
            splits = self.devices.splits_of(
                lambda *given: jax.tree.leaves(self._linearized(turn, given)[1]),
                list(map(internals.type_of, arguments)),
                given,
            )
        parts = {
            n: part
            for n, (one, split) in enumerate(zip(held, splits, strict=True))
            if split is not None
            and id(one) not in read_anyway
            and (part := self.devices.part(kinds[n], split)) is not None
        }
        types = [internals.type_of(arguments[n]) for n in self.hosts]
        pieces = places(
            list(parts.values()),
            [
                self.devices.part(kind, split[1:])
                for kind, split in zip(types, self._of_hosts, strict=True)
            ],
            [_axes(splits[n] or ()) for n in parts],
            list(map(_axes, self._of_hosts)),
        )
        of_parts = dict(zip(parts, pieces, strict=True))
        return [
            _Read(
                argument=read_anyway.get(id(one)),
                pieces=of_parts.get(n, ()),
                kind=parts.get(n, kinds[n]),
                split=splits[n] or (),
            )
            for n, one in enumerate(held)
        ]

    def backward(self, *given: Any) -> list[Any]:
        """The cotangents of the inputs along which there are derivatives.

        Args:
          *given: the inputs, what waits, and the cotangents of the outputs that are reached.
        """
        last = len(given) - len(self.reached)
        inputs, stacks, hosts = self._sorted(given[:last])
        gradients = [self._like(n, inputs[n], given[last]) for n in self.stacked]
        gradients = filled(gradients, self._places, hosts)
        to_outputs = dict(zip(self.reached, given[last:], strict=True))
        kinds = {n: _kind_of(inputs[n], entry=n >= self.first) for n in self.moved}
        starting = [*self.constants, *self.carried]
        zeros = {n: jnp.zeros(kinds[n].shape, kinds[n].dtype) for n in starting}
        shift = self.scan.constants

        def step(turn: _Turn, own: Sequence[Any], state: Any, place: Any) -> Any:
            carry, sums, gradients = state
            here = dict(zip(self.carried, carry, strict=True))
            back = [
                here[n + shift] if n < self.scan.carries else entry_of(to_outputs[n], place)
                for n in self.reached
            ]
            held = self._held(turn, inputs, own, gradients, place)
            # What waits in a gradient is read before anything is written there.
            waiting = [n for n, read in enumerate(turn.reads) if read.in_gradients]
            back_and_waiting = internals.barrier(*back, *(held[n] for n in waiting))
            held = filled(held, waiting, back_and_waiting[len(back) :])
            back = back_and_waiting[: len(back)]
            linear = jax.tree.unflatten(turn.structure, held)
            transposed = jax.linear_transpose(
                lambda *at: tuple(linear(*at)), *(kinds[n] for n in self.moved)
            )
            found = dict(zip(self.moved, transposed(tuple(back)), strict=True))
            return (
                [found[n] for n in self.carried],
                [one + found[n] for n, one in zip(self.constants, sums, strict=True)],
                [
                    self._put_gradient(n, stacked, found[n], place)
                    for n, stacked in zip(self.stacked, gradients, strict=True)
                ],
            ), None

        state: Any = (
            [to_outputs.get(n - shift, zeros[n]) for n in self.carried],
            [zeros[n] for n in self.constants],
            gradients,
        )
        for turn, own in zip(self.turns[::-1], stacks[::-1], strict=True):
            state, _ = self._over(turn, functools.partial(step, turn, own), state, backward=True)
        carry, sums, gradients = state
        return [*sums, *carry, *gradients]

    def _like(self, n: int, stacked: Any, after: Any) -> Any:
        """A stack of the same type as an input, with any content."""
        shared, kind = self.devices.platform == "cpu", internals.type_of(stacked)
        split = self.devices.split(n)
        part = self.devices.part(kind, split)
        if part is None:
            return internals.empty(kind.shape, kind.dtype, after=after, shared=True)
        if self.devices.mesh is not None:
            # Whole on every device, however the array is split.
            after = internals.empty((), kind.dtype, after=after, shared=True)

        def of_part(after: Any) -> Any:
            return internals.empty(part.shape, part.dtype, after=after, shared=shared)

        return self.devices.alone(of_part, ((),), split)(after)

    def _put_gradient(self, n: int, stacked: Any, entry: Any, place: Any) -> Any:
        """The stack of the gradient of an input with one more entry.

        If the stack goes through both loops, the entry is laid out as in the other one.
        """
        if n not in self.hosts:
            return _written(stacked, entry, place)

        def of_part(stacked: Any, entry: Any, place: Any) -> Any:
            innermost = tiles.innermost(self.devices.platform, entry.shape)
            return _written(stacked, internals.laid_out(entry, innermost), place)

        split = self.devices.split(n)
        put = self.devices.alone(of_part, (split, split[1:], ()), split)
        return put(stacked, entry, place)

    def _over(
        self, turn: _Turn, step: Callable[[Any, Any], Any], state: Any, *, backward: bool = False
    ) -> Any:
        """Runs a step for each iteration of a part."""
        at = np.arange(turn.first, turn.first + turn.length, dtype=np.int32)
        unroll = min(self.scan.unroll, turn.length)
        return lax.scan(step, state, at, reverse=self.scan.reverse != backward, unroll=unroll)

    def _sorted(self, kept: Sequence[Any]) -> tuple[list[Any], list[list[Any]], list[Any]]:
        """The inputs, the stacks of each part, and those of gradients that take what waits."""
        rest = iter(kept)
        inputs = list(itertools.islice(rest, len(kept) - self.waiting))
        stacks = [list(itertools.islice(rest, turn.stacks)) for turn in self.turns]
        return inputs, stacks, list(rest)

    def _held(
        self,
        turn: _Turn,
        inputs: Sequence[Any],
        stacks: Sequence[Any],
        gradients: Sequence[Any],
        place: Any,
    ) -> list[Any]:
        """What the linear function of an iteration reads."""
        waiting = [entry_of(one, place - turn.first) for one in stacks]
        own, apart = waiting[: len(turn.own)], iter(waiting[len(turn.own) :])
        take = self.devices.alone(
            functools.partial(_taken_all, turn.packed),
            (self._of_hosts, turn.own, ()),
            [read.split for read in turn.packed],
        )
        packed = iter(take([gradients[n] for n in self._places], own, place))

        def value(read: _Read) -> Any:
            if read.argument is None:
                return next(apart if read.apart else packed)
            one = inputs[read.argument]
            is_whole = read.argument < self.first
            return one if is_whole else self.devices.entry(read.argument, one, place)

        return list(map(value, turn.reads))


def _axes(split: Split) -> frozenset[str]:
    return frozenset(name for axis in split for name in axis)


def _kind_of(value: Any, *, entry: bool) -> jax.ShapeDtypeStruct:
    """The type of a value, or of an entry of a stack."""
    kind = internals.type_of(value)
    shape = kind.shape[1:] if entry else kind.shape
    return jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)


def _starts(place: Any, row: int, axes: int) -> list[Any]:
    """Where something begins in a stack: indices of one type, also if integers have 64 bits."""
    return [place, *np.array([row, *[0] * axes], dtype=np.int32)[:axes]]


def _written(stacked: Any, entry: Any, place: Any) -> Any:
    starts = _starts(place, 0, entry.ndim)
    return lax.dynamic_update_slice(stacked, entry[None], starts, allow_negative_indices=False)


def _piece(value: Any, piece: Piece) -> Any:
    """A piece of a value; itself if that is all."""
    if piece.lines == lines_of(value):
        return value
    lines = value.reshape(-1, *value.shape[-1:]) if value.ndim > 1 else value
    return lines[piece.first : piece.first + piece.lines]


def _piece_kind(kind: Any, piece: Piece) -> Any:
    """The type of a piece of a value of a type."""
    if piece.lines == lines_of(kind):
        return kind
    line = kind.shape[-1:] if kind.ndim > 1 else ()
    return jax.ShapeDtypeStruct((piece.lines, *line), kind.dtype)


def _put_all(
    reads: Sequence[_Read], gradients: Sequence[Any], values: Sequence[Any], place: Any
) -> list[list[Any]]:
    """The stacks of gradients with pieces of values in their places, and the pieces with none."""
    stacks, own = list(gradients), []
    for value, read in zip(values, reads, strict=True):
        for piece in read.pieces:
            some = _piece(value, piece)
            if (where := piece.place) is None:
                own.append(some)
            else:
                stacks[where.entry] = _put(stacks[where.entry], some, where, place)
    return [stacks, own]


def _taken_all(
    reads: Sequence[_Read], gradients: Sequence[Any], own: Sequence[Any], place: Any
) -> list[Any]:
    """The values of which ``_put_all`` put pieces there."""
    values, rest = [], iter(own)
    for read in reads:
        found = []
        for piece in read.pieces:
            if (where := piece.place) is None:
                found.append(next(rest))
            else:
                kind = _piece_kind(read.kind, piece)
                found.append(_taken(gradients[where.entry], where, kind, place))
        whole = found[0] if len(found) == 1 else jnp.concatenate(found)
        values.append(whole.reshape(read.kind.shape))
    return values


def _put(stack: Any, value: Any, where: Place, place: Any) -> Any:
    """The stack of a gradient with a value in its place."""
    shape = (where.together, where.rows, *stack.shape[2:])
    bits = _unsigned(value.dtype.itemsize)
    flat = value.reshape(-1)
    flat = jnp.pad(flat, (0, math.prod(shape) - flat.size))
    if value.dtype == stack.dtype:
        rows = flat.reshape(shape)
    else:
        wide = _unsigned(stack.dtype.itemsize)
        is_bool = value.dtype == jnp.bool_
        flat = flat.astype(bits) if is_bool else lax.bitcast_convert_type(flat, bits)
        rows = functools.reduce(
            lax.bitwise_or,
            (
                lax.shift_left(one.astype(wide), wide.type(8 * bits.itemsize * n))
                for n, one in enumerate(flat.reshape(shape))
            ),
        )
        rows = lax.bitcast_convert_type(rows, stack.dtype)[None]
    starts = _starts(place, where.row, stack.ndim - 1)
    return lax.dynamic_update_slice(stack, rows, starts, allow_negative_indices=False)


def _taken(stack: Any, where: Place, kind: Any, place: Any) -> Any:
    """A value of a type from its place in the stack of a gradient."""
    starts = _starts(place, where.row, stack.ndim - 1)
    sizes = (1, where.rows, *stack.shape[2:])
    rows = lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)
    if kind.dtype != stack.dtype:
        bits = _unsigned(kind.dtype.itemsize)
        wide = lax.bitcast_convert_type(rows[0], _unsigned(stack.dtype.itemsize))
        rows = jnp.stack(
            [
                lax.shift_right_logical(wide, wide.dtype.type(8 * bits.itemsize * n)).astype(bits)
                for n in range(where.together)
            ]
        )
        is_bool = kind.dtype == jnp.bool_
        rows = rows.astype(kind.dtype) if is_bool else lax.bitcast_convert_type(rows, kind.dtype)
    size = math.prod(kind.shape)
    return (rows if rows.size == size else rows.reshape(-1)[:size]).reshape(kind.shape)


def _unsigned(itemsize: int) -> np.dtype[Any]:
    return np.dtype(f"uint{8 * itemsize}")
