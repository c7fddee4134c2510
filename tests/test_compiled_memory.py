"""The promise against the compiler: temporary bytes of planned gradients, as compiled.

A real buffer assignment judges here. ``lower`` and ``upper`` bound compiled over predicted bytes,
``least_share`` the plan for least memory over the plain function, both as compiled. They are what
was seen, with little margin: a change that makes predictions worse must fail, and one that makes
them better should tighten the numbers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import remat_opt
from benchmarks import networks
from benchmarks.networks import lstm
from remat_opt.measurement.compilation import Measurement
from remat_opt.plan import Plan
from tests import random_programs
from tests.devices import needs_libtpu

TPU = [pytest.mark.tpu, pytest.mark.slow, pytest.mark.versions, needs_libtpu]

Array = jax.ShapeDtypeStruct


def residual_net(weights: Any, x: jax.Array) -> jax.Array:
    for w in weights:
        x = jnp.tanh(x @ w) + x
    return jnp.sum(x**2)


def residual_net_arguments(rows: int, width: int, layers: int = 10) -> Any:
    return [Array((width, width), "float32")] * layers, Array((rows, width), "float32")


def convolutional_net(params: Any, image: jax.Array) -> jax.Array:
    x = image
    for kernel, scale, bias in params:
        x = lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        mean, variance = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        x = jax.nn.relu((x - mean) * lax.rsqrt(variance + 1e-5) * scale + bias)
    return jnp.sum(jnp.mean(x, (1, 2)) ** 2)


def convolutional_net_arguments(batch: int, side: int, channels: int, layers: int = 8) -> Any:
    layer = (
        Array((3, 3, channels, channels), "float32"),
        Array((channels,), "float32"),
        Array((channels,), "float32"),
    )
    return [layer] * layers, Array((batch, side, side, channels), "float32")


#: What was compiled for one test is reused by the others.
compiled: dict[Any, Any] = {}


def once(make: Callable[[], Any], *key: Any) -> Any:
    if key not in compiled:
        compiled[key] = make()
    return compiled[key]


def planned(fn: Callable[..., Any], args: Any, device: str, **options: Any) -> Plan:
    """For the gradient alone, like what it is compared with."""
    options = {"gradients": "results", **options}
    make = functools.partial(remat_opt.make_plan, fn, *args, device=device, verify=True, **options)
    return once(make, fn, str(args), device, *options.items())


def plain(fn: Callable[..., Any], args: Any, device: str) -> Measurement:
    gradient = jax.value_and_grad(fn)
    return once(lambda: remat_opt.measure(gradient, *args, device=device), fn, str(args), device)


def plain_bytes(fn: Callable[..., Any], args: Any, device: str) -> int:
    return plain(fn, args, device).temporary_bytes


@pytest.mark.parametrize(
    ("device", "rows", "width", "layers", "least_share", "lower", "upper"),
    [
        ("cpu", 4096, 64, 10, 0.29, 0.99, 1.02),
        # Almost all of the least plan is in a TPU's vector memory, which is not known to the MiB.
        # Its heap is predicted exactly, 160 MiB, but signals of copies as 4 MiB, and they are 1.
        pytest.param("v5e", 65536, 128, 16, 0.25, 0.98, 1.1, marks=TPU),
    ],
)
def test_residual_net(
    device: str,
    rows: int,
    width: int,
    layers: int,
    least_share: float,
    lower: float,
    upper: float,
) -> None:
    args = residual_net_arguments(rows, width, layers)
    unchanged = plain_bytes(residual_net, args, device)
    least = planned(residual_net, args, device)
    assert least.measured.temporary_bytes <= least_share * unchanged
    for plan in (
        least,
        planned(residual_net, args, device, budget=0.4),
        planned(residual_net, args, device, budget=0.6),
    ):
        ratio = plan.measured.temporary_bytes / plan.predicted.temporary_bytes
        assert lower <= ratio <= upper, (plan.objective, ratio)
        if plan.budget_bytes is not None:
            assert plan.measured.temporary_bytes <= upper * plan.budget_bytes


def test_nested_regions_take_what_is_predicted() -> None:
    """A budget that no chain of regions meets without computing values more than once."""
    args = residual_net_arguments(4096, 64, layers=16)
    plan = planned(residual_net, args, "cpu", budget=0.2)
    assert any(stage.inside for stage in plan.stages)
    assert max(decision.times for decision in plan.decisions) > 1
    assert plan.measured.temporary_bytes <= 0.21 * plain_bytes(residual_net, args, "cpu")
    assert 0.99 <= plan.measured.temporary_bytes / plan.predicted.temporary_bytes <= 1.03


@pytest.mark.parametrize(
    ("device", "batch", "side", "channels", "layers", "budget", "least_share", "lower", "upper"),
    [
        # XLA's convolutions for CPU take extra workspace, which no graph shows: the less a plan
        # takes, the larger its share.
        ("cpu", 8, 32, 16, 8, 0.6, 0.27, 1.05, 1.35),
        # The compiler packs loosely if the program fits the device many times over: 1.00 and 1.25
        # times what is predicted with JAX 0.10, 1.20 and 1.50 times with JAX 0.12.
        pytest.param("v5e", 64, 64, 128, 4, 0.85, 0.81, 0.95, 1.4, marks=TPU),
    ],
)
def test_convolutional_net(
    device: str,
    batch: int,
    side: int,
    channels: int,
    layers: int,
    budget: float,
    least_share: float,
    lower: float,
    upper: float,
) -> None:
    args = convolutional_net_arguments(batch, side, channels, layers)
    unchanged = plain_bytes(convolutional_net, args, device)
    least = planned(convolutional_net, args, device)
    assert least.measured.temporary_bytes <= least_share * unchanged
    for plan in (least, planned(convolutional_net, args, device, budget=budget)):
        ratio = plan.measured.temporary_bytes / plan.predicted.temporary_bytes
        assert lower <= ratio <= upper, (plan.objective, ratio)


def attention_net(weights: Any, x: jax.Array) -> jax.Array:
    """Layers of attention in mixed precision, as in most transformers."""
    batch, length, _ = x.shape
    for into, out in weights:
        heads = (x @ into).reshape(batch, length, -1, 3 * 64)
        query, key, value = jnp.split(heads, 3, axis=-1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        shares = jax.nn.softmax(scores / 8).astype(x.dtype)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", shares, value).reshape(batch, length, -1)
        x = x + jnp.tanh(mixed @ out)
    return jnp.sum(x.astype(jnp.float32) ** 2)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.versions
@needs_libtpu
def test_attention_in_mixed_precision_on_a_tpu() -> None:
    layer = Array((512, 1536), "bfloat16"), Array((512, 512), "bfloat16")
    args = [layer] * 3, Array((8, 1024, 512), "bfloat16")
    unchanged = plain_bytes(attention_net, args, "v5e")
    for options in ({}, {"max_overhead": 0.4, "overhead": "flops"}):
        plan = planned(attention_net, args, "v5e", **options)
        ratio = plan.measured.temporary_bytes / plan.predicted.temporary_bytes
        # 0.42 and 0.45 of the unchanged function, and 1.04 and 0.98 times what is predicted, with
        # JAX 0.10 and 0.12. If arrays of 8 MiB lie in the way of those of 256, both may change.
        assert plan.measured.temporary_bytes <= 0.5 * unchanged
        assert 0.85 <= ratio <= 1.15, (options, ratio)


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (residual_net, residual_net_arguments(4096, 64)),
        (convolutional_net, convolutional_net_arguments(8, 32, 16)),
    ],
    ids=["residual net", "convolutional net"],
)
def test_the_compiler_does_recompute_what_was_planned(fn: Callable[..., Any], args: Any) -> None:
    unchanged = plain(fn, args, "cpu").flops
    plan = planned(fn, args, "cpu")
    again = plan.measured.flops - unchanged
    assert plan.predicted.recomputed_flops > 0.3 * plan.predicted.forward_flops
    assert again == pytest.approx(plan.predicted.recomputed_flops, rel=0.1)


def test_what_a_custom_rule_both_returns_and_keeps_is_one_array() -> None:
    def loss(weights: Any, x: jax.Array) -> jax.Array:
        for a, b in weights:
            x = x + random_programs.kernel(jnp.sin(x), a) @ b
        return jnp.mean(x**2)

    args = (
        [(Array((64, 256), "float32"), Array((256, 64), "float32"))] * 6,
        Array((4096, 64), "float32"),
    )
    for share in (1.0, 0.6):
        plan = remat_opt.make_plan(loss, *args, device="cpu", budget=share, verify=True)
        assert plan.measured is not None
        compiled = plan.measured.temporary_bytes
        assert plan.predicted.temporary_bytes == pytest.approx(compiled, rel=0.08), share


def test_less_budget_is_less_compiled_memory() -> None:
    args = residual_net_arguments(4096, 64)
    compiled = [
        planned(residual_net, args, "cpu", budget=budget).measured.temporary_bytes
        for budget in (0.3, 0.5, 0.7, 0.9)
    ]
    assert compiled == sorted(compiled)
    assert compiled[0] < 0.5 * compiled[-1]


def test_a_little_overhead_already_helps() -> None:
    args = convolutional_net_arguments(8, 32, 16)
    little = planned(convolutional_net, args, "cpu", max_overhead=0.1)
    assert little.measured.temporary_bytes < plain_bytes(convolutional_net, args, "cpu")
    least = planned(convolutional_net, args, "cpu")
    assert least.measured.temporary_bytes < little.measured.temporary_bytes


def test_a_recurrent_network_adds_its_weights_gradients_as_they_come() -> None:
    """Without any recomputation; XLA holds a part of each step, 32 times the weights."""

    def recurrent(weights: Any, inputs: jax.Array) -> jax.Array:
        state = jnp.zeros((64, 256))
        for step in range(32):
            state = jnp.tanh(state @ weights[0] + inputs[step] @ weights[1])
        return jnp.sum(state**2)

    args = [Array((256, 256), "float32")] * 2, Array((32, 64, 256), "float32")
    unchanged = plain_bytes(recurrent, args, "cpu")
    as_it_is = planned(recurrent, args, "cpu", max_overhead=0.0)
    assert as_it_is.predicted.recomputed_flops == 0
    assert as_it_is.measured.temporary_bytes < 0.3 * unchanged
    for plan in (as_it_is, planned(recurrent, args, "cpu")):
        assert any("same weights" in note for note in plan.notes)
        assert 0.7 < plan.measured.temporary_bytes / plan.predicted.temporary_bytes < 1.3


@pytest.mark.slow
def test_every_layer_of_a_recurrent_network_adds_its_weights_gradients_as_they_come() -> None:
    """Also those whose input nothing waits for: without ``parts_in_turn`` XLA holds their parts.

    It then takes 1.23 times what is predicted; with it 0.97 times, and with JAX 0.10 1.13 times.
    """
    size = dataclasses.replace(lstm.SIZES["lstm"], steps=20)
    net = lstm.network("lstm", size, networks.default_batch("lstm"), None)
    plan = planned(net.loss_fn, net.arguments, "cpu", max_overhead=0.125, overhead="flops")
    assert any(stage.checkpointed for stage in plan.stages)
    assert 0.85 < plan.measured.temporary_bytes / plan.predicted.temporary_bytes < 1.15
