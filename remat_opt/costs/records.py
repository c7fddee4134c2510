"""What a cost rule returns: a Cost, and how its operation takes part in fusion."""

from __future__ import annotations

import dataclasses
import enum


class Fusion(enum.Enum):
    """What the compiler can do with an operation and its neighbours.

    FUSIBLE: lives inside a fusion; its result is not materialised unless something
      forces it (an opaque reader, a region boundary, an output of the program).
    REDUCTION: takes its fusible producers into its own loop, but writes its result.
    OPAQUE: reads materialised inputs and writes materialised outputs.
    """

    FUSIBLE = "fusible"
    REDUCTION = "reduction"
    OPAQUE = "opaque"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What it takes to run one operation once, on its own.

    Attributes:
      flops: arithmetic operations, as the compiler's ``cost_analysis()`` counts them:
        a multiply-add is two, an elementwise operation one per element.
      transcendentals: exponentials, logarithms, roots, ... which the compiler counts
        apart; ``seconds`` leaves them out, since they hide behind memory traffic.
      bytes_read: bytes read from memory if every input is materialised.
      bytes_written: bytes written if every output is materialised.
      bytes_sent: bytes sent over the network between devices.
      fusion: how it takes part in fusion.
      estimated: whether the figures are a guess (unknown primitive, unknown trip
        count, an algorithm whose steps depend on the data, time spent on a network).
    """

    flops: int
    transcendentals: int
    bytes_read: int
    bytes_written: int
    fusion: Fusion
    estimated: bool = False
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        for field in ("flops", "transcendentals", "bytes_read", "bytes_written", "bytes_sent"):
            value = getattr(self, field)
            if not isinstance(value, int) or value < 0:
                raise ValueError(f"Cost.{field} is {value!r}; it must be an int of at least 0.")
