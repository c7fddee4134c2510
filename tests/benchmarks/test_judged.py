"""The networks that judge have gradients, and wrapping their blocks changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import networks
from benchmarks.networks.judged import (
    deeplab,
    efficientnet,
    encoder_decoder,
    llama,
    mixture_of_experts,
    residual_mlp,
)

SMALL: dict[str, tuple[Any, dict[str, Any], int]] = {
    "residual_mlp": (residual_mlp, {"layers": 3, "width": 8, "hidden": 16}, 4),
    "llama": (
        llama,
        {"layers": 2, "width": 16, "heads": 4, "groups": 2, "hidden": 24}
        | {"vocabulary": 11, "length": 8},
        2,
    ),
    "encoder_decoder": (
        encoder_decoder,
        {"layers": 2, "width": 16, "heads": 2, "hidden": 24, "vocabulary": 11, "length": 6},
        2,
    ),
    "mixture_of_experts": (
        mixture_of_experts,
        {"layers": 2, "width": 16, "heads": 2, "experts": 4, "hidden": 24}
        | {"vocabulary": 11, "length": 8},
        2,
    ),
    "efficientnet_b0": (
        efficientnet,
        {"stages": efficientnet.SIZES["efficientnet_b0"].stages[:2], "image": 16, "classes": 5},
        2,
    ),
    "deeplab": (
        deeplab,
        {"blocks": (1, 1, 1, 1), "base": 4, "pyramid": 8, "early": 4, "image": 33, "classes": 3},
        2,
    ),
}


def test_every_one_is_here() -> None:
    assert set(SMALL) == set(networks.JUDGED)
    assert set(networks.JUDGED).isdisjoint(networks.TUNED)


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.JUDGED)
def test_wrapping_blocks_changes_no_result(name: str) -> None:
    family, sizes, batch = SMALL[name]
    size = dataclasses.replace(family.SIZES[name], **sizes)
    # One compilation, where drawing each parameter by itself would take dozens.
    unwrapped = family.network(name, size, batch, None)
    arguments = jax.jit(unwrapped.make_arguments, static_argnums=0)(0)
    found = []
    for policy in (None, "nothing_saveable"):
        network = family.network(name, size, batch, policy)
        step = jax.jit(jax.value_and_grad(network.loss_fn, has_aux=network.has_aux))
        assert jax.tree.structure(network.arguments) == jax.tree.structure(arguments)
        found.append(step(*arguments))
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        assert bool(jnp.all(jnp.isfinite(one)))
        np.testing.assert_allclose(one, other, rtol=2e-2, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.JUDGED)
def test_at_its_real_size_it_has_shapes_alone(name: str) -> None:
    network = networks.build(name, networks.default_batch(name))
    gradient = jax.grad(network.loss_fn, has_aux=network.has_aux)
    shapes = jax.eval_shape(gradient, *network.arguments)
    gradients = shapes[0] if network.has_aux else shapes
    assert jax.tree.structure(gradients) == jax.tree.structure(network.arguments[0])
