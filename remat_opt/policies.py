"""``jax.checkpoint``'s own policies: which ones exist, and the schedule that each amounts to.

Around the whole function or around every block (``blocks``), as a careful user would write it.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt.graph import Graph
from remat_opt.program import blocks, dataflow
from remat_opt.program.record import Atom, Program
from remat_opt.schedule import Region, Schedule, merged

#: Pairs of names for one policy: the first is shown.
ALIASES = {
    "checkpoint_dots": "dots_saveable",
    "checkpoint_dots_with_no_batch_dims": "dots_with_no_batch_dims_saveable",
}


def default_policies() -> dict[str, Callable[..., Any]]:
    """The policies in ``jax.checkpoint_policies`` that are policies as they stand, by name.

    The others there, such as ``save_only_these_names``, are functions that make one: they name
    their parameters, while a policy takes any equation's. Of two names for one policy, one is
    given.
    """
    found = {}
    for name in sorted(dir(jax.checkpoint_policies)):
        if name.startswith("_") or ALIASES.get(name, name) != name:
            continue
        if (policy := policy_of(name)) is not None:
            found[name] = policy
    return found


def policy_of(name: str) -> Callable[..., Any] | None:
    """The policy of that name in ``jax.checkpoint_policies``; None if it is not a policy."""
    thing = getattr(jax.checkpoint_policies, name, None)
    if not callable(thing):
        return None
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return None
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return thing if takes_any else None


def alone(program: Program, roots: Sequence[int], graph: Graph) -> tuple[Schedule, ...]:
    """What the default policies do by themselves, around the whole function and every block.

    Args:
      program: a traced function.
      roots: for each vertex its equation.
      graph: of these vertices.
    """
    return (
        *schedules(program, roots, graph),
        *schedules_per_block(program, roots, graph, blocks.blocks(program)),
    )


def schedules(program: Program, roots: Sequence[int], graph: Graph) -> Iterator[Schedule]:
    """One checkpoint around the whole function with each of the default policies.

    A vertex is judged by its own equation: what is fused into it is recomputed with it. A vertex
    that must run only once splits the checkpoint in two.

    Args:
      program: a traced function.
      roots: for each vertex its equation.
      graph: of these vertices.
    """
    return schedules_per_block(program, roots, graph, [range(len(program.equations))])


def schedules_per_block(
    program: Program, roots: Sequence[int], graph: Graph, runs: Sequence[range]
) -> Iterator[Schedule]:
    """One checkpoint around every block with each of the default policies; the rest is plain.

    A vertex belongs to the block of its own equation. One that must run only once splits the
    checkpoint of its block in two.

    Args:
      program: a traced function.
      roots: for each vertex its equation, ascending.
      graph: of these vertices.
      runs: the blocks, as ``blocks.blocks`` gives them. Without any there is no schedule.
    """
    block_of = {index: number for number, run in enumerate(runs) for index in run}
    if all(graph.pinned[vertex] or root not in block_of for vertex, root in enumerate(roots)):
        return
    for policy in default_policies().values():
        own = {vertex for vertex, root in enumerate(roots) if _keeps(policy, program, root)}
        yield schedule_per_block(graph, roots, block_of, own)


def schedule_per_block(
    graph: Graph, roots: Sequence[int], block_of: Mapping[int, int], kept: Set[int]
) -> Schedule:
    """One checkpoint around every block that keeps some values; the rest is plain.

    Args:
      graph: of the vertices.
      roots: for each vertex its equation, ascending.
      block_of: for each equation in a block, the block's number.
      kept: vertices.
    """
    places = [
        None if graph.pinned[vertex] else block_of.get(root) for vertex, root in enumerate(roots)
    ]
    parts = (
        (place, tuple(part))
        for place, part in itertools.groupby(range(len(graph)), places.__getitem__)
    )
    return Schedule(
        regions=tuple(
            merged(
                vertices
                if place is None
                else Region(vertices=vertices, kept=tuple(v for v in vertices if v in kept))
                for place, vertices in parts
            )
        )
    )


def kept(policy: Callable[..., Any], program: Program, roots: Sequence[int]) -> frozenset[int]:
    """The vertices that a policy keeps, by what computes them or by a name they are given.

    Args:
      policy: that of a ``jax.checkpoint``.
      program: what is under it.
      roots: for each vertex its equation.
    """
    vertex_of = {root: vertex for vertex, root in enumerate(roots)}
    maker = program.makers()
    found = set()
    for index in range(len(program.equations)):
        if not _keeps(policy, program, index):
            continue
        while (
            index not in vertex_of
            and program.equations[index].operation.primitive in dataflow.ALIASES
        ):
            (value,) = program.equations[index].value_inputs
            if value not in maker:
                break
            index = maker[value]
        if index in vertex_of:
            found.add(vertex_of[index])
    return frozenset(found)


def per_block(
    program: Program, runs: Sequence[range], policy: Callable[..., Any] | None
) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The program with every block under one ``jax.checkpoint``, the rest as it is.

    A block with side effects, which a checkpoint would repeat, also runs as it is.

    Args:
      program: a traced function.
      runs: the blocks, as ``blocks.blocks`` gives them.
      policy: as ``jax.checkpoint`` takes it.

    Returns:
      A function ``run(constants, arguments) -> flat outputs``.
    """
    whole = _with_rest(runs, len(program.equations))
    last_reader = {value: len(whole) for value in program.output_values}
    for place in range(len(whole) - 1, -1, -1):
        for index in whole[place][0]:
            for value in program.equations[index].value_inputs:
                last_reader.setdefault(value, place)

    def run(constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
        environment: dict[int, Any] = dict(zip(program.constants, constants, strict=True))
        environment.update(zip(program.arguments, arguments, strict=True))
        for place, (part, is_block) in enumerate(whole):
            if not is_block or any(program.equations[index].effects for index in part):
                _run_equations(program, part, environment)
                continue
            made = [value for index in part for value in program.equations[index].outputs]
            inside = set(made)
            read = dict.fromkeys(
                value
                for index in part
                for value in program.equations[index].value_inputs
                if value not in inside
            )
            handed_on = [value for value in made if last_reader.get(value, -1) > place]
            block = _block(program, part, tuple(read), handed_on)
            results = jax.checkpoint(block, policy=policy)(*(environment[v] for v in read))
            environment.update(zip(handed_on, results, strict=True))
        return [_read(atom, environment) for atom in program.outputs]

    return run


def as_it_is(program: Program) -> Callable[[Sequence[Any], Sequence[Any]], list[Any]]:
    """The program as a function ``run(constants, arguments) -> flat outputs``."""
    return per_block(program, (), jax.checkpoint_policies.everything_saveable)


def _with_rest(runs: Sequence[range], count: int) -> list[tuple[range, bool]]:
    """The blocks and what lies between them, in order; whether each is a block."""
    whole, reached = [], 0
    for run in runs:
        whole += [(range(reached, run.start), False), (run, True)]
        reached = run.stop
    whole.append((range(reached, count), False))
    return [(part, is_block) for part, is_block in whole if part]


def _block(
    program: Program, part: range, read: Sequence[int], handed_on: Sequence[int]
) -> Callable[..., list[Any]]:
    def block(*given: Any) -> list[Any]:
        environment = dict(zip(read, given, strict=True))
        _run_equations(program, part, environment)
        return [environment[value] for value in handed_on]

    return block


def _run_equations(program: Program, part: range, environment: dict[int, Any]) -> None:
    for index in part:
        equation = program.equations[index]
        inputs = [_read(atom, environment) for atom in equation.inputs]
        results = internals.bind(equation.jax_equation, equation.name_stack, inputs)
        environment.update(zip(equation.outputs, results, strict=True))


def _read(atom: Atom, environment: dict[int, Any]) -> Any:
    return environment[atom] if isinstance(atom, int) else atom.value


def _keeps(policy: Callable[..., Any], program: Program, root: int) -> bool:
    """Whether the policy keeps it; its answer may also be a marker, as for offloading."""
    equation = program.equations[root].jax_equation
    kinds = (atom.aval for atom in equation.invars)
    return policy(equation.primitive, *kinds, **equation.params) is True
