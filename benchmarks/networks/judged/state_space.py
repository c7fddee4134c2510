"""A state-space language model in the manner of Mamba-2, in plain JAX, its layers in a Python loop.

Dao & Gu, "Transformers are SSMs" (2024): each head carries a matrix from token to token, which
decays at a rate that depends on the token. The chunked form of the paper's Listing 1 computes it
without a scan: products as in attention within a chunk, and states from chunk to chunk. Around it
are a short causal convolution, a gate and root-mean-square normalisation. Parameters are float32
and the computation is bfloat16; decays, states, normalisations and the cross-entropy are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.losses import cross_entropy
from benchmarks.networks.record import Network, checkpoint_policy

COMPUTE_DTYPE = jnp.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a state-space model.

    Attributes:
        layers: Number of layers.
        width: Channels of the residual stream; a layer has twice as many inside.
        heads: Heads; must divide `2 * width`.
        state: Channels of the state, for each channel of a head.
        chunk: Tokens of a chunk; must divide `length`.
        vocabulary: Number of tokens.
        length: Tokens in a sequence.
        taps: Tokens that the convolution sees.
    """

    layers: int
    width: int
    heads: int
    state: int
    chunk: int
    vocabulary: int
    length: int
    taps: int = 4

    @property
    def inner(self) -> int:
        """Channels inside a layer."""
        return 2 * self.width

    @property
    def convolved(self) -> int:
        """Channels that the convolution reads: a layer's values, and what enters and leaves."""
        return self.inner + 2 * self.state


SIZES: dict[str, Size] = {
    "state_space": Size(
        layers=8, width=768, heads=24, state=128, chunk=128, vocabulary=32_000, length=2048
    ),
}


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    token_key, *layer_keys = jax.random.split(key, 1 + size.layers)

    def layer(key: jax.Array) -> dict[str, jax.Array]:
        keys = jax.random.split(key, 4)
        outputs = size.inner + size.convolved + size.heads
        # Steps from 0.001 to 0.1, as softplus gives them.
        steps = jnp.exp(
            jax.random.uniform(keys[2], (size.heads,), minval=math.log(1e-3), maxval=math.log(0.1))
        )
        return {
            "norm": jnp.ones(size.width),
            "input": 0.02 * jax.random.normal(keys[0], (size.width, outputs)),
            "kernel": jax.random.normal(keys[1], (size.taps, size.convolved)) / size.taps,
            "kernel_bias": jnp.zeros(size.convolved),
            "step_bias": jnp.log(jnp.expm1(steps)),
            "log_rate": jnp.log(jnp.linspace(1, 16, size.heads)),
            "skip": jnp.ones(size.heads),
            "gate_norm": jnp.ones(size.inner),
            "output": 0.02 * jax.random.normal(keys[3], (size.inner, size.width)),
        }

    return {
        "tokens": 0.02 * jax.random.normal(token_key, (size.vocabulary, size.width)),
        "layers": [layer(layer_key) for layer_key in layer_keys],
        "final_norm": jnp.ones(size.width),
    }


def _rms_norm(scale: jax.Array, x: jax.Array) -> jax.Array:
    """Normalises `[..., width]` over its last axis in float32; the dtype stays."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    return (y * scale).astype(x.dtype)


def _convolve(params: Any, x: jax.Array) -> jax.Array:
    """Convolves each channel of `[batch, length, channels]` by itself with the tokens before."""
    taps, channels = params["kernel"].shape
    y = jax.lax.conv_general_dilated(
        x,
        params["kernel"].astype(x.dtype)[:, None],
        window_strides=(1,),
        padding=[(taps - 1, 0)],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=channels,
    )
    return jax.nn.silu(y + params["kernel_bias"].astype(x.dtype))


def _decays(logs: jax.Array) -> jax.Array:
    """Returns what is left of each token at each later one.

    Args:
        logs: Logarithms of what each token leaves of the ones before, `[..., length]`.

    Returns:
        `[..., length, length]`: the product of the decays after the second position up to the
        first, zero where the second is the later one.
    """
    length = logs.shape[-1]
    sums = jnp.cumsum(logs, axis=-1)
    between = sums[..., :, None] - sums[..., None, :]
    past = jnp.tril(jnp.ones((length, length), dtype=bool))
    return jnp.exp(jnp.where(past, between, -jnp.inf))


def _mix(
    x: jax.Array, logs: jax.Array, enter: jax.Array, leave: jax.Array, chunk: int
) -> jax.Array:
    """Sums for each token over those before it, weighed and decayed.

    Args:
        x: What the tokens bring, `[batch, length, heads, channels]`.
        logs: Logarithms of the decays, `[batch, length, heads]`, float32.
        enter: How a token enters the state, `[batch, length, state]`.
        leave: How a token reads the state, `[batch, length, state]`.
        chunk: Tokens of a chunk.

    Returns:
        `[batch, length, heads, channels]`.
    """
    batch, length, heads, channels = x.shape
    x = x.reshape(batch, -1, chunk, heads, channels)
    enter = enter.reshape(batch, -1, chunk, enter.shape[-1])
    leave = leave.reshape(batch, -1, chunk, leave.shape[-1])
    # [batch, heads, chunks, chunk]
    logs = logs.reshape(batch, -1, chunk, heads).transpose(0, 3, 1, 2)
    sums = jnp.cumsum(logs, axis=-1)

    # Within a chunk: like attention, with decays in place of a softmax.
    scores = jnp.einsum("bcqn,bckn->bcqk", leave, enter, preferred_element_type=jnp.float32)
    weights = (scores[:, None] * _decays(logs)).astype(x.dtype)
    within = jnp.einsum("bhcqk,bckhp->bcqhp", weights, x)

    # What each chunk adds to the state, and the state that each chunk starts from.
    left = jnp.exp(sums[..., -1:] - sums).transpose(0, 2, 3, 1)
    added = jnp.einsum(
        "bckn,bckhp->bchpn",
        enter,
        x * left[..., None].astype(x.dtype),
        preferred_element_type=jnp.float32,
    )
    added = jnp.pad(added, ((0, 0), (1, 0), (0, 0), (0, 0), (0, 0)))
    between = _decays(jnp.pad(sums[..., -1], ((0, 0), (0, 0), (1, 0))))
    states = jnp.einsum("bhzc,bchpn->bzhpn", between, added)[:, :-1]

    # What a chunk's tokens read from it.
    read = jnp.einsum("bcqn,bchpn->bcqhp", leave, states.astype(x.dtype))
    read = read * jnp.exp(sums).transpose(0, 2, 3, 1)[..., None].astype(x.dtype)
    return (within + read).reshape(batch, length, heads, channels)


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a state-space model with its next-token cross-entropy.

    `loss_fn(params, batch)` reads `batch["tokens"]` and `batch["targets"]`, both int32
    `[batch, length]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Sequences in a batch.
        block_policy: Wraps each layer, and only those, in `jax.checkpoint` with this policy; None
            wraps nothing.
    """

    def layer(params: Any, x: jax.Array) -> jax.Array:
        y = _rms_norm(params["norm"], x) @ params["input"].astype(x.dtype)
        gate, convolved, steps = jnp.split(y, [size.inner, size.inner + size.convolved], axis=-1)
        convolved = _convolve(params, convolved)
        values, enter, leave = jnp.split(convolved, [size.inner, size.inner + size.state], axis=-1)
        values = values.reshape(*values.shape[:2], size.heads, -1)
        steps = jax.nn.softplus(steps.astype(jnp.float32) + params["step_bias"])
        logs = -jnp.exp(params["log_rate"]) * steps
        brought = values * steps[..., None].astype(x.dtype)
        mixed = _mix(brought, logs, enter, leave, size.chunk)
        mixed = mixed + params["skip"].astype(x.dtype)[:, None] * values
        mixed = mixed.reshape(gate.shape) * jax.nn.silu(gate)
        z: jax.Array = _rms_norm(params["gate_norm"], mixed) @ params["output"].astype(x.dtype)
        return x + z

    block = layer
    if block_policy is not None:
        block = jax.checkpoint(layer, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x = params["tokens"].astype(COMPUTE_DTYPE)[batch["tokens"]]
        for layer_params in params["layers"]:
            x = block(layer_params, x)
        x = _rms_norm(params["final_norm"], x)
        logits = (x @ params["tokens"].astype(x.dtype).T).astype(jnp.float32)
        return cross_entropy(logits, batch["targets"])

    def make_arguments(seed: int) -> tuple[Any, Any]:
        init_key, text_key = jax.random.split(jax.random.key(seed))
        text = jax.random.randint(text_key, (batch, size.length + 1), 0, size.vocabulary)
        return init(init_key, size), {"tokens": text[:, :-1], "targets": text[:, 1:]}

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
