"""Seconds from FLOPs and bytes: the roofline of Williams, Waterman and Patterson (2009)."""

from __future__ import annotations

from typing import Protocol

from remat_opt.costs.records import Cost


class Machine(Protocol):
    """What the roofline needs to know of a device."""

    @property
    def memory_bandwidth(self) -> float:
        """Bytes per second between the processor and its memory."""

    @property
    def network_bandwidth(self) -> float:
        """Bytes per second that it sends to other devices."""

    def flops_rate(self, dtype: str) -> float:
        """FLOPs per second at a dtype, e.g. ``"bfloat16"``."""


def seconds(cost: Cost, device: Machine, dtype: str) -> float:
    """The least time one operation takes when run on its own, in seconds.

    Computation, memory traffic and network traffic overlap, so the slowest decides. For an
    operation inside a fusion, pass a Cost with the bytes that really move.

    Args:
      cost: FLOPs and bytes.
      device: rates of the machine.
      dtype: the dtype the FLOPs are done in, i.e. that of the operands.
    """
    return max(
        cost.flops / device.flops_rate(dtype),
        (cost.bytes_read + cost.bytes_written) / device.memory_bandwidth,
        cost.bytes_sent / device.network_bandwidth,
    )
