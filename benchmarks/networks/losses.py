"""The loss that every benchmark network ends in."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean softmax cross-entropy, a scalar `[]` of the logits' dtype.

    Args:
        logits: `[..., classes]`.
        labels: `[...]`, integers below `classes`.
    """
    # Picking the label's logit, not multiplying by a one-hot array as large as the logits.
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - label_logits)
