"""Rewrites a program as a chain of ``jax.checkpoint`` regions.

One checkpoint round a whole function changes nothing: its recomputation may start as soon
as the forward pass ends. Each checkpoint of a chain, however, ties its recomputation to the
arrival of its own cotangents, so it cannot start before its turn. So each region of a
schedule becomes one ``jax.checkpoint`` whose policy keeps the region's kept values by
name; every reader inside the region reads the named value. Equations that are fused into
several vertices are emitted again in each region that needs them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from remat_opt import _jax_internals as internals
from remat_opt.program import Program
from remat_opt.schedule import Stage


def name_of(root: int, position: int) -> str:
    """The checkpoint name of one output of an equation."""
    return f"remat_opt_{root}_{position}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A stage made ready to run: which equations, what goes in and what comes out."""

    equations: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: frozenset[int]
    checkpointed: bool


def rewrite(program: Program, stages: Sequence[Stage]) -> Callable[..., list[Any]]:
    """The program as a function of its constants and flat arguments, run stage by stage.

    Args:
      program: a traced function.
      stages: hold every root equation once, in an order of execution.

    Returns:
      A function ``run(constants, arguments) -> flat outputs``.
    """
    steps = _steps(program, stages)

    def run(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        environment: dict[int, Any] = dict(zip(program.constants, constants, strict=True))
        environment.update(zip(program.arguments, arguments, strict=True))
        for step in steps:
            given = [environment[value] for value in step.inputs]
            environment.update(
                zip(step.outputs, _runner(program, step)(*given), strict=True)
            )
        return [
            environment[atom] if isinstance(atom, int) else atom.value for atom in program.outputs
        ]

    return run


def _runner(program: Program, step: _Step) -> Callable[..., list[Any]]:
    names: list[str] = []

    def region(*given: Any) -> list[Any]:
        environment = dict(zip(step.inputs, given, strict=True))
        for index in step.equations:
            equation = program.equations[index]
            inputs = [
                environment[atom] if isinstance(atom, int) else atom.value
                for atom in equation.inputs
            ]
            results = internals.bind(equation.jax_equation, equation.name_stack, inputs)
            if index in step.kept:
                results = [
                    checkpoint_name(result, name_of(index, position))
                    for position, result in enumerate(results)
                ]
            environment.update(zip(equation.outputs, results, strict=True))
        return [environment[value] for value in step.outputs]

    if not step.checkpointed:
        return region
    for index in sorted(step.kept):
        names += [name_of(index, p) for p in range(len(program.equations[index].outputs))]
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    return jax.checkpoint(region, policy=policy)


def _steps(program: Program, stages: Sequence[Stage]) -> list[_Step]:
    maker = {
        value: index
        for index, equation in enumerate(program.equations)
        for value in equation.outputs
    }
    all_roots = {root for stage in stages for root in stage.roots}
    available = set(program.constants) | set(program.arguments)
    drafts: list[tuple[Stage, list[int], list[int]]] = []
    for stage in stages:
        equations = _emitted(program, stage.roots, all_roots, maker, available)
        made = {value for index in equations for value in program.equations[index].outputs}
        inputs = _distinct(
            value
            for index in equations
            for value in program.equations[index].value_inputs
            if value not in made
        )
        drafts.append((stage, equations, inputs))
        for root in stage.roots:
            available.update(program.equations[root].outputs)
    # Outputs that are only another shape of a root are emitted without a checkpoint at the end.
    trailing = _emitted(
        program,
        [maker[v] for v in program.output_values if v in maker and maker[v] not in all_roots],
        all_roots,
        maker,
        available,
    )
    steps = []
    wanted = set(program.output_values)
    if trailing:
        made = {value for index in trailing for value in program.equations[index].outputs}
        inputs = _distinct(
            value
            for index in trailing
            for value in program.equations[index].value_inputs
            if value not in made
        )
        steps.append(
            _Step(
                equations=tuple(trailing),
                inputs=tuple(inputs),
                outputs=tuple(value for value in made if value in wanted),
                kept=frozenset(),
                checkpointed=False,
            )
        )
        wanted -= made
        wanted.update(inputs)
    for stage, equations, inputs in reversed(drafts):
        provided = [value for root in stage.roots for value in program.equations[root].outputs]
        steps.append(
            _Step(
                equations=tuple(equations),
                inputs=tuple(inputs),
                outputs=tuple(value for value in provided if value in wanted),
                kept=frozenset(stage.kept),
                checkpointed=stage.checkpointed,
            )
        )
        wanted.update(inputs)
    return steps[::-1]


def _emitted(
    program: Program,
    roots: Iterable[int],
    all_roots: set[int],
    maker: dict[int, int],
    available: set[int],
) -> list[int]:
    """The roots and the fused equations behind them, in program order."""
    found: set[int] = set()
    pending = list(roots)
    while pending:
        index = pending.pop()
        if index in found:
            continue
        found.add(index)
        for value in program.equations[index].value_inputs:
            if value not in available and value in maker:
                pending.append(maker[value])
    return sorted(found)


def _distinct(values: Iterable[int]) -> list[int]:
    return list(dict.fromkeys(values))
