"""Exports: a plan as ordinary JAX code, and the hand-written policy closest to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from remat_opt import nearest
from remat_opt.api import apply_plan, optimal_remat
from remat_opt.device import Device
from remat_opt.export.source import Source, source_of
from remat_opt.loss_in_step import undecorated
from remat_opt.measurement.step import recording
from remat_opt.misuse import entry_point
from remat_opt.nearest import NearestPolicy
from remat_opt.plan import Plan
from remat_opt.rematerialized import Rematerialized, check_belongs


@entry_point
def to_source(
    plan: Plan | str | os.PathLike[str],
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    **kwargs: Any,
) -> Source:
    """Writes a plan as ordinary JAX code: checkpoints, names and loops, without remat_opt.

    A plan is a decision about a program and does not contain the program, so the function is
    needed too. A decorated function has a method of this name, which uses its own plan.

    Args:
      plan: a plan, or a file of one.
      fn: the function the plan was made for, or the step that differentiates it. If the step
        defines it, it reads arrays of the step, such as the batch: the code takes them as
        ``closed_over=``, in the order that ``Source.closed_over`` gives.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      argnums: see ``optimal_remat``; as when the plan was made, as are those that follow.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      **kwargs: keyword arguments of ``fn``.

    Returns:
      The code, and the arrays that ``fn`` closes over.

    Raises:
      PlanFileError: the plan belongs to another program.
      RematError: something in the program cannot be written as code; the message names it.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    decorated: Rematerialized = apply_plan(
        plan,
        undecorated(fn),
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
    )
    with recording() as found:
        program = decorated.program(*args, **kwargs)
    for call in found.calls(program):
        if call.program.fingerprint() == plan.fingerprint:
            return source_of(plan, call.program, call.bound)
    return decorated.to_source(*args, **kwargs)


@entry_point
def nearest_policy(
    plan: Plan | str | os.PathLike[str],
    fn: Callable[..., Any],
    *args: Any,
    argnums: int | Sequence[int] | None = None,
    has_aux: bool = False,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    device: str | Device | None = None,
    **kwargs: Any,
) -> NearestPolicy:
    """Finds the hand-written policy closest to a plan, and what it loses.

    This is for code that uses ``nn.remat`` or ``jax.checkpoint`` with one policy for all blocks or
    layers. It tries every policy of JAX around every block, around every iteration of a scan, and
    around the whole function, as well as policies that keep by name what the plan keeps in many
    blocks. It returns the one that recomputes least among those predicted to need no more memory
    than the plan or, if there is none, the one that needs the least memory.

    Args:
      plan: a plan, or a file of one.
      fn: the function the plan was made for, or the step that differentiates it.
      *args: its arguments: arrays, or ``jax.ShapeDtypeStruct`` in their place.
      argnums: see ``optimal_remat``; as when the plan was made, as are those that follow.
      has_aux: likewise.
      static_argnums: likewise.
      static_argnames: likewise.
      device: the device, if the plan was made for one of your own.
      **kwargs: keyword arguments of ``fn``.

    Raises:
      PlanFileError: the plan belongs to another program.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> import remat_opt
      >>> def loss(weights, x):
      ...     for w in weights:
      ...         x = jnp.sin(x @ w)
      ...     return jnp.sum(x)
      >>> shape = jax.ShapeDtypeStruct((64, 64), "float32")
      >>> plan = remat_opt.make_plan(loss, [shape] * 8, shape, budget=0.5, device="cpu")
      >>> found = remat_opt.nearest_policy(plan, loss, [shape] * 8, shape)
      >>> found.temporary_bytes >= 0 and "jax.checkpoint" in repr(found)
      True
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    decorated: Rematerialized = optimal_remat(
        undecorated(fn),
        overhead=plan.objective.overhead.value,
        gradients=plan.objective.gradients.value,
        argnums=argnums,
        has_aux=has_aux,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        collectives="recompute" if plan.communicates_again else "keep",
        device=plan.device if device is None else device,
    )
    with recording() as found:
        program = decorated.program(*args, **kwargs)
    inside = [call.program for call in found.calls(program)]
    programs = {one.fingerprint(): one for one in [program, *inside]}
    program = programs.get(plan.fingerprint, program)
    check_belongs(plan, program.fingerprint(), program.name)
    return nearest.of(decorated.problem(program), plan)
