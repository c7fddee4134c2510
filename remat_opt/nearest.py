"""What one can write by hand, with one policy for all blocks, that comes nearest to a plan.

``jax.checkpoint`` or ``nn.remat`` takes a policy, and is put round a class of modules, round the
body of a scan, or round the whole loss. So the candidates are JAX's own policies in each of these
places, and policies that keep by name what the plan keeps in at least so many of the blocks, for
every number that makes a difference. The model that made the plan judges them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from remat_opt import _jax_internals as internals
from remat_opt import planning, policies
from remat_opt.errors import RematError
from remat_opt.plan import Plan
from remat_opt.planning import Problem
from remat_opt.program import blocks, bodies
from remat_opt.program.record import Program
from remat_opt.schedule import Loop, Schedule
from remat_opt.solvers.base import Candidate
from remat_opt.units import format_bytes, format_share

#: As many sets of names as are tried.
_MOST_SETS = 8
_NUMBERED = re.compile(r"(\w*?)_?\d+$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A value to put into ``checkpoint_name``.

    Attributes:
      name: the name.
      label: primitive, dtype and shape, in the first block.
      module: where it is made there.
      source: line of the user's code.
    """

    name: str
    label: str
    module: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NearestPolicy:
    """One policy for all blocks, beside the plan that it stands for; all figures are predicted.

    Attributes:
      where: what to put it round.
      policy: the policy, as code.
      names: what has to be named for it.
      temporary_bytes: the temporaries it needs.
      overhead_share: its recomputation, as a share of the time of a forward pass.
      plan_temporary_bytes: the temporaries of the plan.
      plan_overhead_share: the recomputation of the plan.
    """

    where: str
    policy: str
    names: tuple[Named, ...]
    temporary_bytes: int
    overhead_share: float
    plan_temporary_bytes: int
    plan_overhead_share: float

    def __repr__(self) -> str:
        more_bytes = self.temporary_bytes - self.plan_temporary_bytes
        more_share = self.overhead_share - self.plan_overhead_share
        lines = [
            f"{self.where} with {self.policy}",
            f"  temporaries, predicted: {format_bytes(self.temporary_bytes)}, "
            f"{format_bytes(abs(more_bytes))} {_more(more_bytes)} the plan",
            f"  recomputation: {format_share(self.overhead_share)} of the time of a forward pass, "
            f"{format_share(abs(more_share))} {_more(more_share)} the plan",
        ]
        for one in self.names:
            told = "  ".join(filter(None, (one.label, one.module, one.source)))
            lines.append(f'  checkpoint_name(..., "{one.name}"): {told}')
        return "\n".join(lines)


def _more(amount: float) -> str:
    return "less than" if amount < 0 else "more than"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _ByHand:
    where: str
    policy: str
    schedule: Schedule
    names: tuple[Named, ...] = ()


def of(problem: Problem, plan: Plan) -> NearestPolicy:
    """The nearest policy to a plan.

    Args:
      problem: of the program that the plan was made for.
      plan: the plan.

    Raises:
      RematError: nothing of the program can be put under a checkpoint.
    """
    drafts = [*_whole(problem), *_per_block(problem, plan), *_loops(problem, plan)]
    if not drafts:
        raise RematError(f"Nothing in {plan.function!r} can be put under a checkpoint.")
    judged = planning.expected(problem, [one.schedule for one in drafts])
    most = plan.predicted.model_bytes

    def rank(pair: tuple[_ByHand, Candidate]) -> tuple[bool, float, float]:
        found = pair[1]
        if found.peak_bytes <= most:
            return (False, found.overhead_seconds, found.peak_bytes)
        return (True, found.peak_bytes, found.overhead_seconds)

    draft, found = min(zip(drafts, judged, strict=True), key=rank)
    forward = problem.model.graph.forward_seconds
    return NearestPolicy(
        where=draft.where,
        policy=draft.policy,
        names=draft.names,
        temporary_bytes=found.peak_bytes,
        overhead_share=found.overhead_seconds / forward if forward else 0.0,
        plan_temporary_bytes=most,
        plan_overhead_share=plan.predicted.overhead_share,
    )


def _whole(problem: Problem) -> Iterator[_ByHand]:
    expected = problem.model
    schedules = policies.schedules(problem.program, expected.roots, expected.graph)
    for name, schedule in zip(policies.default_policies(), schedules, strict=False):
        yield _ByHand(
            where="jax.checkpoint round the whole function", policy=name, schedule=schedule
        )


def _per_block(problem: Problem, plan: Plan) -> Iterator[_ByHand]:
    expected, program = problem.model, problem.program
    runs = blocks.blocks(program)
    if not runs:
        return
    where = _block_name(program, runs)
    schedules = policies.schedules_per_block(program, expected.roots, expected.graph, runs)
    for name, schedule in zip(policies.default_policies(), schedules, strict=False):
        yield _ByHand(where=where, policy=name, schedule=schedule)
    yield from _by_name(problem, plan, runs, where)


def _block_name(program: Program, runs: Sequence[range]) -> str:
    """What to call the blocks: by the class of their modules, where names tell it."""
    stems: Counter[str] = Counter()
    for run in runs:
        paths = [program.equations[index].module.split("/") for index in run]
        shared = [
            parts[0]
            for parts in itertools.takewhile(
                lambda parts: len(set(parts)) == 1, zip(*paths, strict=False)
            )
        ]
        found = _NUMBERED.match(shared[-1]) if shared else None
        stems[found[1] if found else ""] += 1
    names = [f"{stem} ({count})" for stem, count in sorted(stems.items()) if stem]
    if len(names) < len(stems):
        return f"jax.checkpoint round each of {len(runs)} blocks"
    return f"nn.remat on every {' and '.join(names)}"


def _by_name(problem: Problem, plan: Plan, runs: Sequence[range], where: str) -> Iterator[_ByHand]:
    """Policies that keep what the plan keeps in at least so many blocks."""
    expected, program = problem.model, problem.program
    kept = {one.root for one in plan.decisions if one.fate == "kept"}
    block_of = {index: number for number, run in enumerate(runs) for index in run}
    kinds: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    seen: Counter[tuple[int, str, str]] = Counter()
    for vertex, root in enumerate(expected.roots):
        number = block_of.get(root)
        if number is None or expected.graph.pinned[vertex]:
            continue
        inside = _inside(program.equations[root].module)
        primitive = program.equations[root].operation.primitive
        kinds[inside, primitive, seen[number, inside, primitive]].append(vertex)
        seen[number, inside, primitive] += 1
    shares = {
        kind: sum(expected.roots[vertex] in kept for vertex in vertices) / len(vertices)
        for kind, vertices in kinds.items()
    }
    for least in sorted({share for share in shares.values() if share}, reverse=True)[:_MOST_SETS]:
        chosen = [kind for kind, share in shares.items() if share >= least]
        vertices = frozenset(vertex for kind in chosen for vertex in kinds[kind])
        names = tuple(_named(problem, kind, kinds[kind][0]) for kind in chosen)
        inside = ", ".join(f'"{one.name}"' for one in names)
        yield _ByHand(
            where=where,
            policy=f"save_only_these_names({inside})",
            schedule=policies.schedule_per_block(
                problem.model.graph, problem.model.roots, block_of, vertices
            ),
            names=names,
        )


def _inside(module: str) -> str:
    """A module's path less what tells blocks apart: the numbers of all but the last in it."""
    *outer, last = module.split("/")
    return "/".join([*(re.sub(r"\d+", "", part) for part in outer), last])


def _named(problem: Problem, kind: tuple[str, str, int], vertex: int) -> Named:
    inside, primitive, place = kind
    equation = problem.program.equations[problem.model.roots[vertex]]
    last = inside.rsplit("/", 1)[-1].lower()
    words = [last or primitive, *([str(place)] if place or not last else [])]
    return Named(
        name="_".join(re.sub(r"\W+", "_", word) for word in words)
        + (f"_{primitive}" if last else ""),
        label=problem.model.labels[vertex],
        module=equation.module,
        source=internals.source_line(equation.jax_equation),
    )


def _loops(problem: Problem, plan: Plan) -> Iterator[_ByHand]:
    """Those of the planner's own candidates that have one policy for all iterations of a scan."""
    for candidate in problem.candidates:
        schedule = candidate.schedule
        scans = [loop for loop in schedule.loops if isinstance(loop, Loop)]
        plain = all(
            len(loop.parts) == 1 and not loop.parts[0].inside and not loop.parts[0].loops
            for loop in scans
        )
        one_stage = all(len(loop.parts[0].stages) == 1 for loop in scans)
        checkpointed = any(region.checkpointed for region in schedule.regions)
        if (
            not scans
            or len(scans) < len(schedule.loops)
            or not plain
            or not one_stage
            or checkpointed
        ):
            continue
        names = tuple(
            name
            for loop in scans
            for name in _names_in_loop(problem, loop.root, loop.parts[0].kept)
        )
        inside = ", ".join(f'"{one.name}"' for one in names)
        yield _ByHand(
            where="jax.checkpoint round the body of every scan",
            policy=f"save_only_these_names({inside})" if names else "nothing_saveable",
            schedule=schedule,
            names=names,
        )


def _names_in_loop(problem: Problem, root: int, kept: Sequence[int]) -> Iterator[Named]:
    equation = problem.program.equations[root]
    body = bodies.body_of(equation, bodies.varying(problem.program))
    for index in kept:
        one = body.equations[index]
        kind = one.operation.outputs[0]
        yield Named(
            name=f"{one.operation.primitive}_{index}",
            label=f"{one.operation.primitive} {kind.dtype}{list(kind.shape)}",
            module=one.module,
            source=internals.source_line(one.jax_equation),
        )
