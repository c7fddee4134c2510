"""Loops and branches. All are opaque: what goes in and comes out is materialised."""

from __future__ import annotations

import dataclasses

from remat_opt.costs.bodies import body_cost, costliest
from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import register, unknown_cost
from remat_opt.operation import Operation


@register("scan")
def scan(operation: Operation) -> Cost:
    """The body's cost, times the length.

    The compiler's ``cost_analysis()`` counts the body once whatever the length, and a
    FLOP or two for the counter.
    """
    return _loop(operation, estimated=False)


@register("while")
def while_loop(operation: Operation) -> Cost:
    """Condition and body as often as the body runs; a guess if the program does not say.

    The compiler's ``cost_analysis()`` counts each once.
    """
    return _loop(operation, estimated=any(body.guessed for body in operation.bodies))


def _loop(operation: Operation, *, estimated: bool) -> Cost:
    turns = [(body.repeats, body_cost(body)) for body in operation.bodies]
    # A loop without equations (all inputs passed through) still moves its arrays once.
    return Cost(
        flops=sum(repeats * turn.flops for repeats, turn in turns),
        transcendentals=sum(repeats * turn.transcendentals for repeats, turn in turns),
        bytes_read=max(
            operation.input_bytes, sum(repeats * turn.bytes_read for repeats, turn in turns)
        ),
        bytes_written=max(
            operation.output_bytes, sum(repeats * turn.bytes_written for repeats, turn in turns)
        ),
        bytes_sent=sum(repeats * turn.bytes_sent for repeats, turn in turns),
        fusion=Fusion.OPAQUE,
        estimated=estimated or any(turn.estimated for _, turn in turns),
    )


@register("custom_linear_solve")
def linear_solve(operation: Operation) -> Cost:
    """The solver, without the products it inverts and without the transposed solver.

    The equation holds products and solvers, each with its transpose, if it has one.
    """
    if not operation.bodies:
        return unknown_cost(operation)
    solver = operation.bodies[len(operation.bodies) // 2]
    return dataclasses.replace(body_cost(solver), fusion=Fusion.OPAQUE)


@register("cond")
def branches(operation: Operation) -> Cost:
    """The costliest branch, as the compiler counts."""
    if not operation.bodies:
        return unknown_cost(operation)
    return dataclasses.replace(costliest(operation.bodies), fusion=Fusion.OPAQUE)
