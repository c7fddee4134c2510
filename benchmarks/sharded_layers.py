"""Layers as people write them on a mesh: a ``scan``, with a ``shard_map`` in its body.

    python -m benchmarks.sharded_layers --device h200:8 --json --rows FILE

``ring`` has ring attention: in the map a loop of its own, in which keys and values go round the
devices. ``experts`` has a mixture of experts, one for each device, to which ``all_to_all`` sends
what is routed there. Both compute in bfloat16, and split the weights of their MLP over the mesh.

Each is compiled in a step of Adam, with parameters and state donated: as it is, with policies of
``jax.checkpoint`` on the body, and with plans for at most some shares of a forward pass's FLOPs.
All bytes are those of one device. Policies repeat collectives; plans only with ``--collectives
recompute``. Rows are appended and resumed as by ``benchmarks.meshes``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.json_lines import JsonLines
from benchmarks.meshes import POLICIES, Case, line, mesh_of

P = PartitionSpec
DEVICES, AXIS = 8, "devices"
_HEADS = 8
#: A layer: takes the mesh, its weights and its input to its output.
Layer = Callable[[Mesh, Any, jax.Array], jax.Array]


def normalized(x: jax.Array) -> jax.Array:
    """Divided by the root of the mean square, computed in single precision."""
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention to the positions of all devices, whose keys and values come by one by one.

    Args:
      q: queries, positions x heads x width; those of this device.
      k: keys, likewise.
      v: values, likewise.
    """
    positions, heads, width = q.shape
    onwards = [(n, (n + 1) % DEVICES) for n in range(DEVICES)]

    def start(value: float, *shape: int) -> jax.Array:
        return lax.pcast(jnp.full(shape, value, jnp.float32), (AXIS,), to="varying")

    def turn(state: Any, _: None) -> tuple[Any, None]:
        k, v, largest, total, found = state
        scores = jnp.einsum("qhd,khd->hqk", q, k, preferred_element_type=jnp.float32)
        scores = scores / width**0.5
        now = jnp.maximum(largest, scores.max(-1))
        weights, before = jnp.exp(scores - now[..., None]), jnp.exp(largest - now)
        more = jnp.einsum(
            "hqk,khd->hqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        k, v = (lax.ppermute(one, AXIS, onwards) for one in (k, v))
        total = total * before + weights.sum(-1)
        return (k, v, now, total, found * before[..., None] + more), None

    state = (
        *(k, v, start(-1e30, heads, positions), start(0, heads, positions)),
        start(0, heads, positions, width),
    )
    (_, _, _, total, found), _ = lax.scan(turn, state, None, length=DEVICES)
    return jnp.einsum("hqd->qhd", found / total[..., None]).astype(q.dtype)


def ring(mesh: Mesh, w: Any, h: jax.Array) -> jax.Array:
    """Ring attention over the positions of all devices, and an MLP."""

    def attend(x: jax.Array, w: Any) -> jax.Array:
        q, k, v = (jnp.reshape(x @ one, (len(x), _HEADS, -1)) for one in w[:3])
        return ring_attention(q, k, v).reshape(x.shape) @ w[3]

    run = jax.shard_map(attend, mesh=mesh, in_specs=(P(AXIS), P()), out_specs=P(AXIS))
    h = h + run(normalized(h), w[:4])
    return h + jax.nn.gelu(normalized(h) @ w[4]) @ w[5]


def experts(mesh: Mesh, w: Any, h: jax.Array) -> jax.Array:
    """A mixture of experts, two for each position, and an MLP for all."""

    def mix(x: jax.Array, w: Any) -> jax.Array:
        chosen, which = lax.top_k(jax.nn.softmax((x @ w[0]).astype(jnp.float32)), 2)
        room = 2 * len(x) // DEVICES
        routed = jax.nn.one_hot(which, DEVICES, dtype=jnp.int32)  # positions x 2 x experts
        order = jnp.cumsum(routed.reshape(-1, DEVICES), 0).reshape(routed.shape) - 1
        routed = routed * (order < room)
        place = jax.nn.one_hot(jnp.sum(order * routed, -1), room)
        routed = routed.astype(place.dtype)
        sent = jnp.einsum("tke,tkr->ter", routed, place)
        back = jnp.einsum("tk,tke,tkr->ter", chosen, routed, place).astype(x.dtype)
        there = jnp.einsum("ter,tw->erw", sent.astype(x.dtype), x)
        there = lax.all_to_all(there, AXIS, 0, 1, tiled=True)
        made = jax.nn.gelu(jnp.einsum("erw,ewf->erf", there, w[1]))
        made = jnp.einsum("erf,efw->erw", made, w[2])
        return jnp.einsum("ter,erw->tw", back, lax.all_to_all(made, AXIS, 1, 0, tiled=True))

    specs = P(AXIS), (P(), P(AXIS), P(AXIS))
    run = jax.shard_map(mix, mesh=mesh, in_specs=specs, out_specs=P(AXIS))
    h = h + run(normalized(h), w[:3])
    return h + jax.nn.gelu(normalized(h) @ w[3]) @ w[4]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One kind of layer.

    Attributes:
      layer: the layer.
      weights: of a width, for each weight of it the shape, and how that is split.
    """

    layer: Layer
    weights: Callable[[int], list[tuple[tuple[int, ...], PartitionSpec]]]


def _mlp(width: int) -> list[tuple[tuple[int, ...], PartitionSpec]]:
    return [((width, 4 * width), P(None, AXIS)), ((4 * width, width), P(AXIS))]


PROGRAMS = {
    "ring": Program(
        layer=ring,
        weights=lambda width: [*[((width, width), P(None, AXIS))] * 4, *_mlp(width)],
    ),
    "experts": Program(
        layer=experts,
        weights=lambda width: [
            ((width, DEVICES), P()),
            ((DEVICES, width, 2 * width), P(AXIS)),
            ((DEVICES, 2 * width, width), P(AXIS)),
            *_mlp(width),
        ],
    ),
}


def loss_of(mesh: Mesh, layer: Layer, policy: str | None = None) -> Callable[..., jax.Array]:
    """The loss of stacked weights and a batch.

    Args:
      mesh: the mesh.
      layer: what the body of the loop does.
      policy: one of ``POLICIES``, to put on the body.
    """

    def step(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return layer(mesh, jax.tree.map(lambda one: one.astype(h.dtype), w), h), None

    body = step
    if policy is not None:
        body = jax.checkpoint(step, policy=POLICIES[policy], prevent_cse=False)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(lax.scan(body, x, w)[0].astype(jnp.float32)))

    return loss


def rows(
    options: argparse.Namespace, name: str, lines: JsonLines | None
) -> Iterator[dict[str, Any]]:
    """All rows of one program."""
    mesh = mesh_of(options.device, {AXIS: DEVICES})
    program = PROGRAMS[name]

    def shape(extents: tuple[int, ...], dtype: Any, *spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, dtype, sharding=NamedSharding(mesh, P(*spec)))

    w = tuple(
        shape((options.layers, *extents), jnp.float32, None, *spec)
        for extents, spec in program.weights(options.width)
    )
    x = shape((DEVICES * options.rows_of_batch, options.width), jnp.bfloat16, AXIS)
    written = functools.partial(loss_of, mesh, program.layer)
    case = Case(
        heading={
            **{"split": name, "how": "scan of maps", "layers": options.layers},
            **{"width": options.width, "batch": options.rows_of_batch, "device": options.device},
            **{"collectives": options.collectives, "jax": jax.__version__},
        },
        loss=written(),
        by_hand={policy: written(policy) for policy in POLICIES},
        arguments=(w, x),
        lines=lines,
    )
    yield from case.unplanned()
    for share in options.shares:
        plan = case.plan(max_overhead=share)
        yield case.row(f"at most {share:g} of a forward pass", plan)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.sharded_layers", description=__doc__
    )
    parser.add_argument("--device", default="h200:8")
    parser.add_argument("--program", choices=list(PROGRAMS), help="one of them; default: both")
    parser.add_argument("--collectives", default="keep", choices=("keep", "recompute"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=1024, dest="rows_of_batch", help="of a device")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.02, 0.2, 0.6, 1.0])
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    lines = None if options.rows is None else JsonLines(options.rows)
    for name in PROGRAMS if options.program is None else [options.program]:
        for row in rows(options, name, lines):
            print(json.dumps(row) if options.json else line(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
