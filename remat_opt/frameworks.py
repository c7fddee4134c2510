"""Modules of ``flax.nnx`` among a function's arguments.

A module is an object that the function may change: statistics, counts of random streams, sown
values. JAX traces only arrays, so these changes would be lost silently. So a call with modules
becomes a call of a pure function: the modules' arrays go in, and what has changed comes out with
the result and is written to the caller's modules, as ``nnx.remat`` does.

Flax is not needed: if nobody has imported it, there are no modules.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_opt.errors import RematError
from remat_opt.program.tracing import Fixed

#: Distinguishes our ``nnx`` contexts from those of its own transformations.
_TAG = "remat_opt"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Split:
    """A module as arrays: those that ``nnx.grad`` differentiates by default, and the others.

    Attributes:
      graphdef: what is not an array.
      parameters: state of the ``nnx.Param`` in it.
      rest: the other state.
    """

    graphdef: Any = dataclasses.field(metadata={"static": True})
    parameters: Any
    rest: Fixed


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True)
class _Updates:
    """What has changed in modules. What has not is named by its place, not computed.

    Attributes:
      computed: arrays.
      places: for each array in the tree, its place among the modules' own; None if computed.
      tree: one ``_Split`` for each module, None for those that did not change.
    """

    computed: list[Any]
    places: tuple[int | None, ...] = dataclasses.field(metadata={"static": True})
    tree: Any = dataclasses.field(metadata={"static": True})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pure:
    """A call without modules among its arguments.

    Attributes:
      fn: the given function if there are no modules, else one that also returns what has changed,
        as auxiliary output.
      args: positional arguments.
      kwargs: keyword arguments.
      finish: writes the changes to the caller's modules, and gives the result that the caller
        expects.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    finish: Callable[[Any], Any]


def is_module(thing: object) -> bool:
    """Whether something is a ``flax.nnx`` module, or another object whose state nnx tracks."""
    nnx = sys.modules.get("flax.nnx")
    # A mutable array is one of these for nnx too, but JAX itself takes care of it.
    return nnx is not None and nnx.graph.is_graph_node(thing) and not isinstance(thing, jax.Ref)


def have_modules(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether there are modules among the arguments of a call."""
    return any(map(is_module, jax.tree.leaves((args, kwargs), is_leaf=is_module)))


def is_change_from_within(error: Exception) -> bool:
    """Whether an error says that a function changes a module that it closes over."""
    errors = sys.modules.get("flax.errors")
    return errors is not None and isinstance(error, errors.TraceContextError)


@contextlib.contextmanager
def pure(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, has_aux: bool
) -> Iterator[Pure]:
    """Turns a call into one without modules, to be made inside this context.

    Args:
      fn: the function called.
      args: its positional arguments.
      kwargs: its keyword arguments.
      has_aux: whether it returns a pair (differentiated, auxiliary).

    Raises:
      RematError: there are Variables of an unsupported experimental kind.
    """
    if not have_modules(args, kwargs):
        yield Pure(fn=fn, args=tuple(args), kwargs=dict(kwargs), finish=lambda found: found)
        return
    nnx = sys.modules["flax.nnx"]
    with nnx.update_context(_TAG):
        with nnx.split_context(_TAG) as context:
            split = _mapped(functools.partial(_split, context), (tuple(args), dict(kwargs)))
        _check_kinds(fn, split)
        arrays = jax.tree.leaves(_splits(split))

        def finish(found: tuple[Any, Any]) -> Any:
            if has_aux:
                loss, (auxiliary, updates) = found
                return _finished((loss, auxiliary), updates, arrays)
            return _finished(*found, arrays)

        yield Pure(fn=_without_modules(fn, has_aux), args=split[0], kwargs=split[1], finish=finish)


def _check_kinds(fn: Callable[..., Any], tree: Any) -> None:
    nnx = sys.modules["flax.nnx"]

    def is_variable(thing: object) -> bool:
        return isinstance(thing, nnx.Variable)

    for variable in filter(is_variable, jax.tree.leaves(tree, is_leaf=is_variable)):
        for kind in ("ref", "hijax"):
            if getattr(variable, kind, False):
                name = getattr(fn, "__name__", type(fn).__name__)
                raise RematError(
                    f"Among the arguments of {name!r} is a Variable of flax.nnx with "
                    f"{kind}=True. Its changes would be lost. Create it without {kind}, or "
                    "leave the decorator out."
                )


def _without_modules(fn: Callable[..., Any], has_aux: bool) -> Callable[..., Any]:
    nnx = sys.modules["flax.nnx"]

    @functools.wraps(fn)
    def without_modules(*args: Any, **kwargs: Any) -> Any:
        arrays = jax.tree.leaves(_splits((args, kwargs)))
        with nnx.merge_context(_TAG, inner=True) as context:
            positional, keywords = _merged(context, (args, kwargs))
        modules = list(
            filter(is_module, jax.tree.leaves((positional, keywords), is_leaf=is_module))
        )
        before = list(map(_contents, modules))
        result = fn(*positional, **keywords)
        with nnx.split_context(_TAG) as context:
            changed = [
                None if _same(contents, _contents(module)) else _split(context, module)
                for module, contents in zip(modules, before, strict=True)
            ]
            result = _mapped(functools.partial(_split, context), result)
        updates = _updates(changed, arrays)
        if not has_aux:
            return result, updates
        if isinstance(result, tuple) and len(result) == 2:
            return result[0], (result[1], updates)
        return result  # ``tracing`` says what is wrong with it

    return without_modules


def _updates(changed: list[_Split | None], arrays: Sequence[Any]) -> _Updates:
    place_of = {id(array): place for place, array in enumerate(arrays)}
    leaves, tree = jax.tree.flatten(changed)
    places = tuple(place_of.get(id(leaf)) for leaf in leaves)
    computed = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]
    return _Updates(computed, places, tree)


def _finished(result: Any, updates: _Updates, arrays: Sequence[Any]) -> Any:
    nnx = sys.modules["flax.nnx"]
    computed = iter(updates.computed)
    leaves = [next(computed) if place is None else arrays[place] for place in updates.places]
    with nnx.merge_context(_TAG, inner=False) as context:
        _merged(context, jax.tree.unflatten(updates.tree, leaves))
        return _merged(context, result)


def _mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    return jax.tree.map(lambda leaf: fn(leaf) if is_module(leaf) else leaf, tree, is_leaf=is_module)


def _split(context: Any, module: Any) -> _Split:
    nnx = sys.modules["flax.nnx"]
    if not isinstance(module, nnx.Variable):
        graphdef, parameters, rest = context.split(module, nnx.Param, ...)
        return _Split(graphdef, parameters, Fixed(rest))
    graphdef, state = context.split(module)
    if isinstance(module, nnx.Param):
        return _Split(graphdef, state, Fixed(None))
    return _Split(graphdef, None, Fixed(state))


def _is_split(thing: object) -> bool:
    return isinstance(thing, _Split)


def _splits(tree: Any) -> list[_Split]:
    return list(filter(_is_split, jax.tree.leaves(tree, is_leaf=_is_split)))


def _merged(context: Any, tree: Any) -> Any:
    def merge(leaf: Any) -> Any:
        if not _is_split(leaf):
            return leaf
        states = (leaf.parameters, leaf.rest.tree)
        return context.merge(leaf.graphdef, *(state for state in states if state is not None))

    return jax.tree.map(merge, tree, is_leaf=_is_split)


def _contents(module: Any) -> tuple[Any, list[Any]]:
    """What a module is made of: what is not an array, and the arrays."""
    with sys.modules["flax.nnx"].split_context() as context:
        graphdef, state = context.split(module)
    leaves, tree = jax.tree.flatten(state)
    return (graphdef, tree), leaves


def _same(one: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    """Whether nothing has changed in between: the arrays are the same objects."""
    return one[0] == other[0] and all(map(lambda a, b: a is b, one[1], other[1]))
