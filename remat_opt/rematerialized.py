"""A function that follows a plan: traced and planned at its first call, and again when needed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import os
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_opt import failure, frameworks, planning, traces, verification
from remat_opt.compilers.model import computes_nothing
from remat_opt.device import Device
from remat_opt.errors import PlanFileError, PlanningWarning, RematError, TraceError
from remat_opt.export.source import Source, source_of
from remat_opt.measurement import compilation
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.step import instead_of
from remat_opt.options import Request
from remat_opt.plan import Plan
from remat_opt.program import tracing
from remat_opt.program.record import UNKNOWN_PLACEMENT, Program
from remat_opt.program.static_leaves import release
from remat_opt.program.tracing import Signature
from remat_opt.recent import Recent
from remat_opt.traces import Place, Trace
from remat_opt.transform import rewriting
from remat_opt.trials import with_measurement
from remat_opt.view.plan_text import printable

#: How many plans a decorated function holds, one for each program that it was traced to: a few
#: hundred kilobytes each for a deep network.
_MOST_PLANS = 64


class Rematerialized:
    """A function that follows a plan; what ``optimal_remat`` and ``apply_plan`` return.

    Calling it gives the values, the tree and the dtypes of the function it wraps, and the same
    derivatives; the backward pass keeps and recomputes as planned. It is planned once for each
    program that it is traced to. Under ``jax.jit`` it is traced whenever the surrounding function
    is; by itself, it is traced and compiled once for calls that are alike.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        request: Request,
        plan: Plan | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        if plan is not None:
            again = plan.communicates_again
            signature = dataclasses.replace(signature, communicates_again=again)
        self.signature = signature
        self.request = request
        self._given = plan
        self._plans: Recent[str, Plan] = Recent(_MOST_PLANS)
        # Programs that have no plan, about which the user was warned.
        self._unplanned: Recent[str, bool] = Recent(_MOST_PLANS)
        self._traces: Recent[Hashable, Trace] = Recent(_MOST_PLANS)
        # The ``flax.nnx`` module that it is a method of, if any.
        self._instance: tuple[Any, ...] = ()
        # Which loss it is, for ``step``: a bound method counts as the function it is bound from.
        self._identity = _identity(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as planned; the results are those of the function itself."""
        with self.pure_call(args, kwargs) as (run, pure):
            return pure.finish(run._call(pure.args, pure.kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instead = instead_of(self._identity, self.fn, self.signature)
        if instead is not None:
            return instead(*args, **kwargs)
        call = self.bind(args, kwargs)
        place = traces.place_of(call, self.fn)
        if place is not None:
            known = self._traces.get(place.key)
            if known is not None and known.references == place.references:
                return known.run(jax.tree.leaves((call.args, call.kwargs)))
        if self.request.errors == "raise":
            return self._run(self.trace(call), call, place)
        try:
            program = self.trace(call)
        except Exception as error:
            if not (failure.is_own_fault(error) and _can_be_traced(call)):
                raise
            return self._run_as_it_is(call, error)
        fingerprint = program.fingerprint()
        if self._unplanned.get(fingerprint):
            return call.fn(*call.args, **call.kwargs)
        try:
            return self._run(program, call, place)
        except Exception as error:
            if not failure.is_own_fault(error):
                raise
            found = self._run_as_it_is(call, error)
            self._unplanned.put(fingerprint, True)
            return found

    def _run(self, program: Program, call: tracing.Call, place: Place | None) -> Any:
        leaves = jax.tree.leaves((call.args, call.kwargs))
        arguments = [*leaves, *program.closed_over]
        # If nothing is being traced, no derivative is taken and there is nothing to plan. If
        # nothing has a derivative, jax.grad refuses.
        is_traced = any(isinstance(value, jax.core.Tracer) for value in arguments)
        if self._given is not None or (is_traced and program.differentiated):
            plan = self.plan_of(program, call)
            run = rewriting.rewrite(
                program, plan.stages, plan.platform, loops=plan.loops, unchanged=plan.unchanged
            )
        else:
            run = rewriting.rewrite(program, (), "cpu", unchanged=True)
        kept = traces.trace_at(place, program, run)
        if place is not None and kept is not None:
            result = kept.run(leaves)
            self._traces.renew(place.key, kept)
            return result
        outputs = run(program.constant_values, arguments)
        return release(jax.tree.unflatten(program.output_tree, outputs))

    def _run_as_it_is(self, call: tracing.Call, error: Exception) -> Any:
        """Calls the function itself, and warns unless that fails too."""
        result = call.fn(*call.args, **call.kwargs)
        facts = {
            "device": self.request.device,
            "objective": self.request.objective,
            "solver": self.request.solver,
            "signature": self.signature,
        }
        failure.warn(error, call.name, facts, call.fn, call.args, call.kwargs, stack_level=4)
        return result

    def __deepcopy__(self, memo: dict[int, Any]) -> Rematerialized:
        """Itself, as for functions: copies of what holds it share its plans."""
        return self

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # So that a decorated method is bound like any other. Argument numbers count as for
        # jax.grad(model.loss): without the instance, which is closed over.
        if instance is None:
            return self
        if frameworks.is_module(instance):
            # Pass the instance as an argument, to carry its state. Plans made ahead are for its
            # parameters.
            bound = self.around(self.fn, self.signature.with_instance())
            bound._instance = (instance,)
            bound.__wrapped__ = self.fn.__get__(instance, owner)
            return bound
        return self.around(self.fn.__get__(instance, owner))

    @contextlib.contextmanager
    def pure_call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Rematerialized, frameworks.Pure]]:
        """A call turned into one without ``flax.nnx`` modules: the function and its arguments."""
        has_aux = self.signature.has_aux
        args = (*self._instance, *args)
        with frameworks.pure(self.fn, args, kwargs, has_aux=has_aux) as pure:
            if pure.fn is self.fn:
                yield self, pure
            else:
                signature = dataclasses.replace(self.signature, has_aux=True)
                yield self.around(pure.fn, signature), pure

    def around(self, fn: Callable[..., Any], signature: Signature | None = None) -> Rematerialized:
        """The same, including plans, around a function that traces to the same programs."""
        found = Rematerialized(fn, signature or self.signature, self.request, self._given)
        found._plans, found._unplanned = self._plans, self._unplanned
        found._traces = self._traces
        found._identity = self._identity
        return found

    def following(self, plan: Plan) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """The way to run a loss by a plan; calls that trace to other programs are planned too."""
        found = self.around(self.fn)
        found._plans, found._traces = Recent(_MOST_PLANS), Recent(_MOST_PLANS)
        found._plans.put(plan.fingerprint, plan)
        found._plans.put(f"{plan.fingerprint} {UNKNOWN_PLACEMENT}", plan)
        return found.around

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with such arguments uses.

        Args:
          *args: arrays or ``jax.ShapeDtypeStruct`` in their place.
          **kwargs: likewise.

        Raises:
          BudgetError: the budget cannot be reached.
        """
        with self.pure_call(args, kwargs) as (run, pure):
            call = run.bind(pure.args, pure.kwargs)
            return run.plan_of(run.trace(call), call)

    def to_source(self, *args: Any, **kwargs: Any) -> Source:
        """The function as run for such arguments, as ordinary JAX code.

        ``str`` of it gives, and ``save`` writes, a module that imports only JAX. Its function takes
        and returns what this one does, at the shapes of these arguments. The code is read back and
        traced before it is returned.

        Args:
          *args: arrays or ``jax.ShapeDtypeStruct`` in their place.
          **kwargs: likewise.

        Raises:
          RematError: something in the program cannot be written as code; the message names it.

        Example:
          >>> import jax, jax.numpy as jnp
          >>> from remat_opt import optimal_remat
          >>> @optimal_remat(device="cpu")
          ... def loss(weights, x):
          ...     return jnp.sum(jnp.sin(jnp.sin(x @ weights) @ weights))
          >>> source = loss.to_source(jnp.ones((8, 8)), jnp.ones((2, 8)))
          >>> "remat_opt" in [line.split()[1] for line in source.text.splitlines()
          ...                 if line.startswith(("import ", "from "))]
          False
        """
        with self.pure_call(args, kwargs) as (run, pure):
            if run is not self:
                raise RematError(
                    f"Among the arguments of {self.fn.__name__!r} are flax.nnx modules, which "
                    "code cannot hold. Write the loss as a function of their state, with "
                    "nnx.split and nnx.merge, and export that."
                )
            call = run.bind(pure.args, pure.kwargs)
            program = run.trace(call)
            return source_of(run.plan_of(program, call), program, call)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with such arguments traces to."""
        with self.pure_call(args, kwargs) as (run, pure):
            return run.trace(run.bind(pure.args, pure.kwargs))

    def problem(self, program: Program) -> planning.Problem:
        """Everything to decide about a program, which must compute something.

        Raises:
          RematError: nothing is differentiated, or the solver does not take the program.
        """
        planning.check_differentiated(program)
        return planning.problem(
            program,
            compilation.resolve_device(self.request.device, program.mesh),
            measure=self.request.objective.overhead,
            solver=self.request.solver,
            gradients=self.request.objective.gradients,
        )

    def choose(
        self,
        program: Program,
        device: Device,
        in_step: str,
        compiled: Callable[[Plan], Measurement],
    ) -> Plan:
        """A plan of a program: by compiling, if asked for, and by what was learnt.

        Args:
          program: the program.
          device: the machine to plan for.
          in_step: what is compiled around the program; anything learnt is about that.
          compiled: compiles a plan inside it.
        """
        wanted, verify = self.request.objective, self.request.verify
        planning.check_differentiated(program)
        if computes_nothing(program):
            plan = planning.make(program, device, wanted, self.request.solver)
            return with_measurement(plan, compiled(plan)) if verify else plan
        known = None
        if verify == "compile" or self.request.learnt is not None:
            memory = verification.Memory(program, device, in_step, self.request.learnt)
            if verify == "compile":
                return verification.choose(self.problem(program), wanted, compiled, memory)
            known = memory.read()
        if verify:
            of = self.problem(program)
            of = of if known is None else planning.informed(of, known, wanted.overhead)
            plan = verification.confirm(of, wanted, compiled)
        else:
            plan = planning.make(program, device, wanted, self.request.solver, known)
        if known is not None or self.request.learnt is None:
            return plan
        note = (
            f"{os.fspath(self.request.learnt or '')!r} says nothing about this program on "
            f"{device.name} with this compiler in this step: the model alone predicts."
        )
        return dataclasses.replace(plan, notes=(*plan.notes, note))

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tracing.Call:
        """A call with its static arguments filled in."""
        return tracing.bind_static(self.fn, self.signature, args, kwargs)

    def trace(self, call: tracing.Call) -> Program:
        """The program that a call traces to."""
        trace = functools.partial(tracing.trace_call, call, has_aux=self.signature.has_aux)
        try:
            program = trace()
            if self._given is None or program.fingerprint() == self._given.fingerprint:
                return program
            if not call.dissolved:
                # The plan may be for the function without its own checkpoints.
                dissolved = self.trace(dataclasses.replace(call, dissolved=True))
                if dissolved.fingerprint() == self._given.fingerprint:
                    return dissolved
            return trace(as_declared=True)
        except Exception as error:
            if not frameworks.is_change_from_within(error):
                raise
            first_line = str(error).splitlines()[0].partition(" (http")[0]
            raise TraceError(
                f"{call.name!r} changes a module that it closes over ({first_line}), and the "
                "change would be lost. Pass the module as an argument."
            ) from error

    def plan_of(self, program: Program, call: tracing.Call) -> Plan:
        """The plan that a call traced to this program follows."""
        fingerprint = program.fingerprint()
        if self._given is not None:
            check_belongs(self._given, fingerprint, program.name)
            return self._given
        made_for = program.placed_fingerprint()
        found = self._plans.made(made_for, lambda: self._make(program, call))
        if program.placement is not None:
            # Under jax.jit it is unknown how arguments are split: assume as last time.
            self._plans.renew(f"{fingerprint} {UNKNOWN_PLACEMENT}", found)
        return found

    def _make(self, program: Program, call: tracing.Call) -> Plan:
        device = compilation.resolve_device(self.request.device, program.mesh)

        def compiled(plan: Plan) -> Measurement:
            arguments = jax.tree.leaves((call.args, call.kwargs))
            return verification.measure_plan(plan, program, arguments, device, with_buffers=True)

        plan = self.choose(program, device, self.request.objective.gradients.value, compiled)
        if program.placement is not None and planning.unsplit_note(program) in plan.notes:
            warnings.warn(planning.unsplit_note(program), PlanningWarning, stacklevel=2)
        return plan


def _identity(fn: Callable[..., Any]) -> object:
    """A function's code: it stays the same if a step redefines the function at each trace."""
    fn = inspect.unwrap(fn)
    is_local = "<locals>" in getattr(fn, "__qualname__", "")
    return getattr(fn, "__code__", object()) if is_local else object()


def _can_be_traced(call: tracing.Call) -> bool:
    """Whether JAX traces a function that ``tracing`` failed on; if not, the error is the user's."""
    try:
        jax.make_jaxpr(call.fn)(*call.args, **call.kwargs)
    except Exception:
        return False
    return True


def check_belongs(plan: Plan, fingerprint: str, function: str) -> None:
    """Raises PlanFileError unless the plan was made for the program with this fingerprint."""
    if plan.fingerprint != fingerprint:
        raise PlanFileError(
            f"The plan was made for another program: for {plan.function!r} with the "
            f"fingerprint {printable(plan.fingerprint[:12])}, traced by JAX "
            f"{printable(plan.jax_version)}; this is {function!r} with {fingerprint[:12]}, "
            f"traced by JAX {jax.__version__}. The function, the shapes of its arguments, "
            "argnums or the version of JAX have changed since then. Make the plan again."
        )
