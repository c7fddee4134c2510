"""What names in a compiled program say about where an instruction comes from.

A rewritten program runs every equation under a scope with the equation's number, and every region
under one with the region's. JAX puts scopes into the ``op_name`` of what it lowers, wrapped in the
transformations applied, and every compiler carries these names along. From
``jit(f)/transpose(jvp(jvp(remat_region1)))/checkpoint/rematted_computation/remat_eq7/layer/sin`` we
know that it is equation 7, in region 1, computed again.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal

#: In the name of everything that ``jax.checkpoint`` computes again.
AGAIN = "rematted_computation"
#: In the name of everything in a backward pass.
BACKWARD = "transpose("
#: In the name of everything in a differentiated function.
_DIFFERENTIATED = "jvp("

#: "other": not in a differentiated function, such as an optimizer's step.
Phase = Literal["forward", "recomputed", "backward", "other"]

# Long enough that no user's scope has such a name by chance.
_EQUATION = re.compile(r"\bremat_eq(\d+)\b")
_REGION = re.compile(r"\bremat_region(\d+(?:_\d+)*)\b")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an instruction comes from.

    Attributes:
      equation: number of the equation in the planned program, or None if it belongs to none.
      region: number of its region, then those of the regions inside; empty if unknown.
      phase: which pass it is part of.
    """

    equation: int | None
    region: tuple[int, ...]
    phase: Phase


def equation_scope(index: int) -> str:
    """The scope that an equation runs under.

    >>> equation_scope(7)
    'remat_eq7'
    """
    return f"remat_eq{index}"


def region_scope(region: Sequence[int]) -> str:
    """The scope of a region: its number, then those of the regions inside.

    >>> region_scope((3, 0))
    'remat_region3_0'
    """
    return "remat_region" + "_".join(map(str, region))


def is_scope(part: str) -> bool:
    """Whether a component of a name, without transformations, is one of these scopes."""
    return bool(_EQUATION.fullmatch(part) or _REGION.fullmatch(part))


def origin(op_name: str) -> Origin:
    """What an ``op_name`` says.

    >>> origin("jit(f)/transpose(jvp(jvp(remat_region1)))/checkpoint/remat_eq7/layer/dot_general")
    Origin(equation=7, region=(1,), phase='backward')
    """
    found = _EQUATION.search(op_name)
    # Anything after the equation's scope belongs to a plan inside another.
    regions = _REGION.findall(op_name[: found.start()] if found else op_name)
    phase: Phase = "other"
    if AGAIN in op_name:
        phase = "recomputed"
    elif BACKWARD in op_name:
        phase = "backward"
    elif found or regions or _DIFFERENTIATED in op_name:
        phase = "forward"
    return Origin(
        equation=int(found[1]) if found else None,
        region=tuple(map(int, regions[-1].split("_"))) if regions else (),
        phase=phase,
    )
