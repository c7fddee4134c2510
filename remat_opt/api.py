"""The doors: decorate a loss, make and apply plans, measure.

Arguments are checked here; everything else happens below.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from remat_opt import comparison, failure, frameworks, planning, solvers, trade_off, verification
from remat_opt.comparison import Comparison, Contender
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.model import computes_nothing
from remat_opt.device import Device
from remat_opt.errors import BudgetError, PlanFileError, RematError, TraceError
from remat_opt.gradients import Gradients
from remat_opt.measurement import compilation, step
from remat_opt.measurement.compilation import Measurement
from remat_opt.measurement.step import LossCall, Step, as_it_is, instead_of
from remat_opt.plan import Objective, Plan
from remat_opt.program import blocks, tracing
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.recent import Recent
from remat_opt.solvers import Solver
from remat_opt.solvers.base import Overhead
from remat_opt.trade_off import Frontier
from remat_opt.transform import rewriting
from remat_opt.units import format_bytes, format_share, parse_bytes
from remat_opt.view.plan_text import printable

#: Plans that a decorated function holds, one for each program that it was traced to: a few hundred
#: kilobytes each for a deep network.
_MOST_PLANS = 64


def objective_of(
    budget: str | int | float | None = None,
    max_overhead: float | None = None,
    overhead: str = "seconds",
    reserve: str | int | None = None,
    gradients: str = "consumed",
) -> Objective:
    """Reads the options that say what is wanted of a plan.

    Args:
      budget: bytes of temporaries, as an int or a text such as ``"6GiB"``; or, as a float,
        a share of what the unchanged function needs; or ``"fit"``.
      max_overhead: share of a forward pass that may be recomputed.
      overhead: ``"seconds"`` or ``"flops"``, what recomputation is counted in.
      reserve: bytes that ``budget="fit"`` leaves free.
      gradients: what becomes of them: ``"consumed"``, ``"together"`` or ``"results"``.

    Raises:
      RematError: both are given, or a number is out of range.
    """
    if budget is not None and max_overhead is not None:
        raise RematError(
            f"budget={budget!r} and max_overhead={max_overhead!r} are both given. A budget asks "
            "for the least overhead, a largest overhead for the least memory: give one of them."
        )
    try:
        counted = Overhead(overhead)
    except ValueError:
        raise RematError(f"overhead={overhead!r}: give 'seconds' or 'flops'.") from None
    try:
        fate = Gradients(gradients)
    except ValueError:
        raise RematError(
            f"gradients={gradients!r}: give 'consumed' where a step uses up each as soon as it is "
            "there, 'together' where it needs all at once, as for clipping by their norm, or "
            "'results' where they are put out."
        ) from None
    wanted = functools.partial(Objective, overhead=counted, gradients=fate)
    if reserve is not None and budget != "fit":
        raise RematError(
            f'reserve={reserve!r} is what budget="fit" leaves free of the device\'s memory; with '
            f"budget={budget!r} it says nothing. Leave it out, or ask for the fit."
        )
    if max_overhead is not None:
        is_number = isinstance(max_overhead, int | float) and not isinstance(max_overhead, bool)
        if not (is_number and max_overhead >= 0 and math.isfinite(max_overhead)):
            raise RematError(
                f"max_overhead={max_overhead!r}: give a share of a forward pass, such as 0.05."
            )
        return wanted(max_overhead=float(max_overhead))
    if budget is None:
        return wanted()
    if budget == "fit":
        free = 0 if reserve is None else parse_bytes(reserve)
        return wanted(fit=True, reserve_bytes=free)
    if isinstance(budget, float):
        if not (budget > 0 and math.isfinite(budget)):
            raise RematError(
                f"budget={budget!r}: a float is a share of what the unchanged function needs, such "
                "as 0.4. For bytes, give an int or a text such as '6GiB'."
            )
        if budget > 16:
            raise RematError(
                f"budget={budget!r}: a float is a share of what the unchanged function needs, and "
                f"{budget:g} times that is hardly meant. For bytes, give an int or '6GiB'."
            )
        return wanted(budget_share=budget)
    return wanted(budget_bytes=parse_bytes(budget))


def solver_of(given: str | Solver) -> Solver:
    """Reads the option that says who decides.

    Raises:
      RematError: there is no such solver, or it does not plan programs.
    """
    if isinstance(given, Solver):
        return given
    found = solvers.named(given) if isinstance(given, str) else None
    if found is None:
        fit = ", ".join(repr(row.name) for row in solvers.available() if row.plans_programs)
        raise RematError(
            f"solver={given!r}: give one of {fit}, or a record of remat_opt.solvers, such as "
            "ApproximateDP(objective='memory')."
        )
    return found


def _numbers(given: int | Sequence[int] | None) -> tuple[int, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, int) else tuple(given)


def _names(given: str | Sequence[str] | None) -> tuple[str, ...]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def signature_of(
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Signature:
    """Reads the options that say how a function's arguments are to be taken."""
    return Signature(
        argnums=None if argnums is None else _numbers(argnums),
        has_aux=has_aux,
        static_argnums=_numbers(static_argnums),
        static_argnames=_names(static_argnames),
    )


class Rematerialized:
    """A function that follows a plan; what ``optimal_remat`` and ``apply_plan`` return.

    Calling it gives the values, the tree and the dtypes of the function it wraps, and its
    derivatives are the same too; taken backward, it keeps and recomputes as planned. The
    function is traced at every call, as ``jax.jit`` would, and planned once for each program
    that this gives. So it is best called under ``jax.jit``.
    """

    __wrapped__: Callable[..., Any]

    def __init__(
        self,
        fn: Callable[..., Any],
        signature: Signature,
        device: str | Device,
        objective: Objective,
        solver: Solver,
        plan: Plan | None,
        verify: bool | str,
        errors: str,
        learnt: str | os.PathLike[str] | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._signature = signature
        self._device = device
        self._objective = objective
        self._solver = solver
        self._given = plan
        self._verify = verify
        self._errors = errors
        self._learnt = learnt
        self._plans: Recent[str, Plan] = Recent(_MOST_PLANS)
        # Programs that have no plan, and were warned of.
        self._unplanned: Recent[str, bool] = Recent(_MOST_PLANS)
        # A module of ``flax.nnx`` that it is a method of.
        self._instance: tuple[Any, ...] = ()
        # Which loss it is, for ``step``: bound methods are one with what they are bound from.
        self._identity = object()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as planned; the results are those of the function itself."""
        with self._pure(args, kwargs) as (run, pure):
            return pure.finish(run._call(pure.args, pure.kwargs))

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        instead = instead_of(self._identity, self._fn, self._signature)
        if instead is not None:
            return instead(*args, **kwargs)
        call = self._bind(args, kwargs)
        if self._errors == "raise":
            return self._run(self._trace(call), call)
        try:
            program = self._trace(call)
        except Exception as error:
            if not (failure.is_own_fault(error) and _can_be_traced(call)):
                raise
            return self._run_as_it_is(call, error)
        fingerprint = program.fingerprint()
        if self._unplanned.get(fingerprint):
            return call.fn(*call.args, **call.kwargs)
        try:
            return self._run(program, call)
        except Exception as error:
            if not failure.is_own_fault(error):
                raise
            found = self._run_as_it_is(call, error)
            self._unplanned.put(fingerprint, True)
            return found

    def _run(self, program: Program, call: tracing.Call) -> Any:
        if program.differentiated or self._given is not None:
            plan = self._plan_of(program, call)
            run = rewriting.rewrite(program, plan.stages, plan.platform, loops=plan.loops)
        else:
            # jax.grad refuses such arguments; a call without derivative has nothing to plan.
            run = rewriting.rewrite(program, (), "cpu")
        outputs = run(program.constant_values, jax.tree.leaves((call.args, call.kwargs)))
        return jax.tree.unflatten(program.output_tree, outputs)

    def _run_as_it_is(self, call: tracing.Call, error: Exception) -> Any:
        """Calls the function itself, and warns where it does not fail by itself."""
        result = call.fn(*call.args, **call.kwargs)
        facts = {
            "device": self._device,
            "objective": self._objective,
            "solver": self._solver,
            "signature": self._signature,
        }
        failure.warn(error, call.name, facts, call.fn, call.args, call.kwargs, stack_level=4)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # So that a decorated method is bound like any other. Numbers count as for
        # jax.grad(model.loss): without the instance, which is closed over.
        if instance is None:
            return self
        if frameworks.is_module(instance):
            # An argument, so that its state comes through. Plans made ahead are for its parameters.
            bound = self._around(self._fn, self._signature.with_instance())
            bound._instance = (instance,)
            bound.__wrapped__ = self._fn.__get__(instance, owner)
            return bound
        return self._around(self._fn.__get__(instance, owner))

    @contextlib.contextmanager
    def _pure(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Iterator[tuple[Rematerialized, frameworks.Pure]]:
        """A call as one without modules of ``flax.nnx``: what to call, with which arguments."""
        has_aux = self._signature.has_aux
        args = (*self._instance, *args)
        with frameworks.pure(self._fn, args, kwargs, has_aux=has_aux) as pure:
            if pure.fn is self._fn:
                yield self, pure
            else:
                signature = dataclasses.replace(self._signature, has_aux=True)
                yield self._around(pure.fn, signature), pure

    def _around(self, fn: Callable[..., Any], signature: Signature | None = None) -> Rematerialized:
        """The same, plans included, round a function that traces to the same programs."""
        found = Rematerialized(
            fn,
            signature or self._signature,
            self._device,
            self._objective,
            self._solver,
            self._given,
            self._verify,
            self._errors,
            self._learnt,
        )
        found._plans, found._unplanned = self._plans, self._unplanned
        found._identity = self._identity
        return found

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with such arguments uses.

        Args:
          *args: arrays or ``jax.ShapeDtypeStruct`` in their place.
          **kwargs: likewise.

        Raises:
          BudgetError: the budget cannot be reached.
        """
        with self._pure(args, kwargs) as (run, pure):
            call = run._bind(pure.args, pure.kwargs)
            return run._plan_of(run._trace(call), call)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with such arguments traces to."""
        with self._pure(args, kwargs) as (run, pure):
            return run._trace(run._bind(pure.args, pure.kwargs))

    def problem(self, program: Program) -> planning.Problem:
        """All that is to be decided about a program, which must compute something.

        Raises:
          RematError: nothing is differentiated, or the solver does not take the program.
        """
        planning.check_differentiated(program)
        return planning.problem(
            program,
            compilation.resolve_device(self._device),
            measure=self._objective.overhead,
            solver=self._solver,
            gradients=self._objective.gradients,
        )

    def _choose(
        self,
        program: Program,
        device: Device,
        in_step: str,
        compiled: Callable[[Plan], Measurement],
    ) -> Plan:
        """A plan of a program: by compiling, if that is asked for, and by what was learnt.

        Args:
          program: the program.
          device: the machine to plan for.
          in_step: what is compiled round the program; what is learnt is about that.
          compiled: compiles a plan in it.
        """
        wanted = self._objective
        planning.check_differentiated(program)
        if computes_nothing(program):
            return planning.make(program, device, wanted, self._solver)
        by_compiling = self._verify == "compile"
        if not by_compiling and self._learnt is None:
            return planning.make(program, device, wanted, self._solver)
        memory = verification.Memory(program, device, in_step, self._learnt)
        if by_compiling:
            return verification.choose(self.problem(program), wanted, compiled, memory)
        known = memory.read()
        plan = planning.make(program, device, wanted, self._solver, known)
        if known is not None:
            return plan
        note = (
            f"{os.fspath(self._learnt or '')!r} tells nothing of this program on {device.name} "
            "with this compiler in this step: the model alone predicts."
        )
        return dataclasses.replace(plan, notes=(*plan.notes, note))

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tracing.Call:
        return tracing.bind_static(self._fn, self._signature, args, kwargs)

    def _trace(self, call: tracing.Call) -> Program:
        trace = functools.partial(tracing.trace_call, call, has_aux=self._signature.has_aux)
        try:
            program = trace()
            if self._given is None or program.fingerprint() == self._given.fingerprint:
                return program
            return trace(as_declared=True)
        except Exception as error:
            if not frameworks.is_change_from_within(error):
                raise
            first_line = str(error).splitlines()[0].partition(" (http")[0]
            raise TraceError(
                f"{call.name!r} changes a module that it closes over ({first_line}), and the "
                "change would be lost. Give it the module as an argument."
            ) from error

    def _plan_of(self, program: Program, call: tracing.Call) -> Plan:
        fingerprint = program.fingerprint()
        if self._given is not None:
            check_belongs(self._given, fingerprint, program.name)
            return self._given
        found = self._plans.get(fingerprint)
        return found or self._plans.put(fingerprint, self._make(program, call))

    def _make(self, program: Program, call: tracing.Call) -> Plan:
        device = compilation.resolve_device(self._device)

        def compiled(plan: Plan) -> Measurement:
            arguments = jax.tree.leaves((call.args, call.kwargs))
            return verification.measure_plan(
                plan, program, arguments, device, with_buffers=self._verify == "compile"
            )

        plan = self._choose(program, device, self._objective.gradients.value, compiled)
        compile_it = self._verify and plan.measured is None
        return dataclasses.replace(plan, measured=compiled(plan)) if compile_it else plan


def _can_be_traced(call: tracing.Call) -> bool:
    """Whether JAX traces a function that ``tracing`` failed on: else the error is its own."""
    try:
        jax.make_jaxpr(call.fn)(*call.args, **call.kwargs)
    except Exception:
        return False
    return True


def check_belongs(plan: Plan, fingerprint: str, function: str) -> None:
    """Raises PlanFileError unless the plan was made for the program with this fingerprint."""
    if plan.fingerprint != fingerprint:
        raise PlanFileError(
            f"The plan was made for another program: for {plan.function!r} with the fingerprint "
            f"{printable(plan.fingerprint[:12])}, traced by JAX {printable(plan.jax_version)}; "
            f"this is {function!r} with {fingerprint[:12]}, traced by JAX {jax.__version__}. "
            "The function, the shapes of its arguments, argnums or the version of JAX have changed "
            "since. Make the plan again."
        )


def optimal_remat(
    fn: Callable[..., Any] | None = None,
    *,
    budget: str | int | float | None = None,
    max_overhead: float | None = None,
    overhead: str = "seconds",
    reserve: str | int | None = None,
    gradients: str = "consumed",
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    plan: Plan | str | os.PathLike[str] | None = None,
    verify: bool | str = False,
    learnt: str | os.PathLike[str] | None = None,
    errors: str = "warn",
) -> Any:
    """Makes a loss function's gradient fit in less memory for the least extra compute.

    Without options: least peak memory with at most one forward pass recomputed.

    Args:
      fn: the loss function. Left out, a decorator is returned.
      budget: temporaries are to stay within this, at the least overhead: bytes, a text such
        as ``"6GiB"``, or a float, the share of what the unchanged function needs; or
        ``"fit"``, the device's memory, less arguments, outputs and ``reserve``.
      max_overhead: least memory for at most this share of a forward pass recomputed.
      overhead: ``"seconds"`` (of the device's roofline) or ``"flops"``.
      reserve: bytes that ``budget="fit"`` leaves free, for all that lives on the device beside
        the gradient step, such as the optimizer's state; nothing when left out.
      gradients: what becomes of the gradients in the step: ``"consumed"``, each as soon as it is
        there, as by Adam with donated state; ``"together"``, all at once, as where they are clipped
        by their norm; ``"results"``, they are put out, as by ``jit(grad(loss))`` alone.
      argnums: the positional argument(s) that ``jax.grad`` will be asked for, the first that is
        not static if left out. It is for plans that are made ahead, and where the derivative is
        taken round a ``jax.jit``: else the arguments that JAX is differentiating count. Of a
        decorated method they count as in ``jax.grad(model.loss)``: without ``self``.
      has_aux: whether the function returns (loss, auxiliary).
      static_argnums: positional arguments that are Python values.
      static_argnames: keyword arguments that are Python values.
      device: the machine to plan for; ``"attached"`` is the one JAX runs on.
      solver: who decides: a name that ``remat_opt.solvers.available()`` lists as fit for
        programs, or one of its records with options, such as
        ``remat_opt.solvers.ApproximateDP(objective="memory")``.
      plan: a plan, or a file of one, to follow instead of making one.
      verify: True compiles the gradient for the device when it is planned, once for each program,
        and writes down under ``measured`` what the compiler says. ``"compile"`` lets the compiler
        choose: several plans are compiled, and the answer is the one that is best as compiled;
        within a budget it truly is, or there is an error. Also in the middle of a trace, as
        under ``jax.jit``: only shapes matter. Closed-over arrays that are being traced count as
        arguments of the program.
      learnt: a file of what was learnt by compiling. With ``verify="compile"`` it is read, if it is
        there, and what is learnt is added: about each program, device, compiler and step. Without,
        plans are made by it, and compile nothing; so it must be there. Only such a file makes plans
        differ from those of another process that asks for the same.
      errors: what to do where planning fails through a fault of remat_opt. ``"warn"`` runs the
        function as it is, with a ``PlanningWarning`` that names a report to file; ``"raise"``
        raises, as the method ``plan`` always does. A budget that cannot be reached and the like
        are raised either way.

    Returns:
      A function with the same results, to be used under ``jax.jit`` with ``jax.grad``,
      ``jax.value_and_grad``, ``jax.vjp`` and the others. Its method ``plan`` gives the plan
      for given arguments.

    Raises:
      RematError: options that contradict each other or are out of range.
      PlanFileError: a plan file that cannot be used.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> @remat_opt.optimal_remat(device="cpu")
      ... def loss(weights, x):
      ...     for w in weights:
      ...         x = jnp.tanh(x @ w)
      ...     return jnp.sum(x)
      >>> weights = [jnp.ones((8, 8))] * 4
      >>> gradients = jax.jit(jax.grad(loss))(weights, jnp.ones((2, 8)))
      >>> [g.shape for g in gradients]
      [(8, 8), (8, 8), (8, 8), (8, 8)]
    """
    if fn is None:
        return functools.partial(
            optimal_remat,
            budget=budget,
            max_overhead=max_overhead,
            overhead=overhead,
            reserve=reserve,
            gradients=gradients,
            argnums=argnums,
            has_aux=has_aux,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            device=device,
            solver=solver,
            plan=plan,
            verify=verify,
            learnt=learnt,
            errors=errors,
        )
    if not callable(fn):
        raise RematError(f"optimal_remat decorates a function, not a {type(fn).__name__}.")
    if plan is not None and (budget is not None or max_overhead is not None):
        raise RematError(
            "plan= is given together with budget= or max_overhead=. A plan is already decided: "
            "leave the others out."
        )
    if verify not in (False, True, "compile"):
        raise RematError(
            f'verify={verify!r}: give True to compile the plan, or "compile" to choose by '
            "compiling."
        )
    if plan is not None and verify:
        raise RematError(
            f"plan= is given together with verify={verify!r}, which is about making one. Leave it "
            "out, or make the plan again with make_plan(verify=...)."
        )
    if plan is not None and learnt is not None:
        raise RematError(
            "plan= is given together with learnt=, which is about making one. Leave it out."
        )
    if errors not in ("warn", "raise"):
        raise RematError(f"errors={errors!r}: give 'warn' or 'raise'.")
    return Rematerialized(
        fn,
        signature_of(argnums, has_aux, static_argnums, static_argnames),
        device,
        objective_of(budget, max_overhead, overhead, reserve, gradients),
        solver_of(solver),
        plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
        verify,
        errors,
        learnt,
    )


def make_plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: str | int | float | None = None,
    max_overhead: float | None = None,
    overhead: str = "seconds",
    reserve: str | int | None = None,
    gradients: str = "consumed",
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    verify: bool | str = False,
    learnt: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans a loss function at the shapes of its arguments, without running it.

    Given a training step, it plans the decorated loss that is differentiated inside, at the shapes
    it is called with there. ``verify=`` then compiles the step, and with ``verify="compile"`` it
    is the step whose temporaries, gradients among them, are within the budget; a share is one
    of what the step as it is compiles to, and ``budget="fit"`` knows the optimizer's state. The
    options that are given here count, not those of the decorator. To run the plan, decorate the
    loss with ``plan=``.

    Args:
      fn: the loss function, a decorated one standing for the function in it; or a step that
        differentiates a decorated one, as with ``jax.grad``.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      budget: see ``optimal_remat``, as are the options that follow.
      max_overhead: likewise.
      overhead: likewise.
      reserve: likewise.
      gradients: likewise.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise; of the step, if it is one.
      donate_argnums: of a step, the arguments it donates, as in ``jax.jit``. Left out, what the
        ``jax.jit`` round the step says, if there is one.
      device: likewise.
      solver: likewise.
      verify: likewise.
      learnt: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      The plan.

    Raises:
      BudgetError: the budget cannot be reached.
      RematError: options out of range, or the solver does not take this program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> @remat_opt.optimal_remat
      ... def loss(weights, x):
      ...     for w in weights:
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> def step(weights, x):
      ...     gradients = jax.grad(loss)(weights, x)
      ...     return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients)
      >>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> plan = remat_opt.make_plan(
      ...     step, [shape] * 8, shape, donate_argnums=0, device="cpu", verify=True
      ... )
      >>> plan.function, plan.measured.alias_bytes == 8 * 64 * 64 * 4
      ('loss', True)
    """
    decorated: Rematerialized = optimal_remat(
        _undecorated(fn),
        budget=budget,
        max_overhead=max_overhead,
        overhead=overhead,
        reserve=reserve,
        gradients=gradients,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        device=device,
        solver=solver,
        verify=verify,
        learnt=learnt,
    )
    with decorated._pure(args, kwargs) as (run, pure):
        call = run._bind(pure.args, pure.kwargs)
        with step.recording() as found:
            program = run._trace(call)
        calls = found.calls(program)
        if calls:
            pure_step = fn if run is decorated else pure.fn
            in_step = _step(pure_step, pure.args, pure.kwargs, decorated._signature, donate_argnums)
            return _plan_in_step(in_step, program, calls, decorated)
        _check_is_loss(fn, donate_argnums)
        # Seen, but not differentiated: a part of this loss, to be run as it is decorated.
        return run._plan_of(run._trace(call) if found.seen else program, call)


def _undecorated(fn: Callable[..., Any]) -> Callable[..., Any]:
    return fn.__wrapped__ if isinstance(fn, Rematerialized) else fn


def _check_is_loss(fn: Callable[..., Any], donate_argnums: int | Sequence[int] | None) -> None:
    """Raises RematError where what was meant as a step differentiates no decorated loss."""
    if donate_argnums is not None:
        name = getattr(fn, "__name__", type(fn).__name__)
        raise RematError(
            f"donate_argnums={donate_argnums!r} is for a training step, but {name!r} "
            "differentiates no decorated loss. Decorate the loss that the step differentiates with "
            "optimal_remat, or, if this is the loss, leave donate_argnums out."
        )


def _step(
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
    donated = step.donated_by(fn, found) if donate_argnums is None else _numbers(donate_argnums)
    return dataclasses.replace(found, donate_argnums=donated)


def _plan_in_step(
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
    device = compilation.resolve_device(wanted._device)
    objective = _in_bytes(wanted, in_step, program, call, device)
    planner = Rematerialized(
        call.fn,
        call.signature,
        device,
        objective,
        wanted._solver,
        None,
        wanted._verify,
        "raise",
        wanted._learnt,
    )

    def compiled(plan: Plan) -> Measurement:
        return in_step.measure(
            _following(planner, plan),
            call.loss,
            device,
            with_buffers=wanted._verify == "compile",
        )

    donated = ",".join(map(str, in_step.donate_argnums))
    plan = planner._choose(
        call.program, device, f"{program.fingerprint()} donates {donated}", compiled
    )
    if wanted._verify and plan.measured is None:
        plan = dataclasses.replace(plan, measured=compiled(plan))
    note = _gradients_note(in_step, call, device)
    return dataclasses.replace(plan, objective=wanted._objective, notes=(*plan.notes, note))


def _following(planner: Rematerialized, plan: Plan) -> step.How:
    """The way to run a loss by a plan; calls that are other programs are planned alike."""
    planner = planner._around(planner._fn)
    planner._plans = Recent(_MOST_PLANS)
    planner._plans.put(plan.fingerprint, plan)
    return planner._around


def _gradient_bytes(call: LossCall, device: Device) -> int:
    program = call.program
    compiler = Compiler(device=device)
    return sum(compiler.buffer_bytes(program.types[value]) for value in program.differentiated)


def _gradients_note(in_step: Step, call: LossCall, device: Device) -> str:
    return (
        "Predictions take each gradient to be used up as soon as it is there. Where "
        f"{in_step.name!r} needs them all at once ({format_bytes(_gradient_bytes(call, device))}), "
        'as for clipping by their norm, give gradients="together".'
    )


def _in_bytes(
    wanted: Rematerialized, in_step: Step, program: Program, call: LossCall, device: Device
) -> Objective:
    """The objective with what depends on the step as bytes.

    Raises:
      BudgetError: nothing is left for temporaries.
      CompileError: a share is asked for, and the step as it is does not compile.
    """
    objective = wanted._objective
    by_compiling = wanted._verify == "compile"
    if objective.budget_share is not None and by_compiling:
        plain = in_step.measure(as_it_is, call.loss, device)
        budget_bytes = round(objective.budget_share * plain.temporary_bytes)
        return dataclasses.replace(objective, budget_share=None, budget_bytes=budget_bytes)
    if objective.fit:
        resident_bytes = in_step.resident_bytes(program, device)
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


def frontier(
    fn: Callable[..., Any],
    *args: Any,
    overhead: str = "seconds",
    gradients: str = "consumed",
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    **kwargs: Any,
) -> Frontier:
    """The best plans over all budgets, predicted, without running or compiling anything.

    Args:
      fn: the loss function, or a step that differentiates a decorated one: see ``make_plan``.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      overhead: see ``optimal_remat``, as are the options that follow.
      gradients: likewise.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      device: likewise.
      solver: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      A table and a picture, in a terminal or a notebook. ``rows`` are plain dictionaries; the
      ``temporary_bytes`` of one, as a budget, give its plan.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> def loss(weights, x):
      ...     for w in weights:
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> rows = remat_opt.frontier(loss, [shape] * 8, shape, device="cpu").rows
      >>> rows[-1]["of_plain"], rows[-1]["recomputed_flops_share"]
      (1.0, 0.0)
    """
    decorated = optimal_remat(
        _undecorated(fn),
        overhead=overhead,
        gradients=gradients,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        device=device,
        solver=solver,
    )
    with step.recording() as found:
        program = decorated.program(*args, **kwargs)
    if calls := found.calls(program):
        program = step.the_one(calls).program
    elif found.seen:
        program = decorated.program(*args, **kwargs)
    planning.check_differentiated(program)
    if computes_nothing(program):
        raise RematError(
            f"{program.name!r} hands on its arguments or constants: there is nothing to plan."
        )
    return trade_off.of(decorated.problem(program), Overhead(overhead))


def apply_plan(
    plan: Plan | str | os.PathLike[str],
    fn: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Any:
    """The function rewritten by a plan that was made for it.

    Args:
      plan: a plan, or a file of one.
      fn: the function the plan was made for; checked by its program's fingerprint when it
        is called.
      argnums: see ``optimal_remat``; as when the plan was made, as are those that follow.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.

    Raises:
      PlanFileError: the file cannot be used, or, when the function is called, the plan
        belongs to another program.
    """
    return optimal_remat(
        fn,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        plan=plan,
        errors="raise",
    )


def measure(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> Measurement:
    """What the compiler says of ``fn`` as given: bytes, FLOPs, seconds to compile.

    To measure a gradient, give the gradient: ``measure(jax.grad(loss), params, batch)``.

    Args:
      fn: any function that ``jax.jit`` takes.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      device: the machine to compile for; it need not be attached.
      static_argnums: as for ``jax.jit``.
      static_argnames: as for ``jax.jit``.
      donate_argnums: as for ``jax.jit``.
      **kwargs: keyword arguments of ``fn``.

    Raises:
      MissingPackageError: the compiler for that device is not installed.
      CompileError: the compiler refused.
    """
    return compilation.measure(
        fn,
        *args,
        device=device,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        **kwargs,
    )


def compare(
    fn: Callable[..., Any],
    *args: Any,
    budgets: Sequence[str | int | float | None] = (),
    max_overheads: Sequence[float] = (),
    overhead: str = "seconds",
    policies: str | Sequence[str] | Mapping[str, str | Callable[..., Any]] | None = None,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    **kwargs: Any,
) -> Comparison:
    """Plans beside the unchanged function and ``jax.checkpoint``, by what the compiler says.

    The gradient of each is compiled for the device, one after the other, and none is run. Given a
    training step, the step is compiled instead, with the decorated loss that is differentiated
    inside run in each of these ways: that is what training needs. A gradient alone lends the
    buffers of its results to temporaries; in a step with donated parameters there are none.

    Args:
      fn: the loss function, a decorated one standing for the function in it; or a step that
        differentiates a decorated one, as with ``jax.grad``.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      budgets: each as ``budget`` of ``optimal_remat``; None among them is least memory.
      max_overheads: each as ``max_overhead`` of ``optimal_remat``. Where neither is given:
        at most 0, 5 and 25 % of a forward pass, and least memory.
      overhead: see ``optimal_remat``, as are the options that follow ``policies``.
      policies: names in ``jax.checkpoint_policies``, each for one ``jax.checkpoint`` round the
        whole function and for one round every block, where the program shows what a block is:
        by the names of modules, or by what it repeats. Or a mapping from labels to such names or
        to functions that do as the loss does, such as the same network with a checkpoint in
        every block. None is all that JAX has, () none.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise; of the step, if it is one.
      donate_argnums: see ``make_plan``.
      device: likewise.
      solver: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      A table and a picture, in a terminal or a notebook. ``rows`` are plain dictionaries. A
      row that failed (a budget that cannot be reached, too large a program) says why.

    Raises:
      RematError: options out of range, a policy that JAX does not have, or what is given as a
        step differentiates no decorated loss.
      TraceError: the function cannot be traced.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> def loss(w, x):
      ...     for _ in range(8):
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> found = remat_opt.compare(
      ...     loss, shape, shape, budgets=[0.8], policies="nothing_saveable", device="cpu"
      ... )
      >>> [row["label"] for row in found.rows]
      ['plain', 'nothing_saveable', 'nothing_saveable, per block', 'budget 80.0 %']
    """
    # One of them may well be given alone, as a reader of the signature would.
    budgets = (budgets,) if isinstance(budgets, str | int | float) else tuple(budgets)
    limits = (max_overheads,) if isinstance(max_overheads, int | float) else tuple(max_overheads)
    if not (budgets or limits):
        budgets, limits = (None,), (0.25, 0.05, 0.0)
    target = compilation.resolve_device(device)
    chosen_solver = solver_of(solver)
    signature = signature_of(argnums, has_aux, static_argnums, static_argnames)
    compiled, calls, in_step = _compiled_in(fn, args, kwargs, signature, donate_argnums, argnums)
    call = step.the_one(calls)

    def ours(label: str, **wanted: Any) -> Contender:
        fate = "consumed" if in_step else "results"
        objective = objective_of(overhead=overhead, gradients=fate, **wanted)
        planner = Rematerialized(
            call.fn, call.signature, target, objective, chosen_solver, None, False, "raise"
        )

        def make() -> tuple[step.How, Plan]:
            plan = planning.make(call.program, target, objective, chosen_solver)
            return _following(planner, plan), plan

        return Contender(label=label, kind="ours", make=make)

    contenders = [
        comparison.plain_contender(),
        *comparison.policy_contenders(
            policies, call.signature, has_blocks=bool(blocks.blocks(call.program))
        ),
        *(ours(_budget_label(budget), budget=budget) for budget in budgets),
        *(ours(f"overhead {format_share(limit)}", max_overhead=limit) for limit in limits),
    ]
    return comparison.contest(
        contenders,
        function=call.program.name,
        device=target.name,
        step=compiled.name if in_step else "",
        measure=lambda how: compiled.measure(how, call.loss, target),
        flops=lambda how: compiled.flops(how, call.loss),
        forward_flops=step.forward_flops(calls),
        remarks=[_gradients_note(compiled, call, target)] if in_step else (),
    )


def _compiled_in(
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
            return _step(fn, args, kwargs, signature, donate_argnums), calls, True
    _check_is_loss(fn, donate_argnums)
    loss = Rematerialized(
        _undecorated(fn),
        signature,
        "cpu",
        Objective(),
        planning.DEFAULT_SOLVER,
        None,
        False,
        "raise",
    )
    numbers = signature.argnums
    if numbers is None:
        call = tracing.bind_static(loss._fn, signature, args, dict(kwargs))
        numbers = tuple(call.positions[number] for number in call.argnums)
    alone = Step(
        fn=jax.value_and_grad(
            loss,
            argnums=numbers if isinstance(argnums, Sequence) else (*numbers, 0)[0],
            has_aux=signature.has_aux,
        ),
        args=tuple(args),
        kwargs=kwargs,
        static_argnums=signature.static_argnums,
        static_argnames=signature.static_argnames,
    )
    return alone, alone.trace()[1], False


def _budget_label(budget: str | int | float | None) -> str:
    if budget is None:
        return "least memory"
    if isinstance(budget, float):
        return f"budget {format_share(budget)}"
    return f"budget {budget if isinstance(budget, str) else format_bytes(budget)}"
