"""A graph network for energies of molecules and materials, in plain JAX.

Sanchez-Gonzalez et al., "Learning to Simulate Complex Physics with Graph Networks" (2020), with an
energy at the end as in Godwin et al., "Simple GNN Regularisation for 3D Molecular Property
Prediction and Beyond" (2022): edges read the atoms at their ends, atoms read the sums of their
edges, round after round, both through MLPs with layer normalisation beside a shortcut. The graphs
of a batch are joined into one. Everything is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.networks.record import Network, checkpoint_policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The dimensions of a graph network.

    Attributes:
        rounds: How often messages are passed.
        width: Channels of an atom, of an edge, and inside the MLPs.
        kinds: Kinds of atoms.
        waves: Functions of the distance that an edge is described by.
        atoms: Atoms of a graph.
        neighbours: Edges that end at an atom.
        cutoff: Length of the longest edge.
    """

    rounds: int
    width: int
    kinds: int
    waves: int
    atoms: int
    neighbours: int
    cutoff: float = 6.0


SIZES: dict[str, Size] = {
    "graph_net": Size(rounds=8, width=256, kinds=100, waves=64, atoms=80, neighbours=32),
}


def _init_mlp(key: jax.Array, *widths: int) -> list[dict[str, jax.Array]]:
    keys = jax.random.split(key, len(widths) - 1)
    return [
        {
            "kernel": jax.random.normal(layer_key, (inputs, outputs)) / math.sqrt(inputs),
            "bias": jnp.zeros(outputs),
        }
        for layer_key, inputs, outputs in zip(keys, widths[:-1], widths[1:], strict=True)
    ]


def _init_branch(key: jax.Array, inputs: int, width: int) -> dict[str, Any]:
    return {
        "mlp": _init_mlp(key, inputs, width, width, width),
        "scale": jnp.ones(width),
        "bias": jnp.zeros(width),
    }


def init(key: jax.Array, size: Size) -> dict[str, Any]:
    """Returns freshly drawn parameters, float32."""
    atom_key, edge_key, energy_key, *round_keys = jax.random.split(key, 3 + size.rounds)
    width = size.width
    rounds = []
    for round_key in round_keys:
        to_edges, to_atoms = jax.random.split(round_key)
        rounds.append(
            {
                "edges": _init_branch(to_edges, 3 * width, width),
                "atoms": _init_branch(to_atoms, 2 * width, width),
            }
        )
    return {
        "kinds": jax.random.normal(atom_key, (size.kinds, width)),
        # A distance's waves and a direction.
        "edges": _init_branch(edge_key, size.waves + 3, width),
        "rounds": rounds,
        "energy": _init_mlp(energy_key, width, width, 1),
    }


def _mlp(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[..., inputs]` to `[..., outputs]`, with a SiLU between two layers."""
    *inner, last = params
    for layer in inner:
        x = jax.nn.silu(x @ layer["kernel"] + layer["bias"])
    y: jax.Array = x @ last["kernel"] + last["bias"]
    return y


def _branch(params: Any, x: jax.Array) -> jax.Array:
    """Maps `[..., inputs]` to `[..., width]` through an MLP and a normalisation."""
    y = _mlp(params["mlp"], x)
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    z: jax.Array = y * params["scale"] + params["bias"]
    return z


def _describe(vectors: jax.Array, size: Size) -> jax.Array:
    """Maps edges' vectors `[edges, 3]` to `[edges, waves + 3]`."""
    distances = jnp.sqrt(jnp.sum(jnp.square(vectors), axis=-1, keepdims=True))
    centres = jnp.linspace(0, size.cutoff, size.waves)
    waves = jnp.exp(-jnp.square((distances - centres) * size.waves / size.cutoff))
    return jnp.concatenate([waves, vectors / distances], axis=-1)


def network(name: str, size: Size, batch: int, block_policy: str | None) -> Network:
    """Builds a graph network with the mean squared error of the energies.

    `loss_fn(params, batch)` reads `batch["kinds"]` and `batch["graphs"]`, the kind of each atom and
    which graph it is in, both int32 `[atoms]` with the atoms of all graphs; `batch["senders"]` and
    `batch["receivers"]`, the atoms that an edge leads from and to, both int32 `[edges]`;
    `batch["vectors"]`, from one to the other, float32 `[edges, 3]`; and `batch["energies"]`,
    float32 `[batch]`.

    Args:
        name: The network's name.
        size: Its dimensions.
        batch: Graphs in a batch.
        block_policy: Wraps each round, and only those, in `jax.checkpoint` with this policy; None
            wraps nothing.
    """

    def pass_messages(
        params: Any, atoms: jax.Array, edges: jax.Array, senders: jax.Array, receivers: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        ends = jnp.concatenate([edges, atoms[senders], atoms[receivers]], axis=-1)
        edges = edges + _branch(params["edges"], ends)
        messages = jax.ops.segment_sum(edges, receivers, num_segments=atoms.shape[0])
        atoms = atoms + _branch(params["atoms"], jnp.concatenate([atoms, messages], axis=-1))
        return atoms, edges

    block = pass_messages
    if block_policy is not None:
        block = jax.checkpoint(pass_messages, policy=checkpoint_policy(block_policy))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        atoms = params["kinds"][batch["kinds"]]
        edges = _branch(params["edges"], _describe(batch["vectors"], size))
        for round_params in params["rounds"]:
            atoms, edges = block(round_params, atoms, edges, batch["senders"], batch["receivers"])
        each = _mlp(params["energy"], atoms)[:, 0]
        energies = batch["energies"]
        found = jax.ops.segment_sum(each, batch["graphs"], num_segments=energies.shape[0])
        return jnp.mean(jnp.square(found - energies))

    def make_arguments(seed: int) -> tuple[Any, Any]:
        keys = jax.random.split(jax.random.key(seed), 5)
        graphs = jnp.repeat(jnp.arange(batch), size.atoms)
        receivers = jnp.repeat(jnp.arange(batch * size.atoms), size.neighbours)
        # The sender is another atom of the same graph.
        steps = jax.random.randint(keys[1], receivers.shape, 1, size.atoms)
        first = receivers // size.atoms * size.atoms
        senders = first + (receivers - first + steps) % size.atoms
        return init(keys[0], size), {
            "kinds": jax.random.randint(keys[2], graphs.shape, 0, size.kinds),
            "graphs": graphs,
            "senders": senders,
            "receivers": receivers,
            "vectors": jax.random.normal(keys[3], (*receivers.shape, 3)),
            "energies": jax.random.normal(keys[4], (batch,)),
        }

    return Network(
        name=name,
        loss_fn=loss_fn,
        has_aux=False,
        make_arguments=make_arguments,
    )
