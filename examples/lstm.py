"""A stack of LSTMs, scanned over time, trained on the source of Python's argparse.

python examples/lstm.py
python examples/lstm.py --width 1024 --layers 4 --length 512 --batch 64 --device h200
"""

import argparse
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
from screen import flags, screen

import remat_opt


def parameters(width, layers):
    keys = iter(jax.random.split(jax.random.key(0), 2 + 2 * layers))

    def drawn(rows, columns):
        return jax.random.normal(next(keys), (rows, columns)) / np.sqrt(rows)

    return {
        "embed": drawn(256, width),
        "layers": [
            {
                "input": drawn(width, 4 * width),
                "state": drawn(width, 4 * width),
                "bias": jnp.zeros(4 * width),
            }
            for _ in range(layers)
        ],
        "head": drawn(width, 256),
    }


def step(layers, states, x):
    """All layers at one time: new states, and the hidden state of the last."""
    found = []
    for layer, (hidden, cell) in zip(layers, states, strict=True):
        gates = x @ layer["input"] + hidden @ layer["state"] + layer["bias"]
        enter, forget, candidate, leave = jnp.split(gates, 4, axis=-1)
        cell = jax.nn.sigmoid(forget + 1) * cell + jax.nn.sigmoid(enter) * jnp.tanh(candidate)
        x = jax.nn.sigmoid(leave) * jnp.tanh(cell)
        found.append((x, cell))
    return found, x


def loss_of(wrap):
    def loss_fn(params, text):
        def at_time(states, x):
            return step(params["layers"], states, x)

        inputs = params["embed"][text[:, :-1].T]
        zeros = jnp.zeros(inputs.shape[1:])
        states = [(zeros, zeros)] * len(params["layers"])
        _, tops = jax.lax.scan(wrap(at_time), states, inputs)
        logits = tops @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:].T).mean()

    return loss_fn


def main():
    options = flags(__doc__, width=64, layers=2, length=96, batch=16)
    text = np.frombuffer(inspect.getsource(argparse).encode(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(
        len(text) - options.length, size=(options.steps, options.batch)
    )
    batches = [(text[start[:, None] + np.arange(options.length + 1)],) for start in starts]

    # The one line.
    optimal = remat_opt.optimal_remat(budget=options.budget, device=options.device)
    loss_fn = optimal(loss_of(lambda at_time: at_time))
    dots = jax.checkpoint_policies.dots_saveable
    by_hand = {
        "jax.checkpoint around every time step": loss_of(jax.checkpoint),
        "... with dots_saveable": loss_of(lambda at_time: jax.checkpoint(at_time, policy=dots)),
    }
    batch = np.zeros((options.batch, options.length + 1), np.int32)
    example = (parameters(options.width, options.layers), batch)
    title = f"LSTM, {options.layers} layers, {options.batch} texts of {options.length}"
    screen(title, loss_fn, example, by_hand, batches, options)


if __name__ == "__main__":
    main()
