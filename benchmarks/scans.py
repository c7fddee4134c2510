"""Loops compared with the same layers unrolled, and an LSTM in little memory.

    python -m benchmarks.scans --device h200 --json --rows benchmarks/results/scans_h200.jsonl

Layers ``h + gelu(rmsnorm(h) @ w1) @ w2`` are written twice: as one ``lax.scan`` (``scan``) and
unrolled (``twin``). Each is planned for budgets from the least memory to what it takes unchanged,
evenly on a logarithmic scale, and each plan is compiled in the step: the gradient alone, or
``adam``, with parameters and state donated. The scan is also compiled as it is, and with the
policies of ``jax.checkpoint`` on its body; what each of these takes is the budget of one more plan.
The summary says how far compiled bytes are from predicted ones, and how much more than its twin the
scan recomputes, interpolating linearly between the twin's plans on both sides of its compiled
bytes.

``--program lstm``: 400 steps, the gradient alone, at 1, 5 and 20 % of what compiles without a plan,
beside Revolve's figure for as many whole states as the same memory holds. What a step takes besides
them is read from a compiled program that keeps a known number of states (``snapshots``).

Recomputation is a share of a forward pass's FLOPs, as in plans. Each row is appended to ``--rows``
as soon as it is known, and existing ones with the same version of JAX are not computed again.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax

import remat_opt
from benchmarks.compiled import STEPS
from benchmarks.json_lines import JsonLines, row_of
from remat_opt.plan import Plan
from remat_opt.solvers import binomial
from remat_opt.training import training_step
from remat_opt.units import format_bytes, format_share

POLICIES = ("nothing_saveable", "dots_saveable", "dots_with_no_batch_dims_saveable")
LSTM_SHARES = (0.01, 0.05, 0.2)
#: Steps of the LSTM, and how many of these are a chunk where only whole states are kept.
_LSTM_STEPS, _LSTM_CHUNK = 400, 20
#: How many arrays an LSTM's state has.
_LSTM_STATE = 2
Layer = Callable[[jax.Array, Any], jax.Array]


def layer(h: jax.Array, w: Any) -> jax.Array:
    """One layer."""
    scale = lax.rsqrt(jnp.mean(h * h, axis=-1, keepdims=True) + 1e-6)
    return h + jax.nn.gelu((h * scale) @ w[0]) @ w[1]


def scan(w: Any, x: jax.Array, *, layer: Layer = layer) -> jax.Array:
    """All layers in a loop."""
    return jnp.mean(lax.scan(lambda h, w: (layer(h, w), None), x, w)[0] ** 2)


def twin(w: Any, x: jax.Array, *, layer: Layer = layer) -> jax.Array:
    """All layers, unrolled."""
    for one in w:
        x = layer(x, one)
    return jnp.mean(x**2)


def lstm(w: Any, rows: jax.Array) -> jax.Array:
    """An LSTM that reads one row after the other."""
    start = _lstm_start(w, rows)
    return jnp.mean(lax.scan(functools.partial(_lstm_step, w), start, rows)[0][0] ** 2)


def lstm_in_chunks(w: Any, rows: jax.Array) -> jax.Array:
    """The same; it keeps the states between chunks, and between the steps of one chunk."""
    step = jax.checkpoint(functools.partial(_lstm_step, w), prevent_cse=False)

    def chunk(state: Any, rows: jax.Array) -> Any:
        return lax.scan(step, state, rows)

    chunks = rows.reshape(-1, _LSTM_CHUNK, *rows.shape[1:])
    start = _lstm_start(w, rows)
    return jnp.mean(lax.scan(jax.checkpoint(chunk, prevent_cse=False), start, chunks)[0][0] ** 2)


def _lstm_start(w: Any, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
    zeros = jnp.zeros((rows.shape[1], w["h"].shape[0]))
    return zeros, zeros


def _lstm_step(w: Any, state: Any, row: jax.Array) -> Any:
    h, c = state
    i, f, g, o = jnp.split(row @ w["x"] + h @ w["h"] + w["b"], 4, axis=-1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None


def _floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


class Case:
    """One function on one device.

    Args:
      heading: the entries that all its rows begin with.
      loss: the function, of parameters and a batch.
      arguments: both.
      lines: existing rows, and where to write more; None to keep none.
    """

    def __init__(
        self,
        heading: dict[str, Any],
        loss: Callable[..., jax.Array],
        arguments: tuple[Any, Any],
        lines: JsonLines | None,
    ) -> None:
        self.heading = heading
        self.loss = loss
        self.arguments = arguments
        self._lines = lines
        self._wanted = {
            "device": heading["device"],
            "gradients": STEPS[heading["step"]].value,
            "overhead": "flops",
        }

    def plan(self, **wanted: Any) -> Plan:
        """A plan for it."""
        return remat_opt.make_plan(self.loss, *self.arguments, **self._wanted, **wanted)

    def row(
        self, kind: str, label: str, make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
    ) -> dict[str, Any]:
        """A row, taken from the file if present.

        Args:
          kind: ``plain``, ``policy`` or ``ours``.
          label: what to call it.
          make: gives the loss to compile, and further entries.
        """
        heading = {**self.heading, "kind": kind, "label": label}
        return row_of(self._lines, heading, lambda: self._compiled(make))

    def _compiled(
        self, make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]]
    ) -> dict[str, Any]:
        loss, more = make()
        arguments: tuple[Any, ...] = self.arguments
        donated: tuple[int, ...] = ()
        if self.heading["step"] == "gradient":
            step = jax.grad(loss)
        else:
            optimizer = optax.adam(1e-3)
            state = jax.eval_shape(optimizer.init, self.arguments[0])
            step = training_step(loss, optimizer)
            arguments, donated = (arguments[0], state, arguments[1]), (0, 1)
        found = remat_opt.measure(
            step, *arguments, device=self.heading["device"], donate_argnums=donated
        )
        return {
            **more,
            "temporary_bytes": found.temporary_bytes,
            "compile_seconds": round(found.compile_seconds, 1),
        }

    def planned(self, label: str, budget: int) -> dict[str, Any]:
        """A row of a plan."""

        def make() -> tuple[Callable[..., Any], dict[str, Any]]:
            plan = self.plan(budget=budget)
            return remat_opt.apply_plan(plan, self.loss), {
                "budget_bytes": budget,
                "predicted_bytes": plan.predicted.temporary_bytes,
                "recomputed_share": round(plan.predicted.recomputed_share, 4),
            }

        return self.row("ours", label, make)

    def plain(self) -> dict[str, Any]:
        """The row of the function as it is."""
        return self.row("plain", "plain", lambda: (self.loss, {"recomputed_share": 0.0}))

    def budgets(self, count: int) -> list[int]:
        """Bytes from the least that plans need to what the unchanged function takes."""
        found = self.plan(max_overhead=4.0).predicted
        least, most = found.temporary_bytes, found.plain_temporary_bytes
        return [
            max(least, round(least * (most / least) ** (n / max(1, count - 1))))
            for n in range(count)
        ]


def layers(options: argparse.Namespace, lines: JsonLines | None) -> Iterator[dict[str, Any]]:
    """Rows of the layers, and the summary."""
    shapes = (options.width, 4 * options.width), (4 * options.width, options.width)
    stacked = tuple(_floats(options.layers, *shape) for shape in shapes)
    apart = [tuple(_floats(*shape) for shape in shapes) for _ in range(options.layers)]
    x = _floats(options.rows_of_batch, options.width)
    made: dict[str, list[dict[str, Any]]] = {}
    for name, loss, w in (("scan", scan, stacked), ("twin", twin, apart)):
        heading = {
            "program": name,
            **{"layers": options.layers, "width": options.width, "batch": options.rows_of_batch},
            **{"device": options.device, "step": options.step, "jax": jax.__version__},
        }
        case = Case(heading, loss, (w, x), lines)
        rows = [case.plain()]
        yield rows[0]
        for policy in POLICIES if name == "scan" else ():
            rows.append(case.row("policy", policy, functools.partial(_with_policy, policy)))
            yield rows[-1]
            rows.append(case.planned(f"within {policy}", rows[-1]["temporary_bytes"]))
            yield rows[-1]
        for number, budget in enumerate(case.budgets(options.budgets)):
            rows.append(case.planned(f"budget {number + 1} of {options.budgets}", budget))
            yield rows[-1]
        made[name] = rows
    yield {**heading, "program": "both", "kind": "summary", **summary(made["scan"], made["twin"])}


def _with_policy(name: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    policy = getattr(jax.checkpoint_policies, name)
    body = jax.checkpoint(layer, policy=policy, prevent_cse=False)
    return functools.partial(scan, layer=body), {}


def summary(scans: Sequence[dict[str, Any]], twins: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How plans of a scan compare with those of its twin.

    Args:
      scans: rows of the scan.
      twins: rows of its twin.

    Returns:
      ``error_median`` and ``error_worst`` of predicted against compiled bytes;
      ``more_than_twin_median`` and ``more_than_twin_worst``: by how much of a forward pass the scan
      recomputes more than its twin at its compiled bytes, for plans within the twin's range, and
      ``ratio_worst``, what it recomputes over what the twin does.
    """
    ours = [row for row in scans if row["kind"] == "ours"]
    errors = [abs(row["predicted_bytes"] / row["temporary_bytes"] - 1) for row in ours]
    beside = [
        (row["recomputed_share"], at_same)
        for row in ours
        if row["label"].startswith("budget")
        and (at_same := recomputed_at(twins, row["temporary_bytes"])) is not None
    ]
    more = [own - other for own, other in beside]
    ratios = [own / other for own, other in beside if other > 0]
    return {
        "error_median": round(statistics.median(errors), 4),
        "error_worst": round(max(errors), 4),
        "compared": len(beside),
        "more_than_twin_median": round(statistics.median(more), 4) if more else None,
        "more_than_twin_worst": round(max(more), 4) if more else None,
        "ratio_worst": round(max(ratios), 4) if ratios else None,
    }


def recomputed_at(rows: Sequence[dict[str, Any]], size: int) -> float | None:
    """What plans recompute at a number of compiled bytes, interpolated between two of them.

    None with less memory than any of them needs. A plan that takes more memory than another and
    recomputes more does not count.
    """
    best: list[tuple[int, float]] = []
    for point in sorted((row["temporary_bytes"], row["recomputed_share"]) for row in rows):
        if not best or point[1] < best[-1][1]:
            best.append(point)
    below = [point for point in best if point[0] <= size]
    above = [point for point in best if point[0] > size]
    if not below:
        return None
    if not above:
        return below[-1][1]
    (low, more), (high, less) = below[-1], above[0]
    return more + (less - more) * (size - low) / (high - low)


def recurrent(options: argparse.Namespace, lines: JsonLines | None) -> Iterator[dict[str, Any]]:
    """Rows of the LSTM."""
    width, batch = options.width, options.rows_of_batch
    heading = {
        "program": "lstm",
        **{"layers": _LSTM_STEPS, "width": width, "batch": batch},
        **{"device": options.device, "step": "gradient", "jax": jax.__version__},
    }
    w = {"x": _floats(32, 4 * width), "h": _floats(width, 4 * width), "b": _floats(4 * width)}
    case = Case(heading, lstm, (w, _floats(_LSTM_STEPS, batch, 32)), lines)
    plain = case.plain()
    yield plain
    kept = _LSTM_STEPS // _LSTM_CHUNK + _LSTM_CHUNK
    snapshots = case.row("snapshots", f"{kept} states", lambda: (lstm_in_chunks, {}))
    yield snapshots
    state = _LSTM_STATE * batch * width * 4
    step = snapshots["temporary_bytes"] - kept * state
    for share in LSTM_SHARES:
        row = case.planned(f"{share:.0%}", round(share * plain["temporary_bytes"]))
        states = min((row["budget_bytes"] - step) // state, _LSTM_STEPS)
        revolve = binomial.recomputed_steps(_LSTM_STEPS, states) / _LSTM_STEPS
        yield {**row, "revolve_recomputed_share": round(revolve, 4)}


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scans", description=__doc__)
    parser.add_argument("--program", default="layers", choices=("layers", "lstm"))
    parser.add_argument("--device", default="h200")
    parser.add_argument("--step", default="gradient", choices=sorted(STEPS))
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4096, dest="rows_of_batch")
    parser.add_argument("--budgets", type=int, default=20)
    parser.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    options = parser.parse_args(arguments)
    lines = None if options.rows is None else JsonLines(options.rows)
    for row in (layers if options.program == "layers" else recurrent)(options, lines):
        print(json.dumps(row) if options.json else _line(row), flush=True)
    return 0


def _line(row: dict[str, Any]) -> str:
    if row["kind"] == "summary":
        return ", ".join(f"{name} {value}" for name, value in row.items())
    predicted = row.get("predicted_bytes")
    share = row.get("recomputed_share")
    line = (
        f"{row['program']:<6} {row['label']:<40} {format_bytes(row['temporary_bytes']):>10} "
        f"{format_bytes(predicted) if predicted else '':>10} "
        f"{format_share(share) if share is not None else '':>8} {row['compile_seconds']:>6.1f} s"
    )
    revolve = row.get("revolve_recomputed_share")
    return line if revolve is None else f"{line}, Revolve {format_share(revolve)}"


if __name__ == "__main__":
    sys.exit(main())
