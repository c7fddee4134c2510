"""A recommender in plain JAX: embedding bags, products between features, two MLPs.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems"
(2019), that is DLRM. A categorical feature of an example is a bag of ids, whose embeddings are
summed; the bags of a batch lie one after the other in one array. The loss is the binary
cross-entropy of a click. Everything is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a recommender.

    Attributes:
        dense: Features that are numbers.
        features: Features that are bags of ids.
        rows: Ids that each of them knows.
        ids: Ids of a bag, on average.
        width: Channels of an embedding.
        bottom: Channels inside the MLP for the numbers.
        top: Channels inside the MLP at the end.
    """

    dense: int
    features: int
    rows: int
    ids: int
    width: int
    bottom: tuple[int, ...]
    top: tuple[int, ...]


SIZES: dict[str, Size] = {
    "recommender": Size(
        dense=13,
        features=26,
        rows=40_000,
        ids=8,
        width=128,
        bottom=(512, 256),
        top=(1024, 1024, 512, 256),
    ),
}


def _init_mlp(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {
            "kernel": jax.random.normal(layer_key, (inputs, outputs)) * math.sqrt(2 / inputs),
            "bias": jnp.zeros(outputs),
        }
        for layer_key, inputs, outputs in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    bottom_key, top_key, *table_keys = jax.random.split(key, 2 + size.features)
    limit = 1 / math.sqrt(size.rows)
    pairs = (size.features + 1) * size.features // 2
    return {
        "tables": [
            jax.random.uniform(table_key, (size.rows, size.width), minval=-limit, maxval=limit)
            for table_key in table_keys
        ],
        "bottom": _init_mlp(bottom_key, size.dense, *size.bottom, size.width),
        "top": _init_mlp(top_key, size.width + pairs, *size.top, 1),
    }


def _bag(table: jax.Array, ids: jax.Array, examples: jax.Array, batch: int) -> jax.Array:
    """Sums the rows of each example's ids, `[batch, width]`."""
    return jax.ops.segment_sum(table[ids], examples, batch, indices_are_sorted=True)


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a recommender with its binary cross-entropy.

    `loss_fn(params, batch)` reads `batch["dense"]`, float32 `[batch, dense]`; `batch["ids"]` and
    `batch["examples"]`, the ids of each feature's bags and the examples that they belong to, both
    int32 `[features, batch * ids]`; and `batch["labels"]`, float32 `[batch]`, zero or one.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Examples in a batch.
        block_policy: Wraps both MLPs and the products between them, and only those, in
            `jax.checkpoint` with this policy; None wraps nothing.
    """

    def bottom(params: Any, x: jax.Array) -> jax.Array:
        for layer in params:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        return x

    def interact(x: jax.Array, bags: list[jax.Array]) -> jax.Array:
        vectors = jnp.stack([x, *bags], axis=1)
        products = jnp.einsum("bfw,bgw->bfg", vectors, vectors)
        row, column = np.tril_indices(vectors.shape[1], -1)
        return jnp.concatenate([x, products[:, row, column]], axis=-1)

    def top(params: Any, x: jax.Array) -> jax.Array:
        *inner, last = params
        for layer in inner:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"])
        logits: jax.Array = x @ last["kernel"] + last["bias"]
        return logits[:, 0]

    if block_policy is not None:
        policy = checkpoint_policy(block_policy)
        bottom = jax.checkpoint(bottom, policy=policy)
        interact = jax.checkpoint(interact, policy=policy)
        top = jax.checkpoint(top, policy=policy)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        labels = batch["labels"]
        bags = [
            _bag(table, batch["ids"][index], batch["examples"][index], labels.shape[0])
            for index, table in enumerate(params["tables"])
        ]
        x = bottom(params["bottom"], batch["dense"])
        logits = top(params["top"], interact(x, bags))
        return jnp.mean(jax.nn.softplus(logits) - labels * logits)

    def make_arguments(seed: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), 5)
        shape = (size.features, batch * size.ids)
        return init(keys[0], size), {
            "dense": jax.random.normal(keys[1], (batch, size.dense)),
            "ids": jax.random.randint(keys[2], shape, 0, size.rows),
            "examples": jnp.sort(jax.random.randint(keys[3], shape, 0, batch), axis=-1),
            "labels": jax.random.bernoulli(keys[4], 0.25, (batch,)).astype(jnp.float32),
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
