"""What exported code calls besides JAX: each function is copied into it if used.

So each is self-contained: it refers only to the modules that exported code imports, and to other
functions of this file, which are copied along. None uses anything that JAX does not export. They do
what those of the same names in ``transform`` do, and compile to the same bytes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero


def zero_of(value: Any) -> Any:
    """The tangent of what does not vary."""
    return SymbolicZero(jax.typeof(value).to_tangent_aval())


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
    parts: Sequence[tuple[int, Any, Sequence[str], Any]],
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
        checkpoint; the names that every iteration keeps; and the body, which takes constants, carry
        and entries to the next carry and new entries.
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
    checkpointed = jax.checkpoint(
        iteration,
        prevent_cse=unrolled >= length,
        policy=jax.checkpoint_policies.save_only_these_names(*names),
    )
    carry, made = lax.scan(
        checkpointed, list(carry), list(stacked), length=length, reverse=reverse, unroll=unrolled
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

    def filled(values: Sequence[Any], chosen: Sequence[int], others: Sequence[Any]) -> list[Any]:
        found = list(values)
        for place, value in zip(chosen, others, strict=True):
            found[place] = value
        return found

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
                    filled(reads, moved, some_reads), filled(carry, carried, some_carry), place
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
            filled(list(map(zero_of, carry)), carried, to_carry),
            filled(list(map(zero_of, made)), made_varying, flat(to_made)),
            filled(list(map(zero_of, reads)), moved, to_reads),
        )

    run.defjvp(rule, symbolic_zeros=True)
    return run(list(reads), list(carry), first)
