"""Seconds that single operations take on the attached device, beside the roofline's.

    python -m benchmarks.rates --device h200 --rows benchmarks/results/rates_nvidia_h200.jsonl

runs operations that a training step is made of, each alone and compiled, on arrays large enough
that memory is not a cache: products at two precisions, convolutions of several kinds, elementwise
functions, softmax, layer normalization, dropout, random bits, sums, transposes and gathers. Beside
each stands what the roofline says (``remat_opt.costs``) for ``--device``, so that a rate in
``remat_opt.device`` that the device does not reach shows. The calls of an operation follow each
other without waiting, and the time is that of the median group of calls.

Sizes are for a GPU or TPU; ``--elements`` makes them smaller. Each row is appended to ``--rows`` as
soon as it is known, and existing ones are not measured again.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.json_lines import JsonLines, row_of
from remat_opt import costs
from remat_opt.device import Device, get_device
from remat_opt.program import flop_count

#: Elements of the arrays that elementwise operations read.
ELEMENTS = 1 << 27
_GROUPS, _CALLS = 5, 10
_COLUMNS = 1024


def _layer_norm(x: jax.Array) -> jax.Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-6)


def _dropout(key: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0.0)


def operations(elements: int) -> Mapping[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """The operations by name: a function of arrays, and the shapes of the arrays.

    Args:
      elements: of each array that an elementwise operation reads; at least 1,024.
    """
    rows = max(1, elements // _COLUMNS)
    x = jax.ShapeDtypeStruct((rows, _COLUMNS), "float32")
    half = jax.ShapeDtypeStruct(x.shape, "bfloat16")
    key = jax.eval_shape(lambda: jax.random.key(0))
    side = max(64, min(4096, int(elements**0.5) // 2))
    few = max(1, elements // (256 * 256))

    def square(dtype: str) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        return (jax.ShapeDtypeStruct((side, side), dtype),) * 2

    heads = jax.ShapeDtypeStruct((few, 256, 64), "float32")
    return {
        "add": (lambda x: x + 1.0, (x,)),
        "add, bfloat16": (lambda x: x + 1.0, (half,)),
        "add of two": (jnp.add, (x, x)),
        "exp": (jnp.exp, (x,)),
        "tanh": (jnp.tanh, (x,)),
        "sin": (jnp.sin, (x,)),
        "gelu by erf": (lambda x: jax.nn.gelu(x, approximate=False), (x,)),
        "gelu by tanh": (jax.nn.gelu, (x,)),
        "gelu by tanh, bfloat16": (jax.nn.gelu, (half,)),
        "silu": (jax.nn.silu, (x,)),
        "sum of rows": (lambda x: x.sum(-1), (x,)),
        "sum of columns": (lambda x: x.sum(0), (x,)),
        "softmax": (jax.nn.softmax, (x,)),
        "layer normalization": (_layer_norm, (x,)),
        "random bits": (lambda key: jax.random.bits(key, x.shape), (key,)),
        "dropout mask": (lambda key: jax.random.bernoulli(key, 0.9, x.shape), (key,)),
        "dropout": (_dropout, (key, x)),
        "transpose": (lambda x: x.T + 1.0, (x,)),
        "gather of rows": (
            lambda x, i: jnp.take(x, i, axis=0),
            (x, jax.ShapeDtypeStruct((rows,), "int32")),
        ),
        "product, float32": (jnp.matmul, square("float32")),
        "product, bfloat16": (jnp.matmul, square("bfloat16")),
        "scores of heads, float32": (lambda q, k: jnp.einsum("hid,hjd->hij", q, k), (heads, heads)),
        **_convolutions(elements // 4),
    }


def _convolutions(
    elements: int,
) -> Mapping[str, tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]]:
    """Convolutions by name, channels last; ``elements`` are those of an operand, roughly."""

    def made(
        side: int,
        channels: int,
        made_channels: int,
        taps: int,
        *,
        axes: int = 2,
        dtype: str = "float32",
        groups: int = 1,
        padding: Any = "SAME",
        **given: Any,
    ) -> tuple[Callable[..., Any], tuple[jax.ShapeDtypeStruct, ...]]:
        spatial = "HW"[-axes:]
        numbers = (f"N{spatial}C", f"{spatial}IO", f"N{spatial}C")
        batch = max(1, elements // (side**axes * channels))
        options = {"window_strides": (1,) * axes, "feature_group_count": groups, **given}

        def convolve(x: jax.Array, kernel: jax.Array) -> jax.Array:
            return jax.lax.conv_general_dilated(
                x, kernel, padding=padding, dimension_numbers=numbers, **options
            )

        x = jax.ShapeDtypeStruct((batch, *(side,) * axes, channels), dtype)
        kernel = jax.ShapeDtypeStruct((*(taps,) * axes, channels // groups, made_channels), dtype)
        return convolve, (x, kernel)

    causal = [(8 * 2, 0)]
    return {
        "convolution 3 x 3, 64 channels": made(56, 64, 64, 3),
        "convolution 3 x 3, 64 channels, bfloat16": made(56, 64, 64, 3, dtype="bfloat16"),
        "convolution 3 x 3, 256 channels": made(28, 256, 256, 3),
        "convolution 3 x 3, 256 channels, bfloat16": made(28, 256, 256, 3, dtype="bfloat16"),
        "convolution 3 x 3, 512 channels": made(16, 512, 512, 3),
        "convolution 1 x 1, 64 to 256 channels": made(56, 64, 256, 1),
        "convolution 1 x 1, 64 to 256 channels, bfloat16": made(56, 64, 256, 1, dtype="bfloat16"),
        "convolution 3 x 3, strided": made(56, 128, 128, 3, window_strides=(2, 2)),
        "convolution 7 x 7, strided, 3 channels": made(224, 3, 64, 7, window_strides=(2, 2)),
        "convolution 3 x 3, dilated": made(64, 256, 256, 3, rhs_dilation=(4, 4)),
        "convolution 3 x 3, 32 groups": made(28, 256, 256, 3, groups=32),
        "convolution 3 x 3, depthwise": made(56, 192, 192, 3, groups=192),
        "convolution 5 x 5, depthwise": made(28, 256, 256, 5, groups=256),
        "convolution 3 x 3, depthwise, bfloat16": made(
            56, 192, 192, 3, groups=192, dtype="bfloat16"
        ),
        "transposed convolution 2 x 2": made(
            64, 128, 64, 2, padding=[(1, 1)] * 2, lhs_dilation=(2, 2)
        ),
        "convolution along one axis, 3 taps": made(4096, 64, 64, 3, axes=1),
        "convolution along one axis, 3 taps, 256 channels": made(4096, 256, 256, 3, axes=1),
        "convolution along one axis, 3 taps, bfloat16": made(
            4096, 64, 64, 3, axes=1, dtype="bfloat16"
        ),
        "convolution along one axis, 1 tap": made(4096, 64, 64, 1, axes=1),
        "convolution along one axis, dilated": made(4096, 64, 64, 3, axes=1, rhs_dilation=(8,)),
        "convolution along one axis, dilated, causal": made(
            4096, 64, 64, 3, axes=1, rhs_dilation=(8,), padding=causal
        ),
        "convolution along one axis, dilated, causal, 256 channels": made(
            4096, 256, 256, 3, axes=1, rhs_dilation=(8,), padding=causal
        ),
    }


def _arguments(kinds: Sequence[Any]) -> list[Any]:
    key = jax.random.key(0)
    found: list[Any] = []
    for kind in kinds:
        if jnp.issubdtype(kind.dtype, jax.dtypes.prng_key):
            found.append(key)
        elif jnp.issubdtype(kind.dtype, jnp.integer):
            found.append(jax.random.permutation(key, kind.shape[0]).astype(kind.dtype))
        else:
            found.append(jax.random.normal(key, kind.shape, kind.dtype))
    return found


def measured_seconds(function: Callable[..., Any], arguments: Sequence[Any]) -> float:
    """Seconds of one call, compiled, among others of its kind."""
    compiled = jax.jit(function).lower(*arguments).compile()
    jax.block_until_ready(compiled(*arguments))
    groups = []
    for _ in range(_GROUPS):
        start = time.perf_counter()
        for _ in range(_CALLS):
            result = compiled(*arguments)
        jax.block_until_ready(result)
        groups.append((time.perf_counter() - start) / _CALLS)
    return statistics.median(groups)


def predicted_seconds(function: Callable[..., Any], kinds: Sequence[Any], device: Device) -> float:
    """The roofline's least time of one call that reads its arguments and writes its result, once.

    Args:
      function: to be called with arrays.
      kinds: their shapes and dtypes.
      device: its rates.
    """
    result = jax.eval_shape(function, *kinds)
    cost = costs.Cost(
        flops=flop_count.forward_flops(function, *kinds),
        transcendentals=0,
        bytes_read=sum(kind.size * kind.dtype.itemsize for kind in kinds),
        bytes_written=result.size * result.dtype.itemsize,
        fusion=costs.Fusion.OPAQUE,
    )
    return costs.seconds(cost, device, str(result.dtype))


def _figures(
    function: Callable[..., Any], kinds: Sequence[Any], device: Device
) -> dict[str, float]:
    return {
        "seconds": measured_seconds(function, _arguments(kinds)),
        "predicted_seconds": predicted_seconds(function, kinds, device),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--device", required=True, help="the attached one, as the planner calls it")
    parser.add_argument("--elements", type=int, default=ELEMENTS, help="of an array (2^27)")
    parser.add_argument("--rows", type=Path, help="file to append rows to")
    given = parser.parse_args(arguments)
    device = get_device(given.device)
    lines = JsonLines(given.rows) if given.rows else None
    print(f"{'':28}{'measured':>12}{'predicted':>12}{'ratio':>8}")
    for name, (function, kinds) in operations(given.elements).items():
        heading = {
            "operation": name,
            "elements": given.elements,
            "device_kind": jax.devices()[0].device_kind,
            "jax": jax.__version__,
        }
        row = row_of(lines, heading, functools.partial(_figures, function, kinds, device))
        found, expected = row["seconds"], row["predicted_seconds"]
        ratio = found / expected
        print(f"{name:28}{found * 1e3:9.3f} ms{expected * 1e3:9.3f} ms{ratio:8.2f}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
