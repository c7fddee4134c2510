"""What JAX knows of ``jax.checkpoint``, its names and its policies, under names of our own.

Each function has a contract test in ``tests/test_jax_contracts.py``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.ad_checkpoint import name_p, nothing_saveable
from jax._src.interpreters.partial_eval import Recompute

from remat_opt import _jax_internals as internals


def name_of(equation: Any) -> str | None:
    """The name that a ``checkpoint_name`` equation gives; None for any other equation."""
    return equation.params["name"] if equation.primitive.name == "name" else None


def function_name(equation: Any) -> str:
    """The name of the function in an equation with a custom derivative rule; "" if unknown."""
    body = equation.params["call_jaxpr"]
    about = getattr(getattr(body, "jaxpr", body), "debug_info", None)
    return str(about.func_name) if about is not None else ""


def saves_name(policy: Any, name: str) -> bool:
    """Whether a policy of ``jax.checkpoint`` keeps, or offloads, values of a name."""
    return _saves(policy, name_p, [jax.core.ShapedArray((), jnp.float32)], {"name": name})


def saves(policy: Any, equation: Any) -> bool:
    """Whether a policy of ``jax.checkpoint`` keeps, or offloads, an equation's result."""
    kinds = [one.aval for one in equation.invars]
    return _saves(policy, equation.primitive, kinds, equation.params)


def _saves(policy: Any, primitive: Any, kinds: list[Any], params: dict[str, Any]) -> bool:
    answer = policy(primitive, *kinds, **params) if policy is not None else False
    return bool(answer) if isinstance(answer, bool) else answer is not Recompute


def listed_names(policy: Any) -> frozenset[str] | None:
    """The names that one of JAX's policies was made to keep or offload; None for other policies."""
    if dataclasses.is_dataclass(policy):
        found = getattr(policy, "saveable_names", None)
        return None if found is None else frozenset(found)
    made_by = getattr(policy, "__qualname__", "").partition(".")[0]
    if made_by not in ("save_only_these_names", "save_and_offload_only_these_names"):
        return None
    cells = inspect.getclosurevars(policy).nonlocals
    return frozenset().union(
        *(names for key, names in cells.items() if key.startswith("names_which"))
    )


def is_save_anything_except(policy: Any) -> bool:
    """Whether a policy is ``save_anything_except_these_names``, which keeps everything."""
    return getattr(policy, "__qualname__", "").startswith("save_anything_except_these_names.")


def saves_nothing(policy: Any) -> bool:
    """Whether a policy is None, or JAX's for recomputing everything."""
    return policy is None or policy is nothing_saveable


def is_plain_policy(policy: Any) -> bool:
    """Whether a policy is the user's own function, not one of JAX's."""
    return inspect.isfunction(policy) and policy.__module__ != nothing_saveable.__module__


@functools.cache
def ignores_plain_policies() -> bool:
    """Whether ``jax_remat3`` is on and treats a user's own policy as None."""

    def save_all(*_: Any, **__: Any) -> bool:
        return True

    def recomputed(policy: Any) -> int:
        def fn(x: Any) -> Any:
            return jnp.sin(jnp.sin(x))

        jaxpr = jax.make_jaxpr(jax.grad(jax.checkpoint(fn, policy=policy)))(1.0)
        return str(jaxpr).count(" sin ")

    return bool(with_old_checkpoint(lambda: recomputed(save_all)) != recomputed(save_all))


def with_old_checkpoint(run: Callable[[], Any]) -> Any:
    """A function's result with ``jax_remat3`` off, so that jaxprs show checkpoints and names."""
    before = uses_new_checkpoint()
    jax.config.update("jax_remat3", False)
    try:
        return run()
    finally:
        jax.config.update("jax_remat3", before)


def uses_new_checkpoint() -> bool:
    """Whether ``jax_remat3`` is on."""
    return bool(jax.config.values["jax_remat3"])


def residuals_of(equation: Any) -> tuple[Any, list[Any]]:
    """What the derivative of an equation keeps: a jaxpr from its inputs, and its results.

    Each result is a residual; one that is an input of the jaxpr is kept anyway.
    """
    inputs = equation.invars
    literals = {n: one.val for n, one in enumerate(inputs) if isinstance(one, internals.Literal)}
    others = [one.aval for one in inputs if not isinstance(one, internals.Literal)]
    shapes = [jax.ShapeDtypeStruct(one.shape, one.dtype) for one in others]

    def kept(*primals: Any) -> Any:
        def run(*values: Any) -> Any:
            left = iter(values)
            given = [literals[n] if n in literals else next(left) for n in range(len(inputs))]
            return internals.bind(equation, equation.source_info.name_stack, given)

        return jax.tree.leaves(jax.vjp(run, *primals)[1])

    closed, _ = internals.make_jaxpr(kept, *shapes)
    return closed, internals.parts(closed)[4]
