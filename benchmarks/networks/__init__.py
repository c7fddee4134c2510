"""The networks that remat_opt is measured on, by name.

Each is written as an ordinary careful user would write it. `build` gives the loss with the shapes
of its arguments; with a block policy it gives the same loss with every block under one checkpoint,
which is what such a user would do by hand against running out of memory. A block is what repeats:
a residual block, a dense layer, an inception module, a stage's two convolutions, a transformer's
layer, a time step.

There are two sets. Rules about compilers were found on `TUNED`, and are tested there. `JUDGED` are
of other families and are never used to find, tune or defend a rule: only they are evidence. Besides
these there are `IDIOMS`: small programs without blocks, each of one way of writing, to find rules
on; and `PUBLIC`: models of packages that others wrote, if they are installed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.networks import (
    densenet,
    gpt,
    idioms,
    inception,
    keras_models,
    lstm,
    public,
    resnet,
    unet,
    vit,
)
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
from benchmarks.networks.record import BLOCK_POLICIES, Network, checkpoint_policy

__all__ = [
    "BLOCK_POLICIES",
    "IDIOMS",
    "JUDGED",
    "PUBLIC",
    "TUNED",
    "Network",
    "build",
    "default_batch",
    "names",
    "set_of",
]

_TUNED = (resnet, densenet, inception, unet, vit, lstm, gpt)
_JUDGED = (
    residual_mlp,
    llama,
    encoder_decoder,
    mixture_of_experts,
    efficientnet,
    deeplab,
    diffusion_unet,
    graph_net,
    state_space,
    wavenet,
    recommender,
    two_tower,
    flax_gru,
    physics_mlp,
)

#: Names of the networks that rules were found on.
TUNED: tuple[str, ...] = tuple(name for family in _TUNED for name in family.SIZES)
#: Names of those that only judge.
JUDGED: tuple[str, ...] = tuple(name for family in _JUDGED for name in family.SIZES)
#: Names of those that each show one way of writing.
IDIOMS: tuple[str, ...] = tuple(idioms.IDIOMS)
#: Names of public models.
PUBLIC: tuple[str, ...] = (*public.PUBLIC, *keras_models.KERAS)

# name -> function of (batch, block_policy)
_NETWORKS: dict[str, Callable[[int, str | None], Network]] = {
    name: partial(family.network, name, size)
    for family in (*_TUNED, *_JUDGED)
    for name, size in family.SIZES.items()
}

# name -> function of (name, batch), of networks without blocks
_WITHOUT_BLOCKS: dict[str, Callable[[str, int], Network]] = {
    **dict.fromkeys(IDIOMS, idioms.network),
    **dict.fromkeys(public.PUBLIC, public.network),
    **dict.fromkeys(keras_models.KERAS, keras_models.network),
}

# Examples in the batch that a network is measured with by default.
_DEFAULT_BATCHES = {
    "resnet18": 64,
    "resnet34": 64,
    "resnet50": 64,
    "resnet101": 32,
    "resnet152": 16,
    "densenet121": 32,
    "inception_v3": 32,
    "unet": 8,
    "vit_b16": 64,
    "lstm": 64,
    "gpt": 8,
    "residual_mlp": 4096,
    "llama": 4,
    "encoder_decoder": 32,
    "mixture_of_experts": 4,
    "efficientnet_b0": 64,
    "deeplab": 8,
    "diffusion_unet": 64,
    "graph_net": 32,
    "state_space": 4,
    "wavenet": 8,
    "recommender": 65_536,
    "two_tower": 128,
    "flax_gru": 512,
    "physics_mlp": 65_536,
    **{name: batch for name, (_, batch) in idioms.IDIOMS.items()},
    **public.PUBLIC,
    **keras_models.KERAS,
}


def names() -> tuple[str, ...]:
    """Returns the names of both sets, those of `IDIOMS` and `PUBLIC` left out."""
    return tuple(_NETWORKS)


def set_of(name: str) -> str:
    """Returns the set that a network belongs to: "tuned", "judged", "idioms" or "public"."""
    if name in IDIOMS:
        return "idioms"
    if name in PUBLIC:
        return "public"
    return "judged" if name in JUDGED else "tuned"


def default_batch(name: str) -> int:
    """Returns the examples in a batch that a network is measured with.

    Raises:
        ValueError: If the name is unknown.
    """
    _check_known(name)
    return _DEFAULT_BATCHES[name]


def build(name: str, batch: int, *, block_policy: str | None = None) -> Network:
    """Builds a network's loss and the shapes of its arguments; allocates nothing.

    Args:
        name: One of `names()`, of `IDIOMS` or of `PUBLIC`.
        batch: Examples in a batch: images or sequences.
        block_policy: None for the network as it is, or one of `BLOCK_POLICIES`, the name of a
            policy in `jax.checkpoint_policies`: every block is then wrapped in a checkpoint with
            it. Stem and head stay as they are.

    Raises:
        ValueError: If the name or the policy is unknown, the batch is not positive, or a policy is
            given for an idiom or a public model.
        ImportError: If it is a public model, and its package is not installed.
    """
    _check_known(name)
    if batch < 1:
        raise ValueError(f"batch is {batch}: give at least 1 example")
    if block_policy is not None:
        checkpoint_policy(block_policy)
    if name in _WITHOUT_BLOCKS:
        if block_policy is not None:
            raise ValueError(f"{name!r} has no blocks: leave block_policy out")
        return _WITHOUT_BLOCKS[name](name, batch)
    return _NETWORKS[name](batch, block_policy)


def _check_known(name: str) -> None:
    if name not in _DEFAULT_BATCHES:
        known = ", ".join((*names(), *_WITHOUT_BLOCKS))
        raise ValueError(f"unknown network {name!r}: give one of {known}")
