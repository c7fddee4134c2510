"""WaveNet in plain JAX: causal convolutions along a waveform whose dilations double.

van den Oord et al., "WaveNet: A Generative Model for Raw Audio" (2016): gated activations, a
residual and a skip output of every layer, samples of 256 levels, and the cross-entropy of the next
one. Everything is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a WaveNet.

    Attributes:
        cycles: How often the dilations start again from one.
        layers: Layers of a cycle; the dilation doubles from each to the next.
        width: Channels of the residual stream, and of the gates.
        skip: Channels of the skip outputs.
        levels: Levels of a sample.
        length: Samples of a clip.
        taps: Samples that a convolution sees.
    """

    cycles: int
    layers: int
    width: int
    skip: int
    length: int
    levels: int = 256
    taps: int = 2


SIZES: dict[str, Size] = {
    "wavenet": Size(cycles=2, layers=10, width=64, skip=256, length=16_000),
}


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    level_key, inner_key, head_key, *layer_keys = jax.random.split(
        key, 3 + size.cycles * size.layers
    )
    width = size.width

    def dense(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
        kernel = jax.random.normal(key, (inputs, outputs)) / math.sqrt(inputs)
        return {"kernel": kernel, "bias": jnp.zeros(outputs)}

    def layer(key: jax.Array) -> dict[str, Any]:
        gate_key, residual_key, skip_key = jax.random.split(key, 3)
        kernel = jax.random.normal(gate_key, (size.taps, width, 2 * width))
        return {
            "gates": {
                "kernel": kernel / math.sqrt(size.taps * width),
                "bias": jnp.zeros(2 * width),
            },
            "residual": dense(residual_key, width, width),
            "skip": dense(skip_key, width, size.skip),
        }

    return {
        "levels": jax.random.normal(level_key, (size.levels, width)),
        "layers": [layer(layer_key) for layer_key in layer_keys],
        "inner": dense(inner_key, size.skip, size.skip),
        "head": dense(head_key, size.skip, size.levels),
    }


def _dense(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[..., inputs]` to `[..., outputs]`."""
    y: jax.Array = x @ params["kernel"] + params["bias"]
    return y


def _causal(params: Any, x: jax.Array, dilation: int) -> jax.Array:
    """Convolves `[batch, length, inputs]` with the samples before."""
    y = jax.lax.conv_general_dilated(
        x,
        params["kernel"],
        window_strides=(1,),
        padding=[(dilation * (params["kernel"].shape[0] - 1), 0)],
        rhs_dilation=(dilation,),
        dimension_numbers=("NWC", "WIO", "NWC"),
    )
    z: jax.Array = y + params["bias"]
    return z


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a WaveNet with the cross-entropy of every next sample.

    `loss_fn(params, batch)` reads `batch["samples"]` and `batch["targets"]`, both int32
    `[batch, length]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Clips in a batch.
        block_policy: Wraps each layer, and only those, in `jax.checkpoint` with this policy; None
            wraps nothing.
    """

    def layer(params: Any, x: jax.Array, dilation: int) -> tuple[jax.Array, jax.Array]:
        filters, gates = jnp.split(_causal(params["gates"], x, dilation), 2, axis=-1)
        y = jnp.tanh(filters) * jax.nn.sigmoid(gates)
        return x + _dense(params["residual"], y), _dense(params["skip"], y)

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy), static_argnums=(2,))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = params["levels"][batch["samples"]]
        total = jnp.zeros((*x.shape[:2], size.skip))
        for index, layer_params in enumerate(params["layers"]):
            x, skip = block(layer_params, x, 2 ** (index % size.layers))
            total = total + skip
        y = jax.nn.relu(_dense(params["inner"], jax.nn.relu(total)))
        return cross_entropy(_dense(params["head"], y), batch["targets"])

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, sample_key = jax.random.split(jax.random.key(seed))
        clips = jax.random.randint(sample_key, (batch, size.length + 1), 0, size.levels)
        return init(init_key, size), {"samples": clips[:, :-1], "targets": clips[:, 1:]}

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
