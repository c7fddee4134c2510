"""Every private or version-dependent use of JAX, under names of our own.

JAX 0.10 and 0.12 differ in how jaxprs are represented (``ClosedJaxpr`` and ``Jaxpr``
became one class) and in the parameters of some equations. The rest of the package
sees neither: it asks this file. Each function here has a contract test in
``tests/test_jax_contracts.py`` that fails when an assumption no longer holds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import operator
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config, source_info_util
from jax._src.core import NamedAxisEffect
from jax.custom_derivatives import SymbolicZero
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend import core as jax_core
from jax.interpreters import ad, batching, mlir, partial_eval

from remat_opt.naming import file_title
from remat_opt.operation import CHECKPOINTS

Literal = jax_core.Literal
Primitive = jax_core.Primitive

#: Where this package's own frames come from; they never made a user's equation.
_OWN_FOLDER = __file__.replace("\\", "/").rsplit("/", 1)[0] + "/"

#: Calls that only group equations: their bodies are inlined in place.
_INLINED_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})


def is_jaxpr(thing: object) -> bool:
    """Whether ``thing`` is a jaxpr, open or closed, of any supported JAX version."""
    return isinstance(thing, jax_core.Jaxpr | jax_core.ClosedJaxpr)


def parts(closed: Any) -> tuple[list[Any], list[Any], list[Any], list[Any], list[Any]]:
    """Takes a closed jaxpr apart: (constant variables, constants, inputs, equations, outputs)."""
    jaxpr = getattr(closed, "jaxpr", closed)
    constants = list(getattr(closed, "consts", ()))
    constant_variables = list(jaxpr.constvars)
    inputs = list(jaxpr.invars)
    return constant_variables, constants, inputs, list(jaxpr.eqns), list(jaxpr.outvars)


def inlinable_body(equation: Any) -> Any | None:
    """The closed jaxpr to put in place of a call equation, or None to carry it whole.

    A nested ``jit`` that prescribes shardings or layouts is not only a group of equations, so it is
    carried as it is. (Side effects are no obstacle: each equation inside declares its own.)
    """
    if equation.primitive.name not in _INLINED_CALLS:
        return None
    params = equation.params
    for key in ("in_shardings", "out_shardings", "in_layouts", "out_layouts"):
        for prescribed in params.get(key, ()) or ():
            if prescribed is not None and type(prescribed).__name__ != "UnspecifiedValue":
                return None
    if params.get("compiler_options_kvs"):
        return None
    return params.get("jaxpr", params.get("call_jaxpr"))


def compiler_options_of(fn: Any) -> dict[str, Any]:
    """The compiler options of a ``jax.jit`` around a function; none for any other function."""
    said = getattr(fn, "_jit_info", None)
    return dict(getattr(said, "compiler_options_kvs", None) or ())


def without_compiler_options(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function, its ``jax.jit`` made again without compiler options if it has any.

    JAX refuses to trace a ``jax.jit`` with options inside another.
    """
    if not compiler_options_of(fn):
        return fn
    said = fn._jit_info  # type: ignore[attr-defined]
    shardings = {
        f"{side}_shardings": jax.tree.unflatten(
            getattr(said, f"{side}_shardings_treedef"), getattr(said, f"{side}_shardings_leaves")
        )
        for side in ("in", "out")
    }
    found: Callable[..., Any] = jax.jit(
        fn.__wrapped__,  # type: ignore[attr-defined]
        static_argnums=said.static_argnums,
        static_argnames=said.static_argnames,
        donate_argnums=said.donate_argnums,
        keep_unused=said.keep_unused,
        inline=said.inline,
        **shardings,
    )
    return found


#: Primitives that call a Python function.
_CALLBACKS = frozenset({"debug_callback", "debug_print", "io_callback", "pure_callback"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """What a ``jax.checkpoint`` equation says.

    Attributes:
      body: the jaxpr under it.
      policy: decides whether an equation's result is kept; None keeps nothing.
      differentiated: whether a derivative has been taken and this is what remains.
      prevents_cse: whether a barrier is before what runs again.
    """

    body: Any
    policy: Callable[..., Any] | None
    differentiated: bool
    prevents_cse: bool


def checkpoint_of(equation: Any) -> Checkpoint | None:
    """Reads an equation that is a ``jax.checkpoint``; None for any other."""
    if equation.primitive.name not in CHECKPOINTS:
        return None
    params = equation.params
    return Checkpoint(
        body=params["jaxpr"],
        policy=params["policy"],
        differentiated=params["differentiated"],
        # One answer, or one for each input.
        prevents_cse=bool(np.any(params["prevent_cse"])),
    )


def branches_of(equation: Any) -> tuple[Any, ...]:
    """The closed jaxprs of the branches of a ``cond``, each of all its inputs but the first."""
    return tuple(equation.params["branches"])


def is_choice_of_platform(equation: Any) -> bool:
    """Whether a ``cond`` chooses by the platform it is compiled for (``platform_dependent``)."""
    return equation.params.get("branches_platforms") is not None


@functools.cache
def branches_copy_inputs() -> bool:
    """Whether a ``cond`` hands out copies of its inputs where checkpoints in branches read them.

    JAX before 0.11 does. Later versions keep the inputs themselves for the backward pass.
    """

    def residuals(flag: Any, x: Any) -> Any:
        branches = jax.checkpoint(jnp.sin), jax.checkpoint(jnp.cos)
        return jax.tree.leaves(jax.vjp(lambda x: jax.lax.cond(flag, *branches, x), x)[1])

    closed, _ = make_jaxpr(
        residuals, jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((2,), "float32")
    )
    _, _, inputs, _, outputs = parts(closed)
    return inputs[1] not in [one for one in outputs if not isinstance(one, Literal)]


def without_checkpoints(equation: Any) -> Any:
    """The equation with each checkpoint in its inner programs replaced by its body.

    Those inside functions with custom derivative rules stay: the rules say what is kept.
    """
    if equation.primitive.name.startswith("custom_"):
        return equation
    changed = _changed_jaxprs(equation.params, _dissolved)
    return equation.replace(params={**equation.params, **changed}) if changed else equation


def _changed_jaxprs(params: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """The parameters that hold jaxprs, with these changed; not those that stay the same."""
    changed = {}
    for key, value in params.items():
        if is_jaxpr(value):
            new: Any = change(value)
        elif isinstance(value, tuple) and any(map(is_jaxpr, value)):
            new = tuple(change(item) if is_jaxpr(item) else item for item in value)
            new = value if all(map(operator.is_, new, value)) else new
        else:
            continue
        if new is not value:
            changed[key] = new
    return changed


def _dissolved(closed: Any) -> Any:
    """A jaxpr, open or closed, without its checkpoints; the same object if it has none."""
    jaxpr = getattr(closed, "jaxpr", closed)
    environment: dict[Any, Any] = {}
    equations: list[Any] = []

    def read(atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else environment.get(atom, atom)

    def put(steps: Iterable[Any], prefix: Any) -> None:
        for step in steps:
            given = [read(atom) for atom in step.invars]
            stack = name_stack_of(step, prefix)
            found = checkpoint_of(step)
            if found is not None and not parts(found.body)[0]:
                _, _, inputs, inner, results = parts(found.body)
                environment.update(zip(inputs, given, strict=True))
                put(inner, stack)
                environment.update(zip(step.outvars, map(read, results), strict=True))
                continue
            # The same body may occur in several places and make different values in each.
            made = step.outvars
            if prefix is not None:
                made = [jax_core.Var(variable.aval) for variable in made]
                environment.update(zip(step.outvars, made, strict=True))
            equations.append(
                without_checkpoints(step).replace(
                    invars=given,
                    outvars=made,
                    source_info=step.source_info.replace(name_stack=stack),
                )
            )

    put(jaxpr.eqns, None)
    same = len(equations) == len(jaxpr.eqns) and all(
        new.params is old.params and new.primitive is old.primitive
        for new, old in zip(equations, jaxpr.eqns, strict=True)
    )
    if same:
        return closed
    new = jaxpr.replace(eqns=equations, outvars=list(map(read, jaxpr.outvars)))
    return new if closed is jaxpr else closed.replace(jaxpr=new)


def _names_an_axis(effect: Any) -> bool:
    return isinstance(effect, NamedAxisEffect)


#: Collectives that JAX does not note as such, and what it takes for one that only computes.
_SILENT = frozenset({"ppermute", "pbroadcast", "pbroadcast_dynamic"})
_LOCAL = frozenset({"axis_index"})


def noting_collectives(equation: Any, *, again: bool = False) -> Any:
    """The equation with a note, an effect, on every axis that it communicates over.

    Likewise for its inner programs. JAX leaves it out for some collectives.

    Args:
      equation: as traced.
      again: whether collectives may run again. Then there are no notes: a collective only computes
        its outputs, and the note makes it look like a side effect.

    Returns:
      The same object if nothing changes.
    """
    change = functools.partial(_noting_collectives, again=again)
    changed = _changed_jaxprs(equation.params, change)
    noted = frozenset(filter(_names_an_axis, equation.effects))
    name, others = equation.primitive.name, equation.effects - noted
    if again or name in _LOCAL:
        noted = frozenset()
    elif name in _SILENT:
        noted = frozenset(map(NamedAxisEffect, _axes_of(equation)))
    elif changed and name != "shard_map":  # which has the axes itself
        noted = _noted_within({**equation.params, **changed})
    effects = others | noted
    if not changed and effects == equation.effects:
        return equation
    return equation.replace(params={**equation.params, **changed}, effects=effects)


def _noting_collectives(closed: Any, *, again: bool) -> Any:
    jaxpr = getattr(closed, "jaxpr", closed)
    equations = [noting_collectives(step, again=again) for step in jaxpr.eqns]
    if all(map(operator.is_, equations, jaxpr.eqns)):
        return closed
    noted = (filter(_names_an_axis, step.effects) for step in equations)
    effects = {one for one in jaxpr.effects if not _names_an_axis(one)}.union(*noted)
    new = jaxpr.replace(eqns=equations, effects=frozenset(effects))
    return new if closed is jaxpr else closed.replace(jaxpr=new)


def _noted_within(params: Mapping[str, Any]) -> frozenset[Any]:
    effects = (getattr(jaxpr, "jaxpr", jaxpr).effects for _, jaxpr in inner_jaxprs(params))
    return frozenset(filter(_names_an_axis, frozenset().union(*effects)))


def inner_jaxprs(params: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All jaxprs among an equation's parameters, with the parameter each one is found under."""
    for key, value in params.items():
        if is_jaxpr(value):
            yield key, value
        elif isinstance(value, tuple | list):
            for item in value:
                if is_jaxpr(item):
                    yield key, item


def array_of(value: Any, aval: Any) -> Any:
    """The array, weak type included, that the value of a jaxpr's literal stands for."""
    if aval.weak_type:
        return jnp.asarray(np.asarray(value).item())
    return jnp.asarray(value, aval.dtype)


def has_effects(equation: Any) -> bool:
    """Whether the equation does more than compute its outputs (prints, calls back, writes).

    Collectives count, unless they may run again (``noting_collectives``).
    """
    return bool(equation.effects)


def has_side_effects(equation: Any) -> bool:
    """Whether the equation does more than compute its outputs and communicate."""
    return not all(map(_names_an_axis, equation.effects))


def at_most_communicates(equation: Any) -> bool:
    """Whether the equation does nothing but compute its outputs and communicate.

    A callback may have no effect in JAX's sense.
    """
    return not (has_side_effects(equation) or calls_back(equation))


def maps_communicate(equation: Any) -> bool:
    """Whether the equation is or holds a ``shard_map`` whose body has noted collectives.

    The map has the axes of these itself, so it has no effect.
    """
    if equation.primitive.name == "shard_map" and _noted_within(equation.params):
        return True
    return any(
        maps_communicate(step)
        for _, jaxpr in inner_jaxprs(equation.params)
        for step in parts(jaxpr)[3]
    )


def is_mutable(variable: Any) -> bool:
    """Whether a variable is a mutable array, as from ``jax.new_ref``: not a value itself."""
    return hasattr(variable.aval, "inner_aval")


def reads_mutable(equation: Any) -> bool:
    """Whether the equation is given a mutable array."""
    return any(map(is_mutable, equation.invars))


def calls_back(equation: Any) -> bool:
    """Whether the equation calls a Python function, by itself or in a program inside it."""
    if equation.primitive.name in _CALLBACKS:
        return True
    return any(
        calls_back(step) for _, jaxpr in inner_jaxprs(equation.params) for step in parts(jaxpr)[3]
    )


def surrounding_axes(equations: Iterable[Any]) -> tuple[str, ...]:
    """Axes of a surrounding ``vmap`` or ``shard_map`` that the equations depend on.

    Those of a ``vmap`` that the equations name, as ``psum`` does, and all those of a ``shard_map``
    whose body this is called in.
    """
    named = set(map(str, jax.sharding.get_abstract_mesh().manual_axes))
    for equation in equations:
        named.update(_named_axes(equation))
    return tuple(sorted(named))


def _named_axes(equation: Any) -> Iterator[str]:
    yield from (str(effect.name) for effect in equation.effects if _names_an_axis(effect))
    # Where collectives may run again, only their parameters say so.
    yield from _axes_of(equation)
    if equation.primitive.name != "shard_map":
        for _, jaxpr in inner_jaxprs(equation.params):
            for step in parts(jaxpr)[3]:
                yield from _named_axes(step)


def _axes_of(equation: Any) -> Iterator[str]:
    """The axes that a collective names."""
    for key in ("axes", "axis_name"):
        told = equation.params.get(key, ())
        told = (told,) if isinstance(told, str) else told
        yield from (one for one in told if isinstance(one, str))


def name_stack_of(equation: Any, prefix: Any = None) -> Any:
    """The equation's name stack, an opaque object, below ``prefix`` if it was inlined."""
    stack = equation.source_info.name_stack
    return stack if prefix is None else prefix + stack


@contextlib.contextmanager
def context_of(equation: Any, name_stack: Any) -> Iterator[None]:
    """Where an equation was traced: its source line, its name stack and its own context."""
    stack = source_info_util.current_name_stack() + name_stack
    with (
        source_info_util.user_context(equation.source_info.traceback, name_stack=stack),
        equation.ctx.manager,
    ):
        yield


def bind(equation: Any, name_stack: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one equation on ``inputs`` and returns its outputs.

    The source line, the name stack and the equation's own context (mesh, compute
    type, precision) are those it was traced with, so that profiles and error
    messages of the rewritten program still point at the user's code.
    """
    primitive = equation.primitive
    params = primitive.get_bind_params(equation.params)
    with context_of(equation, name_stack):
        if isinstance(params, tuple):  # JAX before 0.11: (subfunctions, parameters)
            subfunctions, params = params
            outputs = primitive.bind(*subfunctions, *inputs, **params)
        else:
            outputs = primitive.bind(*inputs, **params)
    return list(outputs) if primitive.multiple_results else [outputs]


def bind_apart(equation: Any, name_stack: Any, inputs: Sequence[Any]) -> list[Any]:
    """Runs one ``custom_jvp_call`` with scalar constants that the compiler cannot merge.

    XLA turns equal constants of one shape into one array, however far apart their readers are. It
    does not look behind an optimization barrier. The derivative is unchanged.
    """

    @jax.custom_jvp
    def apart(*given: Any) -> tuple[Any, ...]:
        return tuple(_run_apart(equation.params["call_jaxpr"], name_stack, given))

    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        def as_it_is(*given: Any) -> tuple[Any, ...]:
            return tuple(bind(equation, name_stack, given))

        return apart(*primals), jvp_of_varying(as_it_is, primals, tangents)

    apart.defjvp(rule, symbolic_zeros=True)
    return list(apart(*inputs))


def jvp_of_varying(
    fn: Callable[..., Sequence[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[Any, ...]:
    """The tangents of ``fn``'s outputs, along only those inputs that have a tangent.

    Args:
      fn: takes the primals and returns several outputs.
      primals: where to take the derivative.
      tangents: as a rule with symbolic zeros receives them.
    """
    varying = [n for n, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]

    def of_varying(*moved: Any) -> Sequence[Any]:
        given = list(primals)
        for number, value in zip(varying, moved, strict=True):
            given[number] = value
        return fn(*given)

    directions = [tangents[number] for number in varying]
    return tuple(jax.jvp(of_varying, [primals[number] for number in varying], directions)[1])


#: Whether the results of a scan can be tied. Under a checkpoint, where some of them are tied to
#: others, JAX before 0.11 takes the cotangents of stacked outputs for those of one iteration.
TIES_SCANS = jax.__version_info__ >= (0, 11)

#: The identity, in place of a barrier on tangents. Its transpose is a barrier on the cotangents.
#: JAX's own barrier cannot be transposed if one of several tangents is not a linear function of
#: what varies, like the zeros of a custom derivative rule.
_tie_p = Primitive("remat_opt_tie")
_tie_p.multiple_results = True


def _tie_abstract(*kinds: Any) -> Sequence[Any]:
    return kinds


def _tie_run(*values: Any) -> list[Any]:
    return list(jax.lax.optimization_barrier(values))


def _tie_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return _tie_p.bind(*primals), _of_those(
        tangents, [not isinstance(one, ad.Zero) for one in tangents], _tie_p.bind
    )


def _tie_transpose(cotangents: Sequence[Any], *primals: Any) -> list[Any]:
    linear = [ad.is_undefined_primal(one) for one in primals]
    there = [
        own and not isinstance(one, ad.Zero) for own, one in zip(linear, cotangents, strict=True)
    ]
    found = _of_those(cotangents, there, barrier)
    return [one if own else None for own, one in zip(linear, found, strict=True)]


def _tie_batched(values: Sequence[Any], axes: Sequence[Any]) -> tuple[Any, Any]:
    return _tie_p.bind(*values), axes


def _tie_without_unused(used: Sequence[bool], *given: Any) -> tuple[list[bool], Any]:
    """Drops what nothing reads.

    Else it would keep alive what it ties. A loop none of whose results has a cotangent would be run
    backward, and pass zeros on to where the function as written has no derivative: times an
    infinite slope, they are no numbers.

    Args:
      used: whether each output is read.
      given: the equation; JAX 0.12 has something before it.
    """
    kept, equation = list(used), given[-1]
    if not any(kept):
        return kept, None
    inputs = [one for one, wanted in zip(equation.invars, kept, strict=True) if wanted]
    outputs = [one for one, wanted in zip(equation.outvars, kept, strict=True) if wanted]
    return kept, equation.replace(invars=inputs, outvars=outputs)


def _of_those(
    values: Sequence[Any], chosen: Sequence[bool], run: Callable[..., Sequence[Any]]
) -> list[Any]:
    """The values, with the chosen ones replaced by what ``run`` makes of them."""
    given = [value for value, wanted in zip(values, chosen, strict=True) if wanted]
    made = iter(run(*given) if given else ())
    return [next(made) if wanted else value for value, wanted in zip(values, chosen, strict=True)]


_tie_p.def_impl(_tie_run)
_tie_p.def_abstract_eval(_tie_abstract)
ad.primitive_jvps[_tie_p] = _tie_jvp
ad.primitive_transposes[_tie_p] = _tie_transpose
batching.primitive_batchers[_tie_p] = _tie_batched
partial_eval.dce_rules[_tie_p] = _tie_without_unused
mlir.register_lowering(_tie_p, mlir.lower_fun(_tie_run, multiple_results=True))


def barrier(*values: Any) -> list[Any]:
    """The values as arrays, none available before all are computed, of the same types as before.

    JAX's own barrier lets each vary over all axes of a ``shard_map`` that any does, before 0.11.
    """
    over = {getattr(getattr(type_of(one), "mat", None), "varying", None) for one in values}
    return list(_tie_p.bind(*values)) if len(over) > 1 else _tie_run(*values)


def tie_cotangents(tangents: Sequence[Any]) -> tuple[Any, ...]:
    """Tangents as they are; none of their cotangents goes on before all are computed.

    Args:
      tangents: as a rule with symbolic zeros receives them; the zeros stay what they are.
    """
    there = [not isinstance(one, SymbolicZero) for one in tangents]
    return tuple(_of_those(tangents, there, _tie_p.bind))


#: A linear function with a transpose of its own. JAX's ``linear_call`` can be neither batched nor
#: differentiated along what it is not linear in; this is then taken for what it computes.
_linear_p = Primitive("remat_opt_linear")
_linear_p.multiple_results = True


def call_linear(
    fn: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    transposed: Callable[[Sequence[Any], Sequence[Any]], Sequence[Any]],
    given: Sequence[Any],
    tangents: Sequence[Any],
    like: Sequence[Any],
) -> list[Any]:
    """``fn(given, tangents)``, whose transpose is written otherwise.

    Args:
      fn: linear in the tangents; takes and gives flat arrays, and closes over none.
      transposed: takes what is given, and the cotangents of all results, to those of all tangents.
      given: what neither is linear in.
      tangents: where to call it.
      like: values whose tangents the results are.
    """
    kinds = tuple(type_of(one).to_tangent_aval() for one in like)
    params = {"fn": fn, "transposed": transposed, "count": len(given), "kinds": kinds}
    return list(_linear_p.bind(*given, *tangents, **params))


def _linear_run(*values: Any, fn: Callable[..., Any], count: int, **_: Any) -> list[Any]:
    return list(fn(list(values[:count]), list(values[count:])))


def _linear_abstract(*_: Any, kinds: Sequence[Any], **__: Any) -> Sequence[Any]:
    return kinds


def _linear_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    count = params["count"]
    moved = [ad.instantiate_zeros(one) for one in tangents]
    if all(isinstance(one, ad.Zero) for one in tangents[:count]):
        found = _linear_p.bind(*primals[:count], *moved[count:], **params)
        return _linear_p.bind(*primals, **params), found
    return jax.jvp(functools.partial(_linear_run, **params), tuple(primals), tuple(moved))


def _linear_transpose(
    cotangents: Sequence[Any],
    *primals: Any,
    transposed: Callable[..., Any],
    count: int,
    kinds: Sequence[Any],
    **_: Any,
) -> list[Any]:
    there = [
        ad.instantiate_zeros(ad.Zero(kind.to_tangent_aval())) if isinstance(one, ad.Zero) else one
        for one, kind in zip(cotangents, kinds, strict=True)
    ]
    return [None] * count + list(transposed(list(primals[:count]), there))


def _linear_batched(values: Sequence[Any], axes: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    found = jax.vmap(functools.partial(_linear_run, **params), tuple(axes))(*values)
    return found, [0] * len(found)


_linear_p.def_impl(_linear_run)
_linear_p.def_abstract_eval(_linear_abstract)
ad.primitive_jvps[_linear_p] = _linear_jvp
ad.primitive_transposes[_linear_p] = _linear_transpose
batching.primitive_batchers[_linear_p] = _linear_batched
mlir.register_lowering(_linear_p, mlir.lower_fun(_linear_run, multiple_results=True))


def _run_apart(closed: Any, name_stack: Any, inputs: Sequence[Any]) -> list[Any]:
    constant_variables, constants, variables, equations, results = parts(closed)
    environment = dict(zip(constant_variables, constants, strict=True))
    environment.update(zip(variables, inputs, strict=True))

    def read(atom: Any) -> Any:
        if not isinstance(atom, Literal):
            return environment[atom]
        value = jnp.asarray(atom.val, type_of(atom.val).dtype)
        return value if value.ndim else jax.lax.optimization_barrier(value)

    for step in equations:
        given = list(map(read, step.invars))
        stack = name_stack_of(step, name_stack)
        body = inlinable_body(step)
        made = bind(step, stack, given) if body is None else _run_apart(body, stack, given)
        environment.update(zip(step.outvars, made, strict=True))
    return list(map(read, results))


def run_with_known(
    closed: Any,
    inputs: Sequence[Any],
    equation: Any,
    literals: Mapping[int, Any],
    outputs: Sequence[Any],
) -> list[Any]:
    """Runs a closed jaxpr, one equation of which has already been run.

    Args:
      closed: the jaxpr; its first inputs are those of ``equation`` that are not literals.
      inputs: values of its inputs.
      literals: values of the equation's other inputs, by position.
      equation: wherever the jaxpr applies it to those inputs, it is not run. (A derivative rule
        need not pass on the primitive's result: that of ``cholesky`` clears the upper triangle
        first. So we look for the equation, not the result.)
      outputs: its results.

    Returns:
      All outputs of the jaxpr.
    """
    constant_variables, constants, variables, equations, results = parts(closed)
    environment = dict(zip(constant_variables, constants, strict=True))
    environment.update(zip(variables, inputs, strict=True))
    given = iter(variables)
    reads = {p: next(given) for p in range(len(equation.invars)) if p not in literals}
    parameters = describe_parameters(equation.params)

    def is_same(position: int, atom: Any) -> bool:
        if position in literals:
            return isinstance(atom, Literal) and np.array_equal(atom.val, literals[position])
        return atom is reads[position]

    def is_known(other: Any) -> bool:
        return (
            other.primitive is equation.primitive
            and len(other.invars) == len(equation.invars)
            and all(is_same(position, atom) for position, atom in enumerate(other.invars))
            and describe_parameters(other.params) == parameters
        )

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, Literal) else environment[variable]

    for step in equations:
        if is_known(step):
            made: Sequence[Any] = outputs
        else:
            made = bind(step, step.source_info.name_stack, list(map(read, step.invars)))
        environment.update(zip(step.outvars, made, strict=True))
    return list(map(read, results))


def depends_on(closed: Any, first: int) -> list[bool]:
    """For each output of a jaxpr whether it depends on one of its inputs from ``first`` on."""
    _, _, variables, equations, results = parts(closed)
    reached = set(variables[first:])

    def is_reached(atom: Any) -> bool:
        return not isinstance(atom, Literal) and atom in reached

    for step in equations:
        if any(map(is_reached, step.invars)):
            reached.update(step.outvars)
    return list(map(is_reached, results))


def zero_tangent(value: Any) -> SymbolicZero:
    """The tangent of a value that does not vary, for rules with symbolic zeros."""
    return SymbolicZero(type_of(value).to_tangent_aval())


def instantiated(tangent: Any, value: Any) -> Any:
    """The tangent of a value as an array, if it is a symbolic zero.

    It varies over the same axes of a ``shard_map`` as the value.
    """
    if not isinstance(tangent, SymbolicZero):
        return tangent
    return ad.instantiate_zeros(ad.Zero(type_of(value).to_tangent_aval()))


def empty(shape: Sequence[int], dtype: Any, *, after: Any, shared: bool) -> Any:
    """An array with any content, of which there is no other.

    JAX before 0.11 takes ``lax.empty`` for something that a ``vmap`` around it varies.

    Args:
      shape: its shape.
      dtype: its dtype.
      after: an array that no other call is given.
      shared: whether the compiler gets zeros for it, of which it makes one array for all.
    """
    if shared or jax.__version_info__ < (0, 11):
        return jnp.full(shape, barrier(jnp.zeros((), dtype), after)[0], dtype)
    return jax.lax.empty(shape, dtype)


def laid_out(value: Any, innermost: int) -> Any:
    """The value, laid out with one axis innermost and the others in their order."""
    if value.ndim < 2 or not isinstance(value, jax.core.Tracer):
        return value
    others = [axis for axis in range(value.ndim) if axis != innermost]
    return with_layout_constraint(value, Layout((*others, innermost)))


def source_line(equation: Any, calls: Sequence[Any] = (), *, only_users: bool = False) -> str:
    """Where the user's code made the equation, as ``file.py:line (function)``; "" if unknown.

    That is the innermost line outside JAX and outside installed packages (a Flax layer is known by
    its module path). If all lines are in packages, it is the innermost outside JAX and this one.

    Args:
      equation: of a jaxpr.
      calls: those whose bodies it was inlined from, innermost first. A JAX function such as
        ``jnp.clip`` is traced once for all its callers. Its equations have no user line, so they
        get that of the call.
      only_users: give "" if all lines are in packages.
    """
    frames = [
        frame
        for one in (equation, *calls)
        for frame in source_info_util.user_frames(one.source_info.traceback)
        if not str(frame.file_name).startswith(_OWN_FOLDER)
    ]
    own = (frame for frame in frames if not _is_installed(str(frame.file_name)))
    frame = next(own, frames[0] if frames and not only_users else None)
    if frame is None:
        return ""
    return f"{file_title(str(frame.file_name))}:{frame.start_line} ({frame.function_name})"


def functions_around(equation: Any, calls: Sequence[Any] = ()) -> list[tuple[str, int]]:
    """The user's functions that made an equation, outermost first.

    Args:
      equation: of a jaxpr.
      calls: those whose bodies it was inlined from, innermost first. A body is traced once for all
        its callers, so the functions are those that made the outermost call.

    Returns:
      The name of each, and the line that called it in the function around it.
    """
    outermost = calls[-1] if calls else equation
    frames = [
        frame
        for frame in source_info_util.user_frames(outermost.source_info.traceback)
        if not _is_installed(str(frame.file_name))
    ][::-1]
    lines = [0, *(frame.start_line for frame in frames)]
    return [(frame.function_name, line) for frame, line in zip(frames, lines, strict=False)]


def names_of_calls(calls: Sequence[Any]) -> list[str]:
    """The functions that inlined calls belong to, such as ``gelu``, outermost first.

    Args:
      calls: innermost first.
    """
    names = (str(call.params.get("name", "")).lstrip("_") for call in reversed(calls))
    return [name for name in names if name.isidentifier()]


def _is_installed(file_name: str) -> bool:
    path = file_name.replace("\\", "/")
    return "/site-packages/" in path or "/dist-packages/" in path or path.startswith(_OWN_FOLDER)


def results_of_call(call: Any, variables: Sequence[Any]) -> list[Any]:
    """The results of an inlined call that correspond to these variables of its body."""
    results = parts(inlinable_body(call))[4]
    return [
        outer
        for outer, inner in zip(call.outvars, results, strict=True)
        if any(inner is variable for variable in variables)
    ]


def custom_name(equation: Any) -> str:
    """The name of a function with a custom derivative, such as ``relu``; "" if unknown.

    The rule wraps one call of a named function. If it does not, nothing says what it is.
    """
    body = equation.params.get("call_jaxpr")
    if body is None or not equation.primitive.name.startswith("custom_"):
        return ""
    inner = parts(body)[3]
    name = str(inner[0].params.get("name", "")) if len(inner) == 1 else ""
    return "" if name == "<lambda>" else name.lstrip("_")


def check(closed: Any) -> None:
    """Type-checks a jaxpr; raises JAX's own error when it is ill-formed."""
    jax_core.check_jaxpr(getattr(closed, "jaxpr", closed))


def without_dead_code(closed: Any) -> Any:
    """The closed jaxpr without what no output needs, in inner programs too."""
    live, _ = partial_eval.dce_jaxpr(
        closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=True
    )
    return closed.replace(jaxpr=live)


def type_of(value: Any) -> Any:
    """The abstract value of an array, a tracer or a Python number."""
    return jax.typeof(value)


def cotangent_type(aval: Any) -> Any:
    """The type of the cotangent of a value of type ``aval``.

    The two differ where types say how a value is sharded or over which mesh axes it varies.
    """
    return aval.to_ct_aval()


def make_jaxpr(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Traces ``fn`` and returns (closed jaxpr, tree of output shapes).

    An argument may be replaced by its abstract value. This says more than a
    ``jax.ShapeDtypeStruct``: how it is sharded, and over which axes of ``shard_map`` it varies.
    """
    return jax.make_jaxpr(fn, return_shape=True)(*args, **kwargs)


def is_differentiated(value: Any) -> bool:
    """Whether a value is the tracer of a derivative, perhaps with a ``vmap`` inside it."""
    while hasattr(type(value), "batch_dim"):
        value = value.val
    return isinstance(value, jax.core.Tracer) and hasattr(type(value), "tangent")


def is_concrete(value: Any) -> bool:
    """Whether a value is an array, or the tracer of a derivative or a ``vmap`` around one.

    False under ``jax.jit`` and the like, where there are no arrays yet.
    """
    while isinstance(value, jax.core.Tracer):
        kind = type(value)
        inner = "val" if hasattr(kind, "batch_dim") else "primal"
        if inner == "primal" and not hasattr(kind, "tangent"):
            return False
        value = getattr(value, inner)
    return not isinstance(value, jax.ShapeDtypeStruct)


def settings() -> Hashable:
    """All JAX settings that traces depend on, and the axes and meshes they are made in."""
    return config.trace_context(), jax.config.values["jax_disable_jit"]


def scan_length(params: Mapping[str, Any]) -> int:
    """How often the body of a ``scan`` equation runs."""
    return int(params["length"])


def while_turns(equation: Any) -> int | None:
    """How often the body of a ``while`` equation runs, if constants alone decide that.

    They do if a carried integer that changes by a constant each turn is compared with another one
    or a constant, as ``fori_loop`` writes it when its bounds are not tracers.
    """
    _, _, tested, tests, _ = parts(equation.params["cond_jaxpr"])
    if len(tests) != 1 or tests[0].primitive.name not in _COMPARED:
        return None
    swapped, more = _COMPARED[tests[0].primitive.name]
    _, _, carried, equations, results = parts(equation.params["body_jaxpr"])
    constants = equation.params["cond_nconsts"]
    turned = equation.params["body_nconsts"]
    first = [*equation.invars[:constants], *equation.invars[constants + turned :]]

    def course(variable: Any) -> tuple[int, int] | None:
        """The initial value of one side of the comparison, and what each turn adds to it."""
        added: int | None = 0
        if not isinstance(variable, Literal):
            place = tested.index(variable)
            variable = first[place]
            if place >= constants:
                place -= constants
                added = _added(carried[turned + place], results[place], equations)
        is_number = isinstance(variable, Literal) and np.ndim(variable.val) == 0
        if added is None or not is_number or not np.issubdtype(variable.aval.dtype, np.integer):
            return None
        return int(variable.val), added

    left, right = map(course, tests[0].invars)
    if left is None or right is None:
        return None
    (low, faster), (high, slower) = (right, left) if swapped else (left, right)
    gap, closing = high + more - low, faster - slower
    if gap <= 0:
        return 0
    return -(-gap // closing) if closing > 0 else None


#: Comparisons of integers as ``a + 0 < b + n``: whether the sides change places, and ``n``.
_COMPARED = {"lt": (False, 0), "le": (False, 1), "gt": (True, 0), "ge": (True, 1)}


def _added(variable: Any, result: Any, equations: Sequence[Any]) -> int | None:
    """The constant that a turn of a loop adds to a variable, or None if it does something else."""
    if result is variable:
        return 0
    for equation in equations:
        if result in equation.outvars and equation.primitive.name in ("add", "sub"):
            left, right = equation.invars
            if left is variable and isinstance(right, Literal):
                return int(right.val) if equation.primitive.name == "add" else -int(right.val)
            if right is variable and isinstance(left, Literal) and equation.primitive.name == "add":
                return int(left.val)
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scan:
    """What a ``scan`` equation says.

    Attributes:
      body: the closed jaxpr of an iteration. It takes constants, carry and one entry of each
        stacked input to the next carry and one entry of each stacked output.
      constants: how many of the inputs are constants; they come first.
      carries: how many are carried; they come next, and first among the outputs.
      length: how often the body runs.
      reverse: whether the last entries come first.
      unroll: how many iterations are unrolled.
    """

    body: Any
    constants: int
    carries: int
    length: int
    reverse: bool
    unroll: int


def scan_of(equation: Any) -> Scan:
    """Reads a ``scan`` equation."""
    params = equation.params
    if "num_consts" in params:  # JAX before 0.11
        constants, carries = params["num_consts"], params["num_carry"]
    else:
        constants, carries, _ = map(len, params["ft_in"].unpack())
    unroll = params["unroll"]
    return Scan(
        body=params["jaxpr"],
        constants=int(constants),
        carries=int(carries),
        length=int(params["length"]),
        reverse=bool(params["reverse"]),
        # True means all of them.
        unroll=int(params["length"]) if unroll is True else max(1, int(unroll)),
    )


_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def describe(thing: object) -> str:
    """A text of an equation parameter that is the same in every process and on every host.

    Memory addresses are left out, sets are sorted, functions are named, and inner
    jaxprs are written equation by equation.
    """
    if is_jaxpr(thing):
        return _describe_jaxpr(thing)
    if isinstance(thing, set | frozenset):
        return "{" + ",".join(sorted(describe(item) for item in thing)) + "}"
    if isinstance(thing, tuple | list):
        return "(" + ",".join(describe(item) for item in thing) + ")"
    if isinstance(thing, Mapping):
        return "{" + ",".join(f"{describe(k)}:{describe(v)}" for k, v in thing.items()) + "}"
    if isinstance(thing, str | int | float | complex | bool | bytes | type(None)):
        return repr(thing)
    # Only a mesh's axis names: the number of devices does not change the program.
    if isinstance(thing, jax.sharding.NamedSharding):
        return str(thing.spec)
    if isinstance(thing, jax.sharding.Mesh | jax.sharding.AbstractMesh):
        return f"mesh of {thing.axis_names}"
    if callable(thing) and not isinstance(thing, type):
        return getattr(thing, "__name__", type(thing).__name__)
    return _ADDRESS.sub("", repr(thing))


#: Parameters that say how a result is laid out on a mesh, as the arguments are, not what it is. A
#: constraint says nothing else.
_LAYOUTS = frozenset({"sharding", "out_sharding", "context_mesh"})


def describe_parameters(params: Mapping[str, Any]) -> str:
    """The text of all parameters of an equation, in the order of their names.

    The layout of the arguments is left out: a program is the same on any mesh. What the user wrote
    is included: constraints, and the axes of a ``shard_map``.
    """
    of_constraint = "unconstrained_dims" in params
    told = {
        key: None if key in _LAYOUTS and not (of_constraint and key == "sharding") else params[key]
        for key in params
    }
    return ";".join(f"{key}={describe(told[key])}" for key in sorted(told))


def same_parameters(equation: Any, other: Any) -> bool:
    """Whether two equations have equal parameters, as far as these can be compared."""
    try:
        return bool(equation.params == other.params)
    except Exception:
        return False


#: How an array's type writes the mesh axes that shard a dimension.
_SHARDED_ALONG = re.compile(r"@(\([^)]*\)|[^,\]]+)")


def _type_text(aval: Any) -> str:
    return _SHARDED_ALONG.sub("", str(aval))


def _describe_jaxpr(closed: Any) -> str:
    constant_variables, _, inputs, equations, outputs = parts(closed)
    numbers: dict[Any, int] = {}

    def atom(variable: Any) -> str:
        if isinstance(variable, Literal):
            return f"{variable.val}:{_type_text(variable.aval)}"
        return f"{numbers.setdefault(variable, len(numbers))}:{_type_text(variable.aval)}"

    def atoms(variables: Iterable[Any]) -> str:
        return " ".join(atom(variable) for variable in variables)

    lines = [atoms(constant_variables), atoms(inputs)]
    lines += [
        f"{atoms(e.outvars)}={e.primitive.name}[{describe_parameters(e.params)}] {atoms(e.invars)}"
        for e in equations
    ]
    lines.append(atoms(outputs))
    return "{" + "|".join(lines) + "}"


def saved_names(policy: object) -> tuple[str, ...] | None:
    """The names that a policy of ``save_only_these_names`` saves; None for any other policy."""
    if getattr(policy, "__qualname__", "").startswith("save_only_these_names."):
        found = policy.__closure__[0].cell_contents  # type: ignore[attr-defined]
    elif type(policy).__name__ == "SaveOnlyTheseNames":  # JAX 0.10
        found = policy.saveable_names  # type: ignore[attr-defined]
    else:
        return None
    return tuple(sorted(found))
