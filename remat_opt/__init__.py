"""remat_opt: planned rematerialisation for JAX.

``optimal_remat`` decorates a loss function so that its gradient fits in less memory for
the least extra compute. See the README for a tour.
"""

from __future__ import annotations

__version__ = "0.1.0"

from remat_opt import solvers
from remat_opt.api import (
    apply_plan,
    compare,
    frontier,
    make_plan,
    measure,
    optimal_remat,
)
from remat_opt.comparison import Comparison
from remat_opt.errors import (
    BudgetError,
    CallError,
    CompileError,
    DeviceError,
    GraphError,
    MissingPackageError,
    PlanFileError,
    PlanningWarning,
    RematError,
    TraceError,
    UnitError,
)
from remat_opt.explanation import Explanation, explain
from remat_opt.export.source import Source
from remat_opt.handover import nearest_policy, to_source
from remat_opt.linting.report import Findings, lint
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.meshes import make_mesh
from remat_opt.nearest import NearestPolicy
from remat_opt.plan import Plan
from remat_opt.trade_off import Frontier

__all__ = [
    "BudgetError",
    "CallError",
    "Comparison",
    "CompileError",
    "DeviceError",
    "Explanation",
    "Findings",
    "Frontier",
    "GraphError",
    "MissingPackageError",
    "Measurement",
    "NearestPolicy",
    "Plan",
    "PlanFileError",
    "PlanningWarning",
    "RematError",
    "Source",
    "TraceError",
    "UnitError",
    "apply_plan",
    "compare",
    "explain",
    "frontier",
    "lint",
    "make_mesh",
    "make_plan",
    "measure",
    "nearest_policy",
    "optimal_remat",
    "solvers",
    "to_source",
]
