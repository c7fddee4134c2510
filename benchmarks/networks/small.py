"""Networks of the same families, small enough to be run on a few processor cores."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from benchmarks.networks import densenet, gpt, inception, lstm, resnet, unet, vit
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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Small:
    """A network small enough to be run on a few processor cores.

    Attributes:
      family: its module.
      batch: examples in a batch.
      changes: what is different from the network's size.
    """

    family: ModuleType
    batch: int
    changes: Mapping[str, Any]


def _small(family: ModuleType, batch: int, **changes: Any) -> Small:
    return Small(family=family, batch=batch, changes=changes)


#: By name.
SMALL: dict[str, Small] = {
    "resnet18": _small(resnet, 8, blocks=(2, 2), image=64, classes=100),
    "resnet34": _small(resnet, 8, blocks=(3, 4), image=64, classes=100),
    "resnet50": _small(resnet, 8, blocks=(2, 2), image=64, classes=100),
    "resnet101": _small(resnet, 8, blocks=(2, 3), image=64, classes=100),
    "resnet152": _small(resnet, 8, blocks=(3, 4), image=64, classes=100),
    "densenet121": _small(densenet, 8, layers=(4, 6), image=64, classes=100),
    "inception_v3": _small(
        inception, 4, pooled=(32, 64), inner=(128,), last=1, image=107, classes=100
    ),
    "unet": _small(unet, 2, widths=(16, 32, 64), image=140),
    "vit_b16": _small(vit, 8, layers=4, width=128, heads=4, patch=8, image=64, classes=100),
    "lstm": _small(lstm, 32, layers=2, width=128, classes=500, steps=16),
    "gpt": _small(gpt, 4, layers=4, width=128, heads=4, vocabulary=1000, length=128),
    "residual_mlp": _small(residual_mlp, 1024, layers=6, width=128, hidden=512),
    "llama": _small(
        llama, 2, layers=4, width=128, heads=4, groups=2, hidden=352, vocabulary=1000, length=128
    ),
    "encoder_decoder": _small(
        encoder_decoder, 16, layers=2, width=128, heads=4, hidden=512, vocabulary=1000, length=64
    ),
    "mixture_of_experts": _small(
        mixture_of_experts,
        4,
        layers=3,
        width=128,
        heads=4,
        experts=4,
        hidden=512,
        vocabulary=1000,
        length=128,
    ),
    "efficientnet_b0": _small(
        efficientnet,
        8,
        stages=efficientnet.SIZES["efficientnet_b0"].stages[:4],
        image=64,
        classes=100,
    ),
    "deeplab": _small(
        deeplab, 2, blocks=(1, 1, 1, 1), base=16, pyramid=64, early=16, image=129, classes=21
    ),
    "diffusion_unet": _small(
        diffusion_unet, 8, widths=(32, 64), attention=(1,), heads=2, groups=8, image=32
    ),
    "graph_net": _small(
        graph_net, 8, rounds=4, width=64, kinds=20, waves=16, atoms=20, neighbours=12
    ),
    "state_space": _small(
        state_space,
        2,
        layers=3,
        width=128,
        heads=4,
        state=32,
        chunk=64,
        vocabulary=1000,
        length=256,
    ),
    "wavenet": _small(wavenet, 4, layers=6, width=32, skip=64, length=2000),
    "recommender": _small(recommender, 4096, rows=1000, width=32, bottom=(64,), top=(128, 64)),
    "two_tower": _small(
        two_tower,
        16,
        vision=two_tower.Tower(layers=3, width=128, heads=4),
        text=two_tower.Tower(layers=3, width=128, heads=4),
        image=64,
        vocabulary=1000,
        length=32,
        features=64,
    ),
    "flax_gru": _small(flax_gru, 32, width=128, vocabulary=500, steps=12),
    "physics_mlp": _small(physics_mlp, 2048, layers=4, width=64, border=256),
}
