"""What happens to the values inside opened loops and choices, for readers of a plan.

For a loop, a schedule says what its iterations keep by name and how they run again. Here the body
is modelled again, just as when the loop was opened, and each of its values gets its fate in each
part of the loop. The branches of a choice and the body of a map are treated likewise.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes, inner, loops
from remat_opt.compilers.model import Model, computes_nothing
from remat_opt.plan import LoopValue
from remat_opt.program import bodies
from remat_opt.program.linearization import linearize
from remat_opt.program.names import Names
from remat_opt.program.record import Program
from remat_opt.schedule import Branch, Choice, Inside, Loop, Mapped, Part, Schedule, Stage
from remat_opt.simulator import demand


def loop_values(program: Program, expected: Model, schedule: Schedule) -> tuple[LoopValue, ...]:
    """The fate of every value inside the loops, choices and maps that a schedule opens.

    Args:
      program: a traced function; on a mesh, one device's part.
      expected: its model.
      schedule: what is decided about it.
    """
    if not schedule.loops:
        return ()
    names = Names(program)
    return tuple(
        value
        for loop in schedule.loops
        for value in _inside(program, expected, names, loop, loop.root)
    )


def _inside(
    program: Program, expected: Model, names: Names, loop: Inside, root: int
) -> Iterator[LoopValue]:
    """Those of one loop, choice or map; see ``_of_loop``."""
    if isinstance(loop, Choice):
        return _of_choice(program, expected, names, loop, root)
    if isinstance(loop, Mapped):
        mapped = program.equations[loop.root].jax_equation
        return iter(
            _jax_meshes.within_map(
                mapped, lambda: list(_of_map(program, expected, names, loop, root))
            )
        )
    return _of_loop(program, expected, names, loop, root)


def _of_choice(
    program: Program, expected: Model, names: Names, choice: Choice, root: int
) -> Iterator[LoopValue]:
    """Those of one choice, branch by branch; see ``_of_loop``."""
    equation = program.equations[choice.root]
    branches = bodies.branches_of(equation, bodies.varying(program))
    # A branch that only hands on what it is given has no values.
    models = [
        None if computes_nothing(one) else loops.body_model(one, expected.compiler)[1]
        for one in branches
    ]
    forward = max((one.graph.forward_seconds for one in models if one is not None), default=0.0)
    scale = expected.graph.seconds[expected.roots.index(choice.root)] / forward if forward else 0.0
    for number, (one, inside, branch) in enumerate(
        zip(branches, models, choice.branches, strict=True), start=1
    ):
        if inside is None:
            continue
        reading = _Body(
            program=one,
            model=inside,
            names=names.inside(equation, one),
            root=root,
            handed_on=frozenset(),
            scale=scale,
        )
        yield from reading.of_branch(branch, f"branch {number} of {len(branches)}")


def _of_map(
    program: Program, expected: Model, names: Names, mapped: Mapped, root: int
) -> Iterator[LoopValue]:
    """Those of one map; see ``_of_loop``."""
    equation = program.equations[mapped.root]
    body = bodies.mapped_of(equation, bodies.varying(program))
    inside = inner.model(body, linearize(body, inside=True), expected.compiler, expected.gradients)
    forward = inside.graph.forward_seconds
    scale = expected.graph.seconds[expected.roots.index(mapped.root)] / forward if forward else 0.0
    reading = _Body(
        program=body,
        model=inside,
        names=names.inside(equation, body),
        root=root,
        handed_on=frozenset(),
        scale=scale,
    )
    yield from reading.of_branch(mapped.body, "each device")


def _of_loop(
    program: Program, expected: Model, names: Names, loop: Loop, root: int
) -> Iterator[LoopValue]:
    """Those of one loop.

    Args:
      program: the program it is in.
      expected: that program's model.
      names: those of its values.
      loop: how it is opened.
      root: position of the outermost loop or choice around it.
    """
    equation = program.equations[loop.root]
    body = bodies.body_of(equation, bodies.varying(program))
    _, inside = loops.body_model(body, expected.compiler)
    scan = internals.scan_of(equation.jax_equation)
    carried = {atom for atom in body.outputs[: scan.carries] if isinstance(atom, int)}
    vertex = expected.roots.index(loop.root)
    forward = inside.graph.forward_seconds
    iteration_seconds = expected.graph.seconds[vertex] / scan.length
    reading = _Body(
        program=body,
        model=inside,
        names=names.inside(equation, body),
        root=root,
        handed_on=frozenset(
            number
            for number, own in enumerate(inside.roots)
            if carried.intersection(body.equations[own].outputs)
        ),
        # Use the whole loop's rates, which the rest of the program is counted in.
        scale=iteration_seconds / forward if forward else 0.0,
    )
    start = 0
    for part in loop.parts:
        where = _iterations(start, part.length)
        yield from reading.of_part(part, f"{where} of {scan.length:,}", runs=part.length, depth=0)
        start += part.length


def _iterations(start: int, length: int) -> str:
    if length == 1:
        return f"iteration {start + 1:,}"
    return f"iterations {start + 1:,} to {start + length:,}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Body:
    """The body of a loop or a map, or a branch of a choice.

    Attributes:
      program: what an iteration, or the branch, does.
      model: its model.
      names: of its values.
      root: position of the outermost loop or choice around it.
      handed_on: vertices that make what one iteration hands to the next.
      scale: seconds at the rates of the loop or choice for each second at the body's.
    """

    program: Program
    model: Model
    names: Names
    root: int
    handed_on: frozenset[int]
    scale: float

    def of_part(self, part: Part, where: str, *, runs: int, depth: int) -> Iterator[LoopValue]:
        """The values of iterations that run alike.

        Args:
          part: the iterations.
          where: what to call them.
          runs: how many iterations of this kind there are in all.
          depth: how many checkpoints are around them, besides their own.
        """
        if part.inside:
            chunks = part.length // part.chunk
            starts = f"{where}: the start of each chunk of {part.chunk:,}"
            for vertex in sorted(self.handed_on):
                fate = "recomputed" if depth else "kept"
                yield self._value(vertex, starts, fate, depth, chunks * runs // part.length)
            start = 0
            for inner in part.inside:
                there = f"{where}, in chunks of {part.chunk:,}: {_iterations(start, inner.length)}"
                yield from self.of_part(
                    inner, there, runs=runs // part.chunk * inner.length, depth=depth + 1
                )
                start += inner.length
            return
        if not part.checkpointed:
            yield from self._of_chain(part.stages, part.loops, where, runs)
            return
        graph = self.model.graph
        iteration = Stage(
            roots=self.model.roots,
            kept=part.kept,
            checkpointed=True,
            inside=() if _is_plain(part.stages) else part.stages,
        )
        regions = self.model.regions([iteration])
        found = demand(
            self.model.graph_of(Schedule(regions=regions, loops=part.loops)),
            Schedule(regions=regions),
        )
        times = Counter(found.all_recomputed())
        stored = found.stored | self.handed_on
        for vertex in range(len(graph)):
            if vertex in stored and not depth:
                fate = "kept"
            else:
                # What is kept in a chunk is computed again when the chunk is.
                fate = "recomputed" if vertex in stored or times[vertex] else "not needed"
            again = times[vertex] + (depth if fate == "recomputed" else 0)
            yield self._value(vertex, where, fate, again, runs)
        for loop in part.loops:
            for value in _inside(self.program, self.model, self.names, loop, self.root):
                needed = value.fate != "not needed"
                yield dataclasses.replace(
                    value,
                    part=f"{where}; inside, {value.part}",
                    fate="recomputed" if needed else value.fate,
                    times=value.times + (depth + 1 if needed else 0),
                    runs=value.runs * runs,
                    seconds=value.seconds * self.scale,
                )

    def of_branch(self, branch: Branch, where: str) -> Iterator[LoopValue]:
        """The values of a branch.

        Args:
          branch: how it runs.
          where: what to call it.
        """
        yield from self._of_chain(branch.stages, branch.loops, where, 1)

    def _of_chain(
        self, stages: Sequence[Stage], opened: Sequence[Inside], where: str, runs: int
    ) -> Iterator[LoopValue]:
        """The values of a chain of regions with no checkpoint around it, which runs so often."""
        schedule = Schedule(regions=self.model.regions(stages), loops=tuple(opened))
        found = demand(self.model.graph_of(schedule), schedule)
        times = Counter(found.all_recomputed())
        stored = found.stored | self.handed_on
        for vertex in sorted(schedule.region_of()):
            again = "recomputed" if times[vertex] else "not needed"
            fate = "kept" if vertex in stored else again
            yield self._value(vertex, where, fate, times[vertex], runs)
        for loop in opened:
            runs_again = times[self.model.roots.index(loop.root)]
            for value in _inside(self.program, self.model, self.names, loop, self.root):
                needed = runs_again and value.fate != "not needed"
                yield dataclasses.replace(
                    value,
                    part=f"{where}; inside, {value.part}",
                    fate="recomputed" if needed else value.fate,
                    times=value.times + (runs_again if needed else 0),
                    runs=value.runs * runs,
                    seconds=value.seconds * self.scale,
                )

    def _value(self, vertex: int, where: str, fate: str, times: int, runs: int) -> LoopValue:
        graph = self.model.graph
        return LoopValue(
            loop=self.root,
            part=where,
            name=self.names.of(self.model.roots[vertex]),
            fate=fate,
            handed_on=vertex in self.handed_on,
            times=times,
            runs=runs,
            bytes=graph.bytes[vertex],
            seconds=graph.seconds[vertex] * self.scale,
            flops=graph.flops[vertex],
        )


def _is_plain(stages: Sequence[Stage]) -> bool:
    """Whether an iteration runs again as it is."""
    return len(stages) == 1 and not stages[0].checkpointed
