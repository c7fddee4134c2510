"""The networks that judge have losses and gradients, and wrapping their blocks changes nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from benchmarks import networks
from benchmarks.networks.judged import (
    deeplab,
    diffusion_unet,
    efficientnet,
    encoder_decoder,
    flax_gru,
    graph_net,
    llama,
    mixture_of_experts,
    physics_mlp,
    recommender,
    residual_mlp,
    state_space,
    two_tower,
    wavenet,
)
from tests.lowered import operations

SMALL_TOWER = two_tower.Tower(layers=2, width=8, heads=2)
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
    "diffusion_unet": (
        diffusion_unet,
        {"widths": (8, 8), "blocks": 1, "attention": (), "heads": 2, "groups": 4, "image": 8},
        2,
    ),
    "graph_net": (
        graph_net,
        {"rounds": 2, "width": 8, "kinds": 3, "waves": 4, "atoms": 5, "neighbours": 3},
        2,
    ),
    "state_space": (
        state_space,
        {"layers": 2, "width": 8, "heads": 2, "state": 4, "chunk": 4}
        | {"vocabulary": 11, "length": 12},
        2,
    ),
    "wavenet": (
        wavenet,
        {"cycles": 2, "layers": 2, "width": 4, "skip": 6, "levels": 5, "length": 12},
        2,
    ),
    "recommender": (
        recommender,
        {"dense": 3, "features": 4, "rows": 7, "ids": 2, "width": 4}
        | {"bottom": (6,), "top": (8, 6)},
        6,
    ),
    "two_tower": (
        two_tower,
        {"vision": SMALL_TOWER, "text": SMALL_TOWER, "image": 8, "patch": 4}
        | {"vocabulary": 11, "length": 6, "features": 8},
        3,
    ),
    "flax_gru": (flax_gru, {"layers": 2, "width": 8, "vocabulary": 11, "steps": 4}, 2),
    "physics_mlp": (physics_mlp, {"layers": 3, "width": 8, "border": 4}, 6),
}


def test_every_one_is_here() -> None:
    assert set(SMALL) == set(networks.JUDGED)
    assert set(networks.JUDGED).isdisjoint(networks.TUNED)


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.JUDGED)
def test_wrapping_blocks_changes_no_result(name: str) -> None:
    family, sizes, batch = SMALL[name]
    size = dataclasses.replace(family.SIZES[name], **sizes)
    plain, wrapped = (
        family.network(name, size, batch, policy) for policy in (None, "nothing_saveable")
    )
    assert str(plain.arguments) == str(wrapped.arguments)
    assert operations(plain.loss_fn, *plain.arguments) == operations(
        wrapped.loss_fn, *wrapped.arguments
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.JUDGED)
def test_losses_are_finite(name: str) -> None:
    family, sizes, batch = SMALL[name]
    size = dataclasses.replace(family.SIZES[name], **sizes)
    network = family.network(name, size, batch, None)
    found = jax.jit(lambda: network.loss_fn(*network.make_arguments(0)))()
    assert all(bool(jnp.all(jnp.isfinite(one))) for one in jax.tree.leaves(found))


@pytest.mark.slow
@pytest.mark.parametrize("name", networks.JUDGED)
def test_at_its_real_size_it_has_shapes_alone(name: str) -> None:
    network = networks.build(name, networks.default_batch(name))
    gradient = jax.grad(network.loss_fn, has_aux=network.has_aux)
    shapes = jax.eval_shape(gradient, *network.arguments)
    gradients = shapes[0] if network.has_aux else shapes
    assert jax.tree.structure(gradients) == jax.tree.structure(network.arguments[0])
