"""The hand-written policy, one for all blocks, that is closest to a plan.

``jax.checkpoint`` or ``nn.remat`` takes a policy, and goes around a class of modules, the body of a
scan, or the whole loss. So the candidates are JAX's own policies in each of these places, and
policies that keep by name what the plan keeps in at least n blocks, for every n that makes a
difference, with and without the comparatively small values. The model that made the plan judges
them. Each name has a small cost, because someone has to write it.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence

from remat_opt import loop_choices, loops, planning, policies
from remat_opt.compilers.opened import Opened
from remat_opt.errors import RematError
from remat_opt.plan import Plan
from remat_opt.planning import Problem
from remat_opt.program import blocks, bodies
from remat_opt.program.linearization import linearize
from remat_opt.program.names import Names
from remat_opt.program.record import Program
from remat_opt.schedule import Loop, Schedule, plain
from remat_opt.solvers.base import Candidate
from remat_opt.units import format_bytes, format_share

#: How many sets of names are tried.
_MOST_SETS = 8
#: A large value is at least this share of what a policy keeps.
_LEAST_SHARE = 0.01
#: The recomputation that saving a name is worth, as a share of a forward pass's time.
_NAME_SHARE = 0.005
_NUMBERED = re.compile(r"(\w*?)_?\d+$")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A value to put into ``checkpoint_name``.

    Attributes:
      name: the name.
      label: what it is in the first block, with its extents.
      module: the module that makes it there.
      source: line of the user's code.
    """

    name: str
    label: str
    module: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class NearestPolicy:
    """One policy for all blocks, compared with the plan it replaces; all figures are predicted.

    Attributes:
      where: what to put it around.
      policy: the policy, as code.
      names: the values to name for it.
      temporary_bytes: the temporaries it needs.
      overhead_share: its recomputation, as a share of a forward pass's time.
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
    """The policy nearest to a plan.

    Args:
      problem: that of the program that the plan was made for.
      plan: the plan.

    Raises:
      RematError: nothing in the program can be put under a checkpoint.
    """
    drafts = [*_whole(problem), *_per_block(problem, plan)]
    judged = list(planning.expected(problem, [one.schedule for one in drafts]))
    with_loops, in_loops = _loops(problem, plan)
    drafts += in_loops
    judged += planning.expected(with_loops, [one.schedule for one in in_loops])
    if not drafts:
        raise RematError(f"Nothing in {plan.function!r} can be put under a checkpoint.")
    most = plan.predicted.model_bytes
    forward = problem.model.graph.forward_seconds

    def rank(pair: tuple[_ByHand, Candidate]) -> tuple[bool, float, float]:
        draft, found = pair
        # Each name also has to be written.
        cost = found.overhead_seconds + _NAME_SHARE * forward * len(draft.names)
        if found.peak_bytes <= most:
            return (False, cost, found.peak_bytes)
        return (True, found.peak_bytes, cost)

    draft, found = min(zip(drafts, judged, strict=True), key=rank)
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
            where="jax.checkpoint around the whole function", policy=name, schedule=schedule
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
    """What to call the blocks: by the class of their modules, if names show it."""
    stems: Counter[str] = Counter()
    for run in runs:
        shared = _shared_path(program, run)
        found = _NUMBERED.match(shared[-1]) if shared else None
        stems[found[1] if found else ""] += 1
    names = [f"{stem} ({count})" for stem, count in sorted(stems.items()) if stem]
    if len(names) < len(stems):
        return f"jax.checkpoint around each of {len(runs)} blocks"
    return f"nn.remat on every {' and '.join(names)}"


def _shared_path(program: Program, run: range) -> list[str]:
    """The modules that all equations of a block are in."""
    paths = [program.equations[index].module.split("/") for index in run]
    levels = zip(*paths, strict=False)
    return [
        level[0]
        for level in itertools.takewhile(lambda level: len(set(level)) == 1, levels)
        if level[0]
    ]


def _by_name(problem: Problem, plan: Plan, runs: Sequence[range], where: str) -> Iterator[_ByHand]:
    """Policies that keep what the plan keeps in at least n blocks, for each n."""
    expected, program = problem.model, problem.program
    kept = {one.root for one in plan.decisions if one.fate == "kept"}
    block_of = {index: number for number, run in enumerate(runs) for index in run}
    depths = [len(_shared_path(program, run)) for run in runs]
    kinds: defaultdict[tuple[str, str, int], list[int]] = defaultdict(list)
    seen: Counter[tuple[int, str, str]] = Counter()
    for vertex, root in enumerate(expected.roots):
        number = block_of.get(root)
        if number is None or expected.graph.pinned[vertex]:
            continue
        inside = "/".join(program.equations[root].module.split("/")[depths[number] :])
        primitive = program.equations[root].operation.primitive
        kinds[inside, primitive, seen[number, inside, primitive]].append(vertex)
        seen[number, inside, primitive] += 1
    sizes = {
        kind: sum(
            expected.graph.bytes[vertex] for vertex in vertices if expected.roots[vertex] in kept
        )
        for kind, vertices in kinds.items()
    }
    shares = {
        kind: sum(expected.roots[vertex] in kept for vertex in vertices) / len(vertices)
        for kind, vertices in kinds.items()
    }
    names = Names(program)
    sets: list[list[tuple[str, str, int]]] = []
    for least in sorted({share for share in shares.values() if share}, reverse=True)[:_MOST_SETS]:
        everything = [kind for kind, share in shares.items() if share >= least]
        total = sum(sizes[kind] for kind in everything)
        large = [kind for kind in everything if sizes[kind] >= _LEAST_SHARE * total]
        sets += [everything, large] if large != everything else [everything]
    for chosen in sets:
        vertices = frozenset(vertex for kind in chosen for vertex in kinds[kind])
        roots = [expected.roots[kinds[kind][0]] for kind in chosen]
        named = _named(names, [(kind[0], root) for kind, root in zip(chosen, roots, strict=True)])
        inside = ", ".join(f'"{one.name}"' for one in named)
        yield _ByHand(
            where=where,
            policy=f"save_only_these_names({inside})",
            schedule=policies.schedule_per_block(
                problem.model.graph, problem.model.roots, block_of, vertices
            ),
            names=named,
        )


def _named(names: Names, values: Sequence[tuple[str, int]]) -> tuple[Named, ...]:
    """What to put into ``checkpoint_name``, each under its own name.

    Args:
      names: those of the program's values.
      values: the module in its block, and the equation, of each.
    """
    found: list[Named] = []
    taken: Counter[str] = Counter()
    for inside, root in values:
        told = names.of(root)
        what = re.split(r" (?:of|in|with) ", told.what)[0]
        words = [*(part for part in inside.split("/") if part.isidentifier()), what]
        name = re.sub(r"\W+", "_", "_".join(words)).strip("_").lower()
        taken[name] += 1
        found.append(
            Named(
                name=f"{name}_{taken[name]}" if taken[name] > 1 else name,
                label=told.title,
                module=told.module,
                source=told.source,
            )
        )
    return tuple(found)


def _loops(problem: Problem, plan: Plan) -> tuple[Problem, list[_ByHand]]:
    """One policy for all iterations of each scan, with a problem whose model knows them."""
    model, program = problem.model, problem.program
    measure = plan.objective.overhead
    ways = loops.ways(program, linearize(program), model, measure, alike=True)
    if not ways:
        return problem, []
    effects = tuple(one for one in model.effects if not isinstance(one, Opened))
    known = loops.opened(dataclasses.replace(model, effects=effects), ways)
    sweep = dataclasses.replace(problem.sweep, model=known)
    found = []
    for choice in loop_choices.choices(ways, measure):
        names = tuple(
            name
            for way in choice
            if isinstance(way.loop, Loop)
            for name in _named_in_loop(problem, way.loop.root, way.loop.parts[0].kept)
        )
        inside = ", ".join(f'"{one.name}"' for one in names)
        found.append(
            _ByHand(
                where="jax.checkpoint around the body of every scan",
                policy=f"save_only_these_names({inside})" if names else "nothing_saveable",
                schedule=dataclasses.replace(
                    plain(model.graph), loops=tuple(way.loop for way in choice)
                ),
                names=names,
            )
        )
    return dataclasses.replace(problem, sweep=sweep), found


def _named_in_loop(problem: Problem, root: int, kept: Sequence[int]) -> tuple[Named, ...]:
    equation = problem.program.equations[root]
    body = bodies.body_of(equation, bodies.varying(problem.program))
    shared = len(_shared_path(body, range(len(body.equations))))
    inside = ["/".join(body.equations[index].module.split("/")[shared:]) for index in kept]
    names = Names(problem.program).inside(equation, body)
    return _named(names, list(zip(inside, kept, strict=True)))
