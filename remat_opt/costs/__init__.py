"""FLOPs, bytes and fusion kind of every primitive, by family; open to users' own.

FLOPs follow the compiler's ``cost_analysis()`` (XLA's ``HloCostAnalysis``), so that a program's
total can be compared with what the compiler reports; ``tests/costs`` does so. If the CPU compiler
expands an operation into others, the rule says what it follows. We differ in two ways: the compiler
counts the body of a loop once, while the rules here multiply by the trip count, and it does not
look into custom calls.
"""

from remat_opt.costs import (  # noqa: F401  (imported for the rules they register)
    calls,
    communication,
    contraction,
    control_flow,
    convolution,
    elementwise,
    fourier,
    indexing,
    layout,
    linear_algebra,
    random,
    reduction,
    sorting,
    window,
)
from remat_opt.costs.bodies import estimated_flops
from remat_opt.costs.contraction import OUTER_PRODUCT, VECTOR_PRODUCT
from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import (
    MissingParameterError,
    Rule,
    combiner_cost,
    cost,
    parameter,
    register,
    registered,
    unknown_cost,
)
from remat_opt.costs.roofline import Machine, seconds

__all__ = [
    "OUTER_PRODUCT",
    "VECTOR_PRODUCT",
    "Cost",
    "Fusion",
    "Machine",
    "MissingParameterError",
    "Rule",
    "combiner_cost",
    "cost",
    "estimated_flops",
    "parameter",
    "register",
    "registered",
    "seconds",
    "unknown_cost",
]
