"""Cost rules by primitive name: look one up, add one of your own.

A rule takes an Operation and returns a Cost; every rule has that one signature. Rules
call ``cost`` again for the operations inside their bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from remat_opt.costs.records import Cost, Fusion
from remat_opt.operation import Operation

#: A cost rule.
Rule = Callable[[Operation], Cost]

_rules: dict[str, Rule] = {}


class MissingParameterError(LookupError):
    """A rule cannot find a parameter it needs: this version of JAX names it differently."""


def register(*primitives: str, override: bool = False) -> Callable[[Rule], Rule]:
    """Makes the decorated function the cost rule of one or more primitives.

    Args:
      *primitives: names as in a jaxpr, e.g. ``"dot_general"``.
      override: replace existing rules.

    Returns:
      A decorator that returns the rule unchanged. A rule defined again under the same name in the
      same module (a notebook cell run again) replaces itself.

    Raises:
      ValueError: no name is given, or one has a rule already and ``override`` is false.
      TypeError: a name is not a string, as with ``@register`` without parentheses.

    Example:
      >>> from remat_opt.costs import Cost, Fusion, register
      >>> @register("my_flash_attention")
      ... def flash_attention(operation):
      ...     query, key = operation.inputs[:2]
      ...     return Cost(
      ...         flops=4 * query.size * key.shape[0],
      ...         transcendentals=0,
      ...         bytes_read=operation.input_bytes,
      ...         bytes_written=operation.output_bytes,
      ...         fusion=Fusion.OPAQUE,
      ...     )
    """
    for primitive in primitives:
        if not isinstance(primitive, str):
            raise TypeError(
                f"register() takes primitive names, but was given {primitive!r}. "
                'Write @register("name") above the rule.'
            )
    if not primitives:
        raise ValueError('register() needs a primitive name: write @register("name").')

    def decorator(rule: Rule) -> Rule:
        # Check everything first, so that a refused call registers nothing.
        for primitive in primitives:
            existing = _rules.get(primitive)
            if existing is not None and not override and _name(existing) != _name(rule):
                raise ValueError(
                    f"The primitive {primitive!r} has a cost rule already: "
                    f"{_name(existing)}. "
                    "Pass override=True to replace it."
                )
        for primitive in primitives:
            _rules[primitive] = rule
        return rule

    return decorator


def _name(rule: Rule) -> str:
    """Where a rule is defined; for a callable object, its class counts."""
    named = rule if hasattr(rule, "__qualname__") else type(rule)
    return f"{named.__module__}.{named.__qualname__}"


def registered() -> frozenset[str]:
    """Names of all primitives that have a cost rule."""
    return frozenset(_rules)


def cost(operation: Operation) -> Cost:
    """FLOPs, bytes and fusion kind of one operation.

    A primitive is estimated if it has no rule, or its rule cannot find a parameter: see
    ``unknown_cost``.

    Raises:
      TypeError: the primitive's rule returned something other than a Cost.
    """
    rule = _rules.get(operation.primitive, unknown_cost)
    try:
        answer = rule(operation)
    except MissingParameterError:
        return unknown_cost(operation)
    if not isinstance(answer, Cost):
        raise TypeError(
            f"The cost rule {_name(rule)} of {operation.primitive!r} "
            f"returned a {type(answer).__name__}; it must return a remat_opt.costs.Cost."
        )
    return answer


def unknown_cost(operation: Operation) -> Cost:
    """The cost of a primitive without a rule: opaque, and flagged as estimated.

    It counts as reading all inputs and writing all outputs, with one FLOP for each element of the
    larger of the two; programs inside it run once for each repeat. If your primitive does more, add
    a rule with ``register``.
    """
    inner = [(body.repeats, cost(step)) for body in operation.bodies for step in body.operations]
    elements = max(sum(array.size for array in operation.inputs), operation.output_size)
    return Cost(
        flops=elements + sum(repeats * each.flops for repeats, each in inner),
        transcendentals=sum(repeats * each.transcendentals for repeats, each in inner),
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
        estimated=True,
    )


def parameter(operation: Operation, name: str) -> Any:
    """One parameter of an operation, for use in rules.

    Raises:
      MissingParameterError: there is none of that name; ``cost`` then estimates.
    """
    try:
        return operation.params[name]
    except KeyError:
        raise MissingParameterError(
            f"{operation.primitive} has no parameter {name!r}; it has "
            f"{', '.join(sorted(operation.params)) or 'none'}."
        ) from None


def combiner_cost(operation: Operation) -> tuple[int, int]:
    """FLOPs and transcendentals of one step of a reduction, scan or scatter.

    The step is the operation's own inner program if it has one (``reduce``, ``scatter-add``); named
    reductions such as ``reduce_sum`` have none and take 1 FLOP.
    """
    if not operation.bodies:
        return 1, 0
    steps = [cost(step) for step in operation.bodies[0].operations]
    return sum(step.flops for step in steps), sum(step.transcendentals for step in steps)
