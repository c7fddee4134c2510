"""A decorated loss inside a training step: found, planned and compiled there.

The step is what memory is spent on: its gradients are temporaries, its state is donated. So a plan
that is made for a step counts what the step keeps, and is compiled as a part of it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt import frameworks
from remat_opt.compilers.compiler import Compiler
from remat_opt.device import Device
from remat_opt.errors import BudgetError, RematError
from remat_opt.measurement import compilation, step
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.step import LossCall, Step, as_it_is
from remat_opt.options import Request, numbers
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.program.propagation import per_device
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.rematerialized import Rematerialized
from remat_opt.units import format_bytes


def undecorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function in a decorated one."""
    return fn.__wrapped__ if isinstance(fn, Rematerialized) else fn


def check_is_loss(fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None) -> None:
    """Raises RematError where what was meant as a step differentiates no decorated loss."""
    if donate_argnums is not None:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise RematError(
            f"donate_argnums={donate_argnums!r} is for a training step, but {name!r} "
            "differentiates no decorated loss. Decorate the loss that the step differentiates with "
            "optimal_remat, or, if this is the loss, leave donate_argnums out."
        )


def step_of(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature,
    donate_argnums: int | Sequence[int] | None,
) -> Step:
    """The step that a user means.

    Raises:
      RematError: options were given that are for a loss.
    """
    if signature.argnums not in (None, (0,)) or signature.has_aux:
        raise RematError(
            "argnums= and has_aux= say how a loss is differentiated; this is a step, which "
            "differentiates a decorated loss. Give them to the decorator."
        )
    found = Step(
        fn=fn,
        args=tuple(args),
        kwargs=kwargs,
        static_argnums=signature.static_argnums,
        static_argnames=signature.static_argnames,
    )
    donated = step.donated_by(fn, found) if donate_argnums is None else numbers(donate_argnums)
    return dataclasses.replace(found, donate_argnums=donated)


def plan_in_step(
    in_step: Step, program: Program, calls: Sequence[LossCall], wanted: Rematerialized
) -> Plan:
    """Plans the loss in a step.

    Args:
      in_step: the step.
      program: of the step.
      calls: of the loss in it.
      wanted: holds the options.
    """
    call = step.the_one(calls)
    device = compilation.resolve_device(wanted.request.device, program.mesh)
    resident = in_step.resident(program, device)
    objective = _in_bytes(wanted, in_step, resident.total, call, device)
    planner = Rematerialized(
        call.fn,
        call.signature,
        dataclasses.replace(wanted.request, device=device, objective=objective, errors="raise"),
    )

    def compiled(plan: Plan) -> Measurement:
        return in_step.measure(
            planner.following(plan),
            call.loss,
            device,
            with_buffers=wanted.request.verify == "compile",
        )

    donated = ",".join(map(str, in_step.donate_argnums))
    plan = planner.choose(
        call.program, device, f"{program.fingerprint()} donates {donated}", compiled
    )
    if wanted.request.verify and plan.measured is None:
        plan = dataclasses.replace(plan, measured=compiled(plan))
    note = gradients_note(in_step, call, device)
    return dataclasses.replace(
        plan,
        objective=wanted.request.objective,
        resident=resident,
        notes=(*plan.notes, note),
    )


def _gradient_bytes(call: LossCall, device: Device) -> int:
    program = per_device(call.program)
    compiler = Compiler(device=device)
    return sum(compiler.buffer_bytes(program.types[value]) for value in program.differentiated)


def gradients_note(in_step: Step, call: LossCall, device: Device) -> str:
    """What a reader should know of gradients in predictions for a step."""
    return (
        "Predictions take each gradient to be used up as soon as it is there. Where "
        f"{in_step.name!r} needs them all at once ({format_bytes(_gradient_bytes(call, device))}), "
        'as for clipping by their norm, give gradients="together".'
    )


def _in_bytes(
    wanted: Rematerialized, in_step: Step, resident_bytes: int, call: LossCall, device: Device
) -> Objective:
    """The objective with what depends on the step as bytes.

    Raises:
      BudgetError: nothing is left for temporaries.
      CompileError: a share is asked for, and the step as it is does not compile.
    """
    objective = wanted.request.objective
    by_compiling = wanted.request.verify == "compile"
    if objective.budget_share is not None and by_compiling:
        plain = in_step.measure(as_it_is, call.loss, device)
        budget_bytes = round(objective.budget_share * plain.temporary_bytes)
        return dataclasses.replace(objective, budget_share=None, budget_bytes=budget_bytes)
    if objective.fit:
        # Where nothing is compiled, all gradients may be there beside what is predicted.
        gradient_bytes = 0 if by_compiling else _gradient_bytes(call, device)
        taken_bytes = resident_bytes + objective.reserve_bytes + gradient_bytes
        if taken_bytes >= device.memory_bytes:
            raise BudgetError(
                f"Nothing is left for temporaries on {device.name}: of its "
                f"{format_bytes(device.memory_bytes)}, arguments and outputs of "
                f"{in_step.name!r} take {format_bytes(resident_bytes)}, gradients "
                f"{format_bytes(gradient_bytes)}, and {format_bytes(objective.reserve_bytes)} are "
                "reserved. Use a device with more memory, donate the state, shard the parameters, "
                "or reserve less.",
                budget_bytes=0,
                least_peak_bytes=0,
                pinning=(),
            )
        return dataclasses.replace(
            objective,
            fit=False,
            reserve_bytes=0,
            budget_bytes=device.memory_bytes - taken_bytes,
        )
    return objective


def compiled_in(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature,
    donate_argnums: int | Sequence[int] | None,
    argnums: int | Sequence[int] | None,
) -> tuple[Step, Sequence[LossCall], bool]:
    """What to compile, the calls of the loss in it, and whether it is a step of the user's."""
    if frameworks.have_modules(args, kwargs):
        raise RematError(
            "compare compiles functions of arrays, but there are modules of flax.nnx among the "
            "arguments. Give it a function of what nnx.split makes of them, which calls nnx.merge; "
            "make_plan and frontier take modules."
        )
    if not isinstance(fn, Rematerialized):
        with step.recording() as found:
            without = dataclasses.replace(signature, argnums=())
            call = tracing.bind_static(fn, without, args, dict(kwargs))
            program = tracing.trace_call(call, has_aux=False)
        if calls := found.calls(program):
            return step_of(fn, args, kwargs, signature, donate_argnums), calls, True
    check_is_loss(fn, donate_argnums)
    loss = Rematerialized(undecorated(fn), signature, Request(device="cpu"))
    several = signature.argnums
    if several is None:
        call = tracing.bind_static(loss.fn, signature, args, dict(kwargs))
        several = tuple(call.positions[number] for number in call.argnums)
    alone = Step(
        fn=jax.value_and_grad(
            loss,
            argnums=(several if isinstance(argnums, Sequence) else (*several, 0)[0]),
            has_aux=signature.has_aux,
        ),
        args=tuple(args),
        kwargs=kwargs,
        static_argnums=signature.static_argnums,
        static_argnames=signature.static_argnames,
    )
    return alone, alone.trace()[1], False
