"""What only running on a device shows: loops, values on the host, a step that did not fit.

    python -m benchmarks.attached --save

Three programs, each in a step of Adam with donated state, float32 unless said:

*   ``scan``: 48 layers of a residual MLP in a ``lax.scan``: unchanged, with policies of
    ``jax.checkpoint`` on the body, and ours within the memory of each.
*   ``offload``: 24 such layers in a row: unchanged, with a checkpoint round each, and with a policy
    that moves each layer's hidden values to the host and back.
*   ``fit``: a GPT in bfloat16 at a batch that does not fit a large GPU: unchanged, with checkpoints
    round its layers, and ours with ``budget="fit"``.

All variants of a program take one step from the same state first: ``difference`` is the largest
relative difference of a loss or a parameter's norm to those of the first variant that ran. Then
they are timed in turns, as in ``benchmarks.step_time``, whose entries the rows have. On a CPU,
programs are small.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import remat_opt
from benchmarks import step_time
from benchmarks.json_lines import JsonLines
from benchmarks.networks.small import SMALL
from benchmarks.scans import POLICIES, layer, scan, twin
from benchmarks.step_time import Run, State
from remat_opt.training import training_step

PROGRAMS = ("scan", "offload", "fit")
_OPTIMIZER = optax.adam(1e-6)
#: Layers, rows and width of a residual MLP; on a CPU.
_SCAN, _SMALL_SCAN = (48, 4096, 1024), (6, 256, 64)
_OFFLOAD, _SMALL_OFFLOAD = (24, 16_384, 1024), (6, 256, 64)
#: Examples of 1,024 tokens.
_FIT_BATCH = 128

Loss = Callable[[Any, Any], jax.Array]
#: What to call it, the loss, and whether its budget is what a variant before it took.
Variant = tuple[str, Loss, str | None]


def _weights(layers: int, rows: int, width: int) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
    """Of a residual MLP, stacked by layer; and a batch."""
    first, second, third = jax.random.split(jax.random.key(0), 3)
    scale = 1 / math.sqrt(width)
    return (
        (
            scale * jax.random.normal(first, (layers, width, 4 * width)),
            scale * 0.5 * jax.random.normal(second, (layers, 4 * width, width)),
        ),
        jax.random.normal(third, (rows, width)),
    )


def _layers(layers: int, rows: int, width: int) -> tuple[list[Any], jax.Array]:
    """The same, layer by layer."""
    weights, batch = _weights(layers, rows, width)
    return list(zip(*weights, strict=True)), batch


def _scan_variants() -> Iterator[Variant]:
    yield "plain", scan, None
    for name in POLICIES:
        policy = getattr(jax.checkpoint_policies, name)
        yield name, functools.partial(scan, layer=jax.checkpoint(layer, policy=policy)), None
    for name in POLICIES:
        yield f"ours, memory of {name}", scan, name


def _named(h: jax.Array, w: Any) -> jax.Array:
    scale = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)
    return h + jax.nn.gelu(checkpoint_name((h * scale) @ w[0], "hidden")) @ w[1]


def _offload_variants() -> Iterator[Variant]:
    yield "plain", functools.partial(twin, layer=_named), None
    yield "checkpoint of each layer", functools.partial(twin, layer=jax.checkpoint(_named)), None
    save = jax.checkpoint_policies.save_only_these_names("hidden")
    yield (
        "hidden values kept",
        functools.partial(twin, layer=jax.checkpoint(_named, policy=save)),
        None,
    )
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["hidden"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    yield (
        "hidden values on the host",
        functools.partial(twin, layer=jax.checkpoint(_named, policy=offload)),
        None,
    )
    yield (
        "ours, memory of a checkpoint",
        functools.partial(twin, layer=_named),
        "checkpoint of each layer",
    )


class Program:
    """One program and its variants.

    Args:
      name: one of ``PROGRAMS``.
      small: whether it is small.
    """

    def __init__(self, name: str, *, small: bool) -> None:
        if name == "fit":
            batch = SMALL["gpt"].batch if small else _FIT_BATCH
            case = step_time.Case(network="gpt", step="adam", small=small, given_batch=batch)
            plain = case.build()
            self._make = functools.partial(plain.make_arguments, 0)
            self.variants: tuple[Variant, ...] = (
                ("plain", plain.loss_fn, None),
                ("checkpoint of each layer", case.build("nothing_saveable").loss_fn, None),
                ("ours, fit", plain.loss_fn, "fit"),
            )
        else:
            sizes, make, variants = {
                "scan": ((_SCAN, _SMALL_SCAN), _weights, _scan_variants),
                "offload": ((_OFFLOAD, _SMALL_OFFLOAD), _layers, _offload_variants),
            }[name]
            self._make = functools.partial(make, *sizes[small])
            self.variants = tuple(variants())

    def arrays(self) -> tuple[State, Any]:
        """A state and a batch, the same ones every time."""
        params, batch = self._make()
        found: tuple[State, Any] = jax.block_until_ready(((params, _OPTIMIZER.init(params)), batch))
        return found

    def compiled(self) -> tuple[dict[str, dict[str, Any]], dict[str, Any]]:
        """Entries of each variant's row by label, and the steps that compiled."""
        (params, state), batch = jax.eval_shape(self.arrays)
        rows: dict[str, dict[str, Any]] = {}
        steps: dict[str, Any] = {}
        for label, loss, budget_of in self.variants:
            row: dict[str, Any] = {}
            try:
                if budget_of is not None:
                    row["budget"] = rows.get(budget_of, {}).get("temporary_bytes", budget_of)
                    decorated = remat_opt.optimal_remat(loss)
                    plan = remat_opt.make_plan(
                        training_step(decorated, _OPTIMIZER),
                        params,
                        state,
                        batch,
                        budget=row["budget"],
                        donate_argnums=(0, 1),
                    )
                    row["predicted_temporary_bytes"] = plan.predicted.temporary_bytes
                    row["recomputed_flops_share"] = round(plan.predicted.recomputed_share, 4)
                    row["predicted_overhead_share"] = round(plan.predicted.overhead_share, 4)
                    loss = remat_opt.apply_plan(plan, loss)
                step = training_step(loss, _OPTIMIZER)
                steps[label], _ = step_time.compile_step(step, (params, state, batch), (0, 1))
                memory = steps[label].memory_analysis()
                row["temporary_bytes"] = memory.temp_size_in_bytes
                row["host_temporary_bytes"] = memory.host_temp_size_in_bytes
            except Exception as error:
                row["error"] = step_time.said(error)
            rows[label] = row
        return rows, steps

    def differences(self, steps: dict[str, Any]) -> dict[str, float | str]:
        """How far one step of each is from that of the first that runs, or why it does not run."""

        def facts(state: State, loss: jax.Array) -> list[float]:
            return [float(loss), *(float(jnp.linalg.norm(one)) for one in jax.tree.leaves(state))]

        wanted = None
        found: dict[str, float | str] = {}
        for label, step in steps.items():
            state, batch = self.arrays()
            try:
                *given, loss = step(*state, batch)
                seen = facts(tuple(given), loss)
                del given, loss
            except Exception as error:
                found[label] = step_time.said(error)
                continue
            finally:
                del state, batch
            wanted = wanted or seen
            found[label] = max(
                abs(one - other) / max(abs(other), 1e-30)
                for one, other in zip(seen, wanted, strict=True)
            )
        return found


def measured(name: str, *, small: bool, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each variant of a program."""
    device = jax.devices()[0]
    program = Program(name, small=small)
    heading = {
        "program": name,
        "small": small,
        "device_kind": device.device_kind,
        "jax": jax.__version__,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }
    rows, steps = program.compiled()
    for label, difference in program.differences(steps).items():
        if isinstance(difference, str):
            rows[label]["error"] = difference
            del steps[label]
        else:
            rows[label]["difference"] = difference
    runs: dict[str, Run] = {
        label: step_time.run_of(step, updates=True) for label, step in steps.items()
    }
    given = step_time.Prepared(rows=rows, runs=runs, arrays=program.arrays)
    timed = step_time.measured(given, rounds=rounds, seconds=seconds)
    return [{**heading, "variant": label, **row} for label, row in zip(rows, timed, strict=True)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attached",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--program", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    parser.add_argument("--rounds", type=int, default=10, help="at least so many (10)")
    parser.add_argument("--seconds", type=float, default=3, help="at least for so long (3)")
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--rows", type=Path, help="file to append rows to")
    file.add_argument("--save", action="store_true", help="the same, of the device's own name")
    given = parser.parse_args(arguments)
    device = jax.devices()[0]
    name = f"attached_{step_time.slug(device.device_kind)}.jsonl"
    path = step_time.RESULTS / name if given.save else given.rows
    lines = JsonLines(path) if path else None
    small = device.platform == "cpu"
    for program in given.program:
        for row in measured(program, small=small, rounds=given.rounds, seconds=given.seconds):
            print(json.dumps(row), flush=True)
            if lines is not None:
                lines.append(row)
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
