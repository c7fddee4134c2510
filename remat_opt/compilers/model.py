"""What a device's compiler is expected to make of a program: the interface of this room.

``model`` gives a graph of numbers and the way back from its vertices to equations. Ask the model
what a schedule takes: it applies what depends on the schedule (``effects``), replays the lives of
all arrays and lays them out as the compiler does (``heap``).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set

import numpy as np

from remat_opt.compilers import convolutions, gathers, grouped_rows, reordered, scheduling
from remat_opt.compilers.compiler import Compiler
from remat_opt.compilers.effects import Effect, Figures
from remat_opt.compilers.heap import laid_out_bytes, outside_results, vector_memory_bytes
from remat_opt.compilers.storage import Storage, dataflow
from remat_opt.compilers.vertices import vertices
from remat_opt.gradients import Gradients, ParameterGradient, Wait, workspace_bytes
from remat_opt.graph import Graph
from remat_opt.program.dataflow import ALIASES
from remat_opt.program.record import Linearization, Program
from remat_opt.schedule import Region, Schedule, Stage, unchanged
from remat_opt.simulator import Demand
from remat_opt.spans import ArgumentCopy, Spans, Stacks, spans


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Model:
    """What is expected of one program.

    Attributes:
      compiler: the compiler.
      graph: what solvers see.
      roots: for each vertex, the position of the equation that makes it.
      labels: for each vertex, a short text such as ``conv_general_dilated f32[64,56,56,64]``.
      gradient_bytes: for each vertex, how much of its workspace is gradients of parameters.
      estimated_flops_share: share of the forward FLOPs whose cost rule is an estimate.
      assumed: names of primitives that JAX could not differentiate.
      effects: what depends on the schedule.
      never_named: the vertices that no checkpoint should keep (``softmax``).
      as_it_is: the same for the unchanged function, if rewriting changes what is stored.
      results: the gradients whose result buffers hold arrays until they are written.
      early: the bytes of arrays that gradients begin as, and that are there in the forward pass.
      converted: weights that are converted before their turn (``scheduling.early``), zeros of
        gradients (``scheduling.tables``), and what the unchanged function starts with
        (``scheduling.started``).
      running: by vertex, what it takes just while it runs, in the forward pass and again, in bytes.
        Solvers do not know of it.
      inside: the part of vertices' workspaces that is for programs inside them, in bytes.
      vector_bytes: how many bytes of arrays may be in vector memory at a time.
      gradients: what happens to those of parameters.
      waits: what waits for updates, in the workspaces of vertices.
      siblings: what waits for its own backward step where nothing is rewritten (``as_written``).
      pieces: the vertices whose cotangents are several arrays, and how many.
      argument_copies: arguments that regions copy.
    """

    compiler: Compiler
    graph: Graph
    roots: tuple[int, ...]
    labels: tuple[str, ...]
    gradient_bytes: tuple[int, ...]
    estimated_flops_share: float
    assumed: tuple[str, ...]
    effects: tuple[Effect, ...]
    never_named: frozenset[int]
    as_it_is: Model | None
    gradients: Gradients
    results: tuple[ParameterGradient, ...] = ()
    early: tuple[int, ...] = ()
    converted: tuple[tuple[int, int, int], ...] = ()
    running: Mapping[int, int] = dataclasses.field(default_factory=dict)
    inside: Mapping[int, int] = dataclasses.field(default_factory=dict)
    vector_bytes: int = 0
    waits: tuple[Wait, ...] = ()
    siblings: tuple[int, ...] = ()
    pieces: Mapping[int, int] = dataclasses.field(default_factory=dict)
    argument_copies: tuple[ArgumentCopy, ...] = ()

    def graph_of(self, schedule: Schedule) -> Graph:
        """The graph as it is under a schedule."""
        figures = Figures.of(self.graph)
        for effect in self.effects:
            effect.change(figures, schedule)
        return figures.put_into(self.graph)

    def in_loop(self) -> Model:
        """The same for the body of an opened loop."""
        effects = tuple(effect.in_loop() for effect in self.effects)
        vector_bytes = vector_memory_bytes(self.compiler)
        found = self.without_updates()
        return dataclasses.replace(
            found, effects=effects, vector_bytes=vector_bytes, argument_copies=()
        )

    def as_written(self) -> Model:
        """The same where nothing is rewritten, though there may be checkpoints."""
        found = self.as_it_is or self
        needs = list(found.graph.needs)
        for vertex in found.siblings:
            # One kernel makes it and its cotangent.
            needs[vertex] = tuple(sorted({*needs[vertex], vertex}))
        return dataclasses.replace(
            found,
            graph=dataclasses.replace(found.graph, needs=tuple(needs)),
            effects=tuple(effect.as_written() for effect in found.effects),
        )

    def without_updates(self) -> Model:
        """The same where gradients are consumed, but none waits for an update."""
        if not self.waits:
            return self
        waiting = workspace_bytes((), self.gradients, len(self.graph), self.waits)
        return dataclasses.replace(
            self,
            graph=_in_step(self.graph, -waiting),
            gradient_bytes=tuple((np.array(self.gradient_bytes) - waiting).tolist()),
            as_it_is=self.as_it_is and self.as_it_is.without_updates(),
            waits=(),
        )

    def with_vector_memory(self) -> Model:
        """The same where arrays may be in vector memory, unless the unchanged function fits there.

        If it does, no plan takes anything, and the heap without it tells which would take less.
        """
        room = vector_memory_bytes(self.compiler)
        if not room or self.unchanged_peak_bytes() <= room:
            return self
        as_it_is = self.as_it_is and dataclasses.replace(self.as_it_is, vector_bytes=room)
        return dataclasses.replace(self, vector_bytes=room, as_it_is=as_it_is)

    def held_bytes(self, schedule: Schedule) -> int:
        """Bytes that are held throughout, besides what is alive."""
        return sum(effect.held_bytes(self.graph, schedule) for effect in self.effects)

    def peak_bytes(self, schedule: Schedule) -> int:
        """The temporaries expected to be needed: the heap, and what is held besides."""
        expected, schedule = self.under(schedule)
        if expected is not self:
            return expected.peak_bytes(schedule)
        lives = self.lives(self.graph_of(schedule), schedule)
        written = [(int(lives.turn[max(0, one.last)]), one.bytes) for one in self.results]
        found = self.laid_out_bytes(outside_results(lives, written), schedule)
        if not (self.early or self.converted):
            return found
        alive = outside_results(lives.with_forward(self.early, self.converted), written)
        return max(found, alive.peak_bytes + self.held_bytes(schedule))

    def branch_peak_bytes(self, schedule: Schedule) -> int:
        """Those of the program as a branch: its inputs stay until it ends."""
        lives = self.lives(self.graph_of(schedule), schedule).held_to_the_end()
        return self.laid_out_bytes(lives, schedule)

    def lives(self, graph: Graph, schedule: Schedule, stacks: Stacks | None = None) -> Spans:
        """The lives of all arrays of a schedule.

        Args:
          graph: the graph as it is under the schedule.
          schedule: what is kept, and how it runs again.
          stacks: see ``spans``.
        """
        copies = self.argument_copies if stacks is None else ()
        if schedule.unchanged:
            copies = tuple(dataclasses.replace(one, entry_of=None) for one in copies)
        return spans(graph, schedule, stacks, self.pieces, copies).with_runs(self.running)

    def laid_out_bytes(self, lives: Spans, schedule: Schedule) -> int:
        """Those of arrays with these lives under a schedule."""
        heap_bytes = laid_out_bytes(lives, self.compiler, vector_bytes=self.vector_bytes)
        return heap_bytes + self.held_bytes(schedule)

    def under(self, schedule: Schedule) -> tuple[Model, Schedule]:
        """The model of what runs under a schedule, and the schedule in terms of its vertices.

        The graph of the unchanged function may differ.
        """
        if self.as_it_is is None or not schedule.unchanged:
            return self, schedule
        return self.as_it_is, unchanged(self.as_it_is.graph)

    def unchanged_peak_bytes(self) -> int:
        """The temporaries that the unchanged function is expected to need."""
        return self.peak_bytes(unchanged(self.graph))

    def admitted(self, schedule: Schedule) -> Schedule:
        """The schedule, without names on vertices that are better left unnamed."""
        if not self.never_named:
            return schedule
        return dataclasses.replace(schedule, regions=_without(schedule.regions, self.never_named))

    def stages(self, schedule: Schedule) -> tuple[Stage, ...]:
        """A schedule in terms of equations."""
        return _stages(self.roots, schedule.regions)

    def regions(self, stages: Sequence[Stage]) -> tuple[Region, ...]:
        """The regions that have these ``stages``."""
        return _regions({root: vertex for vertex, root in enumerate(self.roots)}, stages)

    def recomputation(self, schedule: Schedule) -> tuple[float, int]:
        """Seconds and FLOPs of what runs again inside vertices, in opened loops."""
        found = [effect.recomputation(schedule) for effect in self.effects]
        return math.fsum(seconds for seconds, _ in found), sum(flops for _, flops in found)

    def run_again(self, graph: Graph, schedule: Schedule, wanted: Demand) -> tuple[float, int]:
        """Seconds and FLOPs of all that runs again, in opened loops, too.

        Args:
          graph: the graph as it is under the schedule.
          schedule: regions and fates.
          wanted: what its backward pass demands.
        """
        again = list(wanted.all_recomputed())
        seconds, flops = self.recomputation(schedule)
        return (
            math.fsum(graph.seconds[vertex] for vertex in again) + seconds,
            sum(graph.flops[vertex] for vertex in again) + flops,
        )

    def notes(self, schedule: Schedule) -> Iterator[str]:
        """What a user should know."""
        for effect in self.effects:
            yield from effect.notes(schedule)

    def what_to_do(self) -> str:
        """What a user can do if no plan is within a budget, in sentences."""
        own = (effect.remedy() for effect in self.effects)
        return " ".join(["Give a larger budget or a smaller batch.", *filter(None, own)])


def model(
    program: Program,
    linearization: Linearization,
    compiler: Compiler,
    gradients: Gradients = Gradients.RESULTS,
) -> Model:
    """Builds the model of a program.

    Args:
      program: a traced function.
      linearization: what its backward steps read.
      compiler: the compiler.
      gradients: what happens to the gradients.
    """
    flow = dataflow(program, linearization, compiler)
    storage = Storage(flow, compiler)
    as_it_is = None
    if storage.rewritten:
        as_it_is = _built(Storage(flow, compiler, unchanged=True), gradients, None)
    found = _built(storage, gradients, as_it_is)
    graph = found.graph
    if started := tuple(scheduling.started(storage, graph.bytes, graph.predecessors)):
        before = as_it_is or found
        as_it_is = dataclasses.replace(before, converted=(*before.converted, *started))
        found = dataclasses.replace(found, as_it_is=as_it_is)
    return found


def computes_nothing(program: Program) -> bool:
    """Whether the program only returns arguments and constants, so that its graph is empty."""
    return all(equation.operation.primitive in ALIASES for equation in program.equations)


def _built(storage: Storage, gradients: Gradients, as_it_is: Model | None) -> Model:
    found = vertices(storage)
    program, derivatives = storage.flow.program, storage.flow.linearization.derivatives
    assumed = {
        program.equations[index].operation.primitive
        for index, derivative in derivatives.items()
        if derivative.assumed
    }
    of_parameters = workspace_bytes(
        found.parameter_gradients, gradients, len(found.graph), found.waits
    )
    early = [size for size, _ in found.zeros.beside]
    if gradients is not Gradients.RESULTS:
        early += [
            storage.compiler.buffer_bytes(program.types[one]) for one in sorted(found.zeros.begun)
        ]
    converted = [*scheduling.early(storage, found.graph.bytes)]
    if gradients is not Gradients.RESULTS:
        until = len(found.graph) - 1
        converted += [
            (step, until, storage.bytes_of(one))
            for one, step in found.tables.items()
            if step <= until
        ]
    running = Counter(dict(convolutions.spread_bytes(program, storage.compiler, storage.vertex_of)))
    running.update(grouped_rows.running(storage))
    for effect in found.effects:
        if isinstance(effect, gathers.Gathered):
            running.update(effect.bytes)
    stored = storage.softmaxes if storage.stores_maxima else ()
    row_statistics = (value for one in stored for value in (one.maxima, one.sums))
    return Model(
        compiler=storage.compiler,
        graph=_in_step(found.graph, of_parameters),
        roots=storage.roots,
        labels=found.labels,
        gradient_bytes=tuple(of_parameters.tolist()),
        estimated_flops_share=found.estimated_flops_share,
        assumed=tuple(sorted(assumed)),
        effects=(*found.effects, *(found.put_off if gradients is Gradients.CONSUMED else ())),
        never_named=frozenset(storage.vertices_of(row_statistics)),
        as_it_is=as_it_is,
        gradients=gradients,
        results=tuple(one for one in found.parameter_gradients if not one.fused)
        if gradients is Gradients.RESULTS and storage.compiler.has("results_lend")
        else (),
        early=tuple(early),
        converted=tuple(converted),
        running=running,
        waits=found.waits if gradients is Gradients.CONSUMED else (),
        siblings=found.siblings,
        pieces=found.pieces,
        argument_copies=tuple(reordered.reordered(storage)),
    )


def _in_step(graph: Graph, of_parameters: np.ndarray) -> Graph:
    """The graph in a step where gradients of parameters take this much in addition."""
    workspaces = np.array(graph.workspace_bytes, dtype=np.int64) + of_parameters
    return graph.with_bytes(workspace_bytes=tuple(workspaces.tolist()))


def _without(regions: Sequence[Region], never: Set[int]) -> tuple[Region, ...]:
    """The regions, with some vertices kept by no checkpoint."""
    return tuple(
        dataclasses.replace(
            region,
            kept=tuple(vertex for vertex in region.kept if vertex not in never),
            inside=_without(region.inside, never),
        )
        for region in regions
    )


def _stages(roots: Sequence[int], regions: Sequence[Region]) -> tuple[Stage, ...]:
    return tuple(
        Stage(
            roots=tuple(roots[vertex] for vertex in region.vertices),
            kept=tuple(roots[vertex] for vertex in region.kept),
            checkpointed=region.checkpointed,
            inside=_stages(roots, region.inside),
        )
        for region in regions
    )


def _regions(vertex_of: Mapping[int, int], stages: Sequence[Stage]) -> tuple[Region, ...]:
    return tuple(
        Region(
            vertices=tuple(vertex_of[root] for root in stage.roots),
            kept=tuple(vertex_of[root] for root in stage.kept),
            checkpointed=stage.checkpointed,
            inside=_regions(vertex_of, stage.inside),
        )
        for stage in stages
    )
