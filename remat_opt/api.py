"""The public functions: decorate a loss, make and apply plans, measure, compare."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remat_opt import comparison, planning, trade_off
from remat_opt.comparison import Comparison, Contender
from remat_opt.compilers.model import computes_nothing
from remat_opt.device import Device
from remat_opt.errors import RematError
from remat_opt.gradients import Gradients
from remat_opt.loss_in_step import asked_about, compiled_in, step_of, undecorated
from remat_opt.measurement import compilation, meshes, step
from remat_opt.measurement.compilation import Measurement
from remat_opt.misuse import entry_point
from remat_opt.options import Request, objective_of, signature_of, solver_of
from remat_opt.plan import Plan
from remat_opt.program import blocks
from remat_opt.rematerialized import Rematerialized
from remat_opt.solvers import Solver
from remat_opt.solvers.base import Overhead
from remat_opt.trade_off import Frontier
from remat_opt.units import format_bytes, format_share


@entry_point
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
    existing: str = "keep",
    collectives: str = "keep",
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    plan: Plan | str | os.PathLike[str] | None = None,
    verify: bool | str = False,
    learnt: str | os.PathLike[str] | None = None,
    errors: str = "warn",
) -> Any:
    """Makes a loss function's gradient fit in less memory for the least extra compute.

    Without options: least peak memory with at most one forward pass recomputed. A function that is
    within its budget as it is runs as it is.

    Args:
      fn: the loss function. Without it, a decorator is returned.
      budget: limit on temporaries, to be met with the least overhead: bytes, a string such as
        ``"6GiB"``, a float (the share of what the unchanged function needs), or ``"fit"``
        (the device's memory, less arguments, outputs and ``reserve``).
      max_overhead: least memory for at most this share of a forward pass recomputed.
      overhead: ``"seconds"`` (of the device's roofline) or ``"flops"``.
      reserve: bytes that ``budget="fit"`` leaves free for whatever else is on the device, such as
        the optimizer's state; by default none.
      gradients: how the step uses its gradients: ``"consumed"``, each as soon as it is computed, as
        Adam does with donated state; ``"together"``, all at once, as when clipping by their
        norm; ``"results"``, they are returned, as by ``jit(grad(loss))`` alone.
      argnums: the positional argument(s) that ``jax.grad`` will differentiate. The default is the
        first that is not static or, without arguments, everything that is closed over and being
        traced. It matters only for plans made ahead of time and for derivatives of a ``jax.jit``:
        otherwise the plan is for whatever JAX differentiates, closed over or not. For a
        decorated method, count as in ``jax.grad(model.loss)``: without ``self``.
      has_aux: whether the function returns (loss, auxiliary).
      static_argnums: positional arguments that are Python values, as in ``jax.jit``. Arguments that
        are neither arrays nor numbers are always static.
      static_argnames: arguments that are Python values, by name, passed by position or not.
      existing: what to do with ``jax.checkpoint``, ``nn.remat`` and the like inside the function.
        ``"keep"`` leaves them as they are and plans around them; ``"replace"`` removes them, in
        loops and branches too, so that the plan alone decides.
      collectives: what to do with ``psum``, ``all_gather`` and the like in a ``shard_map``.
        ``"keep"`` runs each once and keeps what the backward pass reads; ``"recompute"`` lets the
        plan run them again, as to gather weights once more. With ``plan=``, it is as when that was
        made.
      device: the device to plan for; ``"attached"`` is the one JAX runs on.
      solver: a name that ``remat_opt.solvers.available()`` lists as fit for programs, or a solver
        with options, such as ``remat_opt.solvers.ApproximateDP(objective="memory")``.
      plan: a plan, or a plan file, to use instead of making one.
      verify: True compiles the gradient for the device when it is planned, once for each program,
        and records under ``measured`` what the compiler says. ``"compile"`` lets the compiler
        choose: it compiles several plans and returns the best as compiled, which is really
        within the budget, or raises an error. Both also work in the middle of a trace, as under
        ``jax.jit``, because only shapes matter. Closed-over arrays that are being traced count
        as arguments of the program.
      learnt: a file that holds what was learnt by compiling, for each program, device, compiler and
        step. With ``verify="compile"`` the file is read, if it exists, and new results are added.
        Without, the file must exist, and plans use it and compile nothing. Only such a file can
        make plans differ from those of another process that asks for the same.
      errors: what to do if planning fails because of a bug in remat_opt. ``"warn"`` runs the
        unchanged function, with a ``PlanningWarning`` that names a report to file; ``"raise"``
        raises, as the method ``plan`` always does. Other errors, such as a budget that cannot be
        reached, are always raised.

    Returns:
      A function with the same results, to be used under ``jax.jit`` with ``jax.grad``,
      ``jax.value_and_grad``, ``jax.vjp`` and the others. Outside ``jax.jit`` it is traced and
      compiled as under ``jax.jit``, so side effects such as printing happen only once. It is
      traced again if a global variable or anything else it refers to has changed. Its method
      ``plan`` returns the plan for given arguments.

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
            existing=existing,
            collectives=collectives,
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
            "plan= cannot be combined with budget= or max_overhead=: a plan is already "
            "decided. Leave the others out."
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
    request = Request(
        device=device,
        objective=objective_of(budget, max_overhead, overhead, reserve, gradients),
        solver=solver_of(solver),
        verify=verify,
        learnt=learnt,
        errors=errors,
    )
    return Rematerialized(
        fn,
        signature_of(argnums, has_aux, static_argnums, static_argnames, existing, collectives),
        request,
        plan if plan is None or isinstance(plan, Plan) else Plan.load(plan),
    )


@entry_point
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
    existing: str = "keep",
    collectives: str = "keep",
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    verify: bool | str = False,
    learnt: str | os.PathLike[str] | None = None,
    **kwargs: Any,
) -> Plan:
    """Plans a loss function for the shapes of its arguments, without running it.

    Given a training step, it plans the decorated loss that the step differentiates, for the shapes
    used there. ``verify=`` then compiles the step. With ``verify="compile"`` the budget applies to
    the temporaries of the step, including gradients. A budget given as a share refers to what the
    unchanged step compiles to, and ``budget="fit"`` accounts for the optimizer's state. The options
    given here count, not those of the decorator. To run the plan, decorate the loss with ``plan=``.

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
      existing: likewise; of a step, what the decorator of its loss says counts.
      collectives: likewise.
      donate_argnums: of a step, the arguments it donates, as in ``jax.jit``. The default is what
        the ``jax.jit`` around the step says, if there is one.
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
        undecorated(fn),
        budget=budget,
        max_overhead=max_overhead,
        overhead=overhead,
        reserve=reserve,
        gradients=gradients,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        existing=existing,
        collectives=collectives,
        device=device,
        solver=solver,
        verify=verify,
        learnt=learnt,
    )
    with asked_about(decorated, fn, args, kwargs, donate_argnums) as (run, call, program, inside):
        return run.plan_of(program, call) if inside is None else inside.plan(decorated)


@entry_point
def frontier(
    fn: Callable[..., Any],
    *args: Any,
    overhead: str = "seconds",
    gradients: str = "consumed",
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    existing: str = "keep",
    collectives: str = "keep",
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    **kwargs: Any,
) -> Frontier:
    """Predicts the best plans over all budgets, without running or compiling anything.

    Args:
      fn: the loss function, or a step that differentiates a decorated one: see ``make_plan``.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      overhead: see ``optimal_remat``, as are the options that follow.
      gradients: likewise.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      existing: likewise.
      collectives: likewise.
      donate_argnums: see ``make_plan``.
      device: likewise.
      solver: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      A table and a picture, in a terminal or a notebook. ``rows`` are plain dictionaries. To get
      the plan of a row, pass its ``temporary_bytes`` as the budget.

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
        undecorated(fn),
        overhead=overhead,
        gradients=gradients,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        existing=existing,
        collectives=collectives,
        device=device,
        solver=solver,
    )
    with asked_about(decorated, fn, args, kwargs, donate_argnums) as (_, _, program, inside):
        planning.check_differentiated(program)
        if computes_nothing(program):
            raise RematError(
                f"{program.name!r} only returns its arguments or constants: there is nothing to "
                "plan."
            )
        problem = decorated.problem(program)
        held_bytes = None
        if inside is not None:
            held_bytes = inside.step.resident(inside.program, problem.device).total
        return trade_off.of(problem, Overhead(overhead), Gradients(gradients), held_bytes)


@entry_point
def apply_plan(
    plan: Plan | str | os.PathLike[str],
    fn: Callable[..., Any],
    *,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    existing: str = "keep",
) -> Any:
    """Rewrites a function by a plan that was made for it.

    Args:
      plan: a plan, or a plan file.
      fn: the function the plan was made for; checked by its program's fingerprint when it
        is called.
      argnums: see ``optimal_remat``; as when the plan was made, as are those that follow.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      existing: likewise. It may be left out: the plan's fingerprint says whether checkpoints inside
        the function were replaced when it was made.

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
        existing=existing,
        plan=plan,
        errors="raise",
    )


@entry_point
def measure(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    **kwargs: Any,
) -> Measurement:
    """Measures ``fn`` as given by compiling it: bytes, FLOPs, seconds to compile.

    To measure a gradient, pass the gradient: ``measure(jax.grad(loss), params, batch)``.

    Args:
      fn: any function that ``jax.jit`` takes.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      device: the device to compile for; it need not be attached.
      static_argnums: as for ``jax.jit``.
      static_argnames: as for ``jax.jit``.
      donate_argnums: as for ``jax.jit``. The default is what the ``jax.jit`` around the function
        says, if there is one.
      **kwargs: keyword arguments of ``fn``.

    Raises:
      MissingPackageError: the compiler for that device is not installed.
      CompileError: the compiler refused.
    """
    target = compilation.resolve_device(device, meshes.mesh_of((args, kwargs)))
    signature = signature_of(None, False, static_argnums, static_argnames)
    return step_of(fn, args, kwargs, signature, donate_argnums).compiled(target)


@entry_point
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
    existing: str = "keep",
    collectives: str = "keep",
    donate_argnums: int | Sequence[int] | None = None,
    device: str | Device = "attached",
    solver: str | Solver = "portfolio",
    verify: bool | str = True,
    **kwargs: Any,
) -> Comparison:
    """Compares plans with the unchanged function and ``jax.checkpoint``, as compiled.

    The gradient of each is compiled for the device, one after the other. Nothing is run. Given a
    training step, the step is compiled instead, with the decorated loss inside it run in each of
    these ways. That is what training needs: a gradient alone lends the buffers of its results to
    temporaries, but a step with donated parameters has no such buffers.

    Args:
      fn: the loss function, a decorated one standing for the function in it; or a step that
        differentiates a decorated one, as with ``jax.grad``.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      budgets: each as ``budget`` of ``optimal_remat``; None among them is least memory.
      max_overheads: each as ``max_overhead`` of ``optimal_remat``. If neither is given: at most
        0, 5 and 25 % of a forward pass, and least memory.
      overhead: see ``optimal_remat``, as are the options that follow ``policies``.
      policies: names in ``jax.checkpoint_policies``. Each is tried with one ``jax.checkpoint``
        around the whole function, and with one around every block if the names of modules, or
        repetition, show what a block is. Or a mapping from labels to such names or to functions
        equivalent to the loss, such as the same network with a checkpoint in every block. None
        means every policy that JAX has, () none.
      argnums: likewise.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise; of the step, if it is one.
      existing: likewise; of a step, what the decorator of its loss says counts.
      collectives: likewise.
      donate_argnums: see ``make_plan``.
      device: likewise.
      solver: likewise.
      verify: by default, each of our rows is the plan predicted to be best, as compiled;
        "compile" chooses by what the compiler says, with up to four compiles for each row.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      A table and a picture, in a terminal or a notebook. ``rows`` are plain dictionaries. A
      row that failed (a budget that cannot be reached, too large a program) says why.

    Raises:
      RematError: options out of range, a policy that JAX does not have, or a step that
        differentiates no decorated loss.
      TraceError: the function cannot be traced.
      MissingPackageError: the compiler for the device is not installed.

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
    if verify not in (True, "compile"):
        raise RematError(
            f"verify={verify!r}: compare compiles every row anyway. Leave verify out, or give "
            '"compile" to choose each of our plans by compiling. frontier compiles nothing.'
        )
    target = compilation.resolve_device(device, meshes.mesh_of((args, kwargs)))
    chosen_solver = solver_of(solver)
    signature = signature_of(
        argnums, has_aux, static_argnums, static_argnames, existing, collectives
    )
    compiled = compiled_in(fn, args, kwargs, signature, donate_argnums, argnums)
    call = compiled.call

    def ours(label: str, **wanted: Any) -> Contender:
        request = Request(
            device=target,
            objective=objective_of(
                overhead=overhead,
                gradients="results" if compiled.is_alone else "consumed",
                **wanted,
            ),
            solver=chosen_solver,
            verify=verify if verify == "compile" else False,
        )
        planner = Rematerialized(call.fn, call.signature, request)

        def make() -> tuple[step.How, Plan]:
            plan = compiled.plan(planner)
            return planner.following(plan), plan

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
        memory_bytes=target.memory_bytes,
        step="" if compiled.is_alone else compiled.step.name,
        measure=lambda how: compiled.measure(how, target),
        flops=compiled.flops,
        forward_flops=compiled.forward_flops,
        remarks=compiled.notes(target),
    )


def _budget_label(budget: str | int | float | None) -> str:
    if budget is None:
        return "least memory"
    if isinstance(budget, float):
        return f"budget {format_share(budget)}"
    return f"budget {budget if isinstance(budget, str) else format_bytes(budget)}"
