"""What exported code calls besides JAX: each function is copied into it if used.

So each is self-contained: it refers only to the modules that exported code imports, and to other
functions of this file, which are copied along. None uses anything that JAX does not export. They do
what those of the same names in ``transform`` do, and compile to the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint


def zero_of(value: Any) -> Any:
    """The tangent of what does not vary."""
    return SymbolicZero(jax.typeof(value).to_tangent_aval())


def replaced(values: Sequence[Any], which: Sequence[int], others: Sequence[Any]) -> list[Any]:
    """The values, with some replaced by others."""
    found = list(values)
    for place, value in zip(which, others, strict=True):
        found[place] = value
    return found


def tied(tangents: Sequence[Any]) -> tuple[Any, ...]:
    """Tangents as they are; none of their cotangents goes on before all are computed."""
    there = [one for one in tangents if not isinstance(one, SymbolicZero)]
    behind = iter(lax.optimization_barrier(there)) if there else iter(())
    return tuple(one if isinstance(one, SymbolicZero) else next(behind) for one in tangents)


def stored(*values: Any) -> tuple[Any, ...]:
    """The values as separate arrays; their cotangents are unchanged."""

    @jax.custom_jvp
    def barrier(*given: Any) -> tuple[Any, ...]:
        return tuple(lax.optimization_barrier(given))

    barrier.defjvp(lambda given, tangents: (barrier(*given), tuple(tangents)), symbolic_zeros=True)
    return tuple(barrier(*values))


def behind_barrier(*values: Any) -> tuple[Any, ...]:
    """The values, none available before all are computed; likewise their cotangents."""

    @jax.custom_jvp
    def barrier(*given: Any) -> tuple[Any, ...]:
        return tuple(lax.optimization_barrier(given))

    barrier.defjvp(lambda given, tangents: (barrier(*given), tied(tangents)), symbolic_zeros=True)
    return tuple(barrier(*values))


def cotangents_together(*values: Any) -> tuple[Any, ...]:
    """The values; none of their cotangents goes on before all are computed."""

    @jax.custom_jvp
    def same(*given: Any) -> tuple[Any, ...]:
        return given

    same.defjvp(lambda given, tangents: (given, tied(tangents)), symbolic_zeros=True)
    return tuple(same(*values))


def named_parts(value: Any, name: str) -> Any:
    """A complex value whose parts are kept by name: JAX does not keep it as one."""
    return lax.complex(
        checkpoint_name(lax.real(value), name), checkpoint_name(lax.imag(value), name)
    )


def weight_first(product: Callable[[Any, Any], Any], weight: int, *operands: Any) -> Any:
    """A product; backward, its weight's gradient is computed before that of the other operand."""

    def in_order(of_weight: Any, of_other: Any) -> Any:
        return product(of_weight, of_other) if weight == 0 else product(of_other, of_weight)

    run = jax.custom_jvp(in_order)

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        result = run(*primals)
        to_weight, to_other = tangents
        if isinstance(to_weight, SymbolicZero):
            if isinstance(to_other, SymbolicZero):
                return result, zero_of(result)
            return result, in_order(primals[0], to_other)
        if isinstance(to_other, SymbolicZero):
            return result, in_order(to_weight, primals[1])
        moved, to_weight = tied((in_order(primals[0], to_other), to_weight))
        return result, moved + in_order(to_weight, primals[1])

    run.defjvp(rule, symbolic_zeros=True)
    return run(operands[weight], operands[1 - weight])


def symmetric(
    product: Callable[[Any, Any], Any], exchanged: tuple[int, ...], left: Any, right: Any
) -> Any:
    """A product of a value with itself; its gradient is a single product.

    Args:
      product: takes the value twice, on the right perhaps transposed.
      exchanged: the result's axes with those of the left operand and the right exchanged.
      left: the value.
      right: the value again.
    """
    run = jax.custom_jvp(product)

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        result = run(*primals)
        if isinstance(tangents[0], SymbolicZero):
            return result, zero_of(result)
        half = product(tangents[0], primals[1])
        return result, half + half.transpose(exchanged)

    run.defjvp(rule, symbolic_zeros=True)
    return run(left, right)


def in_pieces(
    product: Callable[[Any, Any], Any],
    place: int,
    axis: int,
    summed_with: int,
    other: Any,
    *pieces: Any,
) -> Any:
    """A product of joined pieces and another operand; each piece has a cotangent of its own."""

    def of_two(operand: Any, other: Any) -> Any:
        return product(operand, other) if place == 0 else product(other, operand)

    @jax.custom_jvp
    def run(other: Any, *pieces: Any) -> Any:
        return of_two(lax.concatenate(pieces, axis), other)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        result = run(*primals)
        other, *pieces = primals
        moved, stop = [], 0
        for piece, tangent in zip(pieces, tangents[1:], strict=True):
            start, stop = stop, stop + piece.shape[axis]
            if not isinstance(tangent, SymbolicZero):
                part = lax.slice_in_dim(other, start, stop, axis=summed_with)
                moved.append(of_two(tangent, part))
        if not isinstance(tangents[0], SymbolicZero):
            moved.append(of_two(lax.concatenate(pieces, axis), tangents[0]))
        return result, sum(moved[1:], moved[0]) if moved else zero_of(result)

    run.defjvp(rule, symbolic_zeros=True)
    return run(other, *pieces)


def picked(gather: Callable[[Any, Any], Any], operand: Any, indices: Any, clip: bool) -> Any:
    """A gather of one entry from every row; its gradient is elementwise."""

    @jax.custom_jvp
    def pick(operand: Any, indices: Any) -> Any:
        return gather(operand, indices)

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        operand, indices = primals
        result = pick(operand, indices)
        if isinstance(tangents[0], SymbolicZero):
            return result, zero_of(result)
        moved = jnp.sum(jnp.where(chosen(operand, indices, clip), tangents[0], 0), axis=-1)
        return result, moved.reshape(result.shape).astype(result.dtype)

    pick.defjvp(rule, symbolic_zeros=True)
    return pick(operand, indices)


def summed(operand: Any, indices: Any, shape: tuple[int, ...], clip: bool, fill: bool) -> Any:
    """One entry of every row, as a sum over the row; NaN or the nearest if there is none."""
    result = jnp.sum(jnp.where(chosen(operand, indices, not fill), operand, 0), axis=-1)
    if not clip:
        inside = jnp.any(chosen(operand, indices, False), axis=-1)
        result = jnp.where(inside, result, jnp.nan if fill else lax.stop_gradient(result))
    return result.reshape(shape).astype(operand.dtype)


def chosen(operand: Any, indices: Any, clip: bool) -> Any:
    """Where the entries are that indices into rows mean."""
    axis = operand.ndim - 1
    # With indices into all axes, the last one's is last.
    place = indices.reshape(*operand.shape[:-1], -1)[..., -1:]
    place = place.astype(jnp.promote_types(place.dtype, jnp.int32))
    if clip:
        place = jnp.clip(place, 0, operand.shape[axis] - 1)
    return lax.broadcasted_iota(place.dtype, operand.shape, axis) == place


def of_flat(
    operand: Any,
    indices: Any,
    shape: tuple[int, ...],
    axis: int,
    positions: Sequence[tuple[int, int]],
    **options: Any,
) -> Any:
    """Single entries along an axis, looked up in the operand as a flat array.

    Args:
      operand: the array.
      indices: where along the axis, with a last axis of one.
      shape: the result's.
      axis: along which.
      positions: pairs of another axis and that of the indices which runs along it.
      options: of ``lax.gather``, among them its mode.
    """
    along = indices[..., 0].astype(jnp.promote_types(indices.dtype, jnp.int32))
    mode = lax.GatherScatterMode.from_any(options["mode"])
    if mode == lax.GatherScatterMode.CLIP:
        along = jnp.clip(along, 0, operand.shape[axis] - 1)
    entries = along * int(np.prod(operand.shape[axis + 1 :]))
    for place, of_indices in positions:
        position = lax.broadcasted_iota(along.dtype, along.shape, of_indices)
        entries = entries + position * int(np.prod(operand.shape[place + 1 :]))
    if mode == lax.GatherScatterMode.FILL_OR_DROP:
        entries = jnp.where((along >= 0) & (along < operand.shape[axis]), entries, -1)
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    found = lax.gather(operand.reshape(-1), entries[..., None], numbers, (1,), **options)
    return found.reshape(shape)


def kept(name: str, equation: Callable[..., Any], derivatives: Sequence[Any], *inputs: Any) -> Any:
    """Runs an equation whose derivative also reads the output that is kept by name.

    Args:
      name: the output's name, for a policy.
      equation: takes the inputs to the output.
      derivatives: for each input, the function that takes the input's tangent, the output and
        all inputs to the output's tangent; None if no derivative is taken.
      *inputs: the equation's inputs.
    """

    def named(*given: Any) -> Any:
        return checkpoint_name(equation(*given), name)

    run = jax.custom_jvp(named)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        output = named(*primals)
        moved = zero_of(output)
        for tangent, derivative in zip(tangents, derivatives, strict=True):
            if isinstance(tangent, SymbolicZero):
                continue
            if derivative is None:
                raise ValueError(f"This code has no derivative of {name} along this input.")
            part = derivative(tangent, output, *primals)
            moved = part if isinstance(moved, SymbolicZero) else moved + part
        return output, moved

    run.defjvp(rule, symbolic_zeros=True)
    return run(*inputs)


def flat_scan(
    body: Callable[..., Sequence[Any]],
    constants: Sequence[Any],
    carry: Sequence[Any],
    stacked: Sequence[Any],
    *,
    length: int,
    reverse: bool = False,
    unroll: int = 1,
) -> list[Any]:
    """A scan; its body takes constants, carry and entries to the next carry and new entries."""

    def iteration(carry: Sequence[Any], entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = body(*constants, *carry, *entries)
        return list(made[: len(carry)]), list(made[len(carry) :])

    carry, made = lax.scan(
        iteration, list(carry), list(stacked), length=length, reverse=reverse, unroll=unroll
    )
    return [*carry, *made]


def planned_scan(
    parts: Sequence[tuple[int, Any, Any, Any]],
    constants: Sequence[Any],
    carry: Sequence[Any],
    stacked: Sequence[Any],
    *,
    reverse: bool = False,
    unroll: int = 1,
    reach: tuple[Sequence[int], Sequence[int], Sequence[int]] = ((), (), ()),
) -> list[Any]:
    """A scan whose iterations keep what a plan says, in parts that follow one another.

    Args:
      parts: for each, its length; the parts of a chunk, if it runs in chunks, each under one
        checkpoint; the names that every iteration keeps, or None if no checkpoint is around one;
        and the body, which takes constants, carry and entries to the next carry and new entries.
      constants: what every iteration reads.
      carry: what the first iteration receives.
      stacked: inputs of which each iteration reads one entry.
      reverse: whether the last entries come first.
      unroll: how many iterations are unrolled.
      reach: positions that derivatives reach: among constants and ``stacked``, in the carry, and
        among what iterations make.
    """
    length, inside, names, body = parts[0]
    if len(parts) > 1 or inside:
        run = functools.partial(parts_in_order, len(constants), reverse, unroll, reach)
        carry, made, _ = run(parts, [*constants, *stacked], carry, 0)
        return [*carry, *made]

    def iteration(carry: Sequence[Any], entries: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        made = list(body(*constants, *carry, *entries))
        return made[: len(carry)], made[len(carry) :]

    unrolled = min(unroll, length)
    if names is not None:
        iteration = jax.checkpoint(
            iteration,
            prevent_cse=unrolled >= length,
            policy=jax.checkpoint_policies.save_only_these_names(*names),
        )
    carry, made = lax.scan(
        iteration, list(carry), list(stacked), length=length, reverse=reverse, unroll=unrolled
    )
    return [*carry, *made]


def parts_in_order(
    constant_count: int,
    reverse: bool,
    unroll: int,
    reach: tuple[Sequence[int], Sequence[int], Sequence[int]],
    parts: Sequence[tuple[int, Any, Sequence[str], Any]],
    reads: Sequence[Any],
    carry: Sequence[Any],
    place: Any,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs iterations in parts; returns the carry, what is made, and what is read."""
    length, done = sum(part[0] for part in parts), 0
    found = []
    for part in parts:
        start = length - done - part[0] if reverse else done
        carry, made, reads = one_part(
            constant_count, reverse, unroll, reach, part, reads, carry, place + start
        )
        found.append(made)
        done += part[0]
    stacks = zip(*(found[::-1] if reverse else found), strict=True)
    made = [one[0] if len(one) == 1 else jnp.concatenate(one) for one in stacks]
    return list(carry), made, list(reads)


def one_part(
    constant_count: int,
    reverse: bool,
    unroll: int,
    reach: tuple[Sequence[int], Sequence[int], Sequence[int]],
    part: tuple[int, Any, Sequence[str], Any],
    reads: Sequence[Any],
    carry: Sequence[Any],
    first: Any,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Runs the iterations of a part; their gradients are added to those of other parts in place."""
    length, inside, names, body = part
    reads_varying, carried, made_varying = reach
    size = sum(one[0] for one in inside) if inside else 1
    count = length // size
    unrolled = 1 if inside else min(unroll, count)

    def iteration(
        reads: Sequence[Any], carry: Sequence[Any], place: Any
    ) -> tuple[list[Any], list[Any], list[Any]]:
        entries = []
        for one in reads[constant_count:]:
            # Inside the mesh of explicitly sharded arrays: JAX 0.12 puts their gradients into
            # zeros.
            mesh = jax.typeof(one).sharding.mesh
            if mesh.empty or not mesh.are_all_axes_explicit:
                mesh = jax.sharding.get_abstract_mesh()
            with jax.sharding.use_abstract_mesh(mesh):
                entries.append(
                    lax.dynamic_index_in_dim(
                        one, place, keepdims=False, allow_negative_indices=False
                    )
                )
        made = list(body(*reads[:constant_count], *carry, *entries))
        return made[: len(carry)], made[len(carry) :], list(reads)

    chunk = functools.partial(parts_in_order, constant_count, reverse, unroll, reach, inside)
    turn = jax.checkpoint(
        chunk if inside else iteration,
        prevent_cse=unrolled >= count,
        policy=None if inside else jax.checkpoint_policies.save_only_these_names(*names),
    )
    places = np.arange(0, length, size, dtype=np.int32)
    loop = functools.partial(lax.scan, reverse=reverse, unroll=unrolled)

    def flat(made: Sequence[Any]) -> list[Any]:
        return [one.reshape(length, *one.shape[2:]) if inside else one for one in made]

    @jax.custom_jvp
    def run(reads: Any, carry: Any, first: Any) -> tuple[list[Any], list[Any], list[Any]]:
        def step(carry: Any, place: Any) -> tuple[Any, Any]:
            carry, made, _ = turn(reads, carry, place)
            return carry, made

        carry, made = loop(step, carry, first + places)
        return carry, flat(made), reads

    def rule(primals: Any, tangents: Any) -> tuple[Any, Any]:
        reads, carry, first = primals
        moved = [n for n, t in enumerate(tangents[0]) if not isinstance(t, SymbolicZero)]
        moved_carry = [n for n, t in enumerate(tangents[1]) if not isinstance(t, SymbolicZero)]
        if not (set(moved) <= set(reads_varying) and set(moved_carry) <= set(carried)):
            raise ValueError("This code has no derivative of the scan along all of its inputs.")

        def step(state: Any, place: Any) -> Any:
            carry, to_carry, to_reads = state

            def along(some_reads: Sequence[Any], some_carry: Sequence[Any]) -> Any:
                carry_out, made, handed_on = turn(
                    replaced(reads, moved, some_reads), replaced(carry, carried, some_carry), place
                )
                return carry_out, made, [handed_on[n] for n in moved]

            (carry_out, made, _), (to_next, to_made, to_reads) = jax.jvp(
                along,
                ([reads[n] for n in moved], [carry[n] for n in carried]),
                (to_reads, to_carry),
            )
            # Copies, which cost nothing: ``scan`` would not carry what is only passed on.
            handed_on = [jnp.copy(one) for one in to_reads]
            state = carry_out, [to_next[n] for n in carried], handed_on
            return state, (made, [to_made[n] for n in made_varying])

        zeros = [jnp.zeros_like(carry[n]) for n in carried]
        start = (
            list(carry),
            [
                zero if isinstance(tangents[1][n], SymbolicZero) else tangents[1][n]
                for n, zero in zip(carried, zeros, strict=True)
            ],
            [tangents[0][n] for n in moved],
        )
        (carry, to_carry, to_reads), (made, to_made) = loop(step, start, first + places)
        made = flat(made)
        return (carry, made, reads), (
            replaced(list(map(zero_of, carry)), carried, to_carry),
            replaced(list(map(zero_of, made)), made_varying, flat(to_made)),
            replaced(list(map(zero_of, reads)), moved, to_reads),
        )

    run.defjvp(rule, symbolic_zeros=True)
    return run(list(reads), list(carry), first)


def scan_in_gradients(
    parts: Sequence[tuple[int, Any, Sequence[str], Any]],
    constants: Sequence[Any],
    carry: Sequence[Any],
    stacked: Sequence[Any],
    *,
    hosts: Mapping[int, int],
    reach: tuple[Sequence[int], Sequence[int], Sequence[int]],
    reverse: bool = False,
    unroll: int = 1,
) -> list[Any]:
    """Does what ``planned_scan`` does, with what waits in the stacks of its gradients.

    The gradient of a stacked input is a stack as well, which the backward pass fills. Until then
    the entry of an iteration is free: what the iteration keeps waits there, if it fits. The
    backward pass reads it and writes the gradient in its place.

    Only gradients can be taken, not derivatives in forward mode. The derivatives of gradients are
    those of ``planned_scan``; they can be taken in forward mode unless a loop inside is another
    one of this kind.

    Args:
      parts: as ``planned_scan`` takes them, without chunks.
      constants: what every iteration reads.
      carry: what the first iteration receives.
      stacked: inputs of which each iteration reads one entry.
      hosts: the positions in ``stacked`` of those whose gradients take what waits, and for each
        which axis of an entry lies innermost: the same in all loops, as nothing is copied then.
      reach: as ``planned_scan`` takes it.
      reverse: whether the last entries come first.
      unroll: how many iterations are unrolled.
    """
    first, last = len(constants), len(constants) + len(carry)
    values = [*constants, *carry, *stacked]
    reads, carried, made = reach
    of_carry = {first + n for n in carried}
    varying = of_carry.union(n if n < first else n + len(carry) for n in reads)
    reached = [*carried, *(n + len(carry) for n in made)]

    def plain(*inputs: Any) -> list[Any]:
        own = inputs[:first], inputs[first:last], inputs[last:]
        return planned_scan(parts, *own, reverse=reverse, unroll=unroll, reach=reach)

    if not all(jax.typeof(one).sharding.mesh.empty for one in values):
        return plain(*values)

    def forward(*given: Any) -> tuple[list[Any], Any]:
        perturbed = {n for n, one in enumerate(given) if one.perturbed}
        if not perturbed <= varying:
            raise ValueError("This code has no derivative of the scan along all of its inputs.")
        moved = sorted(perturbed | of_carry)
        taking = {n: hosts[n - last] for n in moved if n - last in hosts}
        ahead, behind = loops_in_gradients(
            parts, first, last, reverse, unroll, moved, reached, taking
        )

        def behind_in_plain(inputs: Sequence[Any], _: Any, cotangents: Sequence[Any]) -> Any:
            def along(some: Sequence[Any]) -> list[Any]:
                outputs = plain(*replaced(inputs, moved, some))
                return [outputs[n] for n in reached]

            return jax.vjp(along, [inputs[n] for n in moved])[1](list(cotangents))[0]

        def back(inputs: Sequence[Any], waiting: Any, cotangents: Sequence[Any]) -> Any:
            run = with_derivative_of(behind_in_plain, behind)
            found, _ = run(inputs, waiting, cotangents)
            return tuple(replaced([None] * len(values), moved, found))

        inputs = [one.value for one in given]
        outputs, waiting = with_derivative_of(lambda inputs: plain(*inputs), ahead)(inputs)
        return list(outputs), jax.tree_util.Partial(back, inputs, waiting)

    def backward(back: Any, cotangents: Sequence[Any]) -> Any:
        return back(
            [
                jnp.zeros(one.shape, one.dtype) if isinstance(one, SymbolicZero) else one
                for one in (cotangents[n] for n in reached)
            ]
        )

    run = jax.custom_vjp(plain)
    run.defvjp(forward, backward, symbolic_zeros=True)
    return [one if n in reached else lax.stop_gradient(one) for n, one in enumerate(run(*values))]


def with_derivative_of(
    plain: Callable[..., Sequence[Any]], run: Callable[..., tuple[Sequence[Any], Any]]
) -> Callable[..., tuple[Sequence[Any], Any]]:
    """A function whose first results have the derivative of another's, and the second have none."""
    found = jax.custom_jvp(run)

    def rule(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        outputs, others = found(*primals)
        flat, tree = jax.tree.flatten(tuple(primals))
        moved = jax.tree.leaves(tuple(tangents), is_leaf=lambda t: isinstance(t, SymbolicZero))
        where = [n for n, tangent in enumerate(moved) if not isinstance(tangent, SymbolicZero)]

        def along(*some: Any) -> Sequence[Any]:
            return plain(*jax.tree.unflatten(tree, replaced(flat, where, some)))

        at, directions = [flat[n] for n in where], [moved[n] for n in where]
        to_outputs = jax.jvp(along, at, directions)[1]
        return (outputs, others), (list(to_outputs), jax.tree.map(zero_of, others))

    found.defjvp(rule, symbolic_zeros=True)
    return found


def loops_in_gradients(
    parts: Sequence[tuple[int, Any, Sequence[str], Any]],
    first: int,
    last: int,
    reverse: bool,
    unroll: int,
    moved: Sequence[int],
    reached: Sequence[int],
    hosts: Mapping[int, int],
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The forward and the backward loop of ``scan_in_gradients``.

    Args:
      parts: as ``planned_scan`` takes them, without chunks.
      first: the position of the first input that is carried.
      last: that of the first stacked one.
      reverse: whether the last entries come first.
      unroll: how many iterations are unrolled.
      moved: the positions of the inputs along which there are derivatives.
      reached: those of the outputs that these reach.
      hosts: the positions of the stacked inputs whose gradients take what waits, with the axis that
        lies innermost.

    Returns:
      What takes the inputs to the outputs and to what waits: a list of stacks for each part, and
      the stacks of gradients that take the rest. And what takes the inputs, what waits and the
      cotangents of the outputs that are reached to those of the inputs, and to nothing else.
    """
    stacked = [n for n in moved if n >= last]
    turns, done = [], 0
    for length, _, names, body in parts:
        turn = jax.checkpoint(
            lambda given, body=body: list(body(*given)),
            prevent_cse=length <= unroll,
            policy=jax.checkpoint_policies.save_only_these_names(*names),
        )
        total = sum(part[0] for part in parts)
        turns.append((turn, total - done - length if reverse else done, length))
        done += length
    # Of each part, the structure of the linear function of an iteration, and what that reads: for
    # each, an argument or else pieces, which wait in gradients or in a stack, and its type.
    read_by: dict[int, tuple[Any, list[tuple[int | None, list[Any], Any]]]] = {}

    def over(number: int, step: Callable[..., Any], state: Any, backward: bool) -> Any:
        _, begin, length = turns[number]
        at = np.arange(begin, begin + length, dtype=np.int32)
        return lax.scan(step, state, at, reverse=reverse != backward, unroll=min(unroll, length))

    def linearized(number: int, arguments: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        def along(*some: Any) -> tuple[list[Any], list[Any]]:
            outputs = turns[number][0](replaced(arguments, moved, some))
            return [outputs[n] for n in reached], outputs

        _, linear, outputs = jax.linearize(along, *(arguments[n] for n in moved), has_aux=True)
        held, structure = jax.tree.flatten(linear)
        anyway = {id(one): n for n, one in enumerate(arguments) if not first <= n < last}
        waiting = [jax.typeof(one) for one in held if id(one) not in anyway]
        pieces = iter(places_in(waiting, [jax.typeof(arguments[n]) for n in hosts]))
        found = [
            (anyway.get(id(one)), [] if id(one) in anyway else next(pieces), jax.typeof(one))
            for one in held
        ]
        read_by[number] = structure, found
        return outputs, held

    def ahead(inputs: Sequence[Any]) -> tuple[list[Any], Any]:
        def step(number: int, state: Any, place: Any) -> Any:
            carry, gradients = state
            entries = [entry_of(one, place) for one in inputs[last:]]
            if turns[number][2] == 1:
                # To a compiler this is no loop, and it would round a whole stack for one entry.
                entries = list(lax.optimization_barrier(entries))
            outputs, held = linearized(number, [*inputs[:first], *carry, *entries])
            gradients, waiting = list(gradients), []
            for value, (_, pieces, _) in zip(held, read_by[number][1], strict=True):
                for first_line, lines, where in pieces:
                    piece = value
                    if lines < lines_of(value):
                        piece = value.reshape(-1, *value.shape[-1:]) if value.ndim > 1 else value
                        piece = piece[first_line : first_line + lines]
                    if where is None:
                        waiting.append(piece)
                    else:
                        gradients[where[0]] = put_in(gradients[where[0]], piece, where, place)
            return (outputs[: last - first], gradients), (outputs[last - first :], waiting)

        (after, *_) = [*inputs[first:last], *inputs]
        gradients = [empty_like(inputs[n], after) for n in hosts]
        state, made, stacks = (list(inputs[first:last]), gradients), [], []
        for number in range(len(turns)):
            state, (entries, waiting) = over(number, functools.partial(step, number), state, False)
            made.append(entries)
            stacks.append(waiting)
        alike = zip(*(made[::-1] if reverse else made), strict=True)
        joined = [one[0] if len(one) == 1 else jnp.concatenate(one) for one in alike]
        return [*state[0], *joined], (stacks, state[1])

    def behind(inputs: Sequence[Any], waiting: Any, cotangents: Sequence[Any]) -> Any:
        stacks, taken = waiting
        given = dict(zip(hosts, taken, strict=True))
        to_outputs = dict(zip(reached, cotangents, strict=True))
        kinds = {}
        for n in moved:
            kind = jax.typeof(inputs[n])
            shape = kind.shape if n < last else kind.shape[1:]
            kinds[n] = jax.ShapeDtypeStruct(shape, kind.dtype, weak_type=kind.weak_type)
        zeros = {n: jnp.zeros(kind.shape, kind.dtype) for n, kind in kinds.items()}
        constants = [n for n in moved if n < first]
        carried = [n for n in moved if first <= n < last]

        def step(number: int, state: Any, place: Any) -> Any:
            carry, sums, gradients = state
            here = dict(zip(carried, carry, strict=True))
            back = [
                here[n + first] if n < last - first else entry_of(to_outputs[n], place)
                for n in reached
            ]
            structure, reads = read_by[number]
            own = iter([entry_of(one, place - turns[number][1]) for one in stacks[number]])
            waited = []
            for argument, pieces, kind in reads:
                if argument is not None:
                    continue
                parts_of = []
                for _, lines, where in pieces:
                    if where is None:
                        parts_of.append(next(own))
                        continue
                    of_host = gradients[stacked.index(list(hosts)[where[0]])]
                    some = kind
                    if lines < lines_of(kind):
                        line = kind.shape[-1:] if kind.ndim > 1 else ()
                        some = jax.ShapeDtypeStruct((lines, *line), kind.dtype)
                    parts_of.append(taken_from(of_host, where, some, place))
                whole = parts_of[0] if len(parts_of) == 1 else jnp.concatenate(parts_of)
                waited.append(whole.reshape(kind.shape))
            held = []
            for argument, _, _ in reads:
                if argument is None:
                    held.append(waited.pop(0))
                else:
                    one = inputs[argument]
                    held.append(one if argument < first else entry_of(one, place))
            # What waits in a gradient is read before anything is written there.
            read = [
                n for n, (_, pieces, _) in enumerate(reads) if any(where for *_, where in pieces)
            ]
            after = lax.optimization_barrier([*back, *(held[n] for n in read)])
            linear = jax.tree.unflatten(structure, replaced(held, read, after[len(back) :]))
            transposed = jax.linear_transpose(
                lambda *at: tuple(linear(*at)), *(kinds[n] for n in moved)
            )
            found = dict(zip(moved, transposed(tuple(after[: len(back)])), strict=True))
            return (
                [found[n] for n in carried],
                [one + found[n] for n, one in zip(constants, sums, strict=True)],
                [
                    lax.dynamic_update_slice(
                        one,
                        (laid_out(found[n], hosts[n]) if n in hosts else found[n])[None],
                        [place, *np.zeros(found[n].ndim, np.int32)],
                        allow_negative_indices=False,
                    )
                    for n, one in zip(stacked, gradients, strict=True)
                ],
            ), None

        state: Any = (
            [to_outputs.get(n - first, zeros[n]) for n in carried],
            [zeros[n] for n in constants],
            [given[n] if n in hosts else empty_like(inputs[n], cotangents[0]) for n in stacked],
        )
        for number in reversed(range(len(turns))):
            state, _ = over(number, functools.partial(step, number), state, True)
        carry, sums, gradients = state
        return [*sums, *carry, *gradients], []

    return ahead, behind


def lines_of(value: Any) -> int:
    """How many lines a value has: what differs in no index but the last one."""
    return int(np.prod(value.shape[:-1] if value.ndim > 1 else value.shape, dtype=np.int64))


def places_in(values: Sequence[Any], entries: Sequence[Any]) -> list[list[tuple[int, int, Any]]]:
    """Where what an iteration keeps waits in the entries of gradients: first fit, largest first.

    Returns:
      For each value its pieces: the first line, how many, and an entry, the first row in it, how
      many rows it takes, and how many of its elements lie in one of the entry's; None for a stack
      of its own.
    """

    def width(kind: Any) -> int:
        if not isinstance(kind.dtype, np.dtype) or kind.dtype.kind in "cO":
            return 0
        return kind.dtype.itemsize if kind.dtype.itemsize <= 8 else 0

    def size(kind: Any) -> int:
        return int(np.prod(kind.shape, dtype=np.int64)) * width(kind)

    free = [entry.shape[0] if entry.shape else 0 for entry in entries]
    found: list[list[tuple[int, int, Any]]] = [[] for _ in values]
    for number in sorted(range(len(values)), key=lambda n: (-size(values[n]), n)):
        value, lines = values[number], lines_of(values[number])
        line = value.shape[-1] if value.ndim > 1 else 1
        # Entries by whether their rows are of other lengths, and by room; and how many elements of
        # the value are in one of theirs, and in a row.
        ranked = []
        for n, entry in enumerate(entries):
            if free[n] and size(entry) and width(value) and not width(entry) % width(value):
                together = width(entry) // width(value)
                in_row = together * size(entry) // width(entry) // entry.shape[0]
                room = free[n] * size(entry)
                ranked.append((value.shape[-1:] != entry.shape[-1:], room, n, together, in_row))

        def place(n: int, some: int, together: int, in_row: int, line: int = line) -> Any:
            rows = -(-some * line // in_row)
            free[n] -= rows
            return n, entries[n].shape[0] - free[n] - rows, rows, together

        whole = (one for one in sorted(ranked) if 0 < -(-lines * line // one[4]) <= free[one[2]])
        if (best := next(whole, None)) is not None:
            found[number].append((0, lines, place(best[2], lines, *best[3:])))
            continue
        first = 0
        for _, _, n, together, in_row in sorted(ranked, key=lambda one: (one[0], -one[1], one[2])):
            some = min(free[n] * in_row // line, lines - first) if line else 0
            if some and 8 * some >= lines:
                found[number].append((first, some, place(n, some, together, in_row)))
                first += some
        if first < lines or not lines:
            found[number].append((first, lines - first, None))
    return found


def put_in(stack: Any, value: Any, where: tuple[int, int, int, int], place: Any) -> Any:
    """The stack of a gradient with a value in its place."""
    _, row, rows, together = where
    shape = (together, rows, *stack.shape[2:])
    flat = value.reshape(-1)
    flat = jnp.pad(flat, (0, int(np.prod(shape)) - flat.size))
    if value.dtype == stack.dtype:
        found = flat.reshape(shape)
    else:
        bits, wide = (np.dtype(f"uint{8 * one.dtype.itemsize}") for one in (value, stack))
        is_bool = value.dtype == jnp.bool_
        flat = flat.astype(bits) if is_bool else lax.bitcast_convert_type(flat, bits)
        shifted = [
            lax.shift_left(one.astype(wide), wide.type(8 * bits.itemsize * n))
            for n, one in enumerate(flat.reshape(shape))
        ]
        found = functools.reduce(lax.bitwise_or, shifted)
        found = lax.bitcast_convert_type(found, stack.dtype)[None]
    starts = [place, np.int32(row), *np.zeros(stack.ndim - 2, np.int32)]
    return lax.dynamic_update_slice(stack, found, starts, allow_negative_indices=False)


def taken_from(stack: Any, where: tuple[int, int, int, int], kind: Any, place: Any) -> Any:
    """A value of a type from its place in the stack of a gradient."""
    _, row, rows, together = where
    starts = [place, np.int32(row), *np.zeros(stack.ndim - 2, np.int32)]
    sizes = (1, rows, *stack.shape[2:])
    found = lax.dynamic_slice(stack, starts, sizes, allow_negative_indices=False)
    if kind.dtype != stack.dtype:
        bits, wide = (np.dtype(f"uint{8 * one.dtype.itemsize}") for one in (kind, stack))
        one = lax.bitcast_convert_type(found[0], wide)
        found = jnp.stack(
            [
                lax.shift_right_logical(one, wide.type(8 * bits.itemsize * n)).astype(bits)
                for n in range(together)
            ]
        )
        is_bool = kind.dtype == jnp.bool_
        found = found.astype(kind.dtype) if is_bool else lax.bitcast_convert_type(found, kind.dtype)
    size = int(np.prod(kind.shape))
    return (found if found.size == size else found.reshape(-1)[:size]).reshape(kind.shape)


def empty_like(stack: Any, after: Any) -> Any:
    """An array of the same type with any content, after another array."""
    # For CPU these are zeros, of which XLA would make one array for several loops. Before 0.11, JAX
    # takes what is empty for something that a vmap around it varies.
    if jax.default_backend() == "cpu" or jax.__version_info__ < (0, 11):
        zero, _ = lax.optimization_barrier((jnp.zeros((), stack.dtype), after))
        return jnp.full(stack.shape, zero, stack.dtype)
    return lax.empty(stack.shape, stack.dtype)


def entry_of(stacked: Any, place: Any) -> Any:
    """One entry of a stack."""
    return lax.dynamic_index_in_dim(stacked, place, keepdims=False, allow_negative_indices=False)


def laid_out(value: Any, innermost: int) -> Any:
    """The value, laid out with one axis innermost and the others in their order."""
    if value.ndim < 2 or not isinstance(value, jax.core.Tracer):
        return value
    others = [axis for axis in range(value.ndim) if axis != innermost]
    return with_layout_constraint(value, Layout((*others, innermost)))
