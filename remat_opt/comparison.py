"""Compares plans with plain ``jax.checkpoint``: one row for each, with the compiler's figures.

Every contender is a way to run the loss. The step in which it is differentiated, or its gradient
alone, is compiled for the device and its FLOPs are counted (``flop_count``); nothing is run. A
contender that fails, for example for lack of memory, has a row that says so.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from remat_opt import policies
from remat_opt.errors import MissingPackageError, RematError
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.step import How, as_it_is
from remat_opt.plan import Plan
from remat_opt.program import blocks, tracing
from remat_opt.program.static_leaves import release
from remat_opt.program.tracing import Signature
from remat_opt.units import format_bytes, format_seconds, format_share
from remat_opt.view import drawing, plots, report, scatter

_FIGURES = (
    "predicted_temporary_bytes",
    "temporary_bytes",
    "argument_bytes",
    "output_bytes",
    "host_bytes",
    "recomputed_flops_share",
    "overhead_seconds_share",
    "compile_seconds",
    "plan_seconds",
    "error",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to run the loss.

    Attributes:
      label: what to call it.
      kind: ``plain``, ``policy`` or ``ours``.
      make: gives the loss to run, and the plan that it follows, if there is one.
    """

    label: str
    kind: str
    make: Callable[[], tuple[How, Plan | None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Comparison:
    """What each way of computing a gradient needs, side by side.

    Attributes:
      function: name of the loss function.
      device: name of the device compiled for.
      rows: one dictionary for each contender, all with the same keys. ``label``; ``kind``:
        ``plain`` (the unchanged function), ``policy`` (``jax.checkpoint`` around the whole
        function or every block, or a function of the user's) or ``ours``;
        ``predicted_temporary_bytes``; ``temporary_bytes``, ``argument_bytes``, ``output_bytes``,
        ``host_bytes``, as the compiler says; ``recomputed_flops_share``: FLOPs beyond those of the
        plain gradient, as a share of one forward pass; ``overhead_seconds_share``: predicted time
        of the recomputation, as a share of one forward pass; ``compile_seconds``; ``plan_seconds``
        (the first plan takes the sweep that the others draw on); ``error``: the message if it
        failed. Fields that do not apply are None.
      notes: what a reader of the figures should know.
      step: name of the step that was compiled; "" for the gradient alone.
      limit_bytes: what the device's memory leaves for temporaries, beside arguments and outputs;
        None if that is unknown, or nothing.
    """

    function: str
    device: str
    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...] = ()
    step: str = ""
    limit_bytes: int | None = None

    def to_json(self) -> str:
        """The comparison as JSON text: the fields of this record."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    def __repr__(self) -> str:
        width = report.columns()
        return "\n".join([self._table().text(width), *report.wrapped(self._remarks(), width)])

    def _repr_html_(self) -> str:
        remarks = "".join(f"<div>{report.escape(line)}</div>" for line in self._remarks())
        return report.section(
            self._title(),
            self._picture().svg(),
            dataclasses.replace(self._table(), title="").html(),
            remarks,
        )

    def plot(self, ax: Any = None) -> Any:
        """Draws memory against overhead: our plans as a line, everything else as labelled points.

        Args:
          ax: matplotlib axes; the current ones if None.

        Returns:
          The axes.

        Raises:
          MissingPackageError: matplotlib is not installed.
        """
        return plots.scatter(self._picture(), ax)

    def _title(self) -> str:
        what = f"{self.step} with {self.function}" if self.step else f"Gradient of {self.function}"
        return f"{what} for {self.device}"

    def _remarks(self) -> list[str]:
        errors = [f"{row['label']}: {row['error']}" for row in self.rows if row["error"]]
        return errors + [f"Note: {note}" for note in self.notes]

    def _table(self) -> report.Table:
        plain = next((r["temporary_bytes"] for r in self.rows if r["kind"] == "plain"), None)
        return report.Table(
            title=self._title(),
            headings=(
                "",
                "temporaries",
                "of plain",
                "predicted",
                "recomputed FLOPs",
                "time",
                "to compile",
                "to plan",
            ),
            rows=tuple(_cells(row, plain) for row in self.rows),
            align="lrrrrrrr",
            footer="Temporaries as compiled; recomputed FLOPs and (predicted) time as shares of "
            "one forward pass.",
            spare=("to plan", "to compile", "time", "predicted"),
        )

    def _picture(self) -> scatter.Scatter:
        shown = [row for row in self.rows if row["temporary_bytes"] is not None]
        series = (
            ("plain", "plain"),
            ("jax.checkpoint", "policy"),
            ("remat_opt", "ours"),
        )
        levels: tuple[tuple[str, float], ...] = ()
        if self.limit_bytes is not None:
            levels = ((f"room on {self.device}", float(self.limit_bytes)),)
        return scatter.Scatter(
            title=self._title(),
            x=drawing.share_axis("recomputed FLOPs, as a share of one forward pass"),
            y=drawing.bytes_axis(
                "temporaries, compiled", max((r["temporary_bytes"] for r in shown), default=0)
            ),
            levels=levels,
            series=tuple(
                scatter.Series(
                    label=label,
                    points=tuple(
                        scatter.Point(
                            x=row["recomputed_flops_share"],
                            y=row["temporary_bytes"],
                            label=row["label"],
                        )
                        for row in shown
                        if row["kind"] == kind
                    ),
                    staircase=kind == "ours",
                )
                for label, kind in series
            ),
        )


def _cells(row: Mapping[str, Any], plain: int | None) -> tuple[str, ...]:
    found = row["temporary_bytes"]
    if found is None:
        compiled, share = "failed", ""
    else:
        compiled, share = format_bytes(found), format_share(found / plain) if plain else ""

    def written(key: str, write: Callable[[Any], str]) -> str:
        return "" if row[key] is None else write(row[key])

    return (
        row["label"],
        compiled,
        share,
        written("predicted_temporary_bytes", format_bytes),
        written("recomputed_flops_share", format_share),
        written("overhead_seconds_share", format_share),
        written("compile_seconds", format_seconds),
        written("plan_seconds", format_seconds),
    )


def contest(
    contenders: Sequence[Contender],
    *,
    function: str,
    device: str,
    step: str = "",
    measure: Callable[[How], Measurement],
    flops: Callable[[How], int],
    forward_flops: int,
    memory_bytes: int | None = None,
    remarks: Sequence[str] = (),
) -> Comparison:
    """Compiles and counts every contender.

    Args:
      contenders: the first is the plain function.
      function: its name.
      device: name of the device.
      step: name of what is compiled, if it is not the gradient alone.
      measure: compiles it for the device, with the loss run as a contender does.
      flops: counts its FLOPs, likewise.
      forward_flops: FLOPs of all forward passes of the plain function in it.
      memory_bytes: of the device.
      remarks: notes on all rows.

    Returns:
      A row for each, in the order given.

    Raises:
      MissingPackageError: the compiler for the device is not installed.
    """
    rows: list[dict[str, Any]] = []
    notes: dict[str, list[str]] = {
        remark: [contender.label for contender in contenders] for remark in remarks
    }
    known: dict[Hashable, tuple[Measurement, int]] = {}
    plain_flops: int | None = None
    limit_bytes: int | None = None
    for contender in contenders:
        row: dict[str, Any] = {"label": contender.label, "kind": contender.kind}
        row.update(dict.fromkeys(_FIGURES))
        rows.append(row)
        try:
            start = time.perf_counter()
            how, plan = contender.make()
            if plan is not None:
                row["plan_seconds"] = time.perf_counter() - start
                row["predicted_temporary_bytes"] = plan.predicted.temporary_bytes
                row["overhead_seconds_share"] = plan.predicted.overhead_share
                rows[0]["predicted_temporary_bytes"] = plan.predicted.plain_temporary_bytes
                for note in plan.notes:
                    notes.setdefault(note, []).append(contender.label)
            # Budgets that lead to the same decision are compiled once.
            key: Hashable = contender.label if plan is None else plan.decided
            if key in known:
                measured, counted = known[key]
            else:
                counted = flops(how)
                if plain_flops is None:
                    plain_flops = counted
                row["recomputed_flops_share"] = _share(counted - plain_flops, forward_flops)
                # A plan chosen by compiling has already been compiled in this step.
                measured = (plan and plan.measured) or measure(how)
                known[key] = measured, counted
        except MissingPackageError:
            # Without the compiler there can be no rows.
            raise
        except Exception as error:
            # A user's function may fail in any way; the plain one and ours may not.
            if not isinstance(error, RematError) and contender.kind != "policy":
                raise
            row["error"] = _first_line(error)
            continue
        row["recomputed_flops_share"] = _share(counted - (plain_flops or 0), forward_flops)
        if limit_bytes is None and memory_bytes is not None:
            limit_bytes = memory_bytes - (measured.device_bytes - measured.temporary_bytes)
        row["temporary_bytes"] = measured.temporary_bytes
        row["argument_bytes"] = measured.argument_bytes
        row["output_bytes"] = measured.output_bytes
        row["host_bytes"] = measured.host_bytes
        row["compile_seconds"] = measured.compile_seconds
        for note in measured.notes:
            notes.setdefault(note, []).append(contender.label)
        if contender.kind == "plain":
            row["overhead_seconds_share"] = 0.0
    return Comparison(
        function=function,
        device=device,
        rows=tuple(rows),
        notes=tuple(_noted(note, labels, rows) for note, labels in notes.items()),
        step=step,
        limit_bytes=limit_bytes if limit_bytes is not None and limit_bytes > 0 else None,
    )


def _noted(note: str, labels: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """A note, with the rows it is about unless it is about all of its kind."""
    compiled = {row["label"] for row in rows if row["temporary_bytes"] is not None}
    planned = {row["label"] for row in rows if row["plan_seconds"] is not None}
    about = set(labels)
    return note if about >= compiled or about >= planned > set() else f"{', '.join(labels)}: {note}"


def _share(flops: int, forward_flops: int) -> float:
    return flops / forward_flops if forward_flops else 0.0


def _first_line(error: Exception) -> str:
    said = str(error).strip().split("\n", 1)[0]
    return said if isinstance(error, RematError) else f"{type(error).__name__}: {said}"


def checkpointed(policy: Callable[..., Any], signature: Signature) -> How:
    """The whole function under one ``jax.checkpoint``.

    Args:
      policy: as ``jax.checkpoint`` takes it.
      signature: which of the function's arguments are static.
    """

    def how(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call = tracing.bind_static(fn, signature, args, kwargs)
            return jax.checkpoint(call.fn, policy=policy)(*call.args, **call.kwargs)

        return wrapped

    return how


def checkpointed_per_block(policy: Callable[..., Any], signature: Signature) -> How:
    """Every block of the function (``blocks``) under one ``jax.checkpoint``.

    Args:
      policy: as ``jax.checkpoint`` takes it.
      signature: how the function's arguments are read.
    """

    def how(fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(fn)
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            call = tracing.bind_static(fn, signature, args, kwargs)
            program = tracing.trace_call(call, has_aux=signature.has_aux)
            run = policies.per_block(program, blocks.blocks(program), policy)
            leaves = jax.tree.leaves((call.args, call.kwargs))
            outputs = run(program.constant_values, [*leaves, *program.closed_over])
            return release(jax.tree.unflatten(program.output_tree, outputs))

        return wrapped

    return how


def policy_contenders(
    chosen: str | Sequence[str] | Mapping[str, str | Callable[..., Any]] | None,
    signature: Signature,
    *,
    has_blocks: bool,
) -> list[Contender]:
    """What a user's ``policies=`` means.

    Args:
      chosen: names in ``jax.checkpoint_policies``, or a mapping from labels to such names or to
        functions with the results of the loss; None for all that JAX has.
      signature: how the arguments of the loss are read.
      has_blocks: whether the loss is made of blocks. Then each policy is tried around the whole
        function and around every block, except the one that keeps everything: that is the unchanged
        function.

    Raises:
      RematError: a name is unknown, or a value is neither a name nor a function.
    """
    if chosen is None:
        chosen = tuple(policies.default_policies())
    if isinstance(chosen, str):
        chosen = (chosen,)
    labelled = chosen if isinstance(chosen, Mapping) else {policy: policy for policy in chosen}
    whole: list[Contender] = []
    per_block: list[Contender] = []
    for label, given in labelled.items():
        if isinstance(given, str):
            policy = _policy_of(given)
            whole.append(_contender(str(label), checkpointed(policy, signature)))
            if has_blocks and policy is not jax.checkpoint_policies.everything_saveable:
                how = checkpointed_per_block(policy, signature)
                per_block.append(_contender(f"{label}, per block", how))
            continue
        if not callable(given):
            raise RematError(
                f"policies= has {given!r} ({type(given).__name__}) for {label!r}: give the name of "
                "a policy of jax.checkpoint_policies, or a function with the same results as "
                "the loss."
            )
        if _is_policy_of_jax(given):
            raise RematError(
                f"policies= has a policy itself for {label!r}: give its name, or the function "
                "wrapped in it, as by jax.checkpoint(fn, policy=...)."
            )
        whole.append(_contender(str(label), functools.partial(_other, given)))
    return whole + per_block


def _policy_of(name: str) -> Callable[..., Any]:
    found = policies.policy_of(name)
    if found is None:
        names = ", ".join(policies.default_policies())
        raise RematError(
            f"{name!r} is not a policy of jax.checkpoint_policies that works without "
            f"arguments: give one of {names}, or, for one of your own, a mapping from a label "
            "to the function wrapped in it."
        )
    return found


def _contender(label: str, how: How, kind: str = "policy") -> Contender:
    return Contender(label=label, kind=kind, make=lambda: (how, None))


def _other(function: Callable[..., Any], _: Callable[..., Any]) -> Callable[..., Any]:
    return function


def _is_policy_of_jax(function: object) -> bool:
    return any(
        function is getattr(jax.checkpoint_policies, name) for name in dir(jax.checkpoint_policies)
    )


def plain_contender() -> Contender:
    """The unchanged function, first in every comparison."""
    return _contender("plain", as_it_is, "plain")
