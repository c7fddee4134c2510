"""FLOPs of a function and of its gradient, counted from the program JAX would compile.

The compiler for NVIDIA GPUs reports no FLOPs, and the others count a loop's body once. So the
operations are counted here, by the rules of ``costs``, over the traced program without its dead
code. That holds for any function: a plan's, a ``jax.checkpoint`` with a policy, or checkpoints that
a user placed by hand. What a checkpoint recomputes is the difference between its gradient and that
of the function without it.

This counts the program as written, except that products which repeat another outside checkpoints
count once, with what follows (``tracing``). A compiler that merges more, or undoes a recomputation,
runs less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt import costs
from remat_opt.operation import Operation
from remat_opt.program import tracing
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature

#: Exponent and mantissa bits of the types whose values JAX marks when a checkpoint keeps them.
_PRECISIONS = {
    "float16": (5, 10),
    "bfloat16": (8, 7),
    "float32": (8, 23),
    "float64": (11, 52),
}


def forward_flops(
    fn: Callable[..., Any],
    *args: Any,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> int:
    """Floating-point operations of one call of ``fn``; nothing is run or compiled.

    Args:
      fn: any function that JAX can trace.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      static_argnums: positional arguments that are Python values.
      static_argnames: keyword arguments that are Python values.
      **kwargs: its keyword arguments.

    Raises:
      TraceError: an argument is neither array-like nor declared static.

    Example:
      >>> import jax
      >>> from remat_opt.program.flop_count import forward_flops
      >>> x = jax.ShapeDtypeStruct((8, 8), "float32")
      >>> forward_flops(lambda x: x @ x + 1, x)  # 2 * 8 * 8 * 8, and 8 * 8 additions
      1088
    """
    signature = Signature(
        argnums=(), static_argnums=_tuple(static_argnums), static_argnames=_tuple(static_argnames)
    )
    call = tracing.bind_static(fn, signature, args, kwargs)
    return _count(call.fn, call.args, call.kwargs)


def gradient_flops(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> int:
    """Floating-point operations of one ``jax.value_and_grad`` of ``fn``.

    Args:
      fn: a loss function, with or without checkpoints in it or around it.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      argnums: the positional argument(s) to differentiate.
      has_aux: whether the function returns (loss, auxiliary).
      static_argnums: positional arguments that are Python values.
      static_argnames: keyword arguments that are Python values.
      **kwargs: its keyword arguments.

    Raises:
      TraceError: an argument number is out of range, or an argument is neither array-like
        nor declared static.
    """
    signature = Signature(
        argnums=_tuple(argnums),
        has_aux=has_aux,
        static_argnums=_tuple(static_argnums),
        static_argnames=_tuple(static_argnames),
    )
    call = tracing.bind_static(fn, signature, args, kwargs)
    gradient = jax.value_and_grad(call.fn, argnums=call.argnums, has_aux=has_aux)
    return _count(gradient, call.args, call.kwargs)


def program_flops(program: Program) -> int:
    """Floating-point operations of one run of a traced function."""
    return sum(
        costs.cost(_without_marks(equation.operation)).flops for equation in program.equations
    )


def _tuple(given: Any) -> tuple[Any, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int | str) else tuple(given)


def _count(fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    leaves, tree = jax.tree.flatten((tuple(args), kwargs))

    def flat_fn(*flat: Any) -> Any:
        positional, keywords = jax.tree.unflatten(tree, flat)
        return fn(*positional, **keywords)

    closed, _ = internals.make_jaxpr(flat_fn, *leaves)
    return program_flops(tracing.inner_program(internals.without_dead_code(closed), (), ""))


def _without_marks(operation: Operation) -> Operation:
    """The operation without the marks on kept values, also in its inner programs.

    JAX rounds what a checkpoint keeps to the precision that it already has (``reduce_precision``),
    so that the compiler gives the stored and the recomputed value the same bits. The compiler
    removes this again, but a cost rule would count it.
    """
    if _is_mark(operation):
        return dataclasses.replace(operation, primitive="copy", params={})
    if not operation.bodies:
        return operation
    return dataclasses.replace(
        operation,
        bodies=tuple(
            dataclasses.replace(body, operations=tuple(map(_without_marks, body.operations)))
            for body in operation.bodies
        ),
    )


def _is_mark(operation: Operation) -> bool:
    if operation.primitive != "reduce_precision":
        return False
    bits = (operation.params.get("exponent_bits"), operation.params.get("mantissa_bits"))
    return _PRECISIONS.get(operation.inputs[0].dtype) == bits
