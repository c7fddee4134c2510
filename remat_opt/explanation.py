"""Explains what a training step's memory is spent on, and what can be done about it.

The step is compiled for a device that need not be attached. The compiler's buffer assignment says
what is in memory when, in terms of the user's own program. It is written before the compiler finds
that a program does not fit, so a refused program is explained like any other.
"""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt import frameworks, trade_off
from remat_opt.device import Device
from remat_opt.errors import CompileError, RematError
from remat_opt.gradients import Gradients
from remat_opt.loss_in_step import step_of
from remat_opt.measurement import compilation, meshes, step
from remat_opt.measurement.buffers import CompiledMemory
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.shares import RESIDENT, SHARES, Share, shares
from remat_opt.measurement.step import LossCall, Step
from remat_opt.misuse import entry_point
from remat_opt.options import Request, signature_of
from remat_opt.program import tracing
from remat_opt.program.record import Program
from remat_opt.program.roles import Role, argument_roles
from remat_opt.program.tracing import Signature
from remat_opt.rematerialized import Rematerialized
from remat_opt.solvers.base import Overhead
from remat_opt.units import format_bytes, format_share
from remat_opt.view import explanation_text, report

_SHARE_OF_ROLE: Mapping[Role, Share] = {
    "parameter": "parameters",
    "state": "optimizer state",
    "input": "inputs",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Explanation:
    """What the memory of one step is spent on.

    Attributes:
      function: name of the step.
      device: name of the device compiled for.
      device_title: what people call it, with its memory.
      memory_bytes: memory that a program can use there.
      needed_bytes: what the step needs: arguments, results and temporaries.
      resident_bytes: of these, what is held from start to end.
      refusal: what the compiler said, if it refused; else "".
      shares: one dictionary for each share: ``share``, ``bytes`` at the peak, and ``remedy``.
      timelines: for each share of temporaries, the bytes alive at each step.
      rows: what is alive at the peak, the most bytes first, one dictionary for each group of
        similar arrays: ``share``, ``bytes`` of all, ``count``, ``label``, ``type``, ``module``,
        ``source``.
      notes: what a reader should know.
    """

    function: str
    device: str
    device_title: str
    memory_bytes: int
    needed_bytes: int
    resident_bytes: int
    refusal: str
    shares: tuple[dict[str, Any], ...]
    timelines: dict[str, tuple[int, ...]]
    rows: tuple[dict[str, Any], ...]
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether the step fits the device, and compiles for it."""
        return self.needed_bytes <= self.memory_bytes and not self.refusal

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain data, fit for JSON."""
        found = dataclasses.asdict(self)
        found["timelines"] = {name: list(amounts) for name, amounts in self.timelines.items()}
        return {**found, "shares": list(self.shares), "rows": list(self.rows), "fits": self.fits}

    def to_json(self) -> str:
        """The explanation as JSON text."""
        return json.dumps(self.to_dict(), indent=1)

    def __repr__(self) -> str:
        return explanation_text.text(self.to_dict(), report.columns())

    def _repr_html_(self) -> str:
        return explanation_text.html(self.to_dict())


@entry_point
def explain(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Explains what a training step's memory is spent on, and what can be done about it.

    The step is compiled as written, not run, and it need not fit. If it differentiates a decorated
    loss, the explanation also predicts what plans could save.

    Args:
      fn: a training step, ``jax.grad`` of a loss, or a decorated loss, which stands for its value
        and gradient.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      device: the device to compile for; it need not be attached.
      static_argnums: as for ``jax.jit``.
      static_argnames: as for ``jax.jit``.
      donate_argnums: as for ``jax.jit``. The default is what the ``jax.jit`` around the step
        says, if there is one.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      One screen in a terminal, a page in a notebook. ``rows`` are plain dictionaries.

    Raises:
      MissingPackageError: the compiler for that device is not installed.
      CompileError: the compiler refused for a reason other than memory.
      RematError: some of the arguments are ``flax.nnx`` modules.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> def loss(weights, x):
      ...     for w in weights:
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> def step(weights, x):
      ...     gradients = jax.grad(loss)(weights, x)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
      >>> S = jax.ShapeDtypeStruct
      >>> found = remat_opt.explain(
      ...     step, [S((64, 64), "float32")] * 8, S((4096, 64), "float32"), device="cpu",
      ...     donate_argnums=0,
      ... )
      >>> found.rows[0]["share"], found.fits
      ('activations', True)
    """
    target = compilation.resolve_device(device, meshes.mesh_of((args, kwargs)))
    in_step = _step(
        fn, args, kwargs, signature_of(None, False, static_argnums, static_argnames), donate_argnums
    )
    program, calls = in_step.trace()
    measured: Measurement | None = None
    refusal: CompileError | None = None
    helped_bytes = 0
    try:
        measured = in_step.compiled(target, with_buffers=True)
        if (
            measured.device_bytes > target.memory_bytes
            and target.platform in compilation.OWN_REMATERIALISATION
            and _computed_again(measured.memory)
        ):
            # They would not help, and would hide what the step is made of.
            helped_bytes = measured.device_bytes
            measured = in_step.compiled(target, with_buffers=True, as_written=True)
        memory = measured.memory
    except CompileError as error:
        if error.needed_bytes is None:
            raise
        refusal = error
        memory = error.memory if isinstance(error.memory, CompiledMemory) else None
    roles = _names_and_roles(in_step, program)
    if memory is None:
        found = None
        at_peak = _without_memory(in_step, program, target, measured, refusal)
    else:
        found = shares(memory, roles)
        at_peak = dict(found.at_peak)
    resident_bytes = sum(at_peak[share] for share in RESIDENT)
    needed_bytes = max(sum(at_peak.values()), measured.device_bytes if measured else 0)
    left_bytes = target.memory_bytes - resident_bytes - at_peak["gradients"]
    remedies = _Remedies(in_step, program, calls, target, left_bytes)
    return Explanation(
        function=in_step.name,
        device=target.name,
        device_title=str(target),
        memory_bytes=target.memory_bytes,
        needed_bytes=needed_bytes,
        resident_bytes=resident_bytes,
        refusal=refusal.compiler_message if refusal else "",
        shares=tuple(
            {"share": share, "bytes": at_peak[share], "remedy": remedies.of(share, at_peak)}
            for share in SHARES
        ),
        timelines={}
        if found is None
        else {share: tuple(line.tolist()) for share, line in found.timelines.items()},
        rows=() if found is None else tuple(map(dataclasses.asdict, found.held)),
        notes=_notes(program, memory, measured, at_peak, helped_bytes),
    )


def _step(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature,
    donate_argnums: int | Sequence[int] | None,
) -> Step:
    """What to compile: the step, or the value and gradient of a decorated loss."""
    if frameworks.have_modules(args, kwargs):
        raise RematError(
            "explain compiles functions of arrays, but some of the arguments are flax.nnx "
            "modules. Split them with nnx.split, and give explain a function that calls "
            "nnx.merge."
        )
    if isinstance(fn, Rematerialized):
        call = fn.bind(args, dict(kwargs))
        several = tuple(call.positions[number] for number in call.argnums)
        name = getattr(fn, "__name__", type(fn.fn).__name__)
        fn = jax.value_and_grad(fn, argnums=several or 0, has_aux=fn.signature.has_aux)
        fn.__name__ = f"value_and_grad({name})"
    return step_of(fn, args, kwargs, signature, donate_argnums)


def _computed_again(memory: CompiledMemory | None) -> int:
    """How many values the compiler recomputes of its own accord."""
    return 0 if memory is None else sum(".remat" in one.name for one in memory.instructions)


def _names_and_roles(in_step: Step, program: Program) -> dict[str, Share]:
    """The share that each argument counts towards, by the name that JAX gives it."""
    signature = Signature(
        argnums=(), static_argnums=in_step.static_argnums, static_argnames=in_step.static_argnames
    )
    call = tracing.bind_static(in_step.fn, signature, in_step.args, dict(in_step.kwargs))
    trees = [*zip(call.labels, call.args, strict=True), *sorted(call.kwargs.items())]
    names = [
        f"{label if isinstance(label, str) else f'args[{label}]'}{jax.tree_util.keystr(path)}"
        for label, tree in trees
        for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]
    ]
    roles = argument_roles(program)
    return {name: _SHARE_OF_ROLE[role] for name, role in zip(names, roles, strict=True)}


def _without_memory(
    in_step: Step,
    program: Program,
    device: Device,
    measured: Measurement | None,
    refusal: CompileError | None,
) -> dict[Share, int]:
    """The shares if the memory layout is unknown: all temporaries are one share."""
    resident = in_step.resident(program, device)
    found: dict[Share, int] = dict.fromkeys(SHARES, 0)
    found |= {
        "parameters": resident.parameters,
        "optimizer state": resident.optimizer_state,
        "inputs": resident.inputs,
        "results": resident.results,
    }
    if measured is not None:
        found["workspace"] = measured.temporary_bytes
    elif refusal is not None and refusal.needed_bytes is not None:
        found["workspace"] = max(0, refusal.needed_bytes - resident.total)
    return found


def _notes(
    program: Program,
    memory: CompiledMemory | None,
    measured: Measurement | None,
    at_peak: Mapping[Share, int],
    helped_bytes: int,
) -> tuple[str, ...]:
    notes = []
    if helped_bytes:
        notes.append(
            "shown without the compiler's own rematerialisation, which brings it down to "
            f"{format_bytes(helped_bytes)}, which is still too much"
        )
    if memory is None:
        notes.append(
            "the compiler does not say what is in memory when: all temporaries are shown as "
            "workspace, and arguments with the bytes of their types"
        )
    elif measured is None and (again := _computed_again(memory)):
        notes.append(f"short of memory, the compiler itself computes {again} values again")
    if not at_peak["activations"] and not any(
        one == "parameter" for one in argument_roles(program)
    ):
        notes.append(
            "nothing is differentiated here: to see what training needs, give a training step or "
            "jax.grad of the loss"
        )
    if measured is not None:
        notes += [note for note in measured.notes if not note.startswith("needs ")]
    return tuple(dict.fromkeys(notes))


class _Remedies:
    """What can be done about each share."""

    def __init__(
        self,
        in_step: Step,
        program: Program,
        calls: Sequence[LossCall],
        device: Device,
        left_bytes: int,
    ) -> None:
        self._step = in_step
        self._program = program
        self._calls = calls
        self._device = device
        self._left_bytes = left_bytes

    def of(self, share: Share, at_peak: Mapping[Share, int]) -> str:
        """What can be done about a share; "" if it takes no memory."""
        if not at_peak[share]:
            return ""
        match share:
            case "activations":
                return self._plans()
            case "recomputed":
                return "a plan chooses what, where and when"
            case "results":
                return self._donation()
            case "parameters":
                return "shard them, or use fewer bits; no plan helps"
            case "optimizer state":
                return "shard it, or use fewer bits; no plan helps"
            case "inputs":
                return "a smaller batch, or microbatches"
            case "gradients":
                return "apply each at once; clipping by norm keeps all"
            case "workspace":
                return "a smaller batch, or microbatches"
            case "holes":
                return "left by the compiler where arrays do not pack"

    def _plans(self) -> str:
        if not self._calls:
            return "decorate the loss with @optimal_remat, then explain again"
        try:
            call = step.the_one(self._calls)
            planner = Rematerialized(call.fn, call.signature, Request(device=self._device))
            rows = trade_off.of(
                planner.problem(call.program), Overhead.SECONDS, Gradients.CONSUMED
            ).rows
        except RematError as error:
            return f"no plan: {error}"
        least = rows[0]
        said = (
            f"plans reach {format_bytes(least['temporary_bytes'])} of temporaries, "
            f"recomputing {format_share(least['overhead_seconds_share'])} of a forward pass"
        )
        fit = [row for row in rows if row["temporary_bytes"] <= self._left_bytes]
        if not fit:
            return f"{said}; only {format_bytes(max(0, self._left_bytes))} are left"
        cheapest = min(fit, key=lambda row: row["overhead_seconds_share"])
        share = format_share(cheapest["overhead_seconds_share"])
        return f'{said}; budget="fit" recomputes {share}'

    def _donation(self) -> str:
        """Which arguments to donate, so that results lie in them."""
        kinds = self._program.types
        free = Counter(kinds[value] for value in self._program.output_values)
        roles = argument_roles(self._program)
        donated = {number % len(self._step.args) for number in self._step.donate_argnums}
        wanted, saved_bytes, place = [], 0, 0
        for number in self._step.dynamic_argnums:
            count = len(jax.tree.leaves(self._step.args[number]))
            own = range(place, place + count)
            place += count
            needed = Counter(kinds[self._program.arguments[one]] for one in own)
            if not count or needed - free:
                continue
            free -= needed
            if number not in donated and all(roles[one] != "input" for one in own):
                wanted.append(number)
                saved_bytes += sum(kind.bytes * times for kind, times in needed.items())
        if not wanted:
            return "return less"
        several = (*donated, *wanted)
        numbers = several[0] if len(several) == 1 else tuple(sorted(several))
        return f"donate_argnums={numbers} saves {format_bytes(saved_bytes)}"
