"""The slower of compute and memory traffic decides."""

from __future__ import annotations

import pytest

from remat_opt.costs import Cost, Fusion, seconds


class Toy:
    """100 bytes a second, 10 over the network; 1000 FLOPs a second in bfloat16, else half."""

    memory_bandwidth = 100.0
    network_bandwidth = 10.0

    def flops_rate(self, dtype: str) -> float:
        return 1000.0 if dtype == "bfloat16" else 500.0


@pytest.mark.parametrize(
    ("flops", "dtype", "expected"),
    [(4000, "bfloat16", 4.0), (4000, "float32", 8.0), (10, "float32", 0.5), (0, "int32", 0.5)],
)
def test_seconds(flops: int, dtype: str, expected: float) -> None:
    cost = Cost(
        flops=flops, transcendentals=0, bytes_read=30, bytes_written=20, fusion=Fusion.OPAQUE
    )
    assert seconds(cost, Toy(), dtype) == expected


def test_what_is_sent_goes_by_the_network() -> None:
    cost = Cost(
        flops=10,
        transcendentals=0,
        bytes_read=30,
        bytes_written=20,
        bytes_sent=30,
        fusion=Fusion.OPAQUE,
    )
    assert seconds(cost, Toy(), "float32") == 3.0
