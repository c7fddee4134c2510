"""Lines of Python: assignments, calls that are broken where they are too long, decorators."""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.export.calls import Call
from remat_opt.export.literals import quoted

WIDTH = 100
INDENT = "    "


def policy_decorator(names: Sequence[str]) -> list[str]:
    """The lines of a checkpoint whose policy keeps these names."""
    policy = Call("policy=jax.checkpoint_policies.save_only_these_names", tuple(map(quoted, names)))
    one_line = f"@functools.partial(jax.checkpoint, {policy})"
    if len(one_line) <= WIDTH:
        return [one_line]
    inside = [f"{INDENT}{line}" for line in wrapped(policy, "", ",")]
    return ["@functools.partial(", f"{INDENT}jax.checkpoint,", *inside, ")"]


def listed(items: Sequence[str]) -> str:
    """A tuple of expressions.

    >>> listed(["x"])
    '(x,)'
    """
    return f"({', '.join(items)},)" if len(items) == 1 else f"({', '.join(items)})"


def returned(results: Sequence[str]) -> str:
    """What returns these: a tuple if they are several."""
    return f"return {results[0]}" if len(results) == 1 else f"return {listed(results)}"


def assigned(
    results: Sequence[str], expression: Call, *, one: bool = False, unpack: bool = False
) -> list[str]:
    """Lines that assign what a call gives.

    Args:
      results: the names.
      expression: the call.
      one: whether it gives one value that is no tuple.
      unpack: whether it gives a tuple only of several values.
    """
    if one or (unpack and len(results) == 1):
        (target,) = results
    else:
        target = listed(results)
    if not results:
        return wrapped(expression, "", "")
    return wrapped(expression, f"{target} = ", "")


def wrapped(expression: Call, before: str, behind: str) -> list[str]:
    """A call in one line where it fits, else an argument a line."""
    one_line = f"{before}{expression}{behind}"
    if len(one_line) + 2 * len(INDENT) <= WIDTH or not expression.arguments:
        return [one_line]
    inside = [f"{INDENT}{argument}," for argument in expression.arguments]
    return [f"{before}{expression.fn}(", *inside, f"){behind}"]
