"""Seconds per training step, actually run, on whatever ``jax.devices()`` shows.

    python -m benchmarks.step_time --save

runs every network of both sets through a step of Adam with donated state (``--step gradient``: the
gradient alone), in these variants: unchanged; each JAX default policy around the whole function and
around every block; ours within the temporaries that each default around every block compiles to;
and ours with the least memory. A forward pass alone runs with them. On a CPU, networks are small
ones of the same family (``--small``, ``--no-small``), and a row says which.

All variants of a network, or of ``--workers`` networks, are compiled first, ``--compiles`` at once
for each. Then, in one process, those of a network take turns: a round is one timed step of each;
every round begins with another, and every second one runs in reverse order. A step's output is the
next one's input, whichever variant that is, so that the device holds one state and not one for
each. There are at least ``--rounds`` rounds, and they take at least ``--seconds``. A variant that
does not compile, or does not fit when it runs, has a row with ``error``.

What a row says:

*   ``median_seconds``, ``quartile_seconds``: of a step, over the rounds.
*   ``ratio_to_plain``, ``ratio_quartiles``: median and quartiles of the ratios to the plain step of
    the same round, so that what slows down a while of the run slows down both.
*   ``temporary_bytes``: of the very program that ran, as compiled. ``budget_bytes`` and
    ``predicted_temporary_bytes``: what a plan of ours was asked for and says. A plan is not held to
    its budget as compiled unless ``--verify`` is given, which compiles several for each.
*   ``recomputed_flops_share``: counted, of a forward pass.
*   ``predicted_overhead_share``: what a plan says that recomputation takes, in seconds of the
    device's roofline, as a share of a forward pass. ``predicted_ratio`` is that turned into a ratio
    of steps by the share of the plain step that a forward pass was seen to take here: 1 +
    ``predicted_overhead_share`` x ``ratio_to_plain`` of the row of kind ``forward``.

With ``--rows FILE``, or ``--save`` for ``benchmarks/results/step_time_<device>.jsonl``, rows are
appended to a file, network by network. One is timed as a whole: a complete one is not timed again,
an interrupted one is. The last rows of a network count.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import functools
import json
import re
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import optax

import remat_opt
from benchmarks import networks
from benchmarks.dominance import NETWORKS, POLICIES
from benchmarks.json_lines import JsonLines
from benchmarks.networks import Network
from benchmarks.networks.small import SMALL
from remat_opt.measurement import compilation
from remat_opt.program import flop_count
from remat_opt.training import training_step
from remat_opt.units import format_bytes, format_seconds, format_share

RESULTS = Path(__file__).parent / "results"
#: The steps, and what happens to the gradients in each.
STEPS = {"adam": "consumed", "gradient": "results"}
_SETS = {
    "tuned": "Tuned: networks that rules were found on",
    "judged": "Judged: networks of other families, which alone are evidence",
}
#: Steps of each variant that are not timed.
_WARM_UP = 2
#: Enough, however quick a step is.
_MOST_ROUNDS = 200
#: So small that weights, and with them times, hardly change over all rounds.
_LEARNING_RATE = 1e-6
#: Entries that rows of the same run of a network share.
_KEY = (
    "network",
    "batch",
    "small",
    "size_changes",
    "step",
    "verified",
    "device_kind",
    "jax",
)

#: Held while tracing and planning; compiling goes on beside.
_TRACING = threading.Lock()

#: Parameters, and the optimizer's state if there is one.
State = tuple[Any, ...]
#: Takes a state and a batch; returns the next state and the seconds that it took.
Run = Callable[[State, Any], tuple[State, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One network at one size in one kind of step.

    Attributes:
      network: its name.
      step: one of ``STEPS``.
      small: whether it is the small one of its family.
      given_batch: examples in a batch; the network's own if None.
      verified: whether plans are chosen by compiling.
    """

    network: str
    step: str
    small: bool
    given_batch: int | None = None
    verified: bool = False

    @property
    def batch(self) -> int:
        """Examples in a batch."""
        if self.given_batch is not None:
            return self.given_batch
        if not self.small:
            return networks.default_batch(self.network)
        return SMALL[self.network].batch

    @property
    def changes(self) -> Mapping[str, Any]:
        """What is different from the network's size."""
        return SMALL[self.network].changes if self.small else {}

    def build(self, block_policy: str | None = None) -> Network:
        """The network, as it is or with a policy round every block."""
        if not self.changes:
            return networks.build(self.network, self.batch, block_policy=block_policy)
        family: Any = SMALL[self.network].family
        size = dataclasses.replace(family.SIZES[self.network], **self.changes)
        network: Network = family.network(self.network, size, self.batch, block_policy)
        return network

    def heading(self) -> dict[str, Any]:
        """The entries that every row begins with."""
        device = jax.devices()[0]
        return {
            "set": networks.set_of(self.network),
            "network": self.network,
            "batch": self.batch,
            "small": self.small,
            "size_changes": _plain(self.changes),
            "step": self.step,
            "verified": self.verified,
            "device_kind": device.device_kind,
            "platform": device.platform,
            "jax": jax.__version__,
            "jaxlib": version("jaxlib"),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }


def _plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """A network's sizes as plain data, including those of its stages."""
    found: dict[str, Any] = json.loads(json.dumps(dict(changes), default=dataclasses.asdict))
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a network's step.

    Attributes:
      label: what to call it.
      kind: ``forward``, ``plain``, ``policy`` or ``ours``.
      policy: name of the default policy that it uses, or whose memory it must stay within.
    """

    label: str
    kind: str
    policy: str | None = None


#: All variants, in the order in which they are compiled. A budget comes after what it is based on.
VARIANTS: tuple[Variant, ...] = (
    Variant(label="forward pass alone", kind="forward"),
    Variant(label="plain", kind="plain"),
    *(Variant(label=f"{name}, whole", kind="policy", policy=name) for name in POLICIES),
    *(Variant(label=f"{name}, per block", kind="policy", policy=name) for name in POLICIES),
    *(
        Variant(label=f"ours, memory of {name}, per block", kind="ours", policy=name)
        for name in POLICIES
    ),
    Variant(label="ours, least memory", kind="ours"),
)


class Subject:
    """The variants of one network, to be compiled and run.

    Args:
      case: which network, and how.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._network = case.build()
        self._optimizer = optax.adam(_LEARNING_RATE)
        self._state, self._batch = jax.eval_shape(self._made)
        self._make = jax.jit(self._made)
        self._gradient_flops = self._flops(self._network.loss_fn)
        self._forward_flops = flop_count.forward_flops(
            self._network.loss_fn, *self._network.arguments
        )
        # Of what is compiled: temporary bytes by label; our programs, or those that are on their
        # way, by what they do.
        self._temporary_bytes: dict[str, int] = {}
        self._planned: dict[Any, tuple[str, Future[jax.stages.Compiled]]] = {}

    def _made(self) -> tuple[State, Any]:
        params, batch = self._network.make_arguments(0)
        if self._case.step == "gradient":
            return (params,), batch
        return (params, self._optimizer.init(params)), batch

    def arrays(self) -> tuple[State, Any]:
        """A state and a batch, the same ones every time."""
        found: tuple[State, Any] = jax.block_until_ready(self._make())
        return found

    def _flops(self, loss_fn: Callable[..., Any]) -> int:
        network = self._network
        return flop_count.gradient_flops(loss_fn, *network.arguments, has_aux=network.has_aux)

    def step(self, loss_fn: Callable[..., Any]) -> Callable[..., Any]:
        """The step with this loss, from the parts of a state and a batch.

        It returns the parts of the next state and the loss; for the kind ``gradient``, loss and
        gradients.
        """
        if self._case.step == "gradient":
            return jax.value_and_grad(loss_fn, has_aux=self._network.has_aux)
        return training_step(loss_fn, self._optimizer, has_aux=self._network.has_aux)

    @property
    def _donated(self) -> tuple[int, ...]:
        return () if self._case.step == "gradient" else (0, 1)

    def compiled(self, variant: Variant) -> tuple[dict[str, Any], Run]:
        """Compiles a variant.

        Args:
          variant: one of ``VARIANTS``; if it has a budget, what that is based on was compiled.

        Returns:
          Entries of its row, and how to run it.
        """
        if variant.kind == "forward":
            return self._forward()
        with _TRACING:
            loss_fn, facts, same = self._loss(variant)
            recomputed = self._flops(loss_fn) - self._gradient_flops
            mine: Future[jax.stages.Compiled] = Future()
            if variant.kind == "ours":
                self._planned.setdefault(facts.pop("decided"), (variant.label, mine))
        if same is None:
            try:
                compiled, seconds = compile_step(
                    self.step(loss_fn), (*self._state, self._batch), self._donated
                )
            except Exception as error:
                mine.set_exception(error)
                raise
            mine.set_result(compiled)
            facts["compile_seconds"] = seconds
        else:
            compiled = same.result()
        temporary_bytes = self._measured(compiled, loss_fn)
        self._temporary_bytes[variant.label] = temporary_bytes
        facts["temporary_bytes"] = temporary_bytes
        facts["recomputed_flops_share"] = round(recomputed / self._forward_flops, 4)
        return facts, run_of(compiled, updates=bool(self._donated))

    def _forward(self) -> tuple[dict[str, Any], Run]:
        def forward(*given: Any) -> Any:
            found = self._network.loss_fn(given[0], given[-1])
            return found[0] if self._network.has_aux else found

        compiled, seconds = compile_step(forward, (*self._state, self._batch), ())
        temporary_bytes = _temporary_bytes(compiled)
        facts = {"compile_seconds": seconds, "temporary_bytes": temporary_bytes}
        return facts, run_of(compiled, updates=False)

    def _measured(self, compiled: jax.stages.Compiled, loss_fn: Callable[..., Any]) -> int:
        if jax.default_backend() == "tpu":
            # What the compiler reports there counts gaps twice; `measure` corrects that, at the
            # price of a compile.
            return remat_opt.measure(
                self.step(loss_fn), *self._state, self._batch, donate_argnums=self._donated
            ).temporary_bytes
        return _temporary_bytes(compiled)

    def _loss(
        self, variant: Variant
    ) -> tuple[Callable[..., Any], dict[str, Any], Future[jax.stages.Compiled] | None]:
        """The loss of a variant, entries of its row, and the program if another one has it."""
        loss_fn = self._network.loss_fn
        if variant.kind == "plain":
            return loss_fn, {}, None
        if variant.kind == "policy":
            assert variant.policy is not None
            if variant.label.endswith("per block"):
                return self._case.build(variant.policy).loss_fn, {}, None
            policy = getattr(jax.checkpoint_policies, variant.policy)
            return jax.checkpoint(loss_fn, policy=policy), {}, None
        plan, seconds = self._plan(variant)
        facts: dict[str, Any] = {
            "decided": plan.decided,
            "budget_bytes": plan.budget_bytes,
            "predicted_temporary_bytes": plan.predicted.temporary_bytes,
            "predicted_overhead_share": round(plan.predicted.overhead_share, 4),
            "plan_seconds": seconds,
        }
        label, same = self._planned.get(plan.decided, (None, None))
        if label is not None:
            facts["same_program_as"] = label
        return remat_opt.apply_plan(plan, loss_fn, has_aux=self._network.has_aux), facts, same

    def _plan(self, variant: Variant) -> tuple[remat_opt.Plan, float]:
        """Our plan for this very step, and the seconds that planning took."""
        budget = None
        if variant.policy is not None:
            of = f"{variant.policy}, per block"
            if of not in self._temporary_bytes:
                raise remat_opt.BudgetError(
                    f"There is no budget: {of!r} did not compile.",
                    budget_bytes=0,
                    least_peak_bytes=0,
                    pinning=(),
                )
            budget = self._temporary_bytes[of]
        decorated = remat_opt.optimal_remat(self._network.loss_fn, has_aux=self._network.has_aux)
        start = time.perf_counter()
        plan = remat_opt.make_plan(
            self.step(decorated),
            *self._state,
            self._batch,
            budget=budget,
            gradients=STEPS[self._case.step],
            donate_argnums=self._donated,
            verify="compile" if self._case.verified else False,
        )
        return plan, round(time.perf_counter() - start, 2)


def compile_step(
    fn: Callable[..., Any], shapes: Sequence[Any], donated: tuple[int, ...]
) -> tuple[jax.stages.Compiled, float]:
    """The program to run, and the seconds that compiling took."""
    start = time.perf_counter()
    # The options of ``remat_opt.measure``: otherwise JAX before 0.11 undoes rematerialisation on a
    # CPU.
    options = compilation.compiler_options(compilation.attached_device())
    jitted = jax.jit(fn, donate_argnums=donated, compiler_options=options)
    with _TRACING:
        lowered = jitted.lower(*shapes)
    compiled = lowered.compile()
    return compiled, round(time.perf_counter() - start, 2)


def _temporary_bytes(compiled: jax.stages.Compiled) -> int:
    memory = compiled.memory_analysis()
    assert memory is not None
    return int(memory.temp_size_in_bytes)


def run_of(compiled: jax.stages.Compiled, *, updates: bool) -> Run:
    """How to run a step, timed; ``updates`` says whether it returns the next state."""

    def run(state: State, batch: Any) -> tuple[State, float]:
        start = time.perf_counter()
        found = jax.block_until_ready(compiled(*state, batch))
        seconds = time.perf_counter() - start
        return (tuple(found[: len(state)]) if updates else state), seconds

    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """What was timed.

    Attributes:
      seconds: those of each variant, by its label, one figure per round.
      errors: why others have none.
    """

    seconds: Mapping[str, Sequence[float]]
    errors: Mapping[str, str]


def timed(
    runs: Mapping[str, Run],
    arrays: Callable[[], tuple[State, Any]],
    *,
    rounds: int,
    seconds: float,
) -> Times:
    """Runs variants in turn, each on the state that the previous one returned.

    Args:
      runs: the variants by label. One that fails is left out from then on.
      arrays: makes a state and a batch; called again where a failure may have used them up.
      rounds: the least number of rounds.
      seconds: the least time, unless the limit on rounds is reached.
    """
    # In a list, so that nothing else holds the old ones while new ones are made.
    held = [arrays()]
    errors: dict[str, str] = {}
    found: dict[str, list[float]] = {label: [] for label in runs}

    def one(label: str) -> float | None:
        state, batch = held.pop()
        try:
            state, taken = runs[label](state, batch)
        except Exception as error:
            errors[label] = said(error)
        else:
            held.append((state, batch))
            return taken
        # Only here, where the error is gone, with everything that it held.
        del found[label], state, batch
        held.append(arrays())
        return None

    for label in runs:
        for _ in range(_WARM_UP):
            if label in found:
                one(label)
    start = time.perf_counter()
    for number in range(_MOST_ROUNDS):
        if number >= rounds and time.perf_counter() - start >= seconds:
            break
        for label in turn(tuple(found), number):
            taken = one(label)
            if taken is not None:
                found[label].append(taken)
    return Times(seconds=found, errors=errors)


def turn(labels: Sequence[str], number: int) -> tuple[str, ...]:
    """The order of a round: each begins one further on, and every second one is reversed.

    Example:
      >>> turn("abc", 0), turn("abc", 1), turn("abc", 2)
      (('a', 'b', 'c'), ('a', 'c', 'b'), ('c', 'a', 'b'))
    """
    first = number % len(labels) if labels else 0
    forward = (*labels[first:], *labels[:first])
    return forward[::-1] if number % 2 else forward


def said(error: Exception) -> str:
    """The first line of what an error says."""
    text = str(error).strip().split("\n", 1)[0]
    return text if isinstance(error, remat_opt.RematError) else f"{type(error).__name__}: {text}"


def figures(seconds: Sequence[float], plain: Sequence[float] | None) -> dict[str, Any]:
    """Medians and quartiles.

    Args:
      seconds: those of a variant, one figure per round; two or more.
      plain: those of the plain step in the same rounds, if it was timed.
    """
    first, median, third = statistics.quantiles(seconds, n=4, method="inclusive")
    found: dict[str, Any] = {
        "rounds": len(seconds),
        "median_seconds": round(median, 7),
        "quartile_seconds": [round(first, 7), round(third, 7)],
    }
    if plain is not None:
        ratios = [one / other for one, other in zip(seconds, plain, strict=True)]
        first, median, third = statistics.quantiles(ratios, n=4, method="inclusive")
        found["ratio_to_plain"] = round(median, 4)
        found["ratio_quartiles"] = [round(first, 4), round(third, 4)]
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A network, or another program, whose variants are compiled.

    Attributes:
      rows: of each variant what is known before running, by label, in their order.
      runs: how to run those that compiled.
      arrays: makes a state and a batch.
    """

    rows: dict[str, dict[str, Any]]
    runs: Mapping[str, Run]
    arrays: Callable[[], tuple[State, Any]]


def prepared(case: Case, *, say: Callable[[str], None], compiles: int = 1) -> Prepared:
    """Plans and compiles all variants of a network.

    Args:
      case: which network, and how.
      say: called with what is being done.
      compiles: how many at once.
    """
    say(f"{case.network}: planning and compiling")
    with _TRACING:
        subject = Subject(case)
    runs: dict[str, Run] = {}

    def row(variant: Variant) -> dict[str, Any]:
        try:
            facts, runs[variant.label] = subject.compiled(variant)
        except Exception as error:
            facts = {"error": said(error)}
        say(f"{case.network}: {variant.label}: {facts.get('error', 'compiled')}")
        return {**case.heading(), "variant": variant.label, "kind": variant.kind, **facts}

    rows: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(compiles) as pool:
        # Ours last: a budget is what a policy compiled to.
        for ours in (False, True):
            some = [variant for variant in VARIANTS if (variant.kind == "ours") == ours]
            rows |= {one["variant"]: one for one in pool.map(row, some)}
    return Prepared(rows=rows, runs=runs, arrays=subject.arrays)


def measured(given: Prepared, *, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Times all variants.

    Args:
      given: what was compiled.
      rounds: the least number of rounds.
      seconds: the least time.

    Returns:
      A row for each, in their order.
    """
    rows = given.rows
    try:
        times = timed(given.runs, given.arrays, rounds=rounds, seconds=seconds)
    except Exception as error:
        # The state itself does not fit.
        times = Times(seconds={}, errors=dict.fromkeys(given.runs, said(error)))
    for label, message in times.errors.items():
        rows[label]["error"] = message
    plain = times.seconds.get("plain")
    for label, taken in times.seconds.items():
        rows[label] |= figures(taken, plain)
    forward = rows.get(VARIANTS[0].label, {}).get("ratio_to_plain")
    for row in rows.values():
        if forward is not None and "predicted_overhead_share" in row:
            row["predicted_ratio"] = round(1 + row["predicted_overhead_share"] * forward, 4)
    return list(rows.values())


class Rows:
    """Rows on file, written for a whole network at a time.

    Args:
      path: a file of ``json_lines``; None to keep none.
    """

    def __init__(self, path: Path | None) -> None:
        self._lines = JsonLines(path) if path else None

    def find(self, case: Case) -> list[dict[str, Any]] | None:
        """The last rows of a network, if complete."""
        heading = case.heading()
        same = [
            row
            for row in (self._lines.rows if self._lines else ())
            if all(row.get(name) == heading[name] for name in _KEY)
        ]
        last = same[-len(VARIANTS) :]
        whole = [row["variant"] for row in last] == [variant.label for variant in VARIANTS]
        return last if whole else None

    def put(self, rows: Sequence[dict[str, Any]]) -> None:
        """Writes the rows of a network."""
        for row in rows if self._lines is not None else ():
            assert self._lines is not None
            self._lines.append(row)


def slug(device_kind: str) -> str:
    """A device's kind as part of a file name.

    Example:
      >>> slug("NVIDIA H100 80GB HBM3")
      'nvidia_h100_80gb_hbm3'
    """
    return re.sub(r"[^a-z0-9]+", "_", device_kind.lower()).strip("_")


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Readable lines for one network."""
    first = rows[0]
    sizes = ", ".join(f"{name} {value}" for name, value in first["size_changes"].items())
    yield (
        f"{first['network']}, batch {first['batch']}, {first['step']}, "
        f"{first['device_kind']}, JAX {first['jax']}, {first['date']}"
        + (f", small: {sizes}" if sizes else ", small" if first["small"] else "")
    )
    yield (
        f"{'':<60} {'temporaries':>11} {'predicted':>11} {'step':>9} {'of plain':>8} "
        f"{'(quartiles)':>13} {'predicted':>9} {'FLOPs':>8}"
    )
    for row in rows:
        start = f"{row['variant']:<60}"
        yield f"{start} {row['error'][:60]}" if "error" in row else f"{start} {_cells(row)}"


def _cells(row: Mapping[str, Any]) -> str:
    def cell(name: str, width: int, write: Callable[[Any], str]) -> str:
        return f"{write(row[name]) if name in row else '':>{width}}"

    return " ".join(
        (
            cell("temporary_bytes", 11, format_bytes),
            cell("predicted_temporary_bytes", 11, format_bytes),
            cell("median_seconds", 9, format_seconds),
            cell("ratio_to_plain", 8, "{:.3f}".format),
            cell("ratio_quartiles", 13, lambda pair: f"{pair[0]:.3f}-{pair[1]:.3f}"),
            cell("predicted_ratio", 9, "{:.3f}".format),
            cell("recomputed_flops_share", 8, format_share),
        )
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.step_time",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--network",
        nargs="+",
        default=(*NETWORKS, *networks.JUDGED),
        choices=networks.names(),
        metavar="NAME",
        help="those of the benchmark and all that judge if left out",
    )
    parser.add_argument("--step", default="adam", choices=sorted(STEPS))
    parser.add_argument(
        "--small",
        action=argparse.BooleanOptionalAction,
        help="small networks; if left out, on a CPU alone",
    )
    parser.add_argument("--batch", type=int, help="examples; each network's own if left out")
    parser.add_argument("--verify", action="store_true", help="choose plans by compiling")
    parser.add_argument("--rounds", type=int, default=10, help="at least so many (10)")
    parser.add_argument("--seconds", type=float, default=10, help="at least for so long (10)")
    parser.add_argument("--workers", type=int, default=1, help="networks compiled at once (1)")
    parser.add_argument("--compiles", type=int, default=1, help="of each network at once (1)")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    file = parser.add_mutually_exclusive_group()
    file.add_argument("--rows", type=Path, help="file to append rows to, and to go on from")
    file.add_argument("--save", action="store_true", help="the same, of the device's own name")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.rounds < 2:
        parser.error(f"--rounds {given.rounds}: give at least 2, or there are no quartiles")
    for name in ("workers", "compiles"):
        if getattr(given, name) < 1:
            parser.error(f"--{name} {getattr(given, name)}: give at least 1")
    device = jax.devices()[0]
    small = device.platform == "cpu" if given.small is None else given.small
    path = RESULTS / f"step_time_{slug(device.device_kind)}.jsonl" if given.save else given.rows
    on_file = Rows(path)
    say = functools.partial(print, file=sys.stderr, flush=True)
    # One set after the other, however they were named.
    cases = [
        Case(
            network=name,
            step=given.step,
            small=small,
            given_batch=given.batch,
            verified=given.verify,
        )
        for name in sorted(dict.fromkeys(given.network), key=networks.JUDGED.__contains__)
    ]
    heading = ""
    for start in range(0, len(cases), given.workers):
        some = cases[start : start + given.workers]
        # Nothing compiles while something is timed.
        known = {case: on_file.find(case) for case in some}
        missing = [case for case, rows in known.items() if rows is None]
        with ThreadPoolExecutor(given.workers) as pool:
            compiled = pool.map(
                functools.partial(prepared, say=say, compiles=given.compiles), missing
            )
            ready = dict(zip(missing, compiled, strict=True))
        for case, rows in known.items():
            if rows is None:
                say(f"{case.network}: running")
                rows = measured(ready.pop(case), rounds=given.rounds, seconds=given.seconds)
                on_file.put(rows)
            if not given.json and heading != (heading := _SETS[rows[0]["set"]]):
                print(heading, flush=True)
            lines = map(json.dumps, rows) if given.json else (*table(rows), "")
            print(*lines, sep="\n", flush=True)
        # What the next networks need is memory.
        jax.clear_caches()
    return 0


if __name__ == "__main__":
    sys.exit(main())
