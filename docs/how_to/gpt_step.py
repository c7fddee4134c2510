"""The training step of a small GPT with Adam, too large for a TPU v5e: see explain.md."""

import jax
import jax.numpy as jnp
import optax


def attention(w, x):
    """Causal attention with 8 heads of 64."""
    q, k, v = (part.reshape(*x.shape[:2], 8, 64) for part in jnp.split(x @ w["qkv"], 3, axis=-1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type="float32")
    past = jnp.tril(jnp.ones(scores.shape[2:], bool))
    weights = jax.nn.softmax(jnp.where(past, scores / 8, -1e9)).astype(x.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ w["out"]


def mlp(w, x):
    """The feed-forward half of a block."""
    return jax.nn.gelu(x @ w["up"]) @ w["down"]


def norm(x):
    """RMS normalisation; what follows computes in bfloat16."""
    return (x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)).astype("bfloat16")


def loss(params, tokens):
    """Mean cross-entropy of the next token."""
    x = params["embed"][tokens[:, :-1]]
    for number, w in enumerate(params["blocks"]):
        with jax.named_scope(f"block_{number}"):
            w = jax.tree.map(lambda one: one.astype("bfloat16"), w)
            x = x + attention(w, norm(x))
            x = x + mlp(w, norm(x))
    logits = norm(x) @ params["embed"].T.astype("bfloat16")
    losses = optax.softmax_cross_entropy_with_integer_labels(
        logits.astype("float32"), tokens[:, 1:]
    )
    return jnp.mean(losses)


optimizer = optax.adam(3e-4)


def step(params, state, tokens):
    """One step of Adam."""
    updates, state = optimizer.update(jax.grad(loss)(params, tokens), state, params)
    return optax.apply_updates(params, updates), state


def example_args():
    """256 sequences of 1,024 tokens, as shapes."""
    shapes = {"qkv": (512, 1536), "out": (512, 512), "up": (512, 2048), "down": (2048, 512)}
    block = {name: jax.ShapeDtypeStruct(shape, "float32") for name, shape in shapes.items()}
    params = {"embed": jax.ShapeDtypeStruct((8192, 512), "float32"), "blocks": [block] * 4}
    state = jax.eval_shape(optimizer.init, params)
    return params, state, jax.ShapeDtypeStruct((256, 1025), "int32")
