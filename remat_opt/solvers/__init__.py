"""Solvers: one algorithm a file; they take numbers and return numbers.

``available`` lists them all; the records here are those that ``optimal_remat(solver=...)`` takes.
"""

from remat_opt.solvers.catalogue import (
    ApproximateDP,
    ArbitraryGraph,
    ExactDP,
    Exhaustive,
    HeterogeneousChain,
    IntegerProgram,
    LinearChain,
    Portfolio,
    RandomChoice,
    Revolve,
    Solver,
    Sublinear,
    available,
    named,
)

__all__ = [
    "ApproximateDP",
    "ArbitraryGraph",
    "ExactDP",
    "Exhaustive",
    "HeterogeneousChain",
    "IntegerProgram",
    "LinearChain",
    "Portfolio",
    "RandomChoice",
    "Revolve",
    "Solver",
    "Sublinear",
    "available",
    "named",
]
