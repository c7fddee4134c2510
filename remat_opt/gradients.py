"""Gradients of parameters: what a step does with them, and the memory they take meanwhile.

``jit(grad(loss))`` returns its gradients. They lie in result buffers, which are not temporaries,
and some compilers use these for temporaries until the gradients are written
(``compilers.heap.outside_results``). In a training step with donated state there are no such
buffers. Each gradient is a temporary, from the backward step that writes it to the update that
consumes it, which some compilers put off (``compilers.scheduling``), as with gradients that devices
add up. If they are clipped by their global norm, or otherwise used together, all of them wait for
the last.

Backward steps run in the order of the vertices, last first, whatever is recomputed. So what the
gradients take during a vertex's backward step is the same in every schedule, and counts as
workspace of that step.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable

import numpy as np


class Gradients(enum.Enum):
    """What happens to gradients once they are computed.

    RESULTS: they are results of the program, as with ``jit(grad(loss))``.
    CONSUMED: each is consumed as soon as it exists, as by Adam with donated state.
    TOGETHER: they are needed all at once, as for clipping by their global norm.
    """

    RESULTS = "results"
    CONSUMED = "consumed"
    TOGETHER = "together"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """An array that is there only because an update that reads it waits.

    Attributes:
      first: the first vertex in whose backward step this is so. Backward steps come last first: it
        is the last step to run.
      last: the last such vertex.
      bytes: the array's size.
    """

    first: int
    last: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterGradient:
    """The gradient of one parameter.

    Attributes:
      first: the first vertex that reads the parameter: its backward step completes the gradient.
      last: the last vertex that does: its backward step begins it. Where it begins as the array of
        another's cotangent, the last in whose step it has its own, if any. Where it begins as
        zeros that exist before, the last in whose step these are there.
      bytes: its size.
      fused: whether what consumes it computes it, from a narrower array or from factors, so that it
        is itself an array only if it waits.
      waits: whether what consumes it waits for the end of the backward pass.
    """

    first: int
    last: int
    bytes: int
    fused: bool = False
    waits: bool = False


def workspace_bytes(
    gradients: Iterable[ParameterGradient],
    fate: Gradients,
    count: int,
    waits: Iterable[Wait] = (),
) -> np.ndarray:
    """The bytes that gradients take in each vertex's backward step.

    Args:
      gradients: those of all parameters.
      fate: what happens to them.
      count: number of vertices.
      waits: what waits for updates where these consume gradients.
    """
    change = np.zeros(count + 1, dtype=np.int64)

    def hold(first: int, last: int, size: int) -> None:
        if first <= last:
            change[first] += size
            change[last + 1] -= size

    for one in gradients:
        if fate is Gradients.TOGETHER or (fate is Gradients.CONSUMED and one.waits):
            hold(0, one.last, one.bytes)
        elif fate is Gradients.CONSUMED and not one.fused:
            hold(one.first, one.last, one.bytes)
    if fate is Gradients.CONSUMED:
        for wait in waits:
            hold(wait.first, wait.last, wait.bytes)
    return np.cumsum(change[:-1])
