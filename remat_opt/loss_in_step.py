"""A decorated loss inside a training step: found, planned and compiled there.

Memory is spent on the whole step: its gradients are temporaries, its state is donated. So a plan
made for a step counts what the step keeps, and is compiled as a part of it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_opt import frameworks
from remat_opt.compilers.compiler import Compiler
from remat_opt.device import Device
from remat_opt.errors import BudgetError, RematError
from remat_opt.measurement import compilation, step
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.step import (
    How,
    LossCall,
    Step,
    as_it_is,
    forward_flops,
    the_one,
)
from remat_opt.options import Request, numbers
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.program.propagation import per_device
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.rematerialized import Rematerialized
from remat_opt.units import format_bytes


def undecorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The function inside a decorated one."""
    return fn.__wrapped__ if isinstance(fn, Rematerialized) else fn


def check_is_loss(fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None) -> None:
    """Raises RematError if what was meant as a step differentiates no decorated loss."""
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
    """The step that the user means.

    Raises:
      RematError: options for a loss were given.
    """
    if signature.argnums not in (None, (0,)) or signature.has_aux:
        raise RematError(
            "argnums= and has_aux= say how to differentiate a loss, but this is a step that "
            "differentiates a decorated loss. Give them to the decorator."
        )
    found = Step(
        fn=fn,
        args=tuple(args),
        kwargs=kwargs,
        static_argnums=signature.static_argnums,
        static_argnames=signature.static_argnames,
    )
    if donate_argnums is None:
        donated = step.donated_by(fn, found)
    else:
        donated = tuple(
            tracing.position_of(number, len(args), "donate_argnums")
            for number in numbers(donate_argnums, "donate_argnums")
        )
    return dataclasses.replace(found, donate_argnums=donated)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossInStep:
    """A loss inside what is compiled: the user's step, or the gradient alone.

    Attributes:
      step: what is compiled.
      program: the step's program.
      call: the call of the loss in it.
      forward_flops: FLOPs of all forward passes of the loss in it.
      is_alone: whether the step is no more than the gradient.
    """

    step: Step
    program: Program
    call: LossCall
    forward_flops: int
    is_alone: bool = False
    _plain: dict[Device, Measurement] = dataclasses.field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @classmethod
    def of(
        cls, step: Step, program: Program, calls: Sequence[LossCall], *, is_alone: bool = False
    ) -> LossInStep:
        """The loss that a traced step calls.

        Raises:
          RematError: it calls several.
        """
        return cls(
            step=step,
            program=program,
            call=the_one(calls),
            forward_flops=forward_flops(calls),
            is_alone=is_alone,
        )

    def measure(self, how: How, device: Device) -> Measurement:
        """Compiles the step with something run in place of the loss; unchanged, only once.

        Raises:
          CompileError: the compiler refuses it, as for lack of memory.
        """
        if how is not as_it_is:
            return self.step.measure(how, self.call.loss, device)
        if device not in self._plain:
            self._plain[device] = self.step.measure(how, self.call.loss, device)
        return self._plain[device]

    def flops(self, how: How) -> int:
        """FLOPs of the step with something run in place of the loss."""
        return self.step.flops(how, self.call.loss)

    def plan(self, wanted: Rematerialized) -> Plan:
        """Plans the loss.

        Args:
          wanted: holds the options.

        Raises:
          BudgetError: no plan is within the budget.
          CompileError: the compiler refuses all plans that are to be compiled.
        """
        device = compilation.resolve_device(wanted.request.device, self.program.mesh)
        device = device.told(self.step.compiler_options)
        resident = self.step.resident(self.program, device)
        objective = self._in_bytes(wanted.request, resident.total, device)
        planner = Rematerialized(
            self.call.fn,
            self.call.signature,
            dataclasses.replace(wanted.request, device=device, objective=objective, errors="raise"),
        )

        def compiled(plan: Plan) -> Measurement:
            return self.step.measure(
                planner.following(plan), self.call.loss, device, with_buffers=True
            )

        donated = ",".join(map(str, self.step.donate_argnums))
        of_step = f"{self.program.fingerprint()} donates {donated}"
        context = ", ".join((of_step, *device.option_words))
        plan = planner.choose(self.call.program, device, context, compiled)
        return dataclasses.replace(
            plan,
            objective=wanted.request.objective,
            resident=resident,
            notes=(*plan.notes, *self.notes(device)),
        )

    def notes(self, device: Device) -> tuple[str, ...]:
        """What a reader should know about gradients in predictions."""
        if self.is_alone:
            return ()
        gradients = format_bytes(self._gradient_bytes(device))
        return (
            "Predictions assume that each gradient is used up as soon as it is computed. If "
            f"{self.step.name!r} needs them all at once ({gradients}), as for clipping by "
            'their norm, give gradients="together".',
        )

    def _gradient_bytes(self, device: Device) -> int:
        program = per_device(self.call.program)
        compiler = Compiler(device=device)
        return sum(compiler.buffer_bytes(program.types[value]) for value in program.differentiated)

    def _in_bytes(self, wanted: Request, resident_bytes: int, device: Device) -> Objective:
        """The objective, with what depends on the step turned into bytes.

        Raises:
          BudgetError: nothing is left for temporaries.
          CompileError: a share is asked for, and the unchanged step does not compile.
        """
        objective = wanted.objective
        by_compiling = wanted.verify == "compile"
        if objective.budget_share is not None and by_compiling:
            plain_bytes = self.measure(as_it_is, device).temporary_bytes
            budget_bytes = round(objective.budget_share * plain_bytes)
            return dataclasses.replace(objective, budget_share=None, budget_bytes=budget_bytes)
        if objective.fit:
            # If nothing is compiled, all gradients may be there besides what is predicted.
            # Gradients that are results already count as resident.
            seen = by_compiling or self.is_alone
            gradient_bytes = 0 if seen else self._gradient_bytes(device)
            taken_bytes = resident_bytes + objective.reserve_bytes + gradient_bytes
            if taken_bytes >= device.memory_bytes:
                raise BudgetError(
                    f"Nothing is left for temporaries on {device.name}: of its "
                    f"{format_bytes(device.memory_bytes)}, arguments and outputs of "
                    f"{self.step.name!r} take {format_bytes(resident_bytes)}, gradients "
                    f"{format_bytes(gradient_bytes)}, and "
                    f"{format_bytes(objective.reserve_bytes)} are reserved. Use a device with "
                    "more memory, donate the state, shard the parameters, or reserve less.",
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


@contextlib.contextmanager
def asked_about(
    decorated: Rematerialized,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    donate_argnums: int | Sequence[int] | None,
) -> Iterator[tuple[Rematerialized, tracing.Call, Program, LossInStep | None]]:
    """Finds out whether a function is a loss or a step.

    Args:
      decorated: holds the options, around the function.
      fn: the function as the user gave it.
      args: its positional arguments.
      kwargs: its keyword arguments.
      donate_argnums: of a step, the arguments it donates.

    Yields:
      What runs the function without ``flax.nnx`` modules, its call, the program of the loss, and
      the loss in the step, or None if there is no step.

    Raises:
      RematError: options of a step are given for a loss, or the other way round.
    """
    with decorated.pure_call(args, kwargs) as (run, pure):
        call = run.bind(pure.args, pure.kwargs)
        with step.recording() as found:
            program = run.trace(call)
        if calls := found.calls(program):
            in_step = step_of(
                fn if run is decorated else pure.fn,
                pure.args,
                pure.kwargs,
                decorated.signature,
                donate_argnums,
            )
            inside = LossInStep.of(in_step, program, calls)
            yield run, call, inside.call.program, inside
        else:
            check_is_loss(fn, donate_argnums)
            # Seen, but not differentiated: a part of this loss, to be run as it is decorated.
            yield run, call, run.trace(call) if found.seen else program, None


def compiled_in(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    signature: Signature,
    donate_argnums: int | Sequence[int] | None,
    argnums: int | Sequence[int] | None,
) -> LossInStep:
    """What to compile for a step, or for a loss: its gradient.

    Raises:
      RematError: some arguments are modules, or it differentiates no decorated loss.
    """
    if frameworks.have_modules(args, kwargs):
        raise RematError(
            "compare compiles functions of arrays, but some of the arguments are flax.nnx "
            "modules. Split them with nnx.split, and give compare a function that calls "
            "nnx.merge. make_plan and frontier take modules."
        )
    if not isinstance(fn, Rematerialized):
        with step.recording() as found:
            without = dataclasses.replace(signature, argnums=())
            call = tracing.bind_static(fn, without, args, dict(kwargs))
            program = tracing.trace_call(call, has_aux=False)
        if calls := found.calls(program):
            in_step = step_of(fn, args, kwargs, signature, donate_argnums)
            return LossInStep.of(in_step, program, calls)
    check_is_loss(fn, donate_argnums)
    loss = Rematerialized(undecorated(fn), signature, Request(device="cpu"))
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
    return LossInStep.of(alone, *alone.trace(), is_alone=True)
