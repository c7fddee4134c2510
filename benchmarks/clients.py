"""MaxText's decoder with plans instead of its remat policy.

    python -m benchmarks.clients --device h200 --rows benchmarks/results/clients_h200.jsonl

MaxText is not a dependency: without it, an error says so. It needs Python 3.12, and what
``maxtext`` 0.2.5 imports without asking for it (``benchmarks/README.md``).

MaxText's own loss (``maxtext.trainers.pre_train.train.loss_fn``) of a small Llama-style decoder,
with its layers in one ``lax.scan`` and unrolled, is compiled in an Adam step with parameters and
state donated: with each of MaxText's remat policies, with a policy that saves everything, and with
plans whose budget is what each policy takes. MaxText puts a ``jax.checkpoint`` around each layer
whatever its policy, so plans are made with ``existing="replace"``.

``--equal`` runs one step on the CPU instead: loss and gradients with the decorator where a user
would put it, beside those without.

Recomputation is a share of a forward pass's FLOPs, counted in both.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

import remat_opt
from benchmarks.json_lines import JsonLines, row_of
from remat_opt import device as device_table
from remat_opt.measurement.compile_only import compile_only_devices
from remat_opt.program import flop_count
from remat_opt.training import training_step
from remat_opt.units import format_bytes, format_share

#: Policies by MaxText's names, from little memory to much. ``none`` is not included: MaxText then
#: passes no policy to ``jax.checkpoint``, as with ``full``.
POLICIES = (
    "full",
    "save_out_proj",
    "save_qkv_proj",
    "save_dot_except_mlp",
    "minimal",
    "minimal_with_context",
)
#: The name for no policy: nothing is recomputed.
PLAIN = "plain"


class Client:
    """MaxText's decoder, its loss, and the loss's arguments.

    Args:
      options: sizes, as on the command line.
      scanned: whether the layers are in one loop.
      policy: one of MaxText's names, or ``PLAIN``.
      devices: those of the mesh.

    Attributes:
      config: MaxText's.
    """

    def __init__(
        self, options: argparse.Namespace, scanned: bool, policy: str, devices: Any
    ) -> None:
        try:
            import maxtext
            from maxtext.configs import pyconfig
            from maxtext.utils import maxtext_utils
        except ImportError as error:
            raise SystemExit(f"No MaxText ({error}): see benchmarks/README.md.") from error
        self.config = pyconfig.initialize(
            ["", str(Path(maxtext.__file__).parent / "configs" / "base.yml")],
            **{"run_name": "remat_opt", "hardware": "cpu", "enable_checkpointing": False},
            **{"skip_jax_distributed_system": True, "log_config": False},
            **{"decoder_block": "llama2", "attention": "dot_product", "enable_dropout": False},
            **{"base_emb_dim": options.width, "base_mlp_dim": 4 * options.width},
            **{"base_num_query_heads": options.heads, "base_num_kv_heads": options.heads},
            head_dim=options.width // options.heads,
            base_num_decoder_layers=options.layers,
            vocab_size=options.vocabulary,
            max_target_length=options.tokens,
            per_device_batch_size=options.batch,
            dtype=options.dtype,
            scan_layers=scanned,
            remat_policy="full" if policy == PLAIN else policy,
        )
        self._mesh = maxtext_utils.get_mesh_from_config(self.config, devices)
        self._saves_all = policy == PLAIN

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """The context in which MaxText traces its model."""
        import flax.linen
        from maxtext.layers.nnx_decoders import NNXDecoder

        policy = NNXDecoder.get_remat_policy
        if self._saves_all:
            NNXDecoder.get_remat_policy = lambda _: jax.checkpoint_policies.everything_saveable
        try:
            with self._mesh, flax.linen.logical_axis_rules(self.config.logical_axis_rules):
                yield
        finally:
            NNXDecoder.get_remat_policy = policy

    def model(self) -> Any:
        """The model, with parameters."""
        from flax import nnx
        from maxtext.utils import model_creation_utils

        return model_creation_utils.from_config(self.config, mesh=self._mesh, rngs=nnx.Rngs(0))

    def batch(self) -> dict[str, jax.Array]:
        """Tokens, in MaxText's form."""
        shape = int(self.config.per_device_batch_size), int(self.config.max_target_length)
        inputs = jax.random.randint(jax.random.key(1), shape, 0, self.config.vocab_size)
        places = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        ones = jnp.ones(shape, inputs.dtype)
        return {
            **{"inputs": inputs, "inputs_position": places, "inputs_segmentation": ones},
            **{"targets": jnp.roll(inputs, -1, 1), "targets_position": places},
            "targets_segmentation": ones,
        }

    def loss(self, model: Any, loss_fn: Callable[..., Any]) -> tuple[Callable[..., Any], Any, Any]:
        """The loss of (parameters, (other state, batch)), split as in MaxText's step.

        Args:
          model: the model, or its shapes.
          loss_fn: MaxText's, decorated or not.

        Returns:
          The loss, the parameters, the other state.
        """
        from flax import nnx

        graph, parameters, rest = nnx.split(model, nnx.Param, ...)

        def loss(parameters: Any, state_and_batch: Any) -> Any:
            state, batch = state_and_batch
            merged = nnx.merge(graph, parameters, state, copy=True)
            with self.context():
                return loss_fn(merged, self.config, dict(batch), None, None, is_train=True)[0]

        return loss, parameters, rest

    def abstract(self) -> tuple[Callable[..., Any], tuple[Any, Any]]:
        """The loss, and the shapes of its arguments."""
        from flax import nnx
        from maxtext.trainers.pre_train import train

        with self.context():
            loss, parameters, rest = self.loss(nnx.eval_shape(self.model), train.loss_fn)
        return loss, _shapes((parameters, (rest, jax.eval_shape(self.batch))))


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def measured(options: argparse.Namespace, lines: JsonLines | None) -> Iterator[dict[str, Any]]:
    """Rows of every policy, and of a plan at the memory of each, for both programs."""
    for scanned in (True, False):
        yield from _rows(options, lines, scanned)


def _rows(
    options: argparse.Namespace, lines: JsonLines | None, scanned: bool
) -> Iterator[dict[str, Any]]:
    devices = compile_only_devices(device_table.get_device(options.device))[:1]
    plain, arguments = Client(options, scanned, PLAIN, devices).abstract()
    least = flop_count.gradient_flops(plain, *arguments)
    forward = flop_count.forward_flops(plain, *arguments)
    optimizer = optax.adam(1e-3)
    state = jax.eval_shape(optimizer.init, arguments[0])

    def row(label: str, make: Callable[[], tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
        heading = {
            "program": "scan" if scanned else "row",
            **{name: getattr(options, name) for name in _SIZES},
            **{"device": options.device, "step": "adam", "jax": jax.__version__},
            "label": label,
        }
        return row_of(lines, heading, lambda: compiled(make))

    def compiled(make: Callable[[], tuple[Any, dict[str, Any]]]) -> dict[str, Any]:
        try:
            loss, more = make()
        except remat_opt.BudgetError as error:
            return {"error": str(error)}
        found = remat_opt.measure(
            training_step(loss, optimizer),
            *(arguments[0], state, arguments[1]),
            device=options.device,
            donate_argnums=(0, 1),
        )
        flops = flop_count.gradient_flops(loss, *arguments) - least
        return {
            **more,
            "temporary_bytes": found.temporary_bytes,
            "recomputed_share": round(flops / forward, 4),
            "compile_seconds": round(found.compile_seconds, 1),
        }

    def planned(loss: Callable[..., Any], budget: int) -> tuple[Any, dict[str, Any]]:
        plan = remat_opt.make_plan(
            loss,
            *arguments,
            budget=budget,
            existing="replace",
            overhead="flops",
            device=options.device,
            verify="compile" if options.verify else False,
        )
        written = remat_opt.optimal_remat(loss, plan=plan, existing="replace")
        return written, {"predicted_bytes": plan.predicted.temporary_bytes}

    yield row(PLAIN, lambda: (plain, {}))
    for policy in POLICIES:
        loss, _ = Client(options, scanned, policy, devices).abstract()
        theirs = row(policy, functools.partial(_as_it_is, loss))
        yield theirs
        make = functools.partial(planned, loss, theirs["temporary_bytes"])
        yield row(f"within {policy}" + (", compiled" if options.verify else ""), make)


def _as_it_is(loss: Callable[..., Any]) -> tuple[Any, dict[str, Any]]:
    return loss, {}


def equal(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """One step of each program, decorated and not."""
    from maxtext.trainers.pre_train import train

    decorated = remat_opt.optimal_remat(
        train.loss_fn,
        has_aux=True,
        static_argnames="is_train",
        existing="replace",
        budget=0.5,
        errors="raise",
    )
    for scanned in (True, False):
        client = Client(options, scanned, "full", jax.devices()[:1])
        with client.context():
            model = client.model()
        found = []
        for loss_fn in (train.loss_fn, decorated):
            loss, parameters, rest = client.loss(model, loss_fn)
            batch = client.batch()
            found.append(jax.jit(jax.value_and_grad(loss))(parameters, (rest, batch)))
        (value, gradients), (our_value, our_gradients) = found
        yield {
            "program": "scan" if scanned else "row",
            "loss": float(value),
            "decorated_loss": float(our_value),
            "gradient_largest": max(float(jnp.abs(g).max()) for g in jax.tree.leaves(gradients)),
            "gradient_difference": max(
                float(jnp.abs(g - other).max())
                for g, other in zip(
                    jax.tree.leaves(gradients), jax.tree.leaves(our_gradients), strict=True
                )
            ),
        }


_SIZES = ("layers", "width", "heads", "tokens", "batch", "vocabulary", "dtype")


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.clients", description=__doc__)
    parser.add_argument("--device", default="v5e")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--dtype", default="bfloat16", help="of activations")
    parser.add_argument("--equal", action="store_true", help="run one step and compare")
    parser.add_argument("--verify", action="store_true", help='plan with verify="compile"')
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    lines = None if options.rows is None else JsonLines(options.rows)
    for row in equal(options) if options.equal else measured(options, lines):
        print(json.dumps(row) if options.json or options.equal else _line(row), flush=True)
    return 0


def _line(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['program']:<5} {row['label']:<36} {row['error'][:100]}"
    predicted = row.get("predicted_bytes")
    return (
        f"{row['program']:<5} {row['label']:<36} {format_bytes(row['temporary_bytes']):>10} "
        f"{format_bytes(predicted) if predicted else '':>10} "
        f"{format_share(row['recomputed_share']):>8} {row['compile_seconds']:>6.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
