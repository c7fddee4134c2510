"""Fourier transforms."""

from __future__ import annotations

import math

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import parameter, register
from remat_opt.operation import Operation


@register("fft")
def fourier_transform(operation: Operation) -> Cost:
    """8 n log2(length) for n input elements, as XLA's HandleFft.

    Logarithms are rounded down, and those of several axes multiplied, not added: XLA's
    convention, too high for transforms over two and three axes.
    """
    lengths = parameter(operation, "fft_lengths")
    logarithms = math.prod(int(length).bit_length() - 1 for length in lengths)
    return Cost(
        flops=8 * logarithms * operation.inputs[0].size,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
    )
