"""The cost of an inner program, for the rules of calls, loops and branches."""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import cost
from remat_opt.operation import Body, Operation


def body_cost(body: Body) -> Cost:
    """One run of a body, ``repeats`` not applied.

    FLOPs are the sum over its operations. Bytes are those of the operations that do not fuse; if
    all of them fuse into one loop, it moves about as much as the operation in it that moves most.
    The body is as fusible as its least fusible operation. It is estimated if FLOPs in it are: the
    bytes that devices exchange are a small part of it.
    """
    costs = [cost(operation) for operation in body.operations]
    kinds = {each.fusion for each in costs}
    fusion = next(
        (kind for kind in (Fusion.OPAQUE, Fusion.REDUCTION) if kind in kinds), Fusion.FUSIBLE
    )
    unfused = [each for each in costs if each.fusion is not Fusion.FUSIBLE]
    busiest = max(costs, key=lambda each: each.bytes_read + each.bytes_written, default=None)
    movers = unfused or ([] if busiest is None else [busiest])
    return Cost(
        flops=sum(each.flops for each in costs),
        transcendentals=sum(each.transcendentals for each in costs),
        bytes_read=sum(each.bytes_read for each in movers),
        bytes_written=sum(each.bytes_written for each in movers),
        bytes_sent=sum(each.bytes_sent for each in costs),
        fusion=fusion,
        estimated=any(each.estimated for each in costs if each.flops),
    )


def costliest(bodies: tuple[Body, ...]) -> Cost:
    """The run of the body with most FLOPs; among equals, the one with most traffic."""
    return max(
        (body_cost(body) for body in bodies),
        key=lambda each: (each.flops, each.bytes_read + each.bytes_written),
    )


def estimated_flops(operation: Operation) -> int:
    """The FLOPs of an operation whose figures are a guess; of those inside it only such."""
    own = cost(operation)
    if not own.estimated:
        return 0
    if not operation.bodies or any(body.guessed for body in operation.bodies):
        return own.flops
    inside = sum(
        body.repeats * sum(map(estimated_flops, body.operations)) for body in operation.bodies
    )
    return min(own.flops, inside)
