"""The checkpoints and names in a function's jaxpr: what the checks look at.

Nothing is left out: an equation that nothing reads may be just what a check looks for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from remat_opt import _jax_checkpoints, costs
from remat_opt import _jax_internals as internals
from remat_opt.program import tracing


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A checkpoint, a name or a policy that does nothing.

    Attributes:
      check: which check found it.
      message: what was found.
      remedy: what to do.
      source: the user's line, as ``file.py:line (function)``; "" if unknown.
    """

    check: str
    message: str
    remedy: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Checkpoint:
    """One ``jax.checkpoint``.

    Attributes:
      equation: JAX's own equation.
      policy: as given; None if none was given.
      listed: the names that a policy of names was made with; None for other policies.
      body: what runs under it.
      flops: FLOPs of the body.
      outer: the checkpoint around it, if any.
      source: the user's line.
    """

    equation: Any
    policy: Any
    listed: frozenset[str] | None
    body: Any
    flops: int
    outer: Checkpoint | None
    source: str

    def saves(self, name: str) -> bool:
        """Whether its policy keeps values of a name."""
        return _jax_checkpoints.saves_name(self.policy, name)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Block:
    """One jaxpr: the function's own, or one inside an equation.

    Attributes:
      equations: in order.
      results: its results.
      checkpoint: the innermost checkpoint that it runs under, if any.
    """

    equations: tuple[Any, ...]
    results: tuple[Any, ...]
    checkpoint: Checkpoint | None

    def readers(self, variable: Any) -> list[Any]:
        """The equations that read a variable."""
        return [one for one in self.equations if any(other is variable for other in one.invars)]

    def is_result(self, variable: Any) -> bool:
        """Whether a variable is one of the results."""
        return any(one is variable for one in self.results)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Survey:
    """What there is in a function.

    Attributes:
      name: the function's name.
      blocks: all of its jaxprs, outermost first.
      checkpoints: all of its checkpoints, in order.
      row: the function's own equations, with calls replaced by their equations.
      differentiated: whether derivatives are taken inside, which splits checkpoints.
    """

    name: str
    blocks: tuple[Block, ...]
    checkpoints: tuple[Checkpoint, ...]
    row: tuple[Any, ...]
    differentiated: bool

    def checkpoint_at(self, equation: Any) -> Checkpoint | None:
        """The checkpoint that an equation is."""
        return next((one for one in self.checkpoints if one.equation is equation), None)


def survey(closed: Any, name: str) -> Survey:
    """Goes through a jaxpr.

    Args:
      closed: the function's jaxpr.
      name: the function's name.
    """
    blocks: list[Block] = []
    checkpoints: list[Checkpoint] = []
    split = False

    def walk(jaxpr: Any, around: Checkpoint | None) -> None:
        nonlocal split
        _, _, _, equations, results = internals.parts(jaxpr)
        blocks.append(Block(equations=tuple(equations), results=tuple(results), checkpoint=around))
        for equation in equations:
            inside = around
            found = internals.checkpoint_of(equation)
            if found is not None:
                split = split or found.differentiated
                inside = Checkpoint(
                    equation=equation,
                    policy=found.policy,
                    listed=_jax_checkpoints.listed_names(found.policy),
                    body=found.body,
                    flops=sum(map(flops, internals.parts(found.body)[3])),
                    outer=around,
                    source=line_of(equation),
                )
                checkpoints.append(inside)
            for _, body in internals.inner_jaxprs(equation.params):
                walk(body, inside)

    walk(closed, None)
    return Survey(
        name=name,
        blocks=tuple(blocks),
        checkpoints=tuple(checkpoints),
        row=tuple(row(internals.parts(closed)[3])),
        differentiated=split,
    )


def flops(equation: Any) -> int:
    """Floating-point operations of an equation; loops count as often as they run."""
    return costs.cost(tracing.operation(equation)).flops


def line_of(equation: Any) -> str:
    """The user's line of an equation, or of the first one inside that has one."""
    line = internals.source_line(equation, only_users=True)
    for _, body in internals.inner_jaxprs(equation.params):
        for inside in internals.parts(body)[3]:
            line = line or line_of(inside)
    return line


def row(equations: Sequence[Any]) -> Iterator[Any]:
    """The equations, with calls replaced by their equations."""
    for equation in equations:
        body = internals.inlinable_body(equation)
        if body is None:
            yield equation
        else:
            yield from row(internals.parts(body)[3])
