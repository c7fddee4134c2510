"""Traces of a decorated function that is called outside ``jax.jit``, kept and compiled.

Under ``jax.jit`` a function is traced whenever the surrounding function is. Called by itself, as by
``jax.grad`` alone, it would be traced at every call and run operation by operation. So such a trace
is kept, compiled as by ``jax.jit``, for calls that are alike: the same structure, shapes, types,
shardings and static values, the same differentiated arguments, the same JAX settings, and a
function that still refers to the same things (``program.references``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes
from remat_opt.program.record import Program
from remat_opt.program.references import References, references
from remat_opt.program.static_leaves import release
from remat_opt.program.tracing import Call


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where the trace of a call is kept.

    Attributes:
      key: what calls that are alike have in common.
      references: what the function refers to now.
    """

    key: Hashable
    references: References


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A trace that was kept.

    Attributes:
      references: what the function referred to when it was traced.
      run: takes the flat arguments to the result.
    """

    references: References
    run: Callable[[Sequence[Any]], Any]


def place_of(call: Call, fn: Callable[..., Any]) -> Place | None:
    """Where the trace of a call is kept, or None if it must not be.

    Args:
      call: the call, with its static arguments bound.
      fn: the function.
    """
    leaves, tree = jax.tree.flatten((call.args, call.kwargs))
    if not all(map(internals.is_concrete, leaves)):
        return None
    kinds = tuple(
        (internals.type_of(leaf), _jax_meshes.mesh_of(leaf), _jax_meshes.split_of(leaf))
        for leaf in leaves
    )
    varying = tuple(map(internals.is_differentiated, leaves))
    # Methods of several instances, called in turn, must not evict one another.
    instance = id(getattr(fn, "__self__", None))
    key = tree, kinds, varying, call.static, internals.settings(), instance
    try:
        hash(key)
    except TypeError:
        return None
    found = references(fn)
    return None if found is None else Place(key=key, references=found)


def trace_at(place: Place | None, program: Program, run: Callable[..., list[Any]]) -> Trace | None:
    """What to keep of a trace, or None if it must not be kept.

    Args:
      place: where.
      program: what the call was traced to.
      run: takes its constants and arguments to its outputs.
    """
    # A constant to which we saw no reference may be another one next time.
    if place is None or program.closed_over or not place.references.cover(program.constant_values):
        return None
    computed = [place for place, atom in enumerate(program.outputs) if isinstance(atom, int)]

    def flat(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        outputs = run(constants, arguments)
        return [outputs[place] for place in computed]

    flat.__name__ = program.name
    compiled = jax.jit(flat)

    def run_compiled(arguments: Sequence[Any]) -> Any:
        outputs = [atom if isinstance(atom, int) else atom.value for atom in program.outputs]
        for place, value in zip(
            computed, compiled(program.constant_values, arguments), strict=True
        ):
            outputs[place] = value
        return release(jax.tree.unflatten(program.output_tree, outputs))

    return Trace(references=place.references, run=run_compiled)
