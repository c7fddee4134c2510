"""A scanned decoder with fully sharded parameters on a pod that you do not have.

    python -m benchmarks.pods --rows benchmarks/results/pods_v5e.jsonl
    python -m benchmarks.pods --layers 4 --width 512 --hidden 1408 --tokens 1024

A decoder as Llama has it (RMSNorm, rotary positions, SwiGLU) in one ``lax.scan`` over its layers:
weights in float32, products in bfloat16, loss and softmax in float32. Parameters and both of Adam's
moments are split over all chips of the pod along the width of the model, and so is the batch: one
sequence a chip. The step, with parameters and state donated, is compiled as it is, with policies of
``jax.checkpoint`` on the body of the scan, and with plans of ours: for ``budget="fit"``, and for
the temporaries that each policy compiles to. All bytes are those of one chip.

Recomputation is in FLOPs of the whole pod, as a share of one forward pass. Each row is appended to
``--rows`` as soon as it is known, and existing ones with the same version of JAX are not computed
again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import remat_opt
from benchmarks.json_lines import JsonLines, row_of
from remat_opt.measurement.compilation import compiler_version, resolve_device
from remat_opt.program import flop_count
from remat_opt.training import training_step
from remat_opt.units import format_bytes, format_share

POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
AXIS = "fsdp"
_HEAD, _EPSILON = 128, 1e-6
_OPTIMIZER = optax.adam(1e-3)
Layer = Callable[[jax.Array, Any], jax.Array]
Loss = Callable[[Any, jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a decoder and its batch.

    Attributes:
      layers: number of layers.
      width: width of the model; heads are 128 wide.
      hidden: width inside the MLPs.
      tokens: length of a sequence.
      sequences: number of sequences in the whole pod's batch.
      vocabulary: number of distinct tokens.
    """

    layers: int
    width: int
    hidden: int
    tokens: int
    sequences: int
    vocabulary: int


def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMSNorm, computed in float32."""
    wide = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + _EPSILON)
    return (wide * inverse * scale).astype(x.dtype)


def rotated(x: jax.Array) -> jax.Array:
    """Rotary positions, for (batch, tokens, heads, width of a head)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = jnp.arange(x.shape[1], dtype=jnp.float32)[:, None] * rates
    sine, cosine = (f(angles)[None, :, None, :].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    left, right = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([left * cosine - right * sine, right * cosine + left * sine], axis=-1)


def layer(x: jax.Array, w: Any) -> jax.Array:
    """One layer, for (batch, tokens, width)."""

    def product(x: jax.Array, name: str) -> jax.Array:
        return x @ w[name].astype(x.dtype)

    y = normed(x, w["attention_scale"])
    q, k, v = (
        product(y, name).reshape(*y.shape[:2], -1, _HEAD) for name in ("query", "key", "value")
    )
    attended = jax.nn.dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
    x = x + product(attended.reshape(x.shape), "output")
    y = normed(x, w["mlp_scale"])
    return x + product(jax.nn.silu(product(y, "gate")) * product(y, "up"), "down")


def decoder(mesh: Mesh, layer: Layer = layer) -> Loss:
    """The loss of a decoder whose activations are split by sequences over the mesh."""
    by_sequence = NamedSharding(mesh, PartitionSpec(AXIS))

    def loss(w: Any, tokens: jax.Array) -> jax.Array:
        def body(x: jax.Array, one: Any) -> tuple[jax.Array, None]:
            return lax.with_sharding_constraint(layer(x, one), by_sequence), None

        x = w["embedding"].astype(jnp.bfloat16)[tokens]
        x = lax.with_sharding_constraint(x, by_sequence)
        x, _ = lax.scan(body, x, w["layers"])
        x = normed(x, w["last_scale"])
        logits = (x @ w["head"].astype(x.dtype)).astype(jnp.float32)
        found = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
        return jnp.mean(jax.nn.logsumexp(logits[:, :-1], axis=-1) - found)

    return loss


def arguments(sizes: Sizes, mesh: Mesh) -> tuple[Any, jax.ShapeDtypeStruct]:
    """Shapes of parameters and tokens, split over the mesh."""

    def of(dtype: Any, shape: tuple[int, ...], *spec: str | None) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    weight = functools.partial(of, jnp.float32)
    many, wide, hidden = sizes.layers, sizes.width, sizes.hidden
    into = {"query": wide, "key": wide, "value": wide, "gate": hidden, "up": hidden}
    out_of = {"output": wide, "down": hidden}
    layers = {
        **{name: weight((many, wide, size), None, AXIS, None) for name, size in into.items()},
        **{name: weight((many, size, wide), None, None, AXIS) for name, size in out_of.items()},
        **{name: weight((many, wide), None, AXIS) for name in ("attention_scale", "mlp_scale")},
    }
    parameters = {
        "layers": layers,
        "embedding": weight((sizes.vocabulary, wide), None, AXIS),
        "last_scale": weight((wide,), AXIS),
        "head": weight((wide, sizes.vocabulary), AXIS, None),
    }
    return parameters, of(jnp.int32, (sizes.sequences, sizes.tokens), AXIS)


class Case:
    """The decoder on a pod.

    Args:
      pod: such as ``v5e:4x4``, with as many chips as the batch has sequences.
      sizes: the decoder's sizes.
      lines: existing rows, and where to write more; None to keep none.
    """

    def __init__(self, pod: str, sizes: Sizes, lines: JsonLines | None) -> None:
        self._device = resolve_device(pod)
        self._mesh = remat_opt.make_mesh(pod, (sizes.sequences,), (AXIS,))
        self._loss = decoder(self._mesh)
        self._arguments = arguments(sizes, self._mesh)
        self._heading = {
            "program": "decoder",
            "device": pod,
            **dataclasses.asdict(sizes),
            "step": "adam",
            "jax": jax.__version__,
            "compiler": compiler_version(self._device),
        }
        self._lines = lines
        self._forward_flops = flop_count.forward_flops(self._loss, *self._arguments)
        self._gradient_flops = flop_count.gradient_flops(self._loss, *self._arguments)

    def plain(self) -> dict[str, Any]:
        """The row of the decoder as it is."""
        return self._row("plain", "plain", lambda: (self._loss, {}))

    def policy(self, name: str) -> dict[str, Any]:
        """The row of a policy of ``jax.checkpoint`` on the body of the scan."""

        def make() -> tuple[Loss, dict[str, Any]]:
            policy = getattr(jax.checkpoint_policies, name)
            return decoder(self._mesh, jax.checkpoint(layer, policy=policy, prevent_cse=False)), {}

        return self._row("policy", name, make)

    def planned(self, label: str, budget: int | str, *, verify: bool) -> dict[str, Any]:
        """The row of a plan.

        Args:
          label: what it is.
          budget: as ``make_plan`` takes it.
          verify: whether to choose by compiling.
        """

        def make() -> tuple[Loss, dict[str, Any]]:
            started = time.perf_counter()
            plan = remat_opt.make_plan(
                _step(remat_opt.optimal_remat(self._loss)),
                *self._of_step(),
                donate_argnums=(0, 1),
                device=self._device,
                budget=budget,
                overhead="flops",
                verify="compile" if verify else False,
            )
            return remat_opt.apply_plan(plan, self._loss), {
                "budget_bytes": plan.budget_bytes,
                "predicted_bytes": plan.predicted.temporary_bytes,
                "predicted_plain_bytes": plan.predicted.plain_temporary_bytes,
                "plan_seconds": round(time.perf_counter() - started, 1),
            }

        return self._row("ours", label, make)

    def _row(
        self, kind: str, label: str, make: Callable[[], tuple[Loss, dict[str, Any]]]
    ) -> dict[str, Any]:
        """A row, taken from the file if present; ``make`` gives the loss, and more entries."""
        heading = {**self._heading, "kind": kind, "label": label}
        return row_of(self._lines, heading, lambda: self._compiled(make))

    def _compiled(self, make: Callable[[], tuple[Loss, dict[str, Any]]]) -> dict[str, Any]:
        try:
            loss, row = make()
            flops = flop_count.gradient_flops(loss, *self._arguments) - self._gradient_flops
            row["recomputed_share"] = round(flops / self._forward_flops, 4)
        except remat_opt.BudgetError as error:
            return {"error": str(error)}
        try:
            found = remat_opt.measure(
                _step(loss), *self._of_step(), device=self._device, donate_argnums=(0, 1)
            )
        except remat_opt.CompileError as error:
            if error.needed_bytes is None:
                raise
            return {**row, "error": "does not fit", "needed_bytes": error.needed_bytes}
        return {
            **row,
            "temporary_bytes": found.temporary_bytes,
            "argument_bytes": found.argument_bytes,
            "peak_bytes": found.device_bytes,
            "compile_seconds": round(found.compile_seconds, 1),
        }

    def _of_step(self) -> tuple[Any, Any, Any]:
        """The step's arguments: parameters, Adam's state split like them, tokens."""
        parameters, tokens = self._arguments
        state = optax.tree_utils.tree_map_params(
            _OPTIMIZER,
            lambda _, parameter: parameter,
            jax.eval_shape(_OPTIMIZER.init, parameters),
            parameters,
        )
        return parameters, state, tokens


def _step(loss: Loss) -> Callable[..., Any]:
    return training_step(loss, _OPTIMIZER)


def rows(case: Case, *, verify: bool) -> Iterator[dict[str, Any]]:
    """All rows of a case."""
    yield case.plain()
    suffix = ", compiled" if verify else ""
    yield case.planned(f"fit{suffix}", "fit", verify=verify)
    for name in POLICIES:
        row = case.policy(name)
        yield row
        if "temporary_bytes" in row:
            yield case.planned(f"within {name}{suffix}", row["temporary_bytes"], verify=verify)


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pods", description=__doc__)
    parser.add_argument("--pod", default="v5e:4x4")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=11008)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--sequences", type=int, default=16, help="in all: one for each chip")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--verify", action="store_true", help="choose plans by compiling")
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    sizes = Sizes(
        **{field.name: getattr(options, field.name) for field in dataclasses.fields(Sizes)}
    )
    lines = None if options.rows is None else JsonLines(options.rows)
    for row in rows(Case(options.pod, sizes, lines), verify=options.verify):
        print(json.dumps(row) if options.json else _line(row), flush=True)
    return 0


def _line(row: dict[str, Any]) -> str:
    def amount(name: str) -> str:
        return f"{format_bytes(row[name]) if row.get(name) else '':>10}"

    share = row.get("recomputed_share")
    return (
        f"{row['label']:<46} {amount('temporary_bytes')} {amount('predicted_bytes')} "
        f"{amount('argument_bytes')} {amount('peak_bytes')} "
        f"{format_share(share) if share is not None else '':>8} {row.get('error', '')}"
        f"{amount('needed_bytes')}"
    )


if __name__ == "__main__":
    sys.exit(main())
