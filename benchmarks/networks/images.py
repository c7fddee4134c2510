"""From a flax model of images to a network: its loss, and the shapes of what that reads."""

from __future__ import annotations

from typing import Any

import jax
from flax import linen as nn

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network


def image_network(
    *,
    name: str,
    model: nn.Module,
    batch: int,
    image: tuple[int, int, int],
    classes: int,
    labels: tuple[int, ...] = (),
    batch_norm: bool = True,
    dropout: bool = False,
) -> Network:
    """Builds the softmax cross-entropy of a model.

    `loss_fn(params, batch)` reads `batch["images"]`, float32 `[batch, height, width, channels]`,
    and `batch["labels"]`, int32 `[batch, *labels]`. With batch normalisation it reads
    `batch["batch_stats"]` too, the running averages, and its auxiliary output is the averages after
    this step. They travel in the batch because no gradient is taken in them. With dropout it reads
    `batch["dropout_key"]`, a key of `jax.random.key`.

    Args:
        name: The network's name.
        model: Maps images to logits `[batch, *labels, classes]`.
        batch: Images in a batch.
        image: Height, width and channels of an image.
        classes: Number of classes.
        labels: Shape of one image's labels: `()` for one label, or that of a segmentation.
        batch_norm: Whether the model keeps running averages.
        dropout: Whether the model draws from the stream "dropout".
    """

    def streams(batch: Any) -> Any:
        return {"dropout": batch["dropout_key"]} if dropout else None

    def loss_with_averages(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        variables = {"params": params, "batch_stats": batch["batch_stats"]}
        logits, updated = model.apply(
            variables, batch["images"], mutable=["batch_stats"], rngs=streams(batch)
        )
        return cross_entropy(logits, batch["labels"]), updated["batch_stats"]

    def loss(params: Any, batch: Any) -> jax.Array:
        logits: Any = model.apply({"params": params}, batch["images"], rngs=streams(batch))
        return cross_entropy(logits, batch["labels"])

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, image_key, label_key = jax.random.split(jax.random.key(seed), 3)
        images = jax.random.normal(image_key, (batch, *image))
        drawn: dict[str, Any] = {
            "images": images,
            "labels": jax.random.randint(label_key, (batch, *labels), 0, classes),
        }
        if dropout:
            drawn["dropout_key"] = jax.random.key(seed + 1)
        # One image is enough to find the parameters' shapes.
        variables = model.init(init_key, images[:1])
        if batch_norm:
            drawn["batch_stats"] = variables["batch_stats"]
        return variables["params"], drawn

    return Network(
        name=name,
        loss_fn=loss_with_averages if batch_norm else loss,
        has_aux=batch_norm,
        make_arguments=make_arguments,
    )
