"""What the cotangents of stored values take: most are as large as the value, some take nothing.

A cotangent may instead meet four other fates: the kernels that read it compute it (it is *fused*),
it takes the place of the value, it is written narrower than the value, or it shares the array of
another's cotangent.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set

from remat_opt import costs
from remat_opt.compilers import (
    batched_products,
    operands,
    places,
    row_gathers,
    squares,
    sums,
    transcendental,
)
from remat_opt.compilers.effects import Effect, Figures, handed_in
from remat_opt.compilers.storage import Storage
from remat_opt.program.record import Equation
from remat_opt.schedule import Schedule

#: Bytes of a cotangent that exists but takes nothing: 0 means that there is none.
_NO_ARRAY = 1

#: Functions whose derivative XLA for TPU does not compute in each of several products.
_ONCE = frozenset({"erf", "erfc", "tanh"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandedIn(Effect):
    """Cotangents that take more where they enter a checkpoint.

    They are no arrays elsewhere, or narrower ones.

    Attributes:
      bytes: for vertices with such a cotangent, what it takes there.
      readers: for each of them, those that read it.
    """

    bytes: Mapping[int, int]
    readers: Mapping[int, Sequence[int]]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Writes those that come from outside their vertex's checkpoint."""
        for vertex in handed_in(schedule, self.readers):
            figures.cotangent_bytes[vertex] = self.bytes[vertex]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cotangents:
    """What the cotangents take.

    Attributes:
      bytes: what each takes.
      sizes: what each would take as a separate array.
      held_until_own_step: the vertices whose value stays until their own backward step, since their
        cotangent, or what replaces it, is computed from it.
      in_value: the bytes of what replaces another's value, in its own step only.
      later: for those that begin as another's array, or have a second one, the bytes of that, and
        the vertex from whose backward step on it exists.
      sooner: for those that are written before the backward step of their last reader, whose own
        cotangent passes, the bytes, and the vertices in whose steps they are there in addition.
      handed_in_bytes: see ``HandedIn``.
      arguments: for arguments whose gradient begins as another's array (``sums.Sharing``).
      sources: for those that are no arrays, the vertices from whose cotangents they are computed.
      in_pieces: those that are written as several arrays, one for each slice, and how many. More
        than a few are then added up in one more.
      factors: for those that share the cotangent of a product's operand, all that do.
    """

    bytes: tuple[int, ...]
    sizes: tuple[int, ...]
    held_until_own_step: frozenset[int]
    in_value: Mapping[int, int]
    later: Mapping[int, tuple[int, int]]
    sooner: Mapping[int, tuple[int, range]]
    handed_in_bytes: Mapping[int, int]
    arguments: Mapping[int, tuple[int, int]]
    sources: Mapping[int, Sequence[int]]
    in_pieces: Mapping[int, int]
    factors: Mapping[int, Sequence[int]]

    def read_for(self, vertex: int) -> set[int]:
        """The vertices whose cotangents are read where one is needed."""
        pending, seen = [vertex], {vertex}
        for one in pending:
            if self.bytes[one] <= _NO_ARRAY:
                more = set(self.sources.get(one, ())) - seen
                pending += more
                seen |= more
        return {one for one in seen if self.bytes[one] > _NO_ARRAY}


def cotangents(
    storage: Storage,
    predecessors: Sequence[tuple[int, ...]],
    needs: Sequence[tuple[int, ...]],
    value_bytes: Sequence[int],
    active: Sequence[Sequence[int]],
) -> Cotangents:
    """Finds what the cotangents take.

    Args:
      storage: what is stored.
      predecessors: for each vertex, those that it reads.
      needs: for each vertex, those that its backward step reads.
      value_bytes: bytes of each vertex's value.
      active: for each vertex, its values that have a cotangent.
    """
    of = _Vertices(
        storage=storage,
        predecessors=predecessors,
        needs=needs,
        bytes=value_bytes,
        active=active,
        readers=readers_of(predecessors),
    )
    fused = _fused(of)
    computed = {vertex for vertex in fused if of.written_by_fusing_product(vertex)}
    pieces = set(_pieces(of))
    passing = _passing(of, pieces)
    in_its_place = dict(_broadcast(of))
    fused |= in_its_place.keys() | set(in_its_place.values())
    shared_operands = dict(_shared_operands(of))
    narrow = {
        vertex: storage.operand_bytes(storage.roots[vertex]) for vertex in _rounded(of, pieces)
    }
    narrow.update(dict.fromkeys(fused, 0))
    narrow.update({factors[0]: size for factors, size in shared_operands.items()})
    spread = {v: found for v, found in places.spread(storage).items() if v not in narrow}
    narrow.update({vertex: size for vertex, (size, _) in spread.items()})
    sizes = [
        narrow[vertex] if vertex in narrow else storage.cotangent_bytes(values)
        for vertex, values in enumerate(active)
    ]
    shared = sums.sharing(
        storage.flow,
        {value: vertex for value, vertex in storage.vertex_of.items() if sizes[vertex]},
        [of.active_readers(vertex) for vertex in range(len(active))],
        storage.compiler,
    )
    further = {vertex for factors in shared_operands for vertex in factors[1:]}
    no_arrays = fused | (passing - shared.holders) | shared.alone | shared.until.keys() | further
    return Cotangents(
        bytes=tuple(
            _NO_ARRAY if active[vertex] and vertex in no_arrays else size
            for vertex, size in enumerate(sizes)
        ),
        sizes=tuple(sizes),
        # Products also compute a cotangent from scores as they read them.
        held_until_own_step=frozenset(
            {
                *storage.vertices_of(storage.scores),
                *_read_by_readers(of, fused | passing),
                *itertools.chain(*shared_operands),
            }
        ),
        in_value={
            vertex: storage.cotangent_bytes(active[vertex]) for vertex in in_its_place.values()
        },
        later=dict(_in_other_order(of, sizes))
        | {vertex: (sizes[vertex], step) for vertex, step in shared.until.items()},
        sooner={
            vertex: (sizes[vertex], steps)
            for vertex, steps in _sooner(of, passing - shared.holders - pieces)
            if vertex not in no_arrays
        },
        handed_in_bytes={v: size for v, size in _in_full(of, sizes) if v not in narrow}
        | {v: sizes[v] for v in passing - shared.holders}
        | {v: storage.operand_bytes(storage.roots[v]) for v in computed | further},
        arguments=shared.arguments,
        sources={vertex: of.active_readers(vertex) for vertex in no_arrays - further}
        | {vertex: factors[:1] for factors in shared_operands for vertex in factors[1:]},
        in_pieces={vertex: count for vertex, (_, count) in spread.items()},
        factors={vertex: factors for factors in shared_operands for vertex in factors},
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Vertices:
    """The vertices so far: the arguments of ``cotangents``, and the readers of each."""

    storage: Storage
    predecessors: Sequence[tuple[int, ...]]
    needs: Sequence[tuple[int, ...]]
    bytes: Sequence[int]
    active: Sequence[Sequence[int]]
    readers: Sequence[Sequence[int]]

    def active_readers(self, vertex: int) -> list[int]:
        """Those that read it and have a cotangent."""
        return [reader for reader in self.readers[vertex] if self.active[reader]]

    def equation(self, vertex: int) -> Equation:
        """The equation that makes the vertex."""
        return self.storage.flow.program.equations[self.storage.roots[vertex]]

    def written_by(self, vertex: int) -> Equation:
        """The equation whose kernel writes the vertex."""
        return self.storage.flow.program.equations[self.storage.written_by(vertex)]

    def written_by_fusing_product(self, vertex: int) -> bool:
        """Whether that is a product that computes elementwise operands as it reads them."""
        return self.storage.is_fusing_product(self.storage.written_by(vertex))

    def kind(self, vertex: int) -> costs.Fusion:
        """How that equation is compiled."""
        return self.storage.flow.costs[self.storage.roots[vertex]].fusion

    def computes_rows(self, vertex: int) -> bool:
        """Whether it is a sum, or picks from rows: its gradient is that of rows, broadcast."""
        if self.kind(vertex) is costs.Fusion.REDUCTION:
            return True
        flow = self.storage.flow
        return row_gathers.is_row_gather(flow.program, flow.maker, self.equation(vertex))

    def is_output(self, vertex: int) -> bool:
        """Whether it is an output of the program."""
        return not self.storage.outputs.isdisjoint(self.equation(vertex).outputs)


def _fused(of: _Vertices) -> set[int]:
    """The vertices whose cotangent never reaches memory.

    If products compute their operands as they read them, a cotangent that comes only out of
    reductions (a small array, broadcast, times what is stored) needs no buffer: that of a
    cross-entropy's logits, for example, also where labels' elements are picked by a gather. One
    that a product writes does. That of scores is computed from that of their exponentials
    (``softmax``).
    """
    if not of.storage.compiler.has("cotangents_fused"):
        return set()
    exponentials = {
        vertex
        for vertex, values in enumerate(of.active)
        if not of.storage.weights_of.keys().isdisjoint(values)
    }
    fused: set[int] = set()
    for vertex in reversed(range(len(of.active))):
        readers = of.active_readers(vertex)
        product = of.written_by_fusing_product(vertex)
        if (
            (product or of.kind(vertex) is costs.Fusion.FUSIBLE)
            and readers
            and all(
                of.computes_rows(reader)
                or (
                    of.kind(reader) is costs.Fusion.FUSIBLE
                    and (reader in fused or reader in exponentials)
                )
                for reader in readers
            )
        ):
            fused.add(vertex)
    return fused


def _passing(of: _Vertices, pieces: Set[int]) -> set[int]:
    """Elementwise values between elementwise ones: their cotangent stays within one kernel.

    An example is a stored ``tanh``: its readers, and what it is computed from, have its size, and
    one kernel computes the cotangent of the latter from that of the former. Or all readers are sums
    or pick from rows, and nothing else reads what it is computed from: logits that are capped
    before a cross-entropy.
    """
    if not of.storage.compiler.has("cotangents_pass"):
        return set()
    if of.storage.compiler.has("operands_fused"):
        return {*_dear_operands(of), *pieces}
    found = set()
    for vertex, active in enumerate(of.active):
        readers = of.active_readers(vertex)
        before = [one for one in of.predecessors[vertex] if of.active[one]]
        size = of.storage.cotangent_bytes(active)
        if (
            size
            and of.kind(vertex) is costs.Fusion.FUSIBLE
            and not of.is_output(vertex)
            and readers
            and before
            and (
                all(
                    of.kind(reader) is costs.Fusion.FUSIBLE
                    and of.storage.cotangent_bytes(of.active[reader]) == size
                    for reader in readers
                )
                or (
                    all(map(of.computes_rows, readers))
                    and all(of.active_readers(one) == [vertex] for one in before)
                )
            )
        ):
            found.add(vertex)
    return found


def _dear_operands(of: _Vertices) -> Iterator[int]:
    """Expensive functions that products compute their operands from, as they read them (TPU)."""
    platform = of.storage.compiler.device.platform
    for vertex, active in enumerate(of.active):
        if (
            active
            and transcendental.is_dear(of.written_by(vertex).operation, platform)
            and not of.is_output(vertex)
            and all(
                of.kind(reader) is costs.Fusion.FUSIBLE or of.written_by_fusing_product(reader)
                for reader in of.active_readers(vertex)
            )
        ):
            yield vertex


def _pieces(of: _Vertices) -> Iterator[int]:
    """Elementwise pieces of a concatenation that a product reads, and nothing else (TPU).

    The product's kernel, or that which reads a piece of the whole, writes the cotangent of what the
    piece is computed from.
    """
    for vertex in of.storage.vertices_of(of.storage.pieces):
        if (
            of.kind(vertex) is costs.Fusion.FUSIBLE
            and not of.is_output(vertex)
            and len(of.active_readers(vertex)) == 1
        ):
            yield vertex


def _sooner(of: _Vertices, passing: Set[int]) -> Iterator[tuple[int, range]]:
    """Vertices that only something whose cotangent passes reads last, and the steps until that.

    One kernel writes the cotangents of both factors of a gate ``u * tanh(v)``, as soon as it has
    that of the gate. Those of pieces of a concatenation come one by one, and are left out.
    """
    for vertex in sorted(passing):
        if any(map(of.computes_rows, of.active_readers(vertex))):
            continue
        last = max(of.active_readers(vertex))
        for read in of.predecessors[vertex]:
            if of.active[read] and max(of.active_readers(read)) == vertex:
                yield read, range(vertex + 1, last + 1)


def _rounded(of: _Vertices, pieces: Set[int]) -> Iterator[int]:
    """The products whose cotangent is written as products read it.

    Another product's kernel writes it if only that product reads their result, perhaps through an
    activation. Entries of a batched product's result that are looked up are added to zeros in an
    order of their own, and copied for its gradients.
    """
    if not of.storage.compiler.has("cotangents_rounded"):
        return
    whole = squares.whole(of.storage)
    for vertex in range(len(of.active)):
        if vertex in whole or of.is_output(vertex):
            continue
        if operands.rounds_operands(of.written_by(vertex).operation):
            readers = of.active_readers(vertex)
            if len(readers) == 1 and readers[0] in pieces:
                readers = of.active_readers(readers[0])
            if len(readers) != 1:
                continue
            if of.written_by_fusing_product(readers[0]) or (
                of.equation(readers[0]).operation.primitive == "gather"
                and operands.is_batched(of.written_by(vertex).operation)
            ):
                yield vertex


def _shared_operands(of: _Vertices) -> Iterator[tuple[tuple[int, ...], int]]:
    """Products of which another product's operand is computed, with the bytes of its cotangent.

    Only that array is written: the products that read the factors' cotangents compute these from it
    and from the factors, which stay until then. The two halves of a gated layer are an example.
    With a ``tanh`` or ``erf`` in between, as in a GELU, this does not happen: it would compute too
    much twice.
    """
    if not of.storage.compiler.has("factors_share"):
        return
    equations = of.storage.flow.program.equations
    for root in of.storage.roots:
        cone = of.storage.cone(root)
        if any(equations[index].operation.primitive in _ONCE for index in cone):
            continue
        products = filter(of.storage.is_fusing_product, cone)
        for value in itertools.chain.from_iterable(map(of.storage.flow.reads, products)):
            factors = of.storage.holders(value)
            if len(factors) > 1 and all(_is_factor(of, factor) for factor in factors):
                yield tuple(sorted(factors)), of.storage.cotangent_bytes([value])


def _is_factor(of: _Vertices, vertex: int) -> bool:
    """Whether a product writes the vertex for a single reader."""
    return (
        of.written_by_fusing_product(vertex)
        and not of.is_output(vertex)
        and len(of.active_readers(vertex)) == 1
    )


def _broadcast(of: _Vertices) -> Iterator[tuple[int, int]]:
    """On a CPU, elementwise values that only plain sums read, and their predecessors.

    The cotangent of the former is a broadcast and takes no memory. That of the latter is computed
    from it and the value, in the value's place. Such are the exponentials of a cross-entropy, and
    its logits.
    """
    if not of.storage.compiler.has("broadcast_cotangents"):
        return
    for vertex, needs in enumerate(of.needs):
        before = [one for one in of.predecessors[vertex] if of.active[one]]
        readers = of.active_readers(vertex)
        if (
            of.kind(vertex) is costs.Fusion.FUSIBLE
            and needs == (vertex,)
            and readers
            and all(
                of.kind(reader) is costs.Fusion.REDUCTION and not of.needs[reader]
                for reader in readers
            )
            and len(before) == 1
            and of.bytes[vertex] == of.storage.cotangent_bytes(of.active[before[0]])
        ):
            yield vertex, before[0]


def _in_full(of: _Vertices, sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Vertices whose cotangent is narrower than they are, with what it takes in their own type."""
    for vertex, (values, size) in enumerate(zip(of.active, sizes, strict=True)):
        full = sum(map(of.storage.read_bytes, values))
        if size < full:
            yield vertex, full


def _in_other_order(of: _Vertices, sizes: Sequence[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """Batched products with a second array of their cotangent, and where both begin."""
    active = of.storage.flow.linearization.active_values
    for vertex, size in enumerate(sizes):
        equation, readers = of.equation(vertex), of.active_readers(vertex)
        if (
            size
            and readers
            and batched_products.reads_two_orders(equation.operation, of.storage.compiler)
            and active.issuperset(equation.value_inputs)
        ):
            yield vertex, (size, readers[-1])


def _read_by_readers(of: _Vertices, vertices: Set[int]) -> set[int]:
    """The vertices that their readers' derivatives need."""
    return {
        read
        for vertex, values in enumerate(of.predecessors)
        for read in values
        if read in vertices and read in of.needs[vertex]
    }


def readers_of(predecessors: Sequence[tuple[int, ...]]) -> list[list[int]]:
    """For each vertex, those that read it, ascending."""
    found: list[list[int]] = [[] for _ in predecessors]
    for vertex, read in enumerate(predecessors):
        for predecessor in read:
            found[predecessor].append(vertex)
    return found


def hands_on(vertex: int, predecessors: Sequence[tuple[int, ...]], found: Cotangents) -> bool:
    """Whether the buffer of a vertex's cotangent becomes that of one of its predecessors.

    They must have the same size. If the vertex also reads a reduction of that predecessor, as a
    normalisation reads a mean, the old cotangent is read twice: by the sums that make the
    reduction's cotangent, then together with them. Then the compiler writes the new one beside it.
    """
    size, sizes = found.bytes[vertex], found.sizes
    reduced: set[int] = set()
    pending = [read for read in predecessors[vertex] if sizes[read] < size]
    while pending:
        for read in predecessors[pending.pop()]:
            if read not in reduced:
                reduced.add(read)
                if sizes[read] < size:
                    pending.append(read)
    return any(found.bytes[read] == size and read not in reduced for read in predecessors[vertex])
