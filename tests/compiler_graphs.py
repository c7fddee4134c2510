"""Programs as compilers are expected to store them: shared by the tests of that room."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from remat_opt import planning, verification
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect, Figures
from remat_opt.compilers.model import Model, model
from remat_opt.compilers.storage import Storage, dataflow
from remat_opt.device import get_device
from remat_opt.gradients import Gradients
from remat_opt.graph import Graph
from remat_opt.plan import Objective, Plan
from remat_opt.program import tracing
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Program
from remat_opt.program.tracing import Signature
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import simulate
from remat_opt.solvers.base import Candidate
from tests.programs import ones

X = ones(16, 8)
W = ones(8, 8)


def compiler_of(device: str, off: Collection[str] = ()) -> Compiler:
    """The compiler for a known device, with some rules switched off."""
    return Compiler(device=get_device(device), off=frozenset(off))


def model_of(
    program: Program,
    device: str = "h200",
    off: Collection[str] = (),
    gradients: Gradients = Gradients.RESULTS,
) -> Model:
    """What is expected of a program."""
    return model(program, linearize(program), compiler_of(device, off), gradients=gradients)


def storage_of(program: Program, device: str = "h200") -> Storage:
    """What a compiler stores of a program."""
    compiler = compiler_of(device)
    return Storage(dataflow(program, linearize(program), compiler), compiler)


def graph_of(
    fn: Callable[..., Any], *args: Any, device: str = "h200", **options: Any
) -> tuple[Program, Model, Graph]:
    """A function as a program, what is expected of it, and its graph."""
    program = tracing.trace(fn, *args, signature=Signature(**options))
    found = model_of(program, device)
    return program, found, found.graph


def changed(found: Model, schedule: Schedule) -> Graph:
    """The graph with what depends on a schedule."""
    figures = Figures.of(found.graph)
    for effect in found.effects:
        effect.change(figures, schedule)
    return figures.put_into(found.graph)


def held_bytes(found: Model, schedule: Schedule, kind: type[Effect] = Effect) -> int:
    """What effects of one kind hold in addition."""
    return sum(
        effect.held_bytes(found.graph, schedule)
        for effect in found.effects
        if isinstance(effect, kind)
    )


def wide_zeros(size: int) -> int:
    """What float32 zeros for bfloat16 rows take, where there are any."""
    return size if jax.__version_info__ < (0, 11) else 0


def whole(graph: Graph) -> Schedule:
    """Everything under one checkpoint that keeps nothing."""
    return Schedule(regions=(Region(vertices=tuple(range(len(graph)))),))


def names(graph: Graph) -> list[str]:
    """The primitives of the vertices, in order."""
    return [name.split(":")[1] for name in graph.names]


def stored(graph: Graph) -> list[str]:
    """The primitives of what the backward pass of the unchanged function reads."""
    return [names(graph)[vertex] for vertex in simulate(graph, plain(graph)).stored]


def two_layers(
    weights: Any, x: jax.Array, act: Callable[[jax.Array], jax.Array] = jnp.sin
) -> jax.Array:
    for w in weights:
        x = act(x @ w)
    return jnp.sum(x)


def cross_entropy(w: jax.Array, x: jax.Array, dtype: str | None = None) -> jax.Array:
    """Of logits in their own type, or widened to another."""
    logits = x @ w if dtype is None else (x @ w).astype(dtype)
    picked = jnp.take_along_axis(logits, jnp.arange(x.shape[0])[:, None] % 4, axis=-1)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - picked[:, 0])


class InStep:
    """A function in a step that consumes its gradients, on a device that is not there.

    Args:
      fn: a loss.
      arguments: their shapes.
      device: name of the device.
    """

    def __init__(self, fn: Callable[..., Any], *arguments: Any, device: str = "h200") -> None:
        self._fn, self._device = fn, get_device(device)
        self._arguments, self._tree = jax.tree.flatten(arguments)
        self._objective = Objective(gradients=Gradients.CONSUMED)
        self._program = tracing.trace(fn, *arguments)
        self.problem = planning.problem(
            self._program, self._device, gradients=self._objective.gradients
        )

    def plan(self, chosen: Candidate | None = None) -> Plan:
        """The plan of a candidate; of the one with the least memory if it is None."""
        chosen = chosen or planning.solve(self.problem, self._objective)
        return planning.describe(self.problem, self._program, chosen, self._objective)

    def compiled_bytes(self, plan: Plan, off: Collection[str] = ()) -> int:
        """The temporaries that a plan compiles to, with some rules switched off."""
        found = verification.measure_plan(
            plan, self._program, self._arguments, self._device, off=frozenset(off)
        )
        return found.temporary_bytes

    def unplanned_bytes(self, fn: Callable[..., Any] | None = None) -> int:
        """Those of the function as it is, or of another one in its place."""

        def run(constants: Any, given: Any) -> list[Any]:
            return [(fn or self._fn)(*jax.tree.unflatten(self._tree, given))]

        found = verification.measure_run(
            run, self._program, self._arguments, self._device, self._objective.gradients
        )
        return found.temporary_bytes
