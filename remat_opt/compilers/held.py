"""What compilers hold beside the arrays that a graph shows: the record, and who asks for it.

A graph's vertices are values of the program. Some of what its gradient takes belongs to none of
them; the files that know of a kind say how much it is, whatever else is decided.
"""

from __future__ import annotations

import dataclasses
import enum


class Cause(enum.Enum):
    """What memory is held for."""

    POOLING = "the gradients of max poolings"
    ROWS = "the gradients of gathers that pick one element of each row"
    WIDENED = "bfloat16 weights, and gradients of their rows, as float32"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes that a compiler holds from the forward pass, or early in the backward pass, on.

    Attributes:
      cause: what for.
      values: what is computed by the equations whose gradients it is for.
      bytes: held by a plan that has none of them under a checkpoint.
      checkpointed_bytes: by one that has.
      unchanged_bytes: by the unchanged function.
    """

    cause: Cause
    values: tuple[int, ...]
    bytes: int
    checkpointed_bytes: int
    unchanged_bytes: int
