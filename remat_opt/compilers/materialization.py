"""From a program's equations to the graph: which values the compiler really stores.

XLA fuses: a cheap elementwise result lives inside the kernels that read it and is never
written to memory. A planner that counts every jaxpr value keeps the wrong things. A value
is taken as materialised where

* an opaque equation or a reduction makes it (dot, conv, sort, scan, reduce_sum, ...); of a
  product that is first completed by a bias or a scale, that form (``tpu_fusion.completed``),
* it is a sum of products that the transform has stored (``products.stored_sums``),
* an opaque equation reads it (where a matrix product computes its operands as it reads them,
  that is no reason: ``Device.fuses_into_products``),
* it is an output of the program,
* several vertices read it and it is a concatenation, on TPU, or
* several vertices would have to read more bytes to compute it again than it has itself
  (the sum that forms a residual stream).

Reshapes and the like are other names for the same bytes. All other values belong to the
cones of the vertices that read them: the transform emits them again where needed.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np

from remat_opt import costs
from remat_opt.compilers import (
    cpu_fusion,
    pooling_gradients,
    products,
    row_gathers,
    softmax,
    tpu_fusion,
    transcendental,
    weight_gradients,
)
from remat_opt.compilers.held import Cause, Held
from remat_opt.compilers.matrix_axes import Axes, matrix_axes
from remat_opt.compilers.row_gathers import is_row_gather
from remat_opt.compilers.weight_gradients import SharedWeights
from remat_opt.device import Device
from remat_opt.gradients import Gradients, ParameterGradient, workspace_bytes
from remat_opt.graph import Graph
from remat_opt.operation import PRODUCTS, ArrayType, Operation
from remat_opt.program.dataflow import ALIASES, Dataflow
from remat_opt.program.record import Linearization, Program
from remat_opt.schedule import Region, Schedule, plain
from remat_opt.simulator import demand

#: A fused value is given a buffer when computing it again in each of several readers would
#: read more than this many times its own bytes.
_REREAD_LIMIT = 1.25

#: ... or when it would repeat more than this many equations in each of them.
_CONE_LIMIT = 64

#: Equations that read no more than they give.
_SLICES = frozenset({"slice", "split", "dynamic_slice"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Materialization:
    """The graph of a program, and the way back from its vertices to equations.

    Attributes:
      graph: what solvers see.
      roots: for each vertex the position of the equation that makes it.
      vertex_of: for each materialised value the vertex that holds it.
      labels: for each vertex a short text such as ``conv_general_dilated f32[64,56,56,64]``.
      estimated_flops_share: share of the forward FLOPs whose cost rule is an estimate.
      named_bytes: for some vertices what they take where a checkpoint keeps them by name, if that
        is not what they take otherwise.
      widened_bytes: for some vertices how much more they take when the turn has come of the
        checkpoint that keeps them by name. Searches do not see it.
      handed_in_bytes: for vertices whose cotangent is no array, as products compute it when they
        read it, what it takes where it has to be handed in to a checkpoint. Searches do not see it.
      row_statistics: the vertices that no checkpoint is to keep (``softmax``).
      copied_products: for each vertex how many products it computes whose arrays a TPU copies to
        its vector memory and back (``tpu_fusion``).
      held: what the compiler holds beside the graph.
      waiting_zeros: pairs of vertices that a CPU holds zeros for, as large as the first value,
        while ``searching`` ones before them run, if both are in one region. Searches of plans do
        not see it.
      searching: the vertices that look for the places of maxima.
      transposed: pairs of a vertex and of one that it reads, of which the compiler makes another
        array, for the backward step of the first, as soon as it is there.
      shared_weights: the weights whose gradients the compiler computes in parts.
      parameter_gradients: of each parameter; ``in_step`` adds them to the graph's workspaces.
      assumed: names of primitives that JAX could not differentiate.
      unchanged: the same of the function as it is, where plans change what is stored.
    """

    graph: Graph
    roots: tuple[int, ...]
    vertex_of: dict[int, int]
    labels: tuple[str, ...]
    estimated_flops_share: float
    named_bytes: dict[int, int]
    widened_bytes: dict[int, int]
    handed_in_bytes: dict[int, int]
    row_statistics: tuple[int, ...]
    copied_products: tuple[int, ...]
    held: tuple[Held, ...]
    waiting_zeros: tuple[tuple[int, int], ...]
    searching: tuple[int, ...]
    transposed: tuple[tuple[int, int], ...]
    shared_weights: SharedWeights
    parameter_gradients: tuple[ParameterGradient, ...]
    assumed: tuple[str, ...]
    unchanged: Materialization | None

    def in_step(self, fate: Gradients) -> Materialization:
        """The same in a step that does so with the gradients; of one that puts them out."""
        if fate is Gradients.RESULTS:
            return self
        gradients = workspace_bytes(self.parameter_gradients, fate, len(self.graph))
        workspaces = np.array(self.graph.workspace_bytes, dtype=np.int64) + gradients
        return dataclasses.replace(
            self,
            graph=dataclasses.replace(self.graph, workspace_bytes=tuple(workspaces.tolist())),
            unchanged=self.unchanged and self.unchanged.in_step(fate),
        )

    @property
    def unchanged_graph(self) -> Graph:
        """The graph of the function as it is, with its workspaces; its vertices may be others."""
        if self.unchanged:
            return self.unchanged.unchanged_graph
        if not self.shared_weights:
            return self.graph
        parts = self.shared_weights.parts(len(self.graph))
        return dataclasses.replace(self.graph, workspace_bytes=self._workspaces(parts))

    @property
    def searched_graphs(self) -> tuple[Graph, ...]:
        """What solvers are given: the graph, and that of programs whose values all have names.

        What a value takes is one number in a graph. Plans that keep little see the first one as it
        will be, plans that keep much under checkpoints the second.
        """
        if not self.named_bytes:
            return (self.graph,)
        sizes = tuple(
            self.named_bytes.get(vertex, size) for vertex, size in enumerate(self.graph.bytes)
        )
        return self.graph, dataclasses.replace(self.graph, bytes=sizes)

    def graph_of(self, schedule: Schedule) -> Graph:
        """The graph with what this schedule's values and sums of gradients take."""
        named = self.named_bytes.keys() & set(_kept_by_name(schedule.regions))
        handed_in = self._handed_in(schedule)
        if not (named or handed_in or self.shared_weights or self.waiting_zeros):
            return self.graph
        sizes = list(self.graph.bytes)
        for vertex in named:
            sizes[vertex] = self.named_bytes[vertex]
        cotangents = list(self.graph.cotangent_bytes)
        for vertex in handed_in:
            cotangents[vertex] = self.handed_in_bytes[vertex]
        return dataclasses.replace(
            self.graph,
            bytes=tuple(sizes),
            cotangent_bytes=tuple(cotangents),
            workspace_bytes=self._workspaces(self.sums_bytes(schedule)),
            forward_workspace_bytes=self._forward_workspaces(schedule),
        )

    def _handed_in(self, schedule: Schedule) -> list[int]:
        """The vertices whose cotangent comes from outside a checkpoint that they are under."""
        if not self.handed_in_bytes:
            return []
        checkpoints = dict(_checkpoints(schedule.regions))
        readers = self.graph.successors()
        return [
            vertex
            for vertex in self.handed_in_bytes
            if any(not checkpoints[vertex] <= checkpoints[reader] for reader in readers[vertex])
        ]

    def without_row_statistics(self, schedule: Schedule) -> Schedule:
        """The schedule with no ``row_statistics`` kept by name."""
        return Schedule(regions=_without(schedule.regions, frozenset(self.row_statistics)))

    def sums_bytes(self, schedule: Schedule) -> np.ndarray:
        """What sums of weights' gradients take in each vertex's backward step."""
        return self.shared_weights.sums(schedule.regions, len(self.graph))

    def _workspaces(self, sums_bytes: np.ndarray) -> tuple[int, ...]:
        """The graph's workspaces with such sums in the place of those that it expects."""
        expected = self.shared_weights.expected_sums(len(self.graph))
        workspace_bytes = np.array(self.graph.workspace_bytes, dtype=np.int64)
        return tuple((workspace_bytes - expected + sums_bytes).tolist())

    def _forward_workspaces(self, schedule: Schedule) -> tuple[int, ...]:
        """The graph's forward workspaces with the zeros that wait beside them."""
        found = list(self.graph.forward_workspace_bytes)
        region_of = {
            vertex: number
            for number, region in enumerate(schedule.regions)
            for vertex in region.vertices
        }
        for activation, pooled in self.waiting_zeros:
            if region_of[activation] == region_of[pooled]:
                for vertex in self.searching:
                    found[vertex] += self.graph.bytes[activation] if vertex < activation else 0
        return tuple(found)

    def held_bytes(self, schedule: Schedule, cause: Cause | None = None) -> int:
        """Bytes that the compiler holds beside the graph for a plan; of one cause, if given."""
        found = sum(
            one.checkpointed_bytes if self._under_checkpoint(one, schedule) else one.bytes
            for one in self._held(cause)
        )
        if cause:
            return found
        found += self._transposed_bytes(schedule) + self._copies_bytes(schedule)
        return found + self._widened_bytes(schedule)

    def _widened_bytes(self, schedule: Schedule) -> int:
        """Bytes by which the values grow that one checkpoint keeps: all at once, in its turn."""
        return max(
            sum(self.widened_bytes.get(vertex, 0) for vertex in _kept_by_name([region]))
            for region in schedule.regions
        )

    def _copies_bytes(self, schedule: Schedule) -> int:
        """Bytes of the signals of copies: for the forward pass, for two gradients, and again."""
        if not any(self.copied_products):
            return 0
        again = demand(self.graph, schedule).all_recomputed()
        return tpu_fusion.copies_bytes(
            3 * sum(self.copied_products) + sum(self.copied_products[vertex] for vertex in again)
        )

    def _transposed_bytes(self, schedule: Schedule) -> int:
        """Bytes of what is there twice: transposed, and as it is for regions with a checkpoint."""
        checkpointed = {
            vertex
            for region in schedule.regions
            if region.checkpointed
            for vertex in region.vertices
        }
        if not checkpointed or not self.transposed:
            return 0
        read = {
            one
            for vertex in checkpointed
            for one in (*self.graph.predecessors[vertex], *self.graph.needs[vertex])
        }
        twice = {one for by, one in self.transposed if by not in checkpointed and one in read}
        return sum(self.graph.bytes[one] for one in twice)

    def _under_checkpoint(self, one: Held, schedule: Schedule) -> bool:
        vertices = {self.vertex_of[value] for value in one.values}
        return bool(vertices) and any(
            region.checkpointed and not vertices.isdisjoint(region.vertices)
            for region in schedule.regions
        )

    def unchanged_held_bytes(self, cause: Cause | None = None) -> int:
        """Bytes that it holds beside the graph for the unchanged function."""
        if self.unchanged:
            return self.unchanged.unchanged_held_bytes(cause)
        found = sum(one.unchanged_bytes for one in self._held(cause))
        return found if cause else found + self._copies_bytes(plain(self.graph))

    def _held(self, cause: Cause | None) -> list[Held]:
        return [one for one in self.held if cause in (None, one.cause)]


def _kept_by_name(regions: Sequence[Region]) -> Iterator[int]:
    for region in regions:
        if region.checkpointed:
            yield from region.kept
            yield from _kept_by_name(region.inside)


def _without(regions: Sequence[Region], never: Set[int]) -> tuple[Region, ...]:
    """The regions with some vertices kept at no checkpoint."""
    return tuple(
        dataclasses.replace(
            region,
            kept=tuple(vertex for vertex in region.kept if vertex not in never),
            inside=_without(region.inside, never),
        )
        for region in regions
    )


def _checkpoints(
    regions: Sequence[Region],
    around: Set[tuple[int, ...]] = frozenset(),
    path: tuple[int, ...] = (),
) -> Iterator[tuple[int, Set[tuple[int, ...]]]]:
    """Each vertex with the checkpoints round it, each named by its place in the nest."""
    for number, region in enumerate(regions):
        place = (*path, number)
        inside = {*around, place} if region.checkpointed else around
        if region.inside:
            yield from _checkpoints(region.inside, inside, place)
        else:
            yield from ((vertex, inside) for vertex in region.vertices)


def materialize(program: Program, linearization: Linearization, device: Device) -> Materialization:
    """Builds the graph of materialised values.

    Args:
      program: a traced function.
      linearization: what its backward steps read.
      device: whose rates turn FLOPs and bytes into seconds.
    """
    flow = Dataflow(program, linearization)
    planned = _Builder(flow, device)
    found = planned.build()
    if not planned.softmaxes:
        return found
    as_it_is = _Builder(flow, device, unchanged=True).build()
    return dataclasses.replace(found, unchanged=as_it_is)


def _vertices_of(vertex_of: Mapping[int, int], values: Iterable[int]) -> tuple[int, ...]:
    """The vertices that hold those of some values that are arrays."""
    return tuple(sorted({vertex_of[value] for value in values if value in vertex_of}))


def computes_nothing(program: Program) -> bool:
    """Whether the program only hands on arguments and constants, so that its graph is empty."""
    return all(equation.operation.primitive in ALIASES for equation in program.equations)


class _Builder:
    def __init__(self, flow: Dataflow, device: Device, *, unchanged: bool = False) -> None:
        program = flow.program
        self.program = program
        self.linearization = flow.linearization
        self.device = device
        self.flow = flow
        self.outputs = {self.flow.source[value] for value in program.output_values}
        self.rounded: dict[int, int] = {}
        self.completed: dict[int, int] = {}
        self.matrix_axes: dict[int, Axes] = {}
        # Of each softmax that is rounded what is stored of it, and the weights that come of that.
        self.softmaxes = tuple(softmax.rounded(program, device.platform))
        self.weights_of: dict[int, int] = {}
        if unchanged:
            self.weights_of = {one.exponentials: one.weights for one in self.softmaxes}
        if device.fuses_into_products:
            self.rounded = tpu_fusion.rounded(self.flow, self.outputs)
            self.completed = tpu_fusion.completed(self.flow, self.outputs, self.rounded)
            self.matrix_axes = matrix_axes(program)
        self.stored_sums = dict(products.stored_sums(program, device.platform))
        # On a CPU: where what is divided is stored, so is the divisor.
        self.divided = set() if device.fuses_into_sums else cpu_fusion.divided(self.flow)

    def _bytes(self, value: int) -> int:
        """Bytes of a value where it is stored."""
        kind = self.program.types[value]
        if value in self.rounded:
            kind = tpu_fusion.as_operand(kind)
        return self._stored_bytes(value, kind) * (2 if value in self.divided else 1)

    def _named_bytes(self, value: int) -> int:
        """Bytes of a value where a checkpoint keeps it: neither widened, nor with its divisor."""
        if self.device.fuses_into_sums:
            return self._bytes(value)
        return self.device.buffer_bytes(self.program.types[value])

    def _stored_bytes(self, value: int, kind: ArrayType) -> int:
        """Bytes of an array of some kind that is laid out like a value."""
        if self.device.widens_bfloat16:
            kind = cpu_fusion.widened(kind)
        return self.device.buffer_bytes(kind, self.matrix_axes.get(value))

    def _transposed(
        self, roots: Sequence[int], vertex_of: Mapping[int, int]
    ) -> Iterator[tuple[int, int]]:
        """See ``Materialization.transposed``: on a CPU, what is convolved."""
        for vertex, root in enumerate(roots) if not self.device.fuses_into_sums else ():
            equation = self.program.equations[root]
            if equation.operation.primitive == "conv_general_dilated":
                for value in self.flow.derivative_reads(root):
                    if value in vertex_of:
                        yield vertex, vertex_of[value]

    def _widened(
        self, roots: Sequence[int], vertex_of: Mapping[int, int]
    ) -> Iterator[tuple[int, int]]:
        """See ``Materialization.widened_bytes``: on a CPU, what products read."""
        for root in roots if self.device.widens_bfloat16 else ():
            if self.program.equations[root].operation.primitive not in PRODUCTS:
                continue
            for value in self.flow.derivative_reads(root):
                if value in vertex_of:
                    read_bytes = self._stored_bytes(value, self.program.types[value])
                    if more := read_bytes - self._named_bytes(value):
                        yield vertex_of[value], more

    def _cotangent_bytes(self, values: Iterable[int]) -> int:
        """Bytes of the gradients with respect to some values: products write them in full.

        That of scores or exponentials is written as that of their weights.
        """
        types = self.program.types
        return sum(
            self._stored_bytes(value, types[self.weights_of.get(value, value)]) for value in values
        )

    def _operand_bytes(self, index: int) -> int:
        """Bytes of the gradient with respect to a product, as products read it."""
        return sum(
            self._stored_bytes(value, tpu_fusion.as_operand(self.program.types[value]))
            for value in self.program.equations[index].outputs
        )

    def _product(self, index: int) -> bool:
        """Whether the equation computes elementwise operands as it reads them."""
        return (
            self.device.fuses_into_products
            and self.program.equations[index].operation.primitive in PRODUCTS
        )

    def _forced(self) -> set[int]:
        """Values that are materialised whatever the fan-out."""
        forced: set[int] = set()
        for index, equation in enumerate(self.program.equations):
            if self.flow.opaque(index) or self.flow.costs[index].fusion is costs.Fusion.REDUCTION:
                forced.update(equation.outputs)
            if self.flow.opaque(index) and not self._product(index):
                forced.update(self.flow.reads(index))
        if not self.device.fuses_into_sums:
            forced |= cpu_fusion.read_by_sums(self.flow)
        forced |= transcendental.stored(self.flow, self.device)
        for index in self.stored_sums:
            forced.update(self.program.equations[index].outputs)
        forced.update(self.weights_of)
        forced -= self.completed.keys()
        forced.update(self.completed.values())
        # One array of half the width for several products is less than what it is made of.
        forced.update(value for value, readers in self.rounded.items() if readers > 1)
        forced.update(
            self.flow.source[value]
            for value in self.program.output_values
            if self.flow.source[value] in self.flow.maker
        )
        return forced

    def _stored(self) -> tuple[set[int], dict[int, frozenset[int]]]:
        """The materialised values, and for each fused one what it is computed from.

        What reads a value depends on what else is materialised, so this is found twice: a value
        that only goes into another one, which is materialised itself, has one reader. (On a CPU
        what is found at first is nearer to what is stored.)
        """
        forced = self._forced()
        materialized, leaves = self._leaves(forced, self._reader_counts(forced))
        if self.device.fuses_into_sums:
            readers = self._reader_counts(materialized)
            if any(readers.get(value, 0) < 2 for value in materialized - forced):
                materialized, leaves = self._leaves(forced, readers)
        return materialized, leaves

    def _leaves(
        self, forced: Set[int], readers: Mapping[int, int]
    ) -> tuple[set[int], dict[int, frozenset[int]]]:
        """The forced values and those that are shared and dear to compute again; and the leaves.

        The leaves of a fused value are the materialised values and arguments it is computed from.

        Args:
          forced: what is materialised anyway.
          readers: how many vertices would read each fused value.
        """
        materialized = set(forced)
        # Of each leaf the bytes that are read, and how many equations lie in between.
        read_bytes: dict[int, dict[int, float]] = {}
        sizes: dict[int, int] = {}
        types = self.program.types
        for index, equation in enumerate(self.program.equations):
            if self.flow.is_alias(index):
                continue
            found: dict[int, float] = {}
            size = 1
            for value in {self.flow.source[value] for value in equation.value_inputs}:
                if value in read_bytes and value not in materialized:
                    size += sizes[value]
                    own = read_bytes[value]
                else:
                    own = {value: types[value].bytes}
                for leaf, amount in own.items():
                    found[leaf] = max(amount, found.get(leaf, 0))
            for value in equation.outputs:
                part = self._part(equation.operation, types[value])
                read_bytes[value] = {leaf: amount * part for leaf, amount in found.items()}
                sizes[value] = size
                if value in materialized or readers.get(value, 0) < 2:
                    continue
                total = sum(read_bytes[value].values())
                if (
                    self._put_together(index)
                    or total > _REREAD_LIMIT * types[value].bytes
                    or size > _CONE_LIMIT
                ):
                    materialized.add(value)
        return materialized, {value: frozenset(found) for value, found in read_bytes.items()}

    def _part(self, operation: Operation, result: ArrayType) -> float:
        """The part of its operand that an operation reads for a result."""
        sliced = self.device.fuses_into_sums and operation.primitive in _SLICES
        if not sliced or not operation.inputs[0].bytes:
            return 1.0
        return result.bytes / operation.inputs[0].bytes

    def _put_together(self, index: int) -> bool:
        """Whether the equation's result is stored as soon as it is read twice.

        A TPU stores concatenations: of DenseNet-121 as it is 666 MiB of 2,413 are missing without.
        """
        operation = self.program.equations[index].operation
        return self.device.fuses_into_products and operation.primitive == "concatenate"

    def _reader_counts(self, materialized: Set[int]) -> dict[int, int]:
        """How many vertices (counted up to 2) would read each fused value."""
        roots: dict[int, set[int]] = {}
        for index in reversed(range(len(self.program.equations))):
            if self.flow.is_alias(index):
                continue
            outputs = self.program.equations[index].outputs
            if not materialized.isdisjoint(outputs) or self.flow.opaque(index):
                reached = {index}
            else:
                reached = set().union(*(roots.get(value, ()) for value in outputs))
            for value in self.flow.reads(index):
                known = roots.setdefault(value, set())
                if len(known) < 2:
                    # Of any two of them at least one is new.
                    known.update(itertools.islice(reached, 2))
        return {value: min(2, len(found)) for value, found in roots.items()}

    def build(self) -> Materialization:
        program = self.program
        materialized, leaves = self._stored()
        scores = dict(self._scores(leaves)) if not self.weights_of else {}
        self.weights_of |= scores
        roots = [
            index
            for index, equation in enumerate(program.equations)
            if not self.flow.is_alias(index)
            and (equation.effects or any(value in materialized for value in equation.outputs))
        ]
        vertex_of = {
            value: vertex
            for vertex, root in enumerate(roots)
            for value in program.equations[root].outputs
        }
        outputs = self.outputs
        read = {v for index in range(len(program.equations)) for v in self.flow.reads(index)}

        def holders(value: int) -> Iterable[int]:
            """The vertices to hold in order to have a value."""
            value = self.flow.source[value]
            if value in vertex_of:
                return (vertex_of[value],)
            return tuple(vertex_of[leaf] for leaf in leaves.get(value, ()) if leaf in vertex_of)

        fields: dict[str, list[Any]] = {
            name: []
            for name in (
                "names bytes seconds flops predecessors needs cotangent_bytes internal_bytes "
                "in_place pinned labels"
            ).split()
        }
        active_values: list[list[int]] = []
        differentiated = frozenset(program.differentiated)
        summed_beside: set[int] = set()
        named_bytes: dict[int, int] = {}
        multiplies: set[int] = set()
        parameter_readers: dict[int, list[int]] = {}
        copied_products = [0] * len(roots)
        found_places = {
            self.flow.maker[value]: size
            for value, size in pooling_gradients.places_bytes(program, self.device).items()
            if self.flow.maker[value] in self.linearization.derivatives
        }
        estimated = 0
        for vertex, root in enumerate(roots):
            equation = program.equations[root]
            cone = self._cone(root, materialized)
            predecessors: set[int] = set()
            read_values: set[int] = set()
            needs: set[int] = set()
            internal_bytes = places_bytes = 0
            flops = 0
            for index in cone:
                member = program.equations[index]
                if self._product(index):
                    multiplies.add(vertex)
                    copied_products[vertex] += tpu_fusion.copied_for(member.operation)
                flops += self.flow.costs[index].flops
                estimated += self.flow.costs[index].flops if self.flow.costs[index].estimated else 0
                for value in {self.flow.source[value] for value in member.value_inputs}:
                    if value in vertex_of:
                        predecessors.add(vertex_of[value])
                    if value in vertex_of or value not in self.flow.maker:
                        read_values.add(value)
                derivative = self.linearization.derivatives.get(index)
                if derivative is not None:
                    for value in differentiated.intersection(member.value_inputs):
                        parameter_readers.setdefault(value, []).append(vertex)
                if index == root and root in found_places:
                    places_bytes = found_places[root]
                elif derivative is not None:
                    internal_bytes += derivative.internal_bytes
                    for position in derivative.inputs:
                        atom = member.inputs[position]
                        if isinstance(atom, int):
                            needs.update(holders(atom))
                    for position in derivative.outputs:
                        value = member.outputs[position]
                        if index == root and not member.derivative_reads_kept:
                            internal_bytes += self._bytes(value)
                        else:
                            needs.update(holders(value))
            if self.device.sums_beside and not read_values.isdisjoint(differentiated):
                summed_beside.add(vertex)
            needs = {needed for needed in needs if needed <= vertex}
            if internal_bytes:
                # The residuals are remade by running the vertex again.
                needs.update(predecessors)
            held = [value for value in equation.outputs if value in read or value in outputs]
            active = [v for v in held if v in self.linearization.active_values]
            stored = [v for v in held if v not in outputs]
            held_bytes = sum(self._bytes(v) for v in stored)
            if (named := sum(self._named_bytes(v) for v in stored)) != held_bytes:
                named_bytes[vertex] = named
            moved_bytes = sum(self._bytes(v) for v in {*held, *read_values})
            dtype = _rate_dtype(equation.operation)
            if self.flow.opaque(root):
                seconds = costs.seconds(self.flow.costs[root], self.device, dtype)
            else:
                seconds = max(
                    flops / self.device.flops_rate(dtype),
                    moved_bytes / self.device.memory_bandwidth,
                )
            fields["names"].append(f"{vertex}:{equation.operation.primitive}")
            fields["labels"].append(_label(program, root))
            fields["bytes"].append(held_bytes)
            fields["seconds"].append(seconds)
            fields["flops"].append(flops)
            fields["predecessors"].append(tuple(sorted(predecessors)))
            fields["needs"].append(tuple(sorted(needs)))
            active_values.append(active)
            fields["internal_bytes"].append(internal_bytes + places_bytes)
            fields["pinned"].append(equation.effects or root in found_places)
        readers = _readers(fields["predecessors"])
        active_readers = [[one for one in found if active_values[one]] for found in readers]
        fused = self._fused_cotangents(roots, active_readers, active_values)
        computed = {vertex for vertex in fused if self._product(roots[vertex])}
        fused |= self._overwritten(roots, readers, fields["needs"])
        in_its_place = self._broadcast_cotangents(roots, active_readers, active_values, fields)
        fused |= in_its_place.keys() | set(in_its_place.values())
        # These are there until their own step, as the value, as its cotangent or in its place: and
        # so are scores, from which products compute a cotangent as they read them.
        for vertex in {vertex_of[value] for value in scores} | _read_by_readers(
            fused, fields["predecessors"], fields["needs"]
        ):
            fields["needs"][vertex] = tuple(sorted({*fields["needs"][vertex], vertex}))
        written = {
            vertex: self._operand_bytes(roots[vertex])
            for vertex in self._rounded_cotangents(roots, active_readers)
        }
        written.update(dict.fromkeys(fused, 0))
        fields["cotangent_bytes"] = [
            written[vertex] if vertex in written else self._cotangent_bytes(active)
            for vertex, active in enumerate(active_values)
        ]
        beside_zeros = pooling_gradients.beside_zeros(program, self.device)
        fields["in_place"] = [
            self.flow.costs[root].fusion is costs.Fusion.FUSIBLE
            and vertex not in summed_beside
            and vertex not in multiplies
            and beside_zeros.isdisjoint(program.equations[root].outputs)
            and _hands_on(vertex, fields["predecessors"], fields["cotangent_bytes"])
            for vertex, root in enumerate(roots)
        ]
        fields["workspace_bytes"] = [0] * len(roots)
        for value, size in pooling_gradients.workspace_bytes(program, self.device).items():
            if value in vertex_of:
                fields["workspace_bytes"][vertex_of[value]] = size
        fields["forward_workspace_bytes"] = [0] * len(roots)
        for index, size in pooling_gradients.search_bytes(program, found_places).items():
            (value,) = program.equations[index].outputs
            fields["forward_workspace_bytes"][vertex_of[value]] = size
        transposed = tuple(self._transposed(roots, vertex_of))
        for vertex, operand in transposed:
            beside = fields["cotangent_bytes"][vertex]
            if operand not in fields["needs"][operand]:
                beside += fields["bytes"][operand]
            least = fields["workspace_bytes"][operand]
            fields["workspace_bytes"][operand] = max(least, beside)
        # What takes the place of a value is there in its own step alone.
        for vertex in in_its_place.values():
            fields["workspace_bytes"][vertex] += self._cotangent_bytes(active_values[vertex])
        for vertex, root in enumerate(roots):
            if active_values[vertex]:
                size = cpu_fusion.gradient_bytes(program, root, self.device)
                fields["workspace_bytes"][vertex] += size
        shared_weights = weight_gradients.shared(
            program,
            self.linearization.derivatives,
            self.stored_sums.values(),
            self.device,
            # A product that is completed before it is stored is the vertex of that form.
            vertex_of | {made: vertex_of[last] for made, last in self.completed.items()},
        )
        summed = shared_weights.expected_sums(len(roots)).tolist()
        fields["workspace_bytes"] = [
            size + more for size, more in zip(fields["workspace_bytes"], summed, strict=True)
        ]
        labels = tuple(fields.pop("labels"))
        graph = Graph(**{name: tuple(entries) for name, entries in fields.items()})
        return Materialization(
            graph=graph,
            roots=tuple(roots),
            vertex_of=vertex_of,
            labels=labels,
            estimated_flops_share=estimated / graph.forward_flops if graph.forward_flops else 0.0,
            named_bytes=named_bytes,
            widened_bytes=dict(self._widened(roots, vertex_of)),
            row_statistics=_vertices_of(
                vertex_of, (value for one in self.softmaxes for value in (one.maxima, one.sums))
            ),
            copied_products=tuple(copied_products),
            handed_in_bytes={vertex: self._operand_bytes(roots[vertex]) for vertex in computed},
            held=tuple(
                one
                for kind in (pooling_gradients, row_gathers, cpu_fusion)
                for one in kind.held(program, self.linearization.derivatives, self.device)
            ),
            waiting_zeros=tuple(
                (vertex_of[activation], vertex_of[pooled])
                for activation, pooled in pooling_gradients.waiting_zeros(program)
                if found_places and activation in vertex_of and pooled in vertex_of
            ),
            searching=_vertices_of(
                vertex_of, (program.equations[index].outputs[0] for index in found_places)
            ),
            transposed=transposed,
            shared_weights=shared_weights,
            parameter_gradients=tuple(
                ParameterGradient(
                    first=min(readers),
                    last=max(readers),
                    bytes=self.device.buffer_bytes(program.types[value]),
                )
                for value, readers in sorted(parameter_readers.items())
            ),
            assumed=tuple(
                sorted(
                    {
                        program.equations[index].operation.primitive
                        for index, derivative in self.linearization.derivatives.items()
                        if derivative.assumed
                    }
                )
            ),
            unchanged=None,
        )

    def _scores(self, leaves: Mapping[int, frozenset[int]]) -> Iterator[tuple[int, int]]:
        """The scores that are stored of a softmax with ``maxima``, and the weights."""
        types = self.program.types
        for one in self.softmaxes:
            for leaf in leaves.get(self.flow.source[one.weights], ()):
                if leaf in self.flow.maker and types[leaf].size == types[one.weights].size:
                    yield leaf, one.weights

    def _fused_cotangents(
        self,
        roots: Sequence[int],
        active_readers: Sequence[list[int]],
        active_values: Sequence[list[int]],
    ) -> set[int]:
        """The vertices whose cotangent never reaches memory.

        Where products compute their operands as they read them, a cotangent that comes out of
        reductions alone (a small array, broadcast, times what is stored) needs no buffer: so
        the one of a cross-entropy's logits. What a product writes does. That of scores is computed
        from that of their exponentials (``softmax``).
        """
        if not self.device.fuses_into_products:
            return set()
        exponentials = {
            vertex
            for vertex, values in enumerate(active_values)
            if not self.weights_of.keys().isdisjoint(values)
        }
        kinds = [self.flow.costs[root].fusion for root in roots]
        fused: set[int] = set()
        for vertex in reversed(range(len(roots))):
            readers = active_readers[vertex]
            if (
                (self._product(roots[vertex]) or kinds[vertex] is costs.Fusion.FUSIBLE)
                and readers
                and all(
                    kinds[reader] is costs.Fusion.REDUCTION
                    or (
                        kinds[reader] is costs.Fusion.FUSIBLE
                        and (reader in fused or reader in exponentials)
                    )
                    for reader in readers
                )
            ):
                fused.add(vertex)
        return fused

    def _rounded_cotangents(
        self, roots: Sequence[int], active_readers: Sequence[list[int]]
    ) -> set[int]:
        """The products whose cotangent is written by another product's kernel, as products read it.

        So it is where nothing but that product reads their result, through an activation or none.
        """
        if not self.device.fuses_into_products:
            return set()
        return {
            vertex
            for vertex, equation in enumerate(self.program.equations[root] for root in roots)
            if tpu_fusion.rounds_operands(equation.operation)
            and self.outputs.isdisjoint(equation.outputs)
            and len(active_readers[vertex]) == 1
            and self._product(roots[active_readers[vertex][0]])
        }

    def _broadcast_cotangents(
        self,
        roots: Sequence[int],
        active_readers: Sequence[list[int]],
        active_values: Sequence[list[int]],
        fields: Mapping[str, Sequence[Any]],
    ) -> dict[int, int]:
        """On a CPU, what only plain sums read of what is computed elementwise, and its predecessor.

        The cotangent of the one is a broadcast and takes no memory. That of the other is computed
        from it and the value, in the value's place. Such are the exponentials of a cross-entropy,
        and its logits.
        """
        found = {}
        for vertex, root in enumerate(roots) if not self.device.fuses_into_sums else ():
            before = [one for one in fields["predecessors"][vertex] if active_values[one]]
            if (
                self.flow.costs[root].fusion is costs.Fusion.FUSIBLE
                and fields["needs"][vertex] == (vertex,)
                and active_readers[vertex]
                and all(
                    self.flow.costs[roots[reader]].fusion is costs.Fusion.REDUCTION
                    and not fields["needs"][reader]
                    for reader in active_readers[vertex]
                )
                and len(before) == 1
                and fields["bytes"][vertex] == self._cotangent_bytes(active_values[before[0]])
            ):
                found[vertex] = before[0]
        return found

    def _overwritten(
        self,
        roots: Sequence[int],
        readers: Sequence[list[int]],
        needs: Sequence[tuple[int, ...]],
    ) -> set[int]:
        """The vertices whose cotangent is computed in the place of their value.

        Such are logits: one kernel reads them, last of all, and writes their cotangent. That is so
        where only reductions read a product, and gathers whose gradient is elementwise
        (``row_gathers``), and the derivative of one of them needs it.
        """
        if not self.device.overwrites_values:
            return set()
        equations = [self.program.equations[root] for root in roots]
        return {
            vertex
            for vertex, equation in enumerate(equations)
            if equation.operation.primitive in PRODUCTS
            and self.outputs.isdisjoint(equation.outputs)
            and all(
                self.flow.costs[roots[reader]].fusion is costs.Fusion.REDUCTION
                or is_row_gather(equations[reader].operation)
                for reader in readers[vertex]
            )
            and any(vertex in needs[reader] for reader in readers[vertex])
        }

    def _cone(self, root: int, materialized: set[int]) -> list[int]:
        """The root equation and the fused equations behind it, in program order."""
        found = {root}
        pending = [root]
        while pending:
            for value in self.program.equations[pending.pop()].value_inputs:
                maker = self.flow.maker.get(value)
                if maker is None or maker in found:
                    continue
                if self.flow.source[value] in materialized and not self.flow.is_alias(maker):
                    continue
                found.add(maker)
                pending.append(maker)
        return sorted(found)


def _readers(predecessors: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """For each vertex those that read it, ascending."""
    found: list[list[int]] = [[] for _ in predecessors]
    for vertex, read in enumerate(predecessors):
        for predecessor in read:
            found[predecessor].append(vertex)
    return found


def _read_by_readers(
    vertices: Set[int],
    predecessors: Sequence[tuple[int, ...]],
    needs: Sequence[tuple[int, ...]],
) -> set[int]:
    """Those of the vertices whose readers' derivatives need them."""
    return {
        read
        for vertex, values in enumerate(predecessors)
        for read in values
        if read in vertices and read in needs[vertex]
    }


def _hands_on(
    vertex: int, predecessors: Sequence[tuple[int, ...]], cotangent_bytes: Sequence[int]
) -> bool:
    """Whether the buffer of a vertex's cotangent becomes that of one of its predecessors.

    It takes one of the same size. And where the vertex also reads a reduction of that predecessor,
    as a normalisation reads a mean, the old cotangent is read twice: by the sums that are the
    reduction's cotangent, then together with them. The compiler writes the new one beside it.
    """
    size = cotangent_bytes[vertex]
    reduced: set[int] = set()
    pending = [read for read in predecessors[vertex] if cotangent_bytes[read] < size]
    while pending:
        for read in predecessors[pending.pop()]:
            if read not in reduced:
                reduced.add(read)
                if cotangent_bytes[read] < size:
                    pending.append(read)
    return any(
        cotangent_bytes[read] == size and read not in reduced for read in predecessors[vertex]
    )


def _rate_dtype(operation: Operation) -> str:
    kinds = [kind.dtype for kind in operation.inputs] or [kind.dtype for kind in operation.outputs]
    return kinds[0] if kinds else "float32"


_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def _label(program: Program, root: int) -> str:
    equation = program.equations[root]
    kinds = []
    for value in equation.outputs[:2]:
        kind = program.types[value]
        name = re.sub(r"^(bfloat|float|uint|int|complex)", lambda m: _SHORT[m[0]], kind.dtype)
        kinds.append(f"{name}[{','.join(map(str, kind.shape))}]")
    more = ", ..." if len(equation.outputs) > 2 else ""
    return f"{equation.operation.primitive} {', '.join(kinds)}{more}"
