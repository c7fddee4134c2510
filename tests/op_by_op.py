"""Runs a function as ``jax.jit`` traces it, equation by equation.

XLA compiles each kind of equation once for all programs, but no program as a whole, which is most
of the work that a small one takes. Calls, checkpoints, branches and loops are gone through in
Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from remat_opt import _jax_internals as internals


def run_op_by_op(fn: Callable[..., Any], *args: Any) -> Any:
    """What ``jax.jit(fn)(*args)`` gives."""
    traced = jax.jit(fn).trace(*args)
    # As in a compiled program, nothing runs that no output depends on.
    outputs = _run(internals.without_dead_code(traced.jaxpr), jax.tree.leaves(args))
    return jax.tree.unflatten(jax.tree.structure(traced.out_info), map(jnp.asarray, outputs))


def _run(closed: Any, inputs: Sequence[Any]) -> list[Any]:
    """The outputs of a jaxpr."""
    variables, constants, arguments, equations, outputs = internals.parts(closed)
    known = dict(zip((*variables, *arguments), (*constants, *inputs), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, internals.Literal) else known[atom]

    for equation in equations:
        results = _run_equation(equation, [read(atom) for atom in equation.invars])
        known.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in outputs]


def _run_equation(equation: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    name, params = equation.primitive.name, equation.params
    checkpoint = internals.checkpoint_of(equation)
    # Calls of several names have the latter; nothing asks for the rules of custom derivatives now.
    body = checkpoint.body if checkpoint else internals.inlinable_body(equation)
    body = params.get("call_jaxpr") if body is None else body
    if body is not None:
        return _run(body, inputs)
    if name == "cond" and not internals.is_choice_of_platform(equation):
        branches = internals.branches_of(equation)
        return _run(branches[min(max(int(inputs[0]), 0), len(branches) - 1)], inputs[1:])
    if name == "while":
        return _run_while(params, inputs)
    if name == "scan":
        return _run_scan(internals.scan_of(equation), inputs)
    if name == "remat_opt_linear":
        given, tangents = inputs[: params["count"]], inputs[params["count"] :]
        return _run(internals.make_jaxpr(params["fn"], given, tangents)[0], inputs)
    return internals.bind(equation, internals.name_stack_of(equation), inputs)


def _run_while(params: Any, inputs: Sequence[Any]) -> Sequence[Any]:
    first = params["cond_nconsts"]
    last = first + params["body_nconsts"]
    state = inputs[last:]
    while _run(params["cond_jaxpr"], [*inputs[:first], *state])[0]:
        state = _run(params["body_jaxpr"], [*inputs[first:last], *state])
    return state


def _run_scan(scan: internals.Scan, inputs: Sequence[Any]) -> Sequence[Any]:
    last = scan.constants + scan.carries
    constants, state = inputs[: scan.constants], inputs[scan.constants : last]
    rows = list(zip(*map(list, inputs[last:]), strict=True)) or [()] * scan.length
    made = []
    for row in rows[::-1] if scan.reverse else rows:
        results = _run(scan.body, [*constants, *state, *row])
        state = results[: scan.carries]
        made.append(results[scan.carries :])
    stacks = zip(*(made[::-1] if scan.reverse else made), strict=True)
    return [*state, *map(jnp.stack, stacks)]
