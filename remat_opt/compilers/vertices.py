"""From what is stored to the graph that solvers see, with what depends on the schedule."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from remat_opt import costs
from remat_opt.compilers import (
    convolutions,
    copies,
    cpu_sums,
    gathers,
    grouped_rows,
    joins,
    logits,
    lookups,
    overwriting,
    places,
    pooling,
    row_gathers,
    scheduling,
    shared_weights,
    squares,
    strides,
    transcendental,
    turns,
)
from remat_opt.compilers.cotangents import Cotangents, HandedIn, cotangents, hands_on
from remat_opt.compilers.effects import Effect, OutsideCheckpoints, SharedResults, Unchanged
from remat_opt.compilers.lookups import Zeros
from remat_opt.compilers.shared_weights import SharedWeights
from remat_opt.compilers.storage import Storage
from remat_opt.compilers.traffic import Traffic
from remat_opt.compilers.vector_products import as_written
from remat_opt.gradients import ParameterGradient, Wait
from remat_opt.graph import Graph
from remat_opt.naming import short_type
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.record import Program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Draft:
    """One vertex, before the cost of its cotangent is known.

    Attributes:
      bytes: size of its value.
      named_bytes: size of its value if a checkpoint keeps it by name.
      seconds: time to compute it.
      flops: likewise.
      predecessors: the vertices that it reads, ascending.
      needs: those that its backward step reads, ascending.
      internal_bytes: size of residuals that only running it provides.
      late_bytes: size of those that its backward step computes.
      own_bytes: those of them that are its value, too, if nothing runs again.
      active: its values that have a cotangent.
      estimated_flops: those of ``flops`` that come from an estimate.
      copied_products: how many products it computes whose arrays are copied.
      multiplies: whether it computes a product that computes its operands as it reads them.
      parameters: the differentiated arguments that it reads and has a derivative for.
    """

    bytes: int
    named_bytes: int
    seconds: float
    flops: int
    predecessors: tuple[int, ...]
    needs: tuple[int, ...]
    internal_bytes: int
    late_bytes: int
    own_bytes: int
    active: tuple[int, ...]
    estimated_flops: int
    copied_products: int
    multiplies: bool
    parameters: frozenset[int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vertices:
    """The graph, and what goes with it.

    Attributes:
      graph: what solvers see.
      labels: for each vertex, a short text such as ``conv_general_dilated f32[64,56,56,64]``.
      estimated_flops_share: share of the forward FLOPs whose cost rule is an estimate.
      parameter_gradients: those of each parameter.
      waits: what waits for updates, where these consume gradients.
      put_off: what may wait besides, and is not counted.
      zeros: arrays of zeros that gradients begin as.
      tables: those whose gradients begin as zeros before their turn, and the step before which.
      pieces: the vertices whose cotangents are several arrays, and how many.
      siblings: elementwise vertices that a product alone reads, whose kernel does not make what
        other kernels read.
      effects: what depends on the schedule.
    """

    graph: Graph
    labels: tuple[str, ...]
    estimated_flops_share: float
    parameter_gradients: tuple[ParameterGradient, ...]
    waits: tuple[Wait, ...]
    put_off: tuple[scheduling.PutOff, ...]
    zeros: Zeros
    tables: Mapping[int, int]
    pieces: Mapping[int, int]
    siblings: tuple[int, ...]
    effects: tuple[Effect, ...]


def vertices(storage: Storage) -> Vertices:
    """Puts the graph together."""
    flow, compiler = storage.flow, storage.compiler
    program, derivatives = flow.program, flow.linearization.derivatives
    equations = [program.equations[root] for root in storage.roots]
    found_places = {
        flow.maker[value]: size
        for value, size in pooling.places_bytes(program, compiler).items()
        if flow.maker[value] in derivatives
    }
    drafts = list(_drafts(storage, found_places))
    predecessors = [draft.predecessors for draft in drafts]
    active = [draft.active for draft in drafts]
    of_cotangents = cotangents(
        storage,
        predecessors,
        [draft.needs for draft in drafts],
        [draft.bytes for draft in drafts],
        active,
    )
    needs = [
        tuple(sorted({*draft.needs, vertex}))
        if vertex in of_cotangents.held_until_own_step
        else draft.needs
        for vertex, draft in enumerate(drafts)
    ]
    forward_workspaces = [0] * len(drafts)
    for index, size in pooling.search_bytes(program, found_places).items():
        (value,) = program.equations[index].outputs
        forward_workspaces[storage.vertex_of[value]] = size
    transposed = tuple(_transposed(storage))
    weights = shared_weights.shared(
        program,
        derivatives,
        storage.product_sums.values(),
        compiler,
        # A product that is completed before it is stored is the vertex of that form.
        storage.vertex_of
        | {made: storage.vertex_of[last] for made, last in storage.completed.items()},
    )
    sizes = of_cotangents.bytes
    zeros = lookups.zeros(storage)
    workspaces = _workspaces(storage, drafts, needs, of_cotangents, transposed, weights, zeros)
    apart = turns.apart(storage, [draft.bytes for draft in drafts], sizes, predecessors, needs)
    for vertex, size in apart.items():
        workspaces[vertex] -= size
    products = dict(overwriting.written_by_products(storage, predecessors, active))
    added = Counter(overwriting.added_apart(products, sizes))
    for vertex, size, single in squares.second_cotangents(storage, of_cotangents.sizes, active):
        if single:
            added[vertex] += size
        else:
            workspaces[vertex] += size
    values = [draft.bytes for draft in drafts]
    for vertex, size in overwriting.over_values(storage, products, needs, values, of_cotangents):
        workspaces[vertex] -= size
    graph = Graph(
        names=tuple(
            f"{vertex}:{as_written(equation.operation)}"
            for vertex, equation in enumerate(equations)
        ),
        bytes=tuple(draft.bytes for draft in drafts),
        seconds=tuple(draft.seconds for draft in drafts),
        flops=tuple(draft.flops for draft in drafts),
        predecessors=tuple(_in_order(storage, predecessors)),
        needs=tuple(needs),
        cotangent_bytes=sizes,
        internal_bytes=tuple(draft.internal_bytes for draft in drafts),
        workspace_bytes=tuple(workspaces),
        forward_workspace_bytes=tuple(forward_workspaces),
        in_place=tuple(
            flow.costs[root].fusion is costs.Fusion.FUSIBLE
            and not draft.multiplies
            and vertex not in products
            and of_cotangents.in_pieces.get(vertex, 1) <= places.MOST_READ
            and hands_on(vertex, predecessors, of_cotangents)
            for vertex, (root, draft) in enumerate(zip(storage.roots, drafts, strict=True))
        ),
        pinned=tuple(
            equation.once or root in found_places
            for root, equation in zip(storage.roots, equations, strict=True)
        ),
    )
    flops = graph.forward_flops
    tables = scheduling.tables(storage, values, sizes, predecessors)
    gradients = dict(_parameter_gradients(storage, drafts, of_cotangents, zeros, tables))
    ready = {value: one.first for value, one in gradients.items() if not one.waits}
    return Vertices(
        graph=graph,
        labels=tuple(_label(program, root) for root in storage.roots),
        estimated_flops_share=sum(draft.estimated_flops for draft in drafts) / flops
        if flops
        else 0.0,
        parameter_gradients=tuple(gradients.values()),
        waits=tuple(scheduling.gradients_wait(storage, ready, graph.bytes)),
        put_off=tuple(scheduling.put_off(storage, graph, ready, of_cotangents)),
        zeros=zeros,
        tables=tables,
        pieces=of_cotangents.in_pieces,
        siblings=tuple(_siblings(storage, apart, predecessors)),
        effects=tuple(_effects(storage, drafts, of_cotangents, transposed, weights, graph, added)),
    )


def _siblings(
    storage: Storage, products: Iterable[int], predecessors: Sequence[tuple[int, ...]]
) -> Iterator[int]:
    """See ``Vertices``.

    Args:
      storage: what is stored.
      products: the products that free an operand that nothing else reads.
      predecessors: for each vertex, those that it reads.
    """
    costs_of = storage.flow.costs
    makes_more = {vertex for vertex, _, _ in transcendental.on_the_way(storage)}
    for product in products:
        for vertex in predecessors[product]:
            elementwise = costs_of[storage.roots[vertex]].fusion is costs.Fusion.FUSIBLE
            if elementwise and vertex not in makes_more:
                yield vertex


def _in_order(
    storage: Storage, predecessors: Sequence[tuple[int, ...]]
) -> Iterator[tuple[int, ...]]:
    """What each vertex comes after: what it reads, and for a side effect, the one before."""
    last: tuple[int, ...] = ()
    for vertex, (root, read) in enumerate(zip(storage.roots, predecessors, strict=True)):
        if storage.flow.program.equations[root].effects:
            yield tuple(sorted({*read, *last}))
            last = (vertex,)
        else:
            yield read


def _drafts(storage: Storage, found_places: Mapping[int, int]) -> Iterator[_Draft]:
    flow, compiler = storage.flow, storage.compiler
    program, derivatives = flow.program, flow.linearization.derivatives
    differentiated = frozenset(program.differentiated)
    read = {v for index in range(len(program.equations)) for v in flow.reads(index)}
    traffic = Traffic(storage)
    for vertex, root in enumerate(storage.roots):
        equation = program.equations[root]
        predecessors: set[int] = set()
        read_values: set[int] = set()
        needs: set[int] = set()
        parameters: set[int] = set()
        internal_bytes = late_bytes = own_bytes = flops = estimated = copied = 0
        multiplies = False
        for index in storage.cone(root):
            member = program.equations[index]
            if storage.is_fusing_product(index):
                multiplies = True
                copied += copies.copied_for(member.operation)
            flops += flow.costs[index].flops
            estimated += costs.estimated_flops(member.operation)
            for value in {flow.source[value] for value in member.value_inputs}:
                if value in storage.vertex_of:
                    predecessors.add(storage.vertex_of[value])
                if value in storage.vertex_of or value not in flow.maker:
                    read_values.add(value)
            derivative = derivatives.get(index)
            if derivative is None:
                continue
            parameters |= differentiated.intersection(member.value_inputs)
            if index == root and root in found_places:
                continue
            elementwise = flow.costs[index].fusion is costs.Fusion.FUSIBLE
            own = index == root and not member.derivative_reads_kept
            late_bytes += derivative.late_bytes
            if not elementwise:
                internal_bytes += derivative.internal_bytes
            elif derivative.internal_bytes or (own and derivative.outputs):
                # Other results of an elementwise derivative are not arrays: it reads the operands.
                for value in member.value_inputs:
                    needs.update(storage.holders(value))
            for position in derivative.inputs:
                atom = member.inputs[position]
                if isinstance(atom, int):
                    needs.update(storage.holders(atom))
            for position in derivative.outputs:
                value = member.outputs[position]
                if not own:
                    needs.update(storage.holders(value))
                elif not elementwise:
                    own_bytes += storage.bytes_of(value)
        internal_bytes += own_bytes
        needs = {needed for needed in needs if needed <= vertex}
        if internal_bytes:
            # The residuals are remade by running the vertex again.
            needs.update(predecessors)
        held = [value for value in equation.outputs if value in read or value in storage.outputs]
        kept = [value for value in held if value not in storage.outputs]
        # Of a split, those pieces may be arrays that are read elsewhere than the others.
        split = equation.operation.primitive in places.SLICES
        arrays = [value for value in kept if value in storage.stored or not split]
        moved_bytes = traffic.moved_bytes(held, read_values)
        dtype = _rate_dtype(equation.operation)
        if flow.opaque(root):
            seconds = convolutions.seconds(equation.operation, flow.costs[root], compiler, dtype)
        else:
            seconds = max(
                flops / compiler.device.flops_rate(dtype),
                moved_bytes / compiler.device.memory_bandwidth,
            )
        yield _Draft(
            bytes=sum(map(storage.bytes_of, arrays)),
            named_bytes=sum(map(storage.named_bytes, kept)),
            seconds=seconds,
            flops=flops,
            predecessors=tuple(sorted(predecessors)),
            needs=tuple(sorted(needs)),
            internal_bytes=internal_bytes + found_places.get(root, 0),
            late_bytes=late_bytes,
            own_bytes=own_bytes,
            active=tuple(v for v in held if v in flow.linearization.active_values),
            estimated_flops=estimated,
            copied_products=copied,
            multiplies=multiplies,
            parameters=frozenset(parameters),
        )


def _workspaces(
    storage: Storage,
    drafts: Sequence[_Draft],
    needs: Sequence[tuple[int, ...]],
    of_cotangents: Cotangents,
    transposed: Sequence[tuple[int, int]],
    weights: SharedWeights,
    zeros: Zeros,
) -> list[int]:
    """What is held beside each vertex's backward step, in any schedule."""
    compiler = storage.compiler
    found = weights.expected_sums(len(drafts)).tolist()
    own = [draft.late_bytes for draft in drafts]
    for vertex, operand in transposed:
        beside = of_cotangents.bytes[vertex]
        if operand not in needs[operand]:
            beside += drafts[operand].bytes
        own[operand] = max(own[operand], beside)
    for vertex, size in of_cotangents.in_value.items():
        own[vertex] += size
    for vertex, (size, step) in of_cotangents.later.items():
        for one in range(vertex, step + 1):
            own[one] += size
    for size, steps in of_cotangents.sooner.values():
        for one in steps:
            own[one] += size
    for read in storage.batched_reads:
        own[storage.vertex_of[storage.result(read.product)]] += read.workspace_bytes
    for held in (lookups.beside, strides.spread, grouped_rows.beside):
        for vertex, size in held(storage):
            own[vertex] += size
    for size, until in zeros.beside:
        for vertex in range(until, len(own)):
            own[vertex] += size
    for vertex, root in enumerate(storage.roots):
        if drafts[vertex].active:
            own[vertex] += cpu_sums.gradient_bytes(storage.flow, root, compiler)
    return list(map(sum, zip(found, own, _copied_so_far(storage), strict=True)))


def _copied_so_far(storage: Storage) -> list[int]:
    """For each vertex, the bytes of weight copies that wait in its backward step, or for it."""
    found = [0] * len(storage.roots)
    for vertex, size in convolutions.weight_copies(
        storage.flow.program,
        storage.flow.linearization.derivatives,
        storage.compiler,
        storage.vertex_of,
    ):
        found[vertex] += size
    return list(itertools.accumulate(found))


def _transposed(storage: Storage) -> Iterator[tuple[int, int]]:
    """Convolutions, each with the operand that is transposed for the gradient of its weight."""
    if not storage.compiler.has("transposed_operands"):
        return
    for vertex, root in enumerate(storage.roots):
        equation = storage.flow.program.equations[root]
        if equation.operation.primitive == "conv_general_dilated":
            for value in storage.flow.derivative_reads(root):
                if value in storage.vertex_of:
                    yield vertex, storage.vertex_of[value]


def _widened(storage: Storage) -> Iterator[tuple[int, int]]:
    """Vertices that products read, with the bytes by which they grow if read wider."""
    if not storage.compiler.has("widened"):
        return
    for root in storage.roots:
        if storage.flow.program.equations[root].operation.primitive in PRODUCTS:
            for value in storage.flow.derivative_reads(root):
                more = storage.read_bytes(value) - storage.named_bytes(value)
                if value in storage.vertex_of and more:
                    yield storage.vertex_of[value], more


def _effects(
    storage: Storage,
    drafts: Sequence[_Draft],
    of_cotangents: Cotangents,
    transposed: tuple[tuple[int, int], ...],
    weights: SharedWeights,
    graph: Graph,
    added: Mapping[int, int],
) -> Iterator[Effect]:
    """What depends on the schedule.

    Args:
      storage: what is stored.
      drafts: the vertices.
      of_cotangents: their cotangents.
      transposed: see ``_transposed``.
      weights: those that several products read.
      graph: the graph.
      added: what is held beside backward steps if nothing is rewritten.
    """
    program, compiler = storage.flow.program, storage.compiler
    derivatives = storage.flow.linearization.derivatives
    yield from pooling.effects(program, derivatives, compiler)
    yield from transcendental.effects(storage)
    yield from cpu_sums.held(storage.flow, compiler, storage.vertex_of)
    if weights.weights:
        yield weights
    named = {n: d.named_bytes for n, d in enumerate(drafts) if d.named_bytes != d.bytes}
    widened = dict(_widened(storage))
    if named or widened:
        yield cpu_sums.Named(bytes=named, widened_bytes=widened)
    if transposed:
        yield cpu_sums.Transposed(pairs=transposed)
    readers = graph.successors()
    if shared := dict(_read_twice(drafts)):
        yield SharedResults(bytes=shared, readers={vertex: readers[vertex] for vertex in shared})
    if copied := convolutions.copied(program, derivatives, compiler, storage.vertex_of):
        yield convolutions.CopiedOperands(
            copies=copied,
            alone=convolutions.alone(copied, graph.needs),
            transposed={v: readers[v] for v, one in copied.items() if not one.padding},
        )
    if outside := _outside_checkpoints(storage, of_cotangents):
        yield OutsideCheckpoints(workspace_bytes=outside)
    if added:
        yield Unchanged(workspace_bytes=added)
    yield from gathers.gathered(storage)
    yield from joins.effects(storage, readers, [draft.active for draft in drafts])
    yield from logits.effects(storage)
    yield from squares.effects(storage)
    yield from row_gathers.scattered(storage, graph.cotangent_bytes, graph.predecessors)
    if larger := of_cotangents.handed_in_bytes:
        yield HandedIn(bytes=larger, readers={vertex: readers[vertex] for vertex in larger})
    products = tuple(draft.copied_products for draft in drafts)
    if compiler.has("copies") and any(products):
        yield copies.Copies(products=products)
    yield from copies.handed_on(storage, readers)


def _read_twice(drafts: Sequence[_Draft]) -> Iterator[tuple[int, int]]:
    """Results that a vertex's own backward step reads, and those of later ones, with their bytes.

    Those are one array for both, as what a custom derivative rule both returns and keeps.
    """
    read = {needed for vertex, one in enumerate(drafts) for needed in one.needs if needed < vertex}
    for vertex, one in enumerate(drafts):
        if vertex in read and one.own_bytes:
            yield vertex, min(one.own_bytes, one.bytes)


def _outside_checkpoints(storage: Storage, of_cotangents: Cotangents) -> dict[int, int]:
    """What batched products hold more, or less, in the backward steps of vertices under none."""
    found: Counter[int] = Counter()
    for one in storage.batched_reads:
        if one.comes_last and one.waiting is not None:
            found[storage.vertex_of[one.waiting]] += one.workspace_bytes
        if one.copies_late and one.scores is not None:
            vertex = storage.vertex_of[one.scores]
            size, step = of_cotangents.later.get(vertex, (0, vertex))
            if size and storage.is_read_as_written(one.scores):
                found.subtract(dict.fromkeys(range(vertex + 1, step + 1), size))
    return dict(found)


def _parameter_gradients(
    storage: Storage,
    drafts: Sequence[_Draft],
    of_cotangents: Cotangents,
    zeros: Zeros,
    tables: Mapping[int, int],
) -> Iterator[tuple[int, ParameterGradient]]:
    readers: dict[int, list[int]] = {}
    for vertex, draft in enumerate(drafts):
        for value in draft.parameters:
            readers.setdefault(value, []).append(vertex)
    program, compiler = storage.flow.program, storage.compiler
    added_up = scheduling.added_up(program, compiler)
    for value, found in sorted(readers.items()):
        size, last = compiler.buffer_bytes(program.types[added_up.get(value, value)]), max(found)
        reader, shared = of_cotangents.arguments.get(value, (-1, 0))
        if value in zeros.begun:
            last = len(drafts) - 1
        elif value in tables:
            last = max(last, min(len(drafts) - 1, 2 * len(drafts) - 1 - tables[value]))
        elif reader == last:
            last = shared - 1
        elif cpu_sums.rounds(storage.flow, storage.roots[last], compiler):
            last -= 1
        gradient = ParameterGradient(
            first=min(found),
            last=last,
            bytes=size,
            fused=value in zeros.converted or scheduling.fuses_update(storage, min(found), last),
            waits=value in added_up,
        )
        yield value, gradient


def _rate_dtype(operation: Operation) -> str:
    kinds = [kind.dtype for kind in operation.inputs] or [kind.dtype for kind in operation.outputs]
    return kinds[0] if kinds else "float32"


def _label(program: Program, root: int) -> str:
    equation = program.equations[root]
    kinds = []
    for value in equation.outputs[:2]:
        kind = program.types[value]
        kinds.append(short_type(kind.dtype, kind.shape))
    more = ", ..." if len(equation.outputs) > 2 else ""
    return f"{as_written(equation.operation)} {', '.join(kinds)}{more}"
