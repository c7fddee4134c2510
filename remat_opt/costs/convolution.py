"""Convolutions: two FLOPs for each product with a real input element.

Products with padding, or with a hole that ``lhs_dilation`` puts between input elements, do not
count. That matters most in gradients: the input gradient of a strided convolution is a dilated one,
and counting the holes would make it stride**2 times too expensive. This is XLA's
``HloCostAnalysis::GetConvolutionFlops``, with its loop over output positions replaced by
arithmetic.
"""

from __future__ import annotations

import dataclasses
import math

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import parameter, register
from remat_opt.operation import Operation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Axis:
    """One spatial axis: extents of input, kernel and output, and how they meet."""

    input: int
    kernel: int
    output: int
    stride: int
    padding_low: int
    input_dilation: int
    kernel_dilation: int

    def pairs(self) -> int:
        """How many (output, kernel) positions meet a real input element."""
        return sum(
            self._outputs_meeting(self.padding_low - tap * self.kernel_dilation)
            for tap in range(self.kernel)
        )

    def _outputs_meeting(self, shift: int) -> int:
        """Output positions o for which o * stride - shift is an input element's place.

        The places are the multiples of the input dilation d from 0 to (input - 1) d:
        o lies in a range, and in one residue class modulo d / gcd(stride, d).
        """
        first = max(-(-shift // self.stride), 0)
        last = min(((self.input - 1) * self.input_dilation + shift) // self.stride, self.output - 1)
        common = math.gcd(self.stride, self.input_dilation)
        if shift % common or last < first:
            return 0
        period = self.input_dilation // common
        residue = shift // common * pow(self.stride // common, -1, period) % period
        return (last - residue) // period - (first - 1 - residue) // period


@register("conv_general_dilated")
def convolution(operation: Operation) -> Cost:
    """Exactly what ``cost_analysis()`` gives if the compiler keeps the convolution.

    The CPU compiler turns one with a 1x1 kernel into a matrix product of the same FLOPs.
    """
    numbers = parameter(operation, "dimension_numbers")
    inputs, kernel = operation.inputs[:2]
    output = operation.outputs[0]
    axes = [
        _Axis(
            input=inputs.shape[input_axis],
            kernel=kernel.shape[kernel_axis],
            output=output.shape[output_axis],
            stride=stride,
            padding_low=padding_low,
            input_dilation=input_dilation,
            kernel_dilation=kernel_dilation,
        )
        for (
            input_axis,
            kernel_axis,
            output_axis,
            stride,
            (padding_low, _),
            input_dilation,
            kernel_dilation,
        ) in zip(
            numbers.lhs_spec[2:],
            numbers.rhs_spec[2:],
            numbers.out_spec[2:],
            parameter(operation, "window_strides"),
            parameter(operation, "padding"),
            parameter(operation, "lhs_dilation"),
            parameter(operation, "rhs_dilation"),
            strict=True,
        )
    ]
    # The specs start with the batch and the feature axis.
    batch = inputs.shape[numbers.lhs_spec[0]] // parameter(operation, "batch_group_count")
    input_features = inputs.shape[numbers.lhs_spec[1]] // parameter(
        operation, "feature_group_count"
    )
    output_features = output.shape[numbers.out_spec[1]]
    pairs = math.prod(axis.pairs() for axis in axes)
    return Cost(
        flops=2 * batch * input_features * output_features * pairs,
        transcendentals=0,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.OPAQUE,
    )
