"""Writes one equation in the way that the plan and the compiler ask for."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero
from jax.lax import GatherScatterMode

from remat_opt import _jax_internals as internals
from remat_opt.compilers.joins import Join
from remat_opt.compilers.reordered import entry_axis
from remat_opt.program.record import Equation
from remat_opt.transform.barriers import stored
from remat_opt.transform.steps import Rewriting


def name_of(root: int, position: int, within: str = "") -> str:
    """The checkpoint name of one output of an equation.

    Args:
      root: the equation.
      position: the output's position.
      within: the ``Rewriting.within`` of its program.
    """
    return f"remat_opt_{within}{root}_{position}"


def stands_in(equation: Equation, summed: Set[int], *, own_rule: bool) -> bool:
    """Whether an equation's named outputs should stand in for it in its own derivative.

    A name on something without a derivative must be visible: JAX's partial evaluation does not look
    into a custom-derivative function that was not differentiated, and would run it again.

    Args:
      equation: whose outputs carry names.
      summed: the values that derivatives are taken of, or with respect to.
      own_rule: whether it is written with a derivative of its own that reads no output: one that
        waits for its cotangent, or a product's.
    """
    varies = not summed.isdisjoint(equation.value_inputs)
    return varies and equation.derivative_reads_kept and not own_rule


def arrays_of(equation: Equation, inputs: Sequence[Any]) -> list[Any]:
    """The inputs of an equation, with literals as arrays."""
    return [
        value if isinstance(atom, int) else internals.array_of(value, variable.aval)
        for value, atom, variable in zip(
            inputs, equation.inputs, equation.jax_equation.invars, strict=True
        )
    ]


def run_one(
    rewriting: Rewriting,
    index: int,
    inputs: Sequence[Any],
    *,
    named: bool,
    weight: int | None = None,
    join: Join | None = None,
) -> list[Any]:
    """Runs an equation, its outputs named or not.

    Args:
      rewriting: what holds for all steps.
      index: the equation's number.
      inputs: its inputs.
      named: whether a policy asks for its outputs.
      weight: for a product, the position of the input whose gradient comes first, if any.
      join: for a product, the concatenation whose pieces are inputs in its place, if any.
    """
    equation = rewriting.program.equations[index]
    named_as = functools.partial(_all_named, index, rewriting.within)
    waiting = index in rewriting.ways.waiting
    symmetric = index in rewriting.ways.symmetric
    own_rule = waiting or symmetric or weight is not None or join is not None
    if named and stands_in(equation, rewriting.summed, own_rule=own_rule):
        return _run_kept(equation, inputs, named_as)

    def run(*given: Any) -> list[Any]:
        return internals.bind(equation.jax_equation, equation.name_stack, given)

    if index in rewriting.loops:
        results = rewriting.loops[index](inputs)
    elif index in rewriting.ways.apart:
        results = internals.bind_apart(equation.jax_equation, equation.name_stack, inputs)
    elif index in rewriting.ways.picking:
        results = [_run_picking(equation, *inputs)]
    elif index in rewriting.ways.summing:
        results = [_run_summing(equation, *inputs)]
    elif index in rewriting.ways.flat:
        results = [_run_flat(equation, *inputs)]
    elif index in rewriting.ways.turned:
        results = [_run_turned(equation, *inputs)]
    elif symmetric:
        results = [_run_symmetric(run, equation, *inputs)]
    elif waiting:
        # A checkpoint's derivative waits for its cotangent; nothing needs to be recomputed.
        results = jax.checkpoint(run)(*inputs)
    elif join is not None:
        results = _run_joined(run, rewriting.program.equations[join.equation], join, inputs)
    elif weight is not None:
        results = _run_weight_first(run, inputs, weight)
    else:
        results = run(*inputs)
    if index in rewriting.ways.whole and not named:
        results = list(stored(*results))
    return named_as(results) if named else results


def _run_picking(equation: Equation, operand: Any, indices: Any) -> Any:
    """Runs a gather from rows so that its gradient is elementwise (``row_gathers``)."""

    @jax.custom_jvp
    def pick(operand: Any, indices: Any) -> Any:
        (result,) = internals.bind(equation.jax_equation, equation.name_stack, (operand, indices))
        return result

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        operand, indices = primals
        result = pick(operand, indices)
        if isinstance(tangents[0], SymbolicZero):
            return result, internals.zero_tangent(result)
        here = _chosen(operand, indices, clip=has_mode(equation, GatherScatterMode.CLIP))
        picked = jnp.sum(jnp.where(here, tangents[0], 0), axis=-1)
        return result, picked.reshape(result.shape).astype(result.dtype)

    pick.defjvp(rule, symbolic_zeros=True)
    return pick(operand, indices)


def _run_summing(equation: Equation, operand: Any, indices: Any) -> Any:
    """Runs a gather from rows as a sum over them (``row_gathers``)."""
    fills = has_mode(equation, GatherScatterMode.FILL_OR_DROP)
    here = _chosen(operand, indices, clip=not fills)
    picked = jnp.sum(jnp.where(here, operand, 0), axis=-1)
    if not has_mode(equation, GatherScatterMode.CLIP):
        # Where nothing is picked, there is no gradient either.
        inside = jnp.any(_chosen(operand, indices, clip=False), axis=-1)
        picked = jnp.where(inside, picked, jnp.nan if fills else jax.lax.stop_gradient(picked))
    return picked.reshape(equation.operation.outputs[0].shape).astype(operand.dtype)


def _run_flat(equation: Equation, operand: Any, indices: Any) -> Any:
    """Runs a gather of entries along one axis on a flat operand (``entry_gathers``)."""
    params = equation.jax_equation.params
    numbers = params["dimension_numbers"]
    (axis,) = numbers.start_index_map
    steps = [math.prod(operand.shape[place + 1 :]) for place in range(operand.ndim)]
    along = indices[..., 0].astype(jnp.promote_types(indices.dtype, jnp.int32))
    if has_mode(equation, GatherScatterMode.CLIP):
        along = jnp.clip(along, 0, operand.shape[axis] - 1)
    entries = along * steps[axis]
    for place, of_indices in zip(
        numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True
    ):
        position = jax.lax.broadcasted_iota(along.dtype, along.shape, of_indices)
        entries = entries + position * steps[place]
    if has_mode(equation, GatherScatterMode.FILL_OR_DROP):
        entries = jnp.where((along >= 0) & (along < operand.shape[axis]), entries, -1)
    found = jax.lax.gather(
        operand.reshape(-1),
        entries[..., None],
        jax.lax.GatherDimensionNumbers(
            offset_dims=(), collapsed_slice_dims=(0,), start_index_map=(0,)
        ),
        slice_sizes=(1,),
        unique_indices=params["unique_indices"],
        mode=params["mode"],
        fill_value=params["fill_value"],
    )
    return found.reshape(equation.operation.outputs[0].shape)


def _run_turned(equation: Equation, operand: Any) -> Any:
    """Takes an entry of an operand that is turned first (``reordered``)."""
    axis = entry_axis(equation.operation)
    assert axis is not None, "it takes an entry"
    start = equation.operation.params["start_indices"][axis]
    entry = jax.lax.index_in_dim(jnp.moveaxis(operand, axis, 0), start)
    return jnp.moveaxis(entry, 0, axis)


def _run_symmetric(run: Callable[..., list[Any]], equation: Equation, left: Any, right: Any) -> Any:
    """Runs a product of a value with itself so that its gradient is one product (``squares``)."""

    @jax.custom_jvp
    def product(left: Any, right: Any) -> Any:
        (result,) = run(left, right)
        return result

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        result = product(*primals)
        if isinstance(tangents[0], SymbolicZero):
            return result, internals.zero_tangent(result)
        # The other half of the tangent, that of the value on the right, is this one transposed.
        half = product.fun(tangents[0], primals[1])
        return result, half + half.transpose(exchanged(equation))

    product.defjvp(rule, symbolic_zeros=True)
    return product(left, right)


def exchanged(equation: Equation) -> tuple[int, ...]:
    """The axes of a product's result with those of the left operand and the right exchanged."""
    _, (batch, _) = equation.operation.params["dimension_numbers"]
    axes = tuple(range(len(equation.operation.outputs[0].shape)))
    half = (len(axes) - len(batch)) // 2
    return (*axes[: len(batch)], *axes[len(batch) + half :], *axes[len(batch) : len(batch) + half])


def has_mode(equation: Equation, mode: GatherScatterMode) -> bool:
    """Whether a gather treats indices that are out of bounds in this way."""
    return bool(equation.jax_equation.params["mode"] == mode)


def _chosen(operand: Any, indices: Any, *, clip: bool) -> Any:
    """Whether each element of a gather's operand is picked."""
    axis = operand.ndim - 1
    # With indices into all axes, the last one's is last.
    chosen = indices.reshape(*operand.shape[:-1], -1)[..., -1:]
    # Rows may be longer than small integers can count.
    chosen = chosen.astype(jnp.promote_types(chosen.dtype, jnp.int32))
    if clip:
        chosen = jnp.clip(chosen, 0, operand.shape[axis] - 1)
    return jax.lax.broadcasted_iota(chosen.dtype, operand.shape, axis) == chosen


def _run_joined(
    run: Callable[..., list[Any]], concatenation: Equation, join: Join, inputs: Sequence[Any]
) -> list[Any]:
    """Runs a product of a concatenation so that each piece has a cotangent of its own (``joins``).

    Args:
      run: the product.
      concatenation: the concatenation.
      join: how the product reads it.
      inputs: those of the product, with the pieces in the place of the concatenation.
    """
    axis = concatenation.operation.params["dimension"]

    def of_two(operand: Any, other: Any) -> Any:
        (result,) = run(*((operand, other) if join.place == 0 else (other, operand)))
        return result

    def joined(pieces: Sequence[Any]) -> Any:
        (whole,) = internals.bind(concatenation.jax_equation, concatenation.name_stack, pieces)
        return whole

    @jax.custom_jvp
    def product(other: Any, *pieces: Any) -> Any:
        return of_two(joined(pieces), other)

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        result = product(*primals)
        other, *pieces = primals
        moved, stop = [], 0
        for piece, tangent in zip(pieces, tangents[1:], strict=True):
            start, stop = stop, stop + piece.shape[axis]
            if not isinstance(tangent, SymbolicZero):
                part = jax.lax.slice_in_dim(other, start, stop, axis=join.axis)
                moved.append(of_two(tangent, part))
        if not isinstance(tangents[0], SymbolicZero):
            moved.append(of_two(joined(pieces), tangents[0]))
        return result, sum(moved[1:], moved[0]) if moved else internals.zero_tangent(result)

    product.defjvp(rule, symbolic_zeros=True)
    pieces, other = join.parted(inputs)
    return [product(other, *pieces)]


def _run_weight_first(
    run: Callable[..., list[Any]], inputs: Sequence[Any], weight: int
) -> list[Any]:
    """Runs a product so that, backward, its weight's gradient is computed before the other.

    What the weight's gradient reads may have been recomputed just for it, like the result of an
    activation. Then it is freed before the cotangent of the other operand, which is as large, takes
    its place; XLA for NVIDIA would hold what it is made of to the end of the backward pass.
    """
    (other,) = [p for p in range(len(inputs)) if p != weight]

    @jax.custom_jvp
    def product(of_weight: Any, of_other: Any) -> Any:
        given = [of_weight, of_other] if weight < other else [of_other, of_weight]
        (result,) = run(*given)
        return result

    def rule(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
        result = product(*primals)
        to_weight, to_other = tangents
        if isinstance(to_weight, SymbolicZero):
            if isinstance(to_other, SymbolicZero):
                return result, internals.zero_tangent(result)
            return result, product.fun(primals[0], to_other)
        if isinstance(to_other, SymbolicZero):
            return result, product.fun(to_weight, primals[1])
        moved, to_weight = internals.tie_cotangents((product.fun(primals[0], to_other), to_weight))
        return result, moved + product.fun(to_weight, primals[1])

    product.defjvp(rule, symbolic_zeros=True)
    return [product(inputs[weight], inputs[other])]


def _run_kept(
    equation: Equation, inputs: Sequence[Any], named_as: Callable[[Sequence[Any]], list[Any]]
) -> list[Any]:
    """Runs an equation so that its own derivative also reads the named outputs.

    The derivative rule of ``tanh`` computes the output and reads that, not the named copy. The
    policy would keep the copy, yet the equation and all before it would run again. So the equation
    gets a derivative in which it does not run: the named outputs stand in for it.
    """
    places = [p for p, atom in enumerate(equation.inputs) if isinstance(atom, int)]
    # Do not capture the inputs: the rule outlives the trace that they belong to.
    literals = {
        p: atom.value for p, atom in enumerate(equation.inputs) if not isinstance(atom, int)
    }

    def fill(*given: Any) -> list[Any]:
        filled = literals | dict(zip(places, given, strict=True))
        return [filled[place] for place in range(len(filled))]

    @jax.custom_jvp
    def kept(*given: Any) -> tuple[Any, ...]:
        results = internals.bind(equation.jax_equation, equation.name_stack, fill(*given))
        return tuple(named_as(results))

    def tangent_rule(
        primals: tuple[Any, ...], tangents: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        outputs = kept.fun(*primals)
        varying = [n for n, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def directional(given: Sequence[Any], directions: Sequence[Any]) -> Any:
            def of_varying(*moved: Any) -> tuple[Any, ...]:
                all_given = list(given)
                for number, value in zip(varying, moved, strict=True):
                    all_given[number] = value
                return tuple(
                    internals.bind(equation.jax_equation, equation.name_stack, fill(*all_given))
                )

            return jax.jvp(of_varying, [given[number] for number in varying], directions)

        directions = [tangents[number] for number in varying]
        closed, _ = internals.make_jaxpr(directional, list(primals), directions)
        results = internals.run_with_known(
            closed, [*primals, *directions], equation.jax_equation, literals, outputs
        )
        moved = internals.depends_on(closed, len(primals))
        # A tangent that depends on no direction is zero; something without a derivative may read
        # that output.
        return outputs, tuple(
            tangent if moves else internals.zero_tangent(output)
            for output, tangent, moves in zip(
                outputs, results[len(outputs) :], moved[len(outputs) :], strict=True
            )
        )

    kept.defjvp(tangent_rule, symbolic_zeros=True)
    return list(kept(*(inputs[place] for place in places)))


def _all_named(index: int, within: str, results: Sequence[Any]) -> list[Any]:
    return [
        _named(result, name_of(index, position, within)) for position, result in enumerate(results)
    ]


def _named(value: Any, name: str) -> Any:
    # JAX rounds what a policy keeps to its own precision, but cannot do so for complex numbers, so
    # their parts are kept.
    if jnp.iscomplexobj(value):
        return jax.lax.complex(
            checkpoint_name(jnp.real(value), name), checkpoint_name(jnp.imag(value), name)
        )
    return checkpoint_name(value, name)
