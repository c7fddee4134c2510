"""Functions with a custom backward rule, under a policy of names."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from remat_opt import _jax_checkpoints
from remat_opt import _jax_internals as internals
from remat_opt.linting.survey import Checkpoint, Finding, Survey, line_of
from remat_opt.units import format_bytes


def residuals_without_names(found: Survey) -> Iterator[Finding]:
    """The residuals of a ``custom_vjp`` have no name, so the function runs again."""
    for block in found.blocks:
        checkpoint = block.checkpoint
        if checkpoint is None or not checkpoint.listed:
            continue
        for equation in block.equations:
            if not equation.primitive.name.startswith("custom_vjp_call"):
                continue
            lost_bytes = _without_name(equation, checkpoint)
            if lost_bytes:
                name = _jax_checkpoints.function_name(equation) or "a function"
                yield Finding(
                    check="residuals-without-names",
                    message=f"{name} keeps {format_bytes(lost_bytes)} for its backward rule under "
                    "no name that the policy keeps: all of it is computed again, whatever is "
                    "named outside",
                    remedy="name the residuals with checkpoint_name in its forward rule, and list "
                    "these names in the policy",
                    source=line_of(equation) or checkpoint.source,
                )


def _without_name(equation: Any, checkpoint: Checkpoint) -> int:
    """Bytes of the residuals that are computed and have no name that the policy keeps."""
    closed, residuals = _jax_checkpoints.residuals_of(equation)
    makers = {output: one for one in internals.parts(closed)[3] for output in one.outvars}
    lost = 0
    for residual in residuals:
        maker = None if isinstance(residual, internals.Literal) else makers.get(residual)
        if maker is None:
            continue
        name = _jax_checkpoints.name_of(maker)
        if name is None or not checkpoint.saves(name):
            lost += math.prod(residual.aval.shape) * residual.aval.dtype.itemsize
    return lost
