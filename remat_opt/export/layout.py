"""Lines of Python: assignments, calls (broken if too long), decorators."""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.export.calls import Call
from remat_opt.export.literals import quoted

WIDTH = 100
INDENT = "    "
#: This many arguments, or more, do not get a line each.
_MANY = 6


def policy_decorator(names: Sequence[str]) -> list[str]:
    """The lines of a checkpoint whose policy keeps these names; with none, nothing."""
    if not names:
        return ["@jax.checkpoint"]
    policy = Call("policy=jax.checkpoint_policies.save_only_these_names", tuple(map(quoted, names)))
    one_line = f"@functools.partial(jax.checkpoint, {policy})"
    if len(one_line) <= WIDTH:
        return [one_line]
    inside = [f"{INDENT}{line}" for line in wrapped(policy, "", ",")]
    return ["@functools.partial(", f"{INDENT}jax.checkpoint,", *inside, ")"]


def checkpointed(name: str, run: str, names: Sequence[str]) -> list[str]:
    """The lines that put a function under a checkpoint whose policy keeps these names."""
    if not names:
        return wrapped(Call("jax.checkpoint", (run,)), f"{name} = ", "")
    policy = Call("policy=jax.checkpoint_policies.save_only_these_names", tuple(map(quoted, names)))
    one_line = f"{name} = jax.checkpoint({run}, {policy})"
    if len(one_line) <= WIDTH:
        return [one_line]
    inside = [f"{INDENT}{line}" for line in wrapped(policy, "", ",")]
    return [f"{name} = jax.checkpoint(", f"{INDENT}{run},", *inside, ")"]


def listed(items: Sequence[str]) -> str:
    """A tuple of expressions.

    >>> listed(["x"])
    '(x,)'
    """
    return f"({', '.join(items)},)" if len(items) == 1 else f"({', '.join(items)})"


def returned(results: Sequence[str]) -> str:
    """The return statement for these: a tuple if there are several."""
    return f"return {results[0]}" if len(results) == 1 else f"return {listed(results)}"


def assigned(
    results: Sequence[str], expression: Call, *, one: bool = False, unpack: bool = False
) -> list[str]:
    """Lines that assign the result of a call.

    Args:
      results: the names.
      expression: the call.
      one: whether it returns one value that is not a tuple.
      unpack: whether it returns a tuple only for several values.
    """
    if not results:
        return wrapped(expression, "", "")
    alone = one or (unpack and len(results) == 1)
    target = ", ".join(results) if alone or len(results) > 1 else listed(results)
    if len(target) > WIDTH - 4 * len(INDENT):
        inside = _filled(results, INDENT)
        return ["(", *inside, *wrapped(expression, ") = ", "")]
    return wrapped(expression, f"{target} = ", "")


def wrapped(expression: Call, before: str, behind: str) -> list[str]:
    """A call in one line if it fits, else with its arguments on separate lines."""
    room = WIDTH - 2 * len(INDENT)
    one_line = f"{before}{expression}{behind}"
    if len(one_line) <= room or not expression.arguments:
        return [one_line]
    together = f"{INDENT}{', '.join(expression.arguments)},"
    if len(together) <= room:
        inside = [together]
    elif len(expression.arguments) >= _MANY:
        inside = _filled(expression.arguments, INDENT)
    else:
        inside = [f"{INDENT}{argument}," for argument in expression.arguments]
    return [f"{before}{expression.fn}(", *inside, f"){behind}"]


def _filled(words: Sequence[str], before: str) -> list[str]:
    """Words followed by commas, as many on a line as fit."""
    lines = [before]
    for word in words:
        if lines[-1] != before and len(lines[-1]) + len(word) + 2 > WIDTH - 2 * len(INDENT):
            lines.append(before)
        lines[-1] += f"{'' if lines[-1] == before else ' '}{word},"
    return lines
