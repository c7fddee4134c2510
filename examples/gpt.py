"""A transformer in flax.nnx, scanned over its layers, trained on the source of Python's argparse.

python examples/gpt.py
python examples/gpt.py --width 1024 --layers 24 --heads 16 --length 1024 --batch 16 --device h200
"""

import argparse
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from screen import flags, screen

import remat_opt


class Layer(nnx.Module):
    def __init__(self, width, heads, rngs):
        self.heads = heads
        self.before, self.between = nnx.LayerNorm(width, rngs=rngs), nnx.LayerNorm(width, rngs=rngs)
        self.mix = nnx.Linear(width, 3 * width, rngs=rngs)
        self.out = nnx.Linear(width, width, rngs=rngs)
        self.up, self.down = (
            nnx.Linear(width, 4 * width, rngs=rngs),
            nnx.Linear(4 * width, width, rngs=rngs),
        )

    def __call__(self, x):
        batch, length, width = x.shape
        parts = self.mix(self.before(x)).reshape(batch, length, 3, self.heads, -1)
        q, k, v = jnp.moveaxis(parts, 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
        seen = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(jax.nn.gelu(self.up(self.between(x))))


class GPT(nnx.Module):
    def __init__(self, width, layers, heads, length, rngs):
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(key):
            return Layer(width, heads, nnx.Rngs(key))

        self.tokens = nnx.Embed(256, width, rngs=rngs)
        self.places = nnx.Embed(length, width, rngs=rngs)
        self.layers = stacked(jax.random.split(rngs.params(), layers))
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, 256, rngs=rngs)


def loss_of(graph, params, wrap):
    """The loss as a function of the parameters, with every layer run in some way."""
    layer_graph = nnx.graphdef(nnx.merge(graph, params).layers)

    def loss_fn(params, text):
        model = nnx.merge(graph, params)

        def run(x, layer):
            return nnx.merge(layer_graph, layer)(x), None

        x = model.tokens(text[:, :-1]) + model.places(jnp.arange(text.shape[1] - 1))
        x, _ = jax.lax.scan(wrap(run), x, params["layers"])
        logits = model.head(model.norm(x))
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    return loss_fn


def main():
    options = flags(__doc__, width=64, layers=8, heads=4, length=64, batch=8)
    text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(
        len(text) - options.length, size=(options.steps, options.batch)
    )
    batches = [(text[start[:, None] + np.arange(options.length + 1)],) for start in starts]
    sizes = (options.width, options.layers, options.heads, options.length)
    graph, state = nnx.split(GPT(*sizes, nnx.Rngs(0)))
    params = nnx.to_pure_dict(state)

    # The one line.
    optimal = remat_opt.optimal_remat(budget=options.budget, device=options.device)
    loss_fn = optimal(loss_of(graph, params, lambda run: run))
    dots = jax.checkpoint_policies.dots_saveable
    by_hand = {
        "jax.checkpoint around every layer": loss_of(graph, params, jax.checkpoint),
        "... with dots_saveable": loss_of(
            graph, params, lambda run: jax.checkpoint(run, policy=dots)
        ),
    }
    batch = np.zeros((options.batch, options.length + 1), np.int32)
    title = f"GPT of {options.layers} scanned layers, {options.batch} texts of {options.length}"
    screen(title, loss_fn, (params, batch), by_hand, batches, options)


if __name__ == "__main__":
    main()
