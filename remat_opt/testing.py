"""For tests of training code: a test fails if a plan no longer holds, and says what to do.

A plan file records the program it was made for and, if it was made with ``verify=``, what the
compiler said. Either may change without anyone noticing: a layer is added, or JAX is updated.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt import planning, verification
from remat_opt.device import Device
from remat_opt.errors import CompileError, PlanFileError, RematError
from remat_opt.loss_in_step import asked_about, undecorated
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.misuse import entry_point
from remat_opt.options import Request, signature_of, solver_of
from remat_opt.plan import Plan
from remat_opt.program.record import Program
from remat_opt.rematerialized import Rematerialized
from remat_opt.units import format_bytes, format_share

#: By what share a peak may grow: compilers differ by a little from version to version.
TOLERANCE = 0.02


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a plan still holds.

    Attributes:
      function: name of the loss.
      device: name of the device compiled for.
      then_bytes: temporaries when the plan was made, as compiled.
      now_bytes: temporaries now, as compiled; None if the program has changed or is refused.
      complaint: what is wrong and what to do; "" if the plan holds.
    """

    function: str
    device: str
    then_bytes: int
    now_bytes: int | None
    complaint: str


@entry_point
def check_plan(
    plan: Plan | str | os.PathLike[str],
    fn: Callable[..., Any],
    *args: Any,
    tolerance: float = TOLERANCE,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device | None = None,
    **kwargs: Any,
) -> Verdict:
    """Fails if a plan is no longer for this function, or needs more memory than before.

    The plan is compiled again for its device, which need not be attached.

    Args:
      plan: a plan that was made with ``verify=``, or a plan file.
      fn: what it was made for: the loss, or the step that differentiates it.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      tolerance: the share by which the temporaries may grow.
      argnums: see ``make_plan``; as when the plan was made, as are those that follow.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      donate_argnums: likewise.
      device: the device to compile for; the plan's own if None.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      The verdict, if the plan holds.

    Raises:
      AssertionError: the program has changed or the peak has grown. The message says which, by how
        much, and what to do.
      PlanFileError: the file cannot be used, or the plan was made without ``verify=``.
      MissingPackageError: the compiler for that device is not installed.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> from remat_opt.testing import check_plan
      >>> def loss(w, x):
      ...     for _ in range(8):
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> plan = remat_opt.make_plan(loss, shape, shape, device="cpu", verify=True)
      >>> check_plan(plan, loss, shape, shape).complaint
      ''
    """
    found = verdict(
        plan,
        fn,
        args,
        kwargs,
        tolerance=tolerance,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        device=device,
    )
    if found.complaint:
        raise AssertionError(found.complaint)
    return found


def verdict(
    plan: Plan | str | os.PathLike[str],
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    tolerance: float = TOLERANCE,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device | None = None,
) -> Verdict:
    """Checks whether a plan still holds; see ``check_plan``."""
    if tolerance < 0:
        raise RematError(f"tolerance={tolerance!r}: give a share such as 0.02, not less than 0.")
    made = plan if isinstance(plan, Plan) else Plan.load(plan)
    if made.measured is None:
        raise PlanFileError(
            f"The plan of {made.function!r} was not compiled when it was made, so there is no "
            "peak to compare with. Make it again with verify=True (--verify)."
        )
    target = compilation.resolve_device(made.device if device is None else device)
    planner = Rematerialized(
        undecorated(fn),
        signature_of(argnums, has_aux, static_argnums, static_argnames),
        Request(device=target, objective=made.objective, solver=solver_of(made.solver)),
    )
    with asked_about(planner, fn, args, kwargs, donate_argnums) as (_, call, program, inside):

        def compiled() -> Measurement:
            if inside is None:
                leaves = jax.tree.leaves((call.args, call.kwargs))
                return verification.measure_plan(made, program, leaves, target)
            loss = Rematerialized(inside.call.fn, inside.call.signature, planner.request)
            return inside.measure(loss.following(made), target)

        return _judged(made, program, planner.request, target, compiled, tolerance)


def _judged(
    made: Plan,
    program: Program,
    request: Request,
    device: Device,
    compiled: Callable[[], Measurement],
    tolerance: float,
) -> Verdict:
    assert made.measured is not None, "checked before"
    then_bytes = made.measured.temporary_bytes
    now_bytes = None
    complaint = ""
    if program.fingerprint() != made.fingerprint:
        complaint = (
            f"{program.name!r} is no longer the program that the plan was made for: the function, "
            "the shapes of its arguments, argnums or the version of JAX have changed "
            f"(JAX {made.jax_version} then, {jax.__version__} now). "
            f"{_predicted(made, program, request, device)}Make the plan again."
        )
    else:
        try:
            now_bytes = compiled().temporary_bytes
        except CompileError as error:
            if error.needed_bytes is None:
                raise
            complaint = (
                f"The plan of {made.function!r} compiled to {format_bytes(then_bytes)} of "
                f"temporaries when it was made, and does not compile now. {error}"
            )
    if now_bytes is not None and now_bytes > then_bytes * (1 + tolerance):
        complaint = (
            f"The peak of {made.function!r} under its plan has grown from "
            f"{format_bytes(then_bytes)} to {format_bytes(now_bytes)} of temporaries on "
            f"{device.name}, by {format_share(now_bytes / then_bytes - 1)}; "
            f"{format_share(tolerance)} is tolerated. The program is the same, so what is "
            "compiled around it or the compiler has changed "
            f"({made.measured.compiler_version} then, {compilation.compiler_version(device)} "
            'now). Make the plan again, with verify="compile" to stay within its budget.'
        )
    return Verdict(
        function=program.name,
        device=device.name,
        then_bytes=then_bytes,
        now_bytes=now_bytes,
        complaint=complaint,
    )


def _predicted(made: Plan, program: Program, request: Request, device: Device) -> str:
    """What the same request gives for the program as it is now."""
    before = format_bytes(made.predicted.temporary_bytes)
    try:
        now = planning.make(program, device, made.objective, request.solver)
    except RematError as error:
        return f"The plan's request can no longer be met: {error} "
    return (
        f"A plan for the same request is predicted to take "
        f"{format_bytes(now.predicted.temporary_bytes)} of temporaries now, and was predicted "
        f"to take {before}. "
    )
