"""Convolutions, and their gradients, cost exactly what the compiler says."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from jax import lax

from remat_opt.costs import Fusion, cost

Pairs = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, weakref_slot=True)
class Case:
    """One convolution; jax.jit keeps a weak reference to it."""

    image: tuple[int, ...] = (9, 9)
    kernel: tuple[int, ...] = (3, 3)
    batch: int = 2
    features: int = 4
    output_features: int = 8
    strides: tuple[int, ...] = (1, 1)
    padding: str | Pairs = "SAME"
    input_dilation: tuple[int, ...] | None = None
    kernel_dilation: tuple[int, ...] | None = None
    feature_groups: int = 1
    batch_groups: int = 1

    def args(self) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        inputs = (self.batch, *self.image, self.features)
        kernel = (*self.kernel, self.features // self.feature_groups, self.output_features)
        return (
            jax.ShapeDtypeStruct(inputs, jnp.float32),
            jax.ShapeDtypeStruct(kernel, jnp.float32),
        )

    def __call__(self, inputs: Any, kernel: Any) -> Any:
        axes = "DHW"[-len(self.image) :]
        return lax.conv_general_dilated(
            inputs,
            kernel,
            self.strides,
            self.padding,
            self.input_dilation,
            self.kernel_dilation,
            (f"N{axes}C", f"{axes}IO", f"N{axes}C"),
            feature_group_count=self.feature_groups,
            batch_group_count=self.batch_groups,
        )


CASES = {
    "same": Case(),
    "valid": Case(padding="VALID"),
    "1x1": Case(kernel=(1, 1)),
    "1x1 strided": Case(kernel=(1, 1), strides=(2, 2)),
    "strided": Case(strides=(2, 2)),
    "strided unevenly": Case(image=(10, 13), kernel=(3, 4), strides=(2, 3)),
    "7x7 of stride 2": Case(image=(16, 16), kernel=(7, 7), strides=(2, 2), features=3),
    "padded": Case(padding=((2, 1), (0, 3))),
    "padded beyond the kernel": Case(padding=((5, 4), (6, 0))),
    "cropped": Case(padding=((-1, 0), (1, -2))),
    "kernel dilated": Case(kernel_dilation=(2, 3), padding=((2, 2), (3, 3))),
    "input dilated": Case(input_dilation=(2, 3), padding=((2, 2), (2, 2))),
    "input dilated and strided": Case(
        input_dilation=(2, 4), strides=(3, 2), padding=((2, 2), (1, 3))
    ),
    "all dilated and strided": Case(
        input_dilation=(3, 2), kernel_dilation=(2, 2), strides=(2, 3), padding=((3, 3), (4, 2))
    ),
    "grouped": Case(feature_groups=2),
    "depthwise": Case(feature_groups=4),
    "depthwise strided": Case(feature_groups=4, strides=(2, 2)),
    "batch groups": Case(batch_groups=2),
    "one axis": Case(image=(11,), kernel=(3,), strides=(2,)),
    "three axes": Case(image=(5, 6, 7), kernel=(3, 2, 3), strides=(1, 2, 1)),
}


@pytest.mark.parametrize("name", CASES)
def test_flops_are_the_compilers(name: str, ours: Any, compiled: Any) -> None:
    case = CASES[name]
    assert ours(case, *case.args()) == compiled(case, *case.args())


@pytest.mark.parametrize(
    "name", ["same", "valid", "strided", "7x7 of stride 2", "kernel dilated", "1x1 strided"]
)
@pytest.mark.parametrize("argument", ["input", "kernel"])
def test_flops_of_gradients_are_the_compilers(
    name: str, argument: str, operations: Any, compiled: Any
) -> None:
    """A gradient is a convolution with holes or padding, which do not count."""
    case = CASES[name]
    inputs, kernel = case.args()
    output = jax.eval_shape(case, inputs, kernel)

    def gradient(inputs: Any, kernel: Any, cotangent: Any) -> Any:
        _, pull_back = jax.vjp(case, inputs, kernel)
        return pull_back(cotangent)[0 if argument == "input" else 1]

    # The jaxpr also has the forward convolution, which nothing needs.
    convolutions = [
        operation
        for operation in operations(gradient, inputs, kernel, output)
        if operation.primitive == "conv_general_dilated"
    ]
    expected = compiled(gradient, inputs, kernel, output).flops
    assert cost(convolutions[-1]).flops == expected


def test_any_layout_of_the_axes(ours: Any, compiled: Any) -> None:
    def convolve(inputs: Any, kernel: Any) -> Any:
        return lax.conv_general_dilated(
            inputs, kernel, (2, 1), "SAME", dimension_numbers=("NCHW", "OIHW", "HWNC")
        )

    args = (
        jax.ShapeDtypeStruct((2, 4, 9, 10), jnp.float32),
        jax.ShapeDtypeStruct((8, 4, 3, 5), jnp.float32),
    )
    assert ours(convolve, *args) == compiled(convolve, *args)


def test_opaque_and_bytes(only: Any) -> None:
    answer = cost(only(CASES["strided"], *CASES["strided"].args()))
    assert answer.fusion is Fusion.OPAQUE
    assert answer.bytes_read == 4 * (2 * 9 * 9 * 4 + 3 * 3 * 4 * 8)
    assert answer.bytes_written == 4 * 2 * 5 * 5 * 8
    assert not answer.estimated


extents = st.integers(1, 3)
paddings = st.integers(-1, 4)


@st.composite
def drawn_cases(draw: st.DrawFn) -> Case:
    """A convolution over two axes, anything allowed."""
    groups = draw(st.sampled_from(["none", "feature", "batch"]))
    return Case(
        image=(draw(st.integers(1, 9)), draw(st.integers(1, 9))),
        kernel=(draw(st.integers(1, 4)), draw(st.integers(1, 4))),
        strides=(draw(extents), draw(extents)),
        padding=(
            (draw(paddings), draw(paddings)),
            (draw(paddings), draw(paddings)),
        ),
        input_dilation=(draw(extents), draw(extents)),
        kernel_dilation=(draw(extents), draw(extents)),
        feature_groups=2 if groups == "feature" else 1,
        batch_groups=2 if groups == "batch" else 1,
    )


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)
@given(case=drawn_cases())
def test_flops_of_any_convolution_are_the_compilers(case: Case, ours: Any, unexpanded: Any) -> None:
    """Compared with the count before compilation: CPU rewrites degenerate convolutions."""
    assume(jax.eval_shape(case, *case.args()).size > 0)
    assert ours(case, *case.args()).flops == unexpanded(case, *case.args()).flops
