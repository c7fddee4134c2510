"""The same layers split over a mesh in several ways, by the compiler and by hand.

    python -m benchmarks.meshes --device h200:8 --json --rows benchmarks/results/meshes_h200.jsonl

Layers ``h + gelu(rmsnorm(h) @ w1) @ w2`` on eight devices: ``data`` splits the batch; ``fsdp`` the
parameters as well, which are gathered layer by layer; ``tensor`` the batch in four parts and the
hidden values in two. Each is written so that the compiler splits it (``compiler``), and as a
``shard_map`` around the whole network (``map``) or each layer (``layers``); with ``scan`` before
its name, the layers are in a loop, and such a map is around the loop or in it. With
``--collectives recompute`` plans may run collectives again.

Each is compiled in a step of Adam, with parameters and state donated: as it is, with policies of
``jax.checkpoint`` on each layer, and with plans for budgets from the least memory to what it takes
unchanged, evenly on a logarithmic scale. All bytes are those of one device. Recomputation is a
share of a forward pass's FLOPs. Each row is appended to ``--rows`` as soon as it is known, and
existing ones with the same version of JAX are not computed again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import remat_opt
from benchmarks.json_lines import JsonLines, row_of
from remat_opt.device import get_device
from remat_opt.training import training_step
from remat_opt.units import format_bytes, format_share

P = PartitionSpec
AXES = {"data": 4, "model": 2}
#: Along which axes the batch, and each of a layer's weights, are split.
EVERY = tuple(AXES)
SPLITS = {
    "data": (P(EVERY), (P(), P())),
    "fsdp": (P(EVERY), (P(EVERY), P(EVERY))),
    "tensor": (P("data"), (P(None, "model"), P("model"))),
}
_SCAN = "scan "
CASES = tuple(
    (scan + split, how)
    for scan in ("", _SCAN)
    for split in SPLITS
    for how in ("compiler", "map", "layers")
)
_OPTIMIZER = optax.adam(1e-3)
#: What is put on layers by hand, by label.
POLICIES: dict[str, Callable[..., Any] | None] = {
    "nothing_saveable": None,
    "dots_saveable": jax.checkpoint_policies.dots_saveable,
}
Loss = Callable[[Any, jax.Array], jax.Array]
#: Takes its input and its weights to its output.
Layer = Callable[[jax.Array, Any], jax.Array]


def layer(h: jax.Array, w: Any, split: str = "") -> jax.Array:
    """One layer; in a map, with the collectives that a way to split it needs."""
    w1, w2 = w
    if split == "fsdp":
        w1, w2 = (lax.all_gather(one, EVERY, tiled=True) for one in w)
    scale = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)
    more = jax.nn.gelu((h * scale) @ w1) @ w2
    return h + (lax.psum(more, "model") if split == "tensor" else more)


def network(w: Any, x: jax.Array, run: Layer) -> jax.Array:
    """All layers."""
    if isinstance(w, tuple):
        return lax.scan(lambda h, w: (run(h, w), None), x, w)[0]
    for one in w:
        x = run(x, one)
    return x


def loss_of(mesh: Mesh, split: str, how: str, layers: int, policy: str | None = None) -> Loss:
    """The loss, written in one of the ways.

    Args:
      mesh: the mesh.
      split: one of ``SPLITS``, with ``scan`` before it if the layers are in a loop.
      how: ``compiler``, ``map`` or ``layers``.
      layers: how many layers there are.
      policy: one of ``POLICIES``, to put on each layer.
    """
    own, in_a_loop = split.removeprefix(_SCAN), split.startswith(_SCAN)
    of_x, of_w = SPLITS[own]
    local = functools.partial(layer, split=own)
    run: Layer = layer if how == "compiler" else local
    if how == "layers":
        run = jax.shard_map(local, mesh=mesh, in_specs=(of_x, of_w), out_specs=of_x)
    if policy is not None:
        run = jax.checkpoint(run, policy=POLICIES[policy], prevent_cse=not in_a_loop)

    def loss(w: Any, x: jax.Array) -> jax.Array:
        if how == "compiler" and split == "fsdp":
            whole = NamedSharding(mesh, P())
            w = [tuple(lax.with_sharding_constraint(one, whole) for one in pair) for pair in w]
        found = jnp.mean(network(w, x, run) ** 2)
        return lax.pmean(found, of_x[0]) if how == "map" else found

    if how != "map":
        return loss
    specs: Any = _stacked(of_w) if in_a_loop else [of_w] * layers
    return jax.shard_map(loss, mesh=mesh, in_specs=(specs, of_x), out_specs=P())


def _stacked(specs: tuple[PartitionSpec, ...]) -> tuple[PartitionSpec, ...]:
    """How stacks of all layers are split: like one of them."""
    return tuple(P(None, *spec) for spec in specs)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to split and to write the layers, on one device.

    Attributes:
      heading: the entries that all its rows begin with.
      loss: the function.
      by_hand: the same with each of ``POLICIES`` on its layers.
      arguments: its parameters and batch, as shapes on the mesh.
      lines: existing rows, and where to write more; None to keep none.
    """

    heading: dict[str, Any]
    loss: Loss
    by_hand: Mapping[str, Loss]
    arguments: tuple[Any, Any]
    lines: JsonLines | None

    def plan(self, **wanted: Any) -> remat_opt.Plan:
        """A plan for it."""
        return remat_opt.make_plan(
            self.loss,
            *self.arguments,
            device=self.heading["device"],
            gradients="consumed",
            overhead="flops",
            collectives=self.heading["collectives"],
            **wanted,
        )

    def row(self, label: str, plan: remat_opt.Plan | None = None) -> dict[str, Any]:
        """A row: the function as it is, or with a plan."""

        def make() -> dict[str, Any]:
            loss = self.loss if plan is None else remat_opt.apply_plan(plan, self.loss)
            w, x = self.arguments
            state = jax.eval_shape(_OPTIMIZER.init, w)
            # Moments are split like their parameters.
            like = {one.shape: one.sharding for one in jax.tree.leaves(w)}
            state = jax.tree.map(
                lambda one: jax.ShapeDtypeStruct(
                    one.shape, one.dtype, sharding=like.get(one.shape)
                ),
                state,
            )
            step = training_step(loss, _OPTIMIZER)
            found = remat_opt.measure(
                step, w, state, x, device=self.heading["device"], donate_argnums=(0, 1)
            )
            told = self.plan(max_overhead=0.0) if plan is None else plan
            predicted = told.predicted
            return {
                "predicted_bytes": predicted.plain_temporary_bytes
                if plan is None
                else predicted.temporary_bytes,
                "recomputed_share": 0.0 if plan is None else round(predicted.recomputed_share, 4),
                "temporary_bytes": found.temporary_bytes,
                "compile_seconds": round(found.compile_seconds, 1),
            }

        return row_of(self.lines, {**self.heading, "label": label}, make)

    def unplanned(self) -> Iterator[dict[str, Any]]:
        """The rows of the function as it is, and with policies, which repeat collectives."""
        yield self.row("plain")
        for policy, loss in self.by_hand.items():
            yield dataclasses.replace(self, loss=loss).row(policy)

    def rows(self, budgets: int) -> Iterator[dict[str, Any]]:
        """All its rows."""
        yield from self.unplanned()
        found = self.plan(max_overhead=4.0).predicted
        least, most = found.temporary_bytes, found.plain_temporary_bytes
        for number in range(budgets):
            budget = round(least * (most / least) ** (number / budgets))
            yield self.row(f"budget {number + 1} of {budgets}", self.plan(budget=budget))


def mesh_of(device: str, axes: Mapping[str, int]) -> Mesh:
    """A mesh of a device's kind, attached or not, with these axes."""
    sizes, names = tuple(axes.values()), tuple(axes)
    if get_device(device).attached:
        return jax.make_mesh(sizes, names, axis_types=(AxisType.Auto,) * len(names))
    return remat_opt.make_mesh(device, sizes, names)


def cases(options: argparse.Namespace, lines: JsonLines | None) -> Iterator[Case]:
    """All ways to split and to write the layers."""
    mesh = mesh_of(options.device, AXES)

    def shape(extents: tuple[int, ...], spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(extents, jnp.float32, sharding=NamedSharding(mesh, spec))

    extents = (options.width, 4 * options.width), (4 * options.width, options.width)
    for split, how in CASES:
        if options.split and split != options.split:
            continue
        of_x, of_w = SPLITS[split.removeprefix(_SCAN)]
        if split.startswith(_SCAN):
            stacks = ((options.layers, *own) for own in extents)
            w: Any = tuple(map(shape, stacks, _stacked(of_w)))
        else:
            w = [tuple(map(shape, extents, of_w))] * options.layers
        written = functools.partial(loss_of, mesh, split, how, options.layers)
        parts = AXES["data"] if split.endswith("tensor") else AXES["data"] * AXES["model"]
        yield Case(
            heading={
                **{"split": split, "how": how, "layers": options.layers, "width": options.width},
                **{"batch": options.rows_of_batch, "device": options.device},
                **{"collectives": options.collectives, "jax": jax.__version__},
            },
            loss=written(),
            by_hand={policy: written(policy) for policy in POLICIES},
            arguments=(w, shape((parts * options.rows_of_batch, options.width), of_x)),
            lines=lines,
        )


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.meshes", description=__doc__)
    parser.add_argument("--device", default="h200:8")
    parser.add_argument("--split", choices=list(dict(CASES)), help="one of them; default: all")
    parser.add_argument("--collectives", default="keep", choices=("keep", "recompute"))
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4096, dest="rows_of_batch", help="of a device")
    parser.add_argument("--budgets", type=int, default=3)
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    lines = None if options.rows is None else JsonLines(options.rows)
    errors = []
    for case in cases(options, lines):
        for row in case.rows(options.budgets):
            errors.append(abs(row["predicted_bytes"] / row["temporary_bytes"] - 1))
            print(json.dumps(row) if options.json else line(row), flush=True)
    if not options.json:
        print(f"error: {statistics.median(errors):.1%} in the median, {max(errors):.1%} at worst")
    return 0


def line(row: dict[str, Any]) -> str:
    """A row as text."""
    return (
        f"{row['split']:<11} {row['how']:<9} {row['label']:<14} "
        f"{format_bytes(row['temporary_bytes']):>10} {format_bytes(row['predicted_bytes']):>10} "
        f"{format_share(row['recomputed_share']):>8} {row['compile_seconds']:>6.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
