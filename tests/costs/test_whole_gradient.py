"""Summed over a whole gradient, FLOPs agree with the compiler's within 3 %."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

Params = dict[str, Any]

CLASSES = 10
STAGES = ((16, 1), (32, 2), (64, 2))  # features and stride of each residual block


def _convolve(x: jax.Array, kernel: jax.Array, stride: int) -> jax.Array:
    return lax.conv_general_dilated(
        x, kernel, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def _batch_norm(x: jax.Array, scale: jax.Array, bias: jax.Array) -> jax.Array:
    mean = x.mean((0, 1, 2))
    variance = jnp.square(x).mean((0, 1, 2)) - jnp.square(mean)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias


def _block(params: Params, x: jax.Array, stride: int) -> jax.Array:
    y = _convolve(x, params["first"], stride)
    y = jax.nn.relu(_batch_norm(y, params["scale"], params["bias"]))
    y = _batch_norm(_convolve(y, params["second"], 1), params["scale"], params["bias"])
    return jax.nn.relu(y + _convolve(x, params["shortcut"], stride))


def loss(params: list[Params], images: jax.Array, labels: jax.Array) -> jax.Array:
    """A small residual network with batch normalisation and strided convolutions."""
    x = jax.nn.relu(_convolve(images, params[0]["stem"], 2))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for block, (_, stride) in zip(params[1:], STAGES, strict=True):
        x = _block(block, x, stride)
    logits = x.mean((1, 2)) @ params[0]["head"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


def _shapes(batch: int, image: int) -> tuple[Any, ...]:
    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params: list[Params] = [{"stem": array(7, 7, 3, 16), "head": array(STAGES[-1][0], CLASSES)}]
    width = 16
    for features, _ in STAGES:
        params.append(
            {
                "first": array(3, 3, width, features),
                "second": array(3, 3, features, features),
                "shortcut": array(1, 1, width, features),
                "scale": array(features),
                "bias": array(features),
            }
        )
        width = features
    return params, array(batch, image, image, 3), jax.ShapeDtypeStruct((batch,), jnp.int32)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize(("batch", "image"), [(4, 64), (2, 96), (3, 57)])
def test_flops_of_a_gradient_are_the_compilers_within_3_percent(
    batch: int, image: int, ours: Any, compiled: Any
) -> None:
    args = _shapes(batch, image)
    gradient = jax.grad(loss)
    assert ours(gradient, *args).flops == pytest.approx(compiled(gradient, *args).flops, rel=0.03)
