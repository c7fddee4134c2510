"""The doors: decorate a loss, make and apply plans, measure.

Arguments are checked here; everything else happens below.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from remat_opt import (
    comparison,
    failure,
    flop_count,
    measurement,
    planning,
    solvers,
    tracing,
    trade_off,
    transform,
    verification,
)
from remat_opt.comparison import Comparison, Contender
from remat_opt.device import Device
from remat_opt.errors import PlanFileError, RematError
from remat_opt.materialization import computes_nothing
from remat_opt.measurement import Measurement
from remat_opt.plan import Objective, Plan
from remat_opt.plan_text import printable
from remat_opt.program import Program
from remat_opt.recent import Recent
from remat_opt.solvers import Solver
from remat_opt.solvers.base import Overhead
from remat_opt.tracing import Signature
from remat_opt.trade_off import Frontier
from remat_opt.units import format_bytes, format_share, parse_bytes

#: Plans that a decorated function holds, one for each program that it was traced to: a few hundred
#: kilobytes each for a deep network.
_MOST_PLANS = 64


def objective_of(
    budget: str | int | float | None = None,
    max_overhead: float | None = None,
    overhead: str = "seconds",
    reserve: str | int | None = None,
) -> Objective:
    """Reads the options that say what is wanted of a plan.

    Args:
      budget: bytes of temporaries, as an int or a text such as ``"6GiB"``; or, as a float,
        a share of what the unchanged function needs; or ``"fit"``.
      max_overhead: share of a forward pass that may be recomputed.
      overhead: ``"seconds"`` or ``"flops"``, what recomputation is counted in.
      reserve: bytes that ``budget="fit"`` leaves free.

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
        return Objective(max_overhead=float(max_overhead), overhead=counted)
    if budget is None:
        return Objective(overhead=counted)
    if budget == "fit":
        free = 0 if reserve is None else parse_bytes(reserve)
        return Objective(fit=True, reserve_bytes=free, overhead=counted)
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
        return Objective(budget_share=budget, overhead=counted)
    return Objective(budget_bytes=parse_bytes(budget), overhead=counted)


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
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
) -> Signature:
    """Reads the options that say how a function's arguments are to be taken."""
    return Signature(
        argnums=_numbers(argnums),
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
        self._plans: Recent[str, Plan] = Recent(_MOST_PLANS)
        # Programs that have no plan, and were warned of.
        self._unplanned: Recent[str, bool] = Recent(_MOST_PLANS)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function as planned; the results are those of the function itself."""
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
            run = transform.rewrite(program, plan.stages, plan.platform)
        else:
            # jax.grad refuses such arguments; a call without derivative has nothing to plan.
            run = transform.rewrite(program, (), "cpu")
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
        failure.warn(error, call.name, facts, call.fn, call.args, call.kwargs, stack_level=3)
        return result

    def __get__(self, instance: object, owner: type | None = None) -> Any:
        # So that a decorated method is bound like any other. Numbers count as for
        # jax.grad(model.loss): without the instance, which is closed over.
        if instance is None:
            return self
        bound = Rematerialized(
            self._fn.__get__(instance, owner),
            self._signature,
            self._device,
            self._objective,
            self._solver,
            self._given,
            self._verify,
            self._errors,
        )
        bound._plans, bound._unplanned = self._plans, self._unplanned
        return bound

    def plan(self, *args: Any, **kwargs: Any) -> Plan:
        """The plan that a call with such arguments uses.

        Args:
          *args: arrays or ``jax.ShapeDtypeStruct`` in their place.
          **kwargs: likewise.

        Raises:
          BudgetError: the budget cannot be reached.
        """
        call = self._bind(args, kwargs)
        return self._plan_of(self._trace(call), call)

    def program(self, *args: Any, **kwargs: Any) -> Program:
        """The program that a call with such arguments traces to."""
        return self._trace(self._bind(args, kwargs))

    def problem(self, program: Program) -> planning.Problem:
        """All that is to be decided about a program, which must compute something.

        Raises:
          RematError: nothing is differentiated, or the solver does not take the program.
        """
        planning.check_differentiated(program)
        return planning.problem(
            program,
            measurement.resolve_device(self._device),
            measure=self._objective.overhead,
            solver=self._solver,
        )

    def _bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tracing.Call:
        return tracing.bind_static(self._fn, self._signature, args, kwargs)

    def _trace(self, call: tracing.Call) -> Program:
        return tracing.trace_call(call, has_aux=self._signature.has_aux)

    def _plan_of(self, program: Program, call: tracing.Call) -> Plan:
        fingerprint = program.fingerprint()
        if self._given is not None:
            check_belongs(self._given, fingerprint, program.name)
            return self._given
        found = self._plans.get(fingerprint)
        return found or self._plans.put(fingerprint, self._make(program, call))

    def _make(self, program: Program, call: tracing.Call) -> Plan:
        device = measurement.resolve_device(self._device)

        def compiled(plan: Plan) -> Measurement:
            arguments = jax.tree.leaves((call.args, call.kwargs))
            return verification.measure_plan(plan, program, arguments, device)

        if self._verify == "compile" and not computes_nothing(program):
            return verification.choose(self.problem(program), self._objective, compiled)
        plan = planning.make(program, device, self._objective, self._solver)
        return dataclasses.replace(plan, measured=compiled(plan)) if self._verify else plan


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
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    plan: Plan | str | os.PathLike[str] | None = None,
    verify: bool | str = False,
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
      argnums: the positional argument(s) that ``jax.grad`` will be asked for. Of a decorated
        method they count as in ``jax.grad(model.loss)``: without ``self``.
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
            argnums=argnums,
            has_aux=has_aux,
            static_argnums=static_argnums,
            static_argnames=static_argnames,
            device=device,
            solver=solver,
            plan=plan,
            verify=verify,
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
    if errors not in ("warn", "raise"):
        raise RematError(f"errors={errors!r}: give 'warn' or 'raise'.")
    return Rematerialized(
        fn,
        signature_of(argnums, has_aux, static_argnums, static_argnames),
        device,
        objective_of(budget, max_overhead, overhead, reserve),
        solver_of(solver),
        plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
        verify,
        errors,
    )


def make_plan(
    fn: Callable[..., Any],
    *args: Any,
    budget: str | int | float | None = None,
    max_overhead: float | None = None,
    overhead: str = "seconds",
    reserve: str | int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    verify: bool | str = False,
    **kwargs: Any,
) -> Plan:
    """Plans a loss function at the shapes of its arguments, without running it.

    Args:
      fn: the loss function.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      budget: see ``optimal_remat``, as are the options that follow.
      max_overhead: likewise.
      overhead: likewise.
      reserve: likewise.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      device: likewise.
      solver: likewise.
      verify: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      The plan.

    Raises:
      BudgetError: the budget cannot be reached.
      RematError: options out of range, or the solver does not take this program.
    """
    decorated = optimal_remat(
        fn,
        budget=budget,
        max_overhead=max_overhead,
        overhead=overhead,
        reserve=reserve,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        device=device,
        solver=solver,
        verify=verify,
    )
    plan: Plan = decorated.plan(*args, **kwargs)
    return plan


def frontier(
    fn: Callable[..., Any],
    *args: Any,
    overhead: str = "seconds",
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    **kwargs: Any,
) -> Frontier:
    """The best plans over all budgets, predicted, without running or compiling anything.

    Args:
      fn: the loss function.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      overhead: see ``optimal_remat``, as are the options that follow.
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
        fn._fn if isinstance(fn, Rematerialized) else fn,
        overhead=overhead,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        device=device,
        solver=solver,
    )
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
    argnums: int | Sequence[int] = 0,
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
      **kwargs: keyword arguments of ``fn``.

    Raises:
      MissingPackageError: the compiler for that device is not installed.
      CompileError: the compiler refused.
    """
    return measurement.measure(
        fn,
        *args,
        device=device,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        **kwargs,
    )


def measure_gradient(
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    **kwargs: Any,
) -> Measurement:
    """What the compiler says of the gradient of a loss function; options as ``optimal_remat``."""
    numbers = _numbers(argnums)
    return measurement.measure(
        jax.value_and_grad(
            fn, argnums=numbers[0] if isinstance(argnums, int) else numbers, has_aux=has_aux
        ),
        *args,
        device=device,
        static_argnums=_numbers(static_argnums),
        static_argnames=_names(static_argnames),
        **kwargs,
    )


def compare(
    fn: Callable[..., Any],
    *args: Any,
    budgets: Sequence[str | int | float | None] = (),
    max_overheads: Sequence[float] = (),
    overhead: str = "seconds",
    policies: str | Sequence[str] | Mapping[str, str | Callable[..., Any]] | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    **kwargs: Any,
) -> Comparison:
    """Plans beside the unchanged function and ``jax.checkpoint``, by what the compiler says.

    The gradient of each is compiled for the device, one after the other, and none is run.

    Args:
      fn: the loss function; a decorated one stands for the function in it.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      budgets: each as ``budget`` of ``optimal_remat``; None among them is least memory.
      max_overheads: each as ``max_overhead`` of ``optimal_remat``. Where neither is given:
        at most 0, 5 and 25 % of a forward pass, and least memory.
      overhead: see ``optimal_remat``, as are the options that follow ``policies``.
      policies: names in ``jax.checkpoint_policies`` for one ``jax.checkpoint`` round the whole
        function; or a mapping from labels to such names or to functions that do as ``fn``
        does, such as the same network with a checkpoint in every block. None is all that JAX
        has, () none.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      device: likewise.
      solver: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      A table and a picture, in a terminal or a notebook. ``rows`` are plain dictionaries. A
      row that failed (a budget that cannot be reached, too large a program) says why.

    Raises:
      RematError: options out of range, or a policy that JAX does not have.
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
      >>> [(row["label"], row["error"]) for row in found.rows]
      [('plain', None), ('nothing_saveable', None), ('budget 80.0 %', None)]
    """
    if isinstance(fn, Rematerialized):
        fn = fn._fn
    # One of them may well be given alone, as a reader of the signature would.
    budgets = (budgets,) if isinstance(budgets, str | int | float) else tuple(budgets)
    limits = (max_overheads,) if isinstance(max_overheads, int | float) else tuple(max_overheads)
    if not (budgets or limits):
        budgets, limits = (None,), (0.25, 0.05, 0.0)
    target = measurement.resolve_device(device)
    static: dict[str, Any] = {
        "static_argnums": static_argnums,
        "static_argnames": static_argnames,
    }
    options: dict[str, Any] = {"argnums": argnums, "has_aux": has_aux, **static}

    def ours(label: str, **wanted: Any) -> Contender:
        decorated = optimal_remat(
            fn, overhead=overhead, device=target, solver=solver, **wanted, **options
        )

        def make() -> tuple[Callable[..., Any], Plan]:
            return decorated, decorated.plan(*args, **kwargs)

        return Contender(label=label, kind="ours", make=make)

    contenders = [
        comparison.plain_contender(fn),
        *comparison.policy_contenders(fn, policies, signature_of(**options)),
        *(ours(_budget_label(budget), budget=budget) for budget in budgets),
        *(ours(f"overhead {format_share(limit)}", max_overhead=limit) for limit in limits),
    ]
    return comparison.contest(
        contenders,
        function=getattr(fn, "__name__", type(fn).__name__),
        device=target.name,
        measure=lambda made: measure_gradient(made, *args, device=target, **options, **kwargs),
        gradient_flops=lambda made: flop_count.gradient_flops(made, *args, **options, **kwargs),
        forward_flops=flop_count.forward_flops(fn, *args, **static, **kwargs),
    )


def _budget_label(budget: str | int | float | None) -> str:
    if budget is None:
        return "least memory"
    if isinstance(budget, float):
        return f"budget {format_share(budget)}"
    return f"budget {budget if isinstance(budget, str) else format_bytes(budget)}"
