"""``jax.checkpoint``'s own policies: which there are, and what each comes to as a schedule."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from remat_opt.graph import Graph
from remat_opt.program import Program
from remat_opt.schedule import Region, Schedule

#: Two names of one policy: the first is shown.
ALIASES = {
    "checkpoint_dots": "dots_saveable",
    "checkpoint_dots_with_no_batch_dims": "dots_with_no_batch_dims_saveable",
}


def default_policies() -> dict[str, Callable[..., Any]]:
    """The policies in ``jax.checkpoint_policies`` that are policies as they stand, by name.

    The others there, such as ``save_only_these_names``, are functions that make one. Those
    take what they need by name or position, where a policy takes an equation's parameters,
    whatever these are. Of two names for one policy, one is given.
    """
    found = {}
    for name in sorted(dir(jax.checkpoint_policies)):
        if name.startswith("_") or ALIASES.get(name, name) != name:
            continue
        if (policy := policy_of(name)) is not None:
            found[name] = policy
    return found


def policy_of(name: str) -> Callable[..., Any] | None:
    """The policy of that name in ``jax.checkpoint_policies``; None if what it names is none."""
    thing = getattr(jax.checkpoint_policies, name, None)
    if not callable(thing):
        return None
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return thing if takes_any else None


def schedules(program: Program, roots: Sequence[int], graph: Graph) -> Iterator[Schedule]:
    """One checkpoint round the whole function with each of the default policies.

    A vertex counts as what its own equation is: what is fused into it is computed again with
    it. A vertex that must run once parts the checkpoint in two.

    Args:
      program: a traced function.
      roots: for each vertex its equation.
      graph: of these vertices.
    """
    runs = [
        (pinned, tuple(run))
        for pinned, run in itertools.groupby(range(len(graph)), graph.pinned.__getitem__)
    ]
    for policy in default_policies().values():
        kept = {vertex for vertex, root in enumerate(roots) if _keeps(policy, program, root)}
        yield Schedule(
            regions=tuple(
                Region(
                    vertices=vertices,
                    kept=() if pinned else tuple(v for v in vertices if v in kept),
                    checkpointed=not pinned,
                )
                for pinned, vertices in runs
            )
        )


def _keeps(policy: Callable[..., Any], program: Program, root: int) -> bool:
    """Whether the policy says so; what it says may also be a marker, such as one for offloading."""
    equation = program.equations[root].jax_equation
    kinds = (atom.aval for atom in equation.invars)
    return policy(equation.primitive, *kinds, **equation.params) is True
