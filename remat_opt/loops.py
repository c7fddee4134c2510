"""What to do inside the loops of a program: how each ``scan`` is opened, and with what else.

Choices and maps are opened together with the loops (``branches``, ``maps``).

Problem. An iteration of a ``scan`` keeps the same as every other one, so what it keeps counts as
often as the loop is long. Beside that may be decided how many iterations share one checkpoint
(chunks), and where one way of doing it gives way to another (parts).

Method. The body is a program of its own, and gets its own model. An iteration under one checkpoint
that keeps some values by name has three figures: bytes kept, recomputation, and the workspace of
one iteration. The kept sets are those of the minimum cut, which are best for every exchange rate
between the first two, and those of ``jax.checkpoint``'s own policies; where the workspace is large,
the body runs again as a chain that the default solver found, and keeps nothing or what passes
between the chain's regions. From these come the ways to open a loop: all iterations alike, and
parts with chunks in chunks (``solvers.loop_nests``). What keeps more comes last, since it is free
again first. The ways that no other beats in memory and recomputation are left.

To the rest of the program a loop is a vertex, whose figures depend on the way it is opened. Several
loops are opened together (``loop_choices``). The default solver plans the rest for a few of these
choices, from the least memory to the most, and all its schedules are judged with all choices. A
loop in the body of another is opened likewise.

Complexity: for a body, as for a program of its size; the rest is arithmetic on some hundreds of
ways, and a bounded number of replays.

Guarantee: none of optimality. Deterministic.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from remat_opt import _jax_internals as internals
from remat_opt import (
    _jax_meshes,
    branches,
    gradient_places,
    inner,
    loop_choices,
    maps,
    named_chains,
    policies,
)
from remat_opt.compilers import operands, tiles
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Figures
from remat_opt.compilers.model import Model, computes_nothing
from remat_opt.compilers.opened import Opened, Opening
from remat_opt.compilers.stacks import (
    Read,
    beside_stacks,
    counted_around_bytes,
    in_gradients_bytes,
    stacks,
    takes_entries,
)
from remat_opt.gradients import Gradients
from remat_opt.graph import Graph
from remat_opt.loop_choices import hull, memory, spread
from remat_opt.program import bodies
from remat_opt.program.linearization import linearize
from remat_opt.program.record import Equation, Linearization, Program, axis_names
from remat_opt.schedule import Inside, Loop, Part, Region, Schedule, Split, Stage
from remat_opt.simulator import demand
from remat_opt.solvers import loop_nests, min_cut, portfolio
from remat_opt.solvers.base import Candidate, Overhead, judged, pareto, priced, thinned
from remat_opt.solvers.loop_nests import Chain, Piece, Way

#: A loop is opened if its residuals take at least this share of what the unchanged function takes.
_LEAST_SHARE = 0.01
#: How many kept sets of a body, ways to run it again, and ways to open a loop are looked at.
_MOST_KEPT, _MOST_INSIDE, _MOST_WAYS = 24, 6, 256
#: After how many of the regions in which an iteration runs again what they hand on may be kept.
_MOST_PLACES = 4
#: How many ways to run an iteration one loop mixes, for each way to measure their memory.
_MOST_MIXED = 12
#: For how many choices for all loops the rest is planned, and how many of its schedules are judged
#: with all.
_MOST_SEARCHES, _MOST_SCHEDULES = 4, 48
#: Vertices that are judged in all.
_WORK = 1_200_000
#: What was found for bodies and branches, by kind, fingerprint and depth: equal ones, as of layers
#: written one after the other, are planned once.
Known = dict[Hashable, Any]
#: How deep loops in loops are opened.
_DEPTH = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Iteration:
    """One way to run an iteration.

    Attributes:
      checkpointed: whether it is under a checkpoint of its own.
      kept: positions of the equations whose results are kept by name.
      stages: the chain in which it runs again; without that checkpoint, in which it runs.
      loops: those inside it that are opened.
      kept_bytes: of what it leaves for the backward pass.
      workspace_bytes: what its backward pass takes beside the stacks, in a loop that is a part.
      whole_bytes: likewise, where that is the whole loop.
      alone_bytes: likewise where it is in no loop, beside what it keeps.
      seconds: what is computed again.
      flops: likewise.
      waiting: what of it and of its state would wait in the stacks of gradients.
    """

    checkpointed: bool
    kept: tuple[int, ...]
    stages: tuple[Stage, ...]
    loops: tuple[Inside, ...]
    kept_bytes: int
    workspace_bytes: int
    whole_bytes: int
    alone_bytes: int
    seconds: float
    flops: int
    waiting: _Waiting

    def cost(self, measure: Overhead) -> float:
        """What is computed again, in the given measure."""
        return measure.of(self.seconds, self.flops)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """What an iteration leaves in the stacks of gradients.

    Attributes:
      bytes: of what waits there.
      entries: the positions of the gradients that it waits in, among those of the loop.
      workspace_bytes: what the backward pass of the iteration takes beside stacks.
    """

    bytes: int
    entries: frozenset[int]
    workspace_bytes: int


#: Where nothing may wait there.
_NOT_WAITING = _Waiting(bytes=0, entries=frozenset(), workspace_bytes=0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """What all iterations of a loop have in common.

    Attributes:
      length: how many there are.
      carry_bytes: of what one hands to the next.
      result_bytes: of the gradients of what one writes to stacks.
      beside_bytes: of what is rounded ahead of the loop, less what is counted around it as well.
      gradient_bytes: of the gradient of one entry of each stack.
      alone_bytes: of copies of entries that wait, too, where an iteration is in no loop.
      chunks: whether iterations may share a checkpoint: then all that is in them runs again.
      are_results: whether these gradients are results of the program.
      seconds: of one.
      flops: of one.
    """

    length: int
    carry_bytes: int
    result_bytes: int
    beside_bytes: int
    gradient_bytes: tuple[int, ...]
    alone_bytes: int
    chunks: bool
    are_results: bool
    seconds: float
    flops: int

    def chain(
        self,
        iterations: Sequence[_Iteration],
        measure: Overhead,
        *,
        in_gradients: bool,
        whole: bool = False,
    ) -> Chain:
        """The loop as numbers, with these ways to run an iteration; whole, or in parts.

        If what fits waits in gradients, that is not counted.
        """

        def way(one: _Iteration) -> Way:
            seconds = one.cost(measure)
            if in_gradients:
                return Way(
                    kept_bytes=max(0, self.carry_bytes + one.kept_bytes - one.waiting.bytes),
                    workspace_bytes=one.waiting.workspace_bytes,
                    alone_bytes=one.waiting.workspace_bytes,
                    seconds=seconds,
                )
            return Way(
                kept_bytes=one.kept_bytes,
                workspace_bytes=one.whole_bytes if whole else one.workspace_bytes,
                alone_bytes=one.alone_bytes,
                seconds=seconds,
            )

        return Chain(
            length=self.length,
            state_bytes=0 if in_gradients else self.carry_bytes,
            result_bytes=self.result_bytes,
            seconds=measure.of(self.seconds, self.flops),
            ways=tuple(map(way, iterations)),
            chunks=self.chunks and not in_gradients,
            alone_bytes=self.alone_bytes if in_gradients else 0,
        )


def opened(expected: Model, ways: Sequence[Sequence[Opening]]) -> Model:
    """The model, which knows what opened loops take.

    Args:
      expected: of the program.
      ways: for each loop all ways to open it.
    """
    effect = Opened(ways={way.loop: way for of_loop in ways for way in of_loop})
    return dataclasses.replace(expected, effects=(*expected.effects, effect))


def ways(
    program: Program,
    linearization: Linearization,
    expected: Model,
    measure: Overhead,
    depth: int = _DEPTH,
    *,
    alike: bool = False,
    stacked: bool = False,
    known: Known | None = None,
) -> list[tuple[Opening, ...]]:
    """For each loop, choice or map of a program that is worth it the ways to open it.

    By ascending memory.

    Args:
      program: a traced function.
      linearization: what its backward steps read.
      expected: its model.
      measure: what recomputation is counted in.
      depth: how many loops in loops are looked into.
      alike: whether to give only those in which each iteration is under one checkpoint, all of
        them with the same policy, as one writes them by hand.
      stacked: whether the program is the body of a loop, with no checkpoint around it, or a branch:
        JAX alone decides then what waits of what is under no checkpoint.
      known: bodies and branches that were planned before, for the same compiler and measure.
    """
    known = {} if known is None else known
    if not depth or not any(
        one.operation.primitive in ("scan", "cond", "shard_map") for one in program.equations
    ):
        return []
    least_bytes = _LEAST_SHARE * expected.unchanged_peak_bytes()
    given = bodies.varying(program)
    found = []
    for vertex, root in enumerate(expected.roots):
        equation = program.equations[root]
        derivative = linearization.derivatives.get(root)
        if (
            derivative is None
            or derivative.assumed
            or not 0 < derivative.internal_bytes >= least_bytes
        ):
            continue
        drafts: Iterable[Opening] = ()
        # By hand one writes a checkpoint around a body, and none into a branch.
        if not alike and bodies.is_open_choice(equation):
            search = functools.partial(
                _of_branch, compiler=expected.compiler, measure=measure, depth=depth, known=known
            )
            of_branch = functools.partial(_branch, search=search, depth=depth, known=known)
            drafts = branches.openings(
                program, vertex, root, derivative, expected, measure, of_branch
            )
        elif not alike and bodies.is_open_map(equation):
            search = functools.partial(
                _of_map,
                compiler=expected.compiler,
                gradients=expected.gradients,
                measure=measure,
                depth=depth,
                known=known,
            )
            drafts = maps.openings(program, vertex, root, expected, search, stacked=stacked)
        elif bodies.is_open_loop(equation) and internals.scan_of(equation.jax_equation).length > 1:
            body = bodies.body_of(equation, given)
            drafts = _openings(program, body, vertex, root, expected, measure, depth, known)
        if alike:
            drafts = (way for way in drafts if _is_alike(way.loop))
        if of_loop := list(drafts):
            found.append(of_loop)
    adds_up = stacked or len(found) > 1
    return [_best(of_loop, measure, adds_up=adds_up) for of_loop in found]


def _best(drafts: Sequence[Opening], measure: Overhead, *, adds_up: bool) -> tuple[Opening, ...]:
    """The ways that no other beats in memory and recomputation, by ascending memory.

    Args:
      drafts: ways to open one loop.
      measure: what recomputation is counted in.
      adds_up: whether what is stacked counts for itself too: with that of other loops, or
        iterations, it adds up, and workspaces do not.
    """

    def cost(way: Opening) -> float:
        return way.cost(measure)

    in_order = sorted(drafts, key=lambda way: (memory(way), cost(way)))
    found: list[Opening] = []
    for way in in_order:
        if not found or cost(way) < cost(found[-1]):
            found.append(way)
    found = spread(found, memory, cost, _MOST_WAYS)
    more: list[Opening] = []
    for way in in_order if adds_up else ():
        if not any(
            cost(one) <= cost(way) and one.stacked_bytes <= way.stacked_bytes
            for one in (*found, *more)
        ):
            more.append(way)
    return tuple(sorted([*found, *spread(more, memory, cost, _MOST_WAYS)], key=memory))


def together(
    graph: Graph,
    ways: Sequence[Sequence[Opening]],
    front: Sequence[Candidate],
    search: Callable[[Graph], list[Candidate]],
    measure: Overhead,
) -> Iterator[Candidate]:
    """Candidates for the whole program with its loops opened.

    Args:
      graph: of the program.
      ways: for each loop the ways to open it.
      front: candidates with all loops as they are.
      search: gives candidates for a graph.
      measure: what recomputation is counted in.
    """
    choices = loop_choices.choices(ways, measure)
    graphs = [_with(graph, choice) for choice in choices]
    most = max(1, min(_MOST_SEARCHES, _WORK // (300 * len(graph))))
    schedules = dict.fromkeys(one.schedule for one in front)
    for number in thinned(range(len(choices)), most):
        schedules |= dict.fromkeys(one.schedule for one in search(graphs[number]))
    most = max(4, min(_MOST_SCHEDULES, _WORK // (len(graph) * len(choices))))
    chosen = thinned(list(schedules), most)
    for choice, one in zip(choices, graphs, strict=True):
        loops = tuple(way.loop for way in choice)
        seconds = math.fsum(way.seconds for way in choice)
        flops = sum(way.flops for way in choice)
        for found in judged(one, chosen):
            yield dataclasses.replace(
                found,
                schedule=dataclasses.replace(found.schedule, loops=loops),
                overhead_seconds=found.overhead_seconds + seconds,
                recomputed_flops=found.recomputed_flops + flops,
            )


def _with(graph: Graph, choice: Sequence[Opening]) -> Graph:
    """The graph with some loops opened."""
    figures = Figures.of(graph)
    for way in choice:
        way.write(figures)
    return figures.put_into(graph)


# --- one loop -----------------------------------------------------------------------------


def _openings(
    program: Program,
    body: Program,
    vertex: int,
    root: int,
    expected: Model,
    measure: Overhead,
    depth: int,
    known: Known,
) -> Iterator[Opening]:
    """Ways to open one loop, in any order; none if it cannot be."""
    if computes_nothing(body) or not body.differentiated:
        return
    scan = internals.scan_of(program.equations[root].jax_equation)
    compiler = expected.compiler
    arguments, varying = body.arguments, bodies.varying(body)
    carry = arguments[scan.constants : scan.constants + scan.carries]
    entries = arguments[scan.constants + scan.carries :]
    splits = _splits(program.equations[root], body)
    hosts = _hosts(body, entries, compiler)
    if program.equations[root].placement is not None:
        # Each device must have an entry of every iteration, in stacks where something is to wait.
        of_entries = splits[scan.constants + scan.carries :]
        hosts = {
            n: value for n, value in hosts.items() if of_entries and not any(of_entries[n][:1])
        }
    key = "iteration", _same(body), tuple(carry), tuple(entries), tuple(hosts), depth
    if key not in known:
        known[key] = _iterations(body, carry, entries, hosts, compiler, measure, depth, known)
    iterations, forward = known[key]
    if not iterations:
        return
    inputs = program.equations[root].inputs[scan.constants + scan.carries :]

    def total(values: Sequence[int]) -> int:
        return sum(compiler.buffer_bytes(body.types[value]) for value in values)

    results = [atom for atom in body.outputs[scan.carries :] if isinstance(atom, int)]
    graph = expected.graph
    handed_in_bytes = counted_around_bytes(
        total([value for value in carry if value in varying]),
        graph.cotangent_bytes[vertex],
        compiler,
    )
    # Of the body's own rates and the whole loop's the latter are what the rest is counted in.
    seconds = graph.seconds[vertex] / scan.length
    scale = seconds / forward.seconds if forward.seconds else 0.0
    shape = _Shape(
        length=scan.length,
        carry_bytes=total(carry),
        result_bytes=total([value for value in results if value in varying]),
        beside_bytes=scan.length * _rounded_bytes(body, entries, compiler) - handed_in_bytes,
        gradient_bytes=tuple(compiler.buffer_bytes(body.types[one]) for one in entries),
        alone_bytes=total(entries) if takes_entries(compiler) else 0,
        chunks=not any(one.once for one in body.equations),
        are_results=expected.gradients is Gradients.RESULTS
        and set(inputs) <= set(program.arguments),
        seconds=seconds,
        flops=graph.flops[vertex] // scan.length,
    )
    iterations = [dataclasses.replace(one, seconds=one.seconds * scale) for one in iterations]
    closed_bytes = expected.inside.get(vertex, 0)
    under = [one for one in iterations if one.checkpointed]
    for in_gradients in (False, True) if any(one.waiting.bytes for one in under) else (False,):
        single = under if in_gradients else iterations
        drafts = _drafts(shape, single, under, measure, in_gradients=in_gradients)
        for used, pieces in drafts:
            yield _opening(vertex, root, shape, used, pieces, closed_bytes, in_gradients, splits)


def _rounded_bytes(body: Program, entries: Sequence[int], compiler: Compiler) -> int:
    """Bytes of one entry of the stacks that are rounded ahead of the loop, for maps in it too."""
    found = operands.rounded_entries_bytes(body, entries, compiler)
    for equation in body.equations:
        if bodies.is_open_map(equation):
            inside = bodies.mapped_of(equation, frozenset())
            given = zip(equation.inputs, inside.arguments, strict=True)
            own = [argument for atom, argument in given if atom in entries]
            found += operands.rounded_entries_bytes(inside, own, compiler)
    return found


def _hosts(body: Program, entries: Sequence[int], compiler: Compiler) -> dict[int, int]:
    """The entries of stacks in whose gradients something can wait, by position among them.

    They must have one. If its order were another one in the forward loop than in the backward loop,
    the stack would be copied in between. In a ``vmap`` or ``shard_map`` that the body names the
    axes of, JAX would derive the backward loop outside of it.
    """
    equations = [one.jax_equation for one in body.equations]
    kinds = (atom.aval for one in equations for atom in one.invars)
    if any(map(_jax_meshes.is_a_part, kinds)) or internals.surrounding_axes(equations):
        return {}
    differentiated = set(body.differentiated)
    return {
        place: value
        for place, value in enumerate(entries)
        if value in differentiated and tiles.fills_tiles(compiler, body.types[value])
    }


def _splits(equation: Equation, body: Program) -> tuple[Split, ...]:
    """How the inputs of a loop are split, as a plan says it; see ``Loop.splits``."""
    placement = equation.placement
    if placement is None:
        return ()
    sizes = dict(placement.axes)
    found = [axis_names(spec or (), sizes) for spec in placement.specs]
    inside = [axis_names(spec, sizes) for spec in body.splits.values()]
    return () if None in (*found, *inside) else tuple(one for one in found if one is not None)


def _is_alike(loop: Inside) -> bool:
    """Whether every iteration runs, and runs again, as it is written, and keeps the same."""
    if not isinstance(loop, Loop):
        return False
    part = loop.parts[0]
    as_usual = part.checkpointed and not (loop.in_gradients or part.inside or part.loops)
    return len(loop.parts) == 1 and as_usual and len(part.stages) == 1


def _drafts(
    shape: _Shape,
    iterations: Sequence[_Iteration],
    under: Sequence[_Iteration],
    measure: Overhead,
    *,
    in_gradients: bool,
) -> Iterator[tuple[Sequence[_Iteration], tuple[Piece, ...]]]:
    """Parts, in order of execution, with the iterations that they speak of.

    Args:
      shape: what they have in common.
      iterations: those of which one can be the whole loop.
      under: those that may be mixed, or in chunks: under checkpoints of their own. Outside of these
        an entry that is read by index would wait for the backward pass.
      measure: what recomputation is counted in.
      in_gradients: whether what fits waits in gradients.
    """
    for number in range(len(iterations)):
        yield iterations, (Piece(length=shape.length, way=number),)
    if not under:
        return
    used = _mixed(shape, under, measure, in_gradients=in_gradients)
    for pieces in loop_nests.nests(shape.chain(used, measure, in_gradients=in_gradients)):
        yield used, pieces


def _mixed(
    shape: _Shape,
    iterations: Sequence[_Iteration],
    measure: Overhead,
    *,
    in_gradients: bool,
) -> list[_Iteration]:
    """Those that parts are made of: best at some exchange rate between memory and recomputation.

    In a part of many iterations memory is what each keeps; in one of few, a share of the workspace
    as well.
    """
    found: dict[_Iteration, None] = {}
    ways = shape.chain(iterations, measure, in_gradients=in_gradients).ways
    by_workspace = sorted(
        zip(iterations, ways, strict=True), key=lambda pair: pair[1].workspace_bytes
    )
    for share in (0.0, 1 / shape.length, 1.0):
        points: dict[tuple[float, float], _Iteration] = {}
        for one, way in by_workspace:
            size = way.kept_bytes + math.ceil(share * way.workspace_bytes)
            points.setdefault((size, one.cost(measure)), one)
        best = [points[point] for point in hull(list(points))]
        found |= dict.fromkeys(thinned(best, _MOST_MIXED))
    return list(found)


def _opening(
    vertex: int,
    root: int,
    shape: _Shape,
    iterations: Sequence[_Iteration],
    pieces: Sequence[Piece],
    closed_bytes: int,
    in_gradients: bool,
    splits: tuple[Split, ...],
) -> Opening:
    """Parts with the figures of the whole.

    The stacks of gradients that take what waits are there from the forward pass on. As gradients
    they are counted, if at all, around the loop when its turn comes, so that they are taken off
    there.
    """
    whole = len(pieces) == 1 and not pieces[0].inside
    chain = functools.partial(shape.chain, iterations, in_gradients=in_gradients)
    found = loop_nests.judge(chain(Overhead.SECONDS, whole=whole), pieces)
    flops = loop_nests.judge(chain(Overhead.FLOPS), pieces).seconds
    entries: set[int] = set()
    if in_gradients:
        entries.update(*(iterations[one.way].waiting.entries for one in pieces))
    gradients = [] if shape.are_results else [shape.gradient_bytes[n] for n in entries]
    taken_bytes = shape.length * sum(gradients)
    return Opening(
        vertex=vertex,
        loop=Loop(
            root=root,
            parts=tuple(_part(iterations, piece) for piece in pieces),
            in_gradients=tuple(sorted(entries)),
            splits=splits,
        ),
        stacked_bytes=found.held_bytes + taken_bytes,
        workspace_bytes=found.peak_bytes - found.held_bytes + shape.beside_bytes - taken_bytes,
        closed_bytes=closed_bytes,
        seconds=found.seconds,
        flops=round(flops),
    )


def _part(iterations: Sequence[_Iteration], piece: Piece) -> Part:
    if piece.inside:
        inside = tuple(_part(iterations, one) for one in piece.inside)
        return Part(length=piece.length, inside=inside)
    one = iterations[piece.way]
    return Part(
        length=piece.length,
        checkpointed=one.checkpointed,
        kept=one.kept,
        kept_bytes=one.kept_bytes,
        stages=one.stages,
        loops=one.loops,
    )


# --- one branch, or the body of one map ---------------------------------------------------


def _same(body: Program) -> Hashable:
    """Equal for bodies that are planned alike: they compute the same, and lie alike on a mesh."""
    places = [one.placement and one.placement.text for one in body.equations]
    return body.fingerprint(), tuple(places), tuple(sorted(body.added_up.items()))


def _branch(
    body: Program, *, search: branches.Search, depth: int, known: Known
) -> tuple[list[branches.Way], float]:
    key = "branch", _same(body), depth
    if key not in known:
        known[key] = branches.ways(body, search)
    found: tuple[list[branches.Way], float] = known[key]
    return found


def _of_branch(
    body: Program, *, compiler: Compiler, measure: Overhead, depth: int, known: Known
) -> tuple[Model, list[Candidate]]:
    # What happens to the gradients that a branch hands out is counted around it.
    linearization, expected = body_model(body, compiler, Gradients.RESULTS)
    return _front(body, linearization, expected, measure, depth, known, stacked=True)


def _of_map(
    body: Program,
    *,
    compiler: Compiler,
    gradients: Gradients,
    measure: Overhead,
    depth: int,
    known: Known,
) -> tuple[Model, list[Candidate]]:
    key = "map", _same(body), gradients, depth
    if key not in known:
        linearization = linearize(body, inside=True)
        expected = inner.model(body, linearization, compiler, gradients)
        known[key] = _front(body, linearization, expected, measure, depth, known)
    found: tuple[Model, list[Candidate]] = known[key]
    return found


def _front(
    body: Program,
    linearization: Linearization,
    expected: Model,
    measure: Overhead,
    depth: int,
    known: Known,
    *,
    stacked: bool = False,
) -> tuple[Model, list[Candidate]]:
    """The model of a body that runs once, and candidates for all budgets, as of a whole program.

    Those of the policies and of minimum cuts are all there: what is best where residuals go one by
    one need not be in a branch, or beside other maps.
    """
    graph = expected.graph
    search = functools.partial(portfolio.frontier, measure=measure)
    cuts = named_chains.of_minimum_cuts(graph, measure, _MOST_KEPT)
    alone = judged(graph, [*policies.alone(body, expected.roots, graph), *cuts])
    front = pareto([*search(graph), *alone], measure)
    inside = ways(body, linearization, expected, measure, depth - 1, stacked=stacked, known=known)
    if inside:
        expected = opened(expected, inside)
        front = pareto([*front, *together(graph, inside, front, search, measure)], measure)
    return expected, [*alone, *front]


# --- one iteration ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Forward:
    """What one run of the body takes."""

    seconds: float
    flops: int


def _iterations(
    body: Program,
    carry: Sequence[int],
    entries: Sequence[int],
    hosts: Mapping[int, int],
    compiler: Compiler,
    measure: Overhead,
    depth: int,
    known: Known,
) -> tuple[list[_Iteration], _Forward]:
    """The ways to run an iteration that no other beats in all figures.

    Args:
      body: of the loop.
      carry: its arguments that are carried.
      entries: its arguments that are entries of stacks.
      hosts: those in whose gradients something can wait, by position among them.
      compiler: which one it is.
      measure: what recomputation is counted in.
      depth: how many loops in loops are looked into.
      known: bodies and branches that were planned before.
    """
    linearization, expected = body_model(body, compiler)
    expected = expected.in_loop()
    read = stacks(body, carry, entries, expected)
    inside = functools.partial(
        ways, body, linearization, measure=measure, depth=depth - 1, known=known
    )
    found: dict[_Iteration, None] = {}
    once = frozenset(v for v, pinned in enumerate(expected.graph.pinned) if pinned)
    pinned = (body.equations[expected.roots[vertex]] for vertex in once)
    under = bodies.runs_under_checkpoints(body) and all(map(bodies.is_collective, pinned))
    if under:
        named = _kept_by_name(expected, once)
        for graph, loops, own in _with_each(named, inside(named), measure):
            for schedule in _schedules(body, own, graph, measure, once):
                schedule = dataclasses.replace(schedule, loops=loops)
                if once.isdisjoint(demand(named.graph, schedule).all_recomputed()):
                    found[_iteration(body, own, schedule, read, carry, hosts)] = None
    if not under or any(expected.graph.internal_bytes):
        opening = inside(expected, stacked=True)
        for graph, loops, own in _with_each(expected, opening, measure, stacked=True):
            # As it is, a map hands out more here than where the compiler may leave it out.
            if not loops and read.maps:
                continue
            chains = named_chains.chains(
                graph, measure, most_cuts=_MOST_KEPT, most_chains=_MOST_INSIDE
            )
            for schedule in chains:
                schedule = dataclasses.replace(schedule, loops=loops)
                found[_bare_iteration(own, schedule, read)] = None
    best: list[_Iteration] = []
    for one in found:
        figures = _figures(one, measure)
        if not any(
            other is not one
            and all(
                theirs <= own for theirs, own in zip(_figures(other, measure), figures, strict=True)
            )
            for other in best
        ):
            best.append(one)
    forward = expected.graph
    return best, _Forward(seconds=forward.forward_seconds, flops=forward.forward_flops)


def _with_each(
    expected: Model,
    inside: Sequence[Sequence[Opening]],
    measure: Overhead,
    *,
    stacked: bool = False,
) -> Iterator[tuple[Graph, tuple[Inside, ...], Model]]:
    """The graph of a body with nothing in it opened, and with some choices of what is.

    Args:
      expected: the model of the body.
      inside: for each loop in it the ways to open it.
      measure: what recomputation is counted in.
      stacked: whether what these loops keep waits in stacks.

    Yields:
      The graph, what is opened, and the body's model, which knows all of that.
    """
    graph = expected.graph
    yield graph, (), expected
    if inside:
        expected = opened(expected, inside)
        choices = loop_choices.choices(inside, measure)
        chosen = thinned(choices, _MOST_INSIDE)
        if stacked:
            chosen += thinned(_least_stacked(choices, measure), _MOST_INSIDE)
        for choice in dict.fromkeys(chosen):
            yield _with(graph, choice), tuple(way.loop for way in choice), expected


def _least_stacked(
    choices: Sequence[tuple[Opening, ...]], measure: Overhead
) -> list[tuple[Opening, ...]]:
    """The choices that are best at some exchange rate between what is stacked and recomputation."""
    points: dict[tuple[float, float], tuple[Opening, ...]] = {}
    for choice in sorted(choices, key=loop_choices.memory_together):
        size = sum(way.stacked_bytes for way in choice)
        points.setdefault((size, math.fsum(way.cost(measure) for way in choice)), choice)
    return [points[point] for point in hull(list(points))]


def _kept_by_name(expected: Model, once: frozenset[int]) -> Model:
    """The model of a body that may run under a checkpoint, though some vertices must run once.

    Those are collectives, which do not run again where their results are kept by name.
    """
    if not once:
        return expected
    count = len(expected.graph)
    graph = dataclasses.replace(
        expected.graph, pinned=(False,) * count, forward_workspace_bytes=(0,) * count
    )
    return dataclasses.replace(expected, graph=graph, never_named=expected.never_named - once)


def _figures(way: _Iteration, measure: Overhead) -> tuple[float, ...]:
    return (
        not way.checkpointed,  # which cannot be mixed
        way.kept_bytes - way.waiting.bytes,
        way.waiting.workspace_bytes,
        way.kept_bytes,
        way.workspace_bytes,
        way.whole_bytes,
        way.alone_bytes,
        way.cost(measure),
    )


def body_model(
    body: Program, compiler: Compiler, gradients: Gradients = Gradients.CONSUMED
) -> tuple[Linearization, Model]:
    """What the backward steps of a loop's body, or of a branch, read, and its model."""
    linearization = linearize(body, inside=True)
    expected = inner.model(body, linearization, compiler, gradients)
    return linearization, dataclasses.replace(expected, graph=_with_outputs(body, expected))


def _with_outputs(body: Program, expected: Model) -> Graph:
    """The body's graph, in which outputs take memory: kept by name, they are stacked again."""
    graph, compiler = expected.graph, expected.compiler
    outputs = set(body.output_values)
    sizes = [
        size
        + sum(
            compiler.buffer_bytes(body.types[value])
            for value in body.equations[root].outputs
            if value in outputs
        )
        for root, size in zip(expected.roots, graph.bytes, strict=True)
    ]
    return graph.with_bytes(bytes=tuple(sizes))


def _schedules(
    body: Program, expected: Model, graph: Graph, measure: Overhead, once: frozenset[int]
) -> Iterator[Schedule]:
    """One checkpoint around an iteration: what it keeps, and how it runs again.

    What runs once is always kept, so that to keep it costs nothing more.
    """
    everything = tuple(range(len(graph)))
    if once:
        sizes = (min(size, 1) if v in once else size for v, size in enumerate(graph.bytes))
        graph = graph.with_bytes(bytes=tuple(sizes))

    def schedule(kept: Iterable[int], chain: tuple[Region, ...] = ()) -> Schedule:
        names = tuple(sorted(once.union(kept)))
        return Schedule(regions=(Region(vertices=everything, kept=names, inside=chain),))

    for cut in min_cut.breakpoints(priced(graph, measure), most_cuts=_MOST_KEPT):
        yield schedule(cut.kept)
    for one in policies.schedules(body, expected.roots, graph):
        yield schedule(v for region in one.regions for v in region.kept)
    if len(graph) > 2:
        chains = [
            one.schedule.regions
            for one in portfolio.frontier(graph, measure)
            if len(one.schedule.regions) > 1
        ]
        for chain in thinned(chains, _MOST_INSIDE):
            for kept in dict.fromkeys(_kept_of(graph, chain)):
                yield schedule(kept, chain)


def _kept_of(graph: Graph, chain: tuple[Region, ...]) -> Iterator[tuple[int, ...]]:
    """What an iteration may keep by name that runs again as a chain.

    Nothing; what some regions hand on to those behind them, so that they run again only in their
    own turn; or all that any region reads.
    """
    yield ()
    for first in thinned(range(1, len(chain)), _MOST_PLACES):
        later = chain[first:]
        own = {vertex for region in later for vertex in region.vertices}
        yield tuple(sorted(demand(graph, Schedule(regions=later)).stored - own))
    yield tuple(sorted(demand(graph, Schedule(regions=chain)).stored))


def _waiting(
    body: Program,
    expected: Model,
    schedule: Schedule,
    read: Read,
    carry: Sequence[int],
    hosts: Mapping[int, int],
) -> _Waiting:
    """What of an iteration's values would wait in the gradients of those entries."""
    graph, compiler = expected.graph_of(schedule), expected.compiler
    stored = [vertex for vertex in demand(graph, schedule).stored if graph.bytes[vertex]]
    owners = [(value, -1) for value in carry] + [
        (value, vertex)
        for vertex in sorted(stored)
        for value in body.equations[expected.roots[vertex]].outputs
    ]
    pieces = gradient_places.places(
        [body.types[value] for value, _ in owners],
        [body.types[value] for value in hosts.values()],
        [body.axes_of(value) for value, _ in owners],
        [body.axes_of(value) for value in hosts.values()],
    )
    positions = list(hosts)
    waiting_bytes = 0
    entries: set[int] = set()
    kept: dict[int, int] = {}
    carried: set[int] = set()
    for (value, vertex), of_value in zip(owners, pieces, strict=True):
        there = [(one.lines, one.place.entry) for one in of_value if one.place is not None]
        if not there:
            continue
        kind = body.types[value]
        size = compiler.buffer_bytes(kind)
        if vertex < 0:
            carried.add(value)
        else:
            size = min(size, graph.bytes[vertex])
            kept[vertex] = min(kept.get(vertex, 0) + size, graph.bytes[vertex])
        lines = sum(some for some, _ in there)
        waiting_bytes += size * lines // gradient_places.lines_of(kind)
        entries.update(positions[entry] for _, entry in there)
    return _Waiting(
        bytes=waiting_bytes,
        entries=frozenset(entries),
        workspace_bytes=in_gradients_bytes(expected, schedule, read, kept, carried) if hosts else 0,
    )


def _iteration(
    body: Program,
    expected: Model,
    schedule: Schedule,
    read: Read,
    carry: Sequence[int],
    hosts: Mapping[int, int],
) -> _Iteration:
    """A schedule of a body, one region around all of it, with its figures."""
    schedule = expected.admitted(schedule)
    graph = expected.graph_of(schedule)
    wanted = demand(graph, schedule)
    (region,) = schedule.regions
    inside = expected.stages(Schedule(regions=region.inside))
    if not inside:
        inside = (Stage(roots=expected.roots, kept=(), checkpointed=False),)
    kept_bytes = sum(graph.bytes[vertex] for vertex in wanted.stored)
    beside = beside_stacks(expected, schedule, read, region.inside)
    seconds, flops = expected.run_again(graph, schedule, wanted)
    return _Iteration(
        checkpointed=True,
        kept=tuple(expected.roots[vertex] for vertex in region.kept if vertex in wanted.stored),
        stages=inside,
        loops=schedule.loops,
        kept_bytes=kept_bytes,
        workspace_bytes=beside.part_bytes,
        whole_bytes=beside.whole_bytes,
        alone_bytes=beside.alone_bytes,
        seconds=seconds,
        flops=flops,
        waiting=_waiting(body, expected, schedule, read, carry, hosts),
    )


def _bare_iteration(expected: Model, schedule: Schedule, read: Read) -> _Iteration:
    """A schedule of a body, a chain of regions with nothing around it, with its figures."""
    schedule = expected.admitted(schedule)
    graph = expected.graph_of(schedule)
    wanted = demand(graph, schedule)
    kept_bytes = sum(graph.bytes[vertex] for vertex in wanted.stored)
    kept_bytes += sum(graph.internal_bytes[vertex] for vertex in schedule.under_none())
    beside = beside_stacks(expected, schedule, read, schedule.regions)
    seconds, flops = expected.run_again(graph, schedule, wanted)
    return _Iteration(
        checkpointed=False,
        kept=(),
        stages=expected.stages(schedule),
        loops=schedule.loops,
        kept_bytes=kept_bytes,
        workspace_bytes=beside.whole_bytes,
        whole_bytes=beside.whole_bytes,
        alone_bytes=beside.whole_bytes,
        seconds=seconds,
        flops=flops,
        waiting=_NOT_WAITING,
    )
