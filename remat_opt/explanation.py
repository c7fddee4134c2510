"""Why a training step needs the memory that it does, and what can be done about it.

The step is compiled, for a device that need not be there. What the compiler decided says what lies
in memory when, in the words of the user's own program; it is written before the compiler finds that
a program does not fit, so that one that is refused is explained like any other.
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
from remat_opt.loss_in_step import step_of
from remat_opt.measurement import compilation, step
from remat_opt.measurement.buffers import CompiledMemory
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.shares import RESIDENT, SHARES, Share, Shares, shares
from remat_opt.measurement.step import LossCall, Step
from remat_opt.options import Request, signature_of
from remat_opt.program import tracing
from remat_opt.program.record import Program
from remat_opt.program.roles import Role, argument_roles
from remat_opt.program.tracing import Signature
from remat_opt.rematerialized import Rematerialized
from remat_opt.solvers.base import Overhead
from remat_opt.units import format_bytes, format_share
from remat_opt.view import explanation_text

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
      memory_bytes: what a program can have there.
      needed_bytes: what the step needs: arguments, results and temporaries.
      resident_bytes: of these, what is there from first to last.
      refusal: what the compiler said, if it refused; else "".
      shares: one dictionary for each share: ``share``, ``bytes`` at the peak, and ``remedy``.
      timelines: for each share of temporaries the bytes that are alive at each step.
      rows: what is alive at the peak, the most bytes first, one dictionary for arrays that are
        alike: ``share``, ``bytes`` of all, ``count``, ``label``, ``type``, ``module``, ``source``.
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
        return explanation_text.text(self.to_dict())

    def _repr_html_(self) -> str:
        return explanation_text.html(self.to_dict())


def explain(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Explanation:
    """What a training step's memory is spent on, and what can be done about it.

    The step is compiled as it is written and not run; also where it does not fit. Where it
    differentiates a decorated loss, what plans could save is predicted, too.

    Args:
      fn: a training step, ``jax.grad`` of a loss, or a decorated loss, which stands for its value
        and gradient.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      device: the machine to compile for; it need not be attached.
      static_argnums: as for ``jax.jit``.
      static_argnames: as for ``jax.jit``.
      donate_argnums: as for ``jax.jit``. Left out, what the ``jax.jit`` round the step says, if
        there is one.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      One screen in a terminal, a page in a notebook. ``rows`` are plain dictionaries.

    Raises:
      MissingPackageError: the compiler for that device is not installed.
      CompileError: the compiler refused, and not for want of memory.
      RematError: there are modules of ``flax.nnx`` among the arguments.

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
    target = compilation.resolve_device(device)
    in_step = _step(fn, args, kwargs, signature_of(None, False, static_argnums, static_argnames),
                    donate_argnums)
    program, calls = in_step.trace()
    measured: Measurement | None = None
    refusal: CompileError | None = None
    try:
        measured = compilation.measure(
            in_step.fn,
            *in_step.args,
            device=target,
            static_argnums=in_step.static_argnums,
            static_argnames=in_step.static_argnames,
            donate_argnums=in_step.donate_argnums,
            with_buffers=True,
            **in_step.kwargs,
        )
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
        notes=_notes(program, memory, measured, at_peak),
    )
