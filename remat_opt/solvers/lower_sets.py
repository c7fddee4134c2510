r"""Lower sets and canonical strategies: the basis of Kusumoto's algorithms.

Problem. Given an increasing sequence of lower sets L_1 < ... < L_k = V, say what its canonical
strategy takes. A lower set is a set of vertices that holds all predecessors of its members.
Forward, the strategy computes block V_i = L_i \ L_{i-1} and keeps only the boundary d(L_i), the
members that a vertex outside L_i reads. Backward, it takes the blocks in reverse, recomputes what
is missing in each, and runs its backward steps.

Method. Lower sets are bit masks: bit v says whether vertex v is in. ``Family`` holds many of them
side by side as arrays, so that the terms of all pairs that end in the same lower set come from one
matrix-vector product. ``evaluate`` computes the figures of one sequence straight from the
definitions; ``schedule_of`` turns it into a ``Schedule``.

Why not a ready-made tool: networkx enumerates antichains, from which lower sets follow, but not
in order of size and not lazily up to a limit.

Complexity: enumeration O(#L n); the terms of one lower set against all others O(#L n).

Guarantee: the figures are the paper's, exactly, for integer bytes below 2**53 in total.

Readings. Term (ii) of Eq. 2 counts a block twice: once for its values, once for their gradients.
The gradients are counted with ``cotangent_bytes`` here, which is the paper's M unless the graph
gives others. Terms (iii) and (iv) are both counted where they overlap, as one is gradients and the
other forward caches (correction 8). Eq. 1 charges the last block, in which nothing is ever
forgotten; both that figure and the executable one are given (correction 6). The pruned family needs
the empty set and V added (correction 7).

Left out: ``needs`` (the paper's backward steps read the inputs of the operation), in-place
gradients and internal bytes. The referee knows all three.

Reference: Kusumoto, Inoue, Watanabe, Akiba, Koyama (2019), sections 2, 3 and 4.3.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from remat_opt.graph import Graph
from remat_opt.schedule import Region, Schedule


def members(mask: int) -> tuple[int, ...]:
    """The vertices of a bit mask, ascending."""
    found = []
    while mask:
        low = mask & -mask
        found.append(low.bit_length() - 1)
        mask ^= low
    return tuple(found)


def mask_of(vertices: Iterable[int]) -> int:
    """The bit mask of some vertices."""
    mask = 0
    for vertex in vertices:
        mask |= 1 << vertex
    return mask


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Neighbours:
    """The edges of a graph as bit masks, one per vertex.

    Attributes:
      predecessors: what each vertex reads.
      successors: what reads each vertex.
    """

    predecessors: tuple[int, ...]
    successors: tuple[int, ...]

    @property
    def everything(self) -> int:
        """V, the set of all vertices."""
        return (1 << len(self.predecessors)) - 1

    def after(self, mask: int) -> int:
        """delta-plus(S): what reads a member of ``mask``."""
        return _union(self.successors, mask)

    def before(self, mask: int) -> int:
        """delta-minus(S): what a member of ``mask`` reads."""
        return _union(self.predecessors, mask)

    def is_lower(self, mask: int) -> bool:
        """Whether ``mask`` is a lower set: delta-minus(L) is part of L."""
        return not self.before(mask) & ~mask

    def boundary(self, mask: int) -> int:
        r"""d(L) = delta-minus(V \ L) & L: the members that a vertex outside reads."""
        return mask_of(v for v in members(mask) if self.successors[v] & ~mask)


def _union(sets: Sequence[int], mask: int) -> int:
    found = 0
    for vertex in members(mask):
        found |= sets[vertex]
    return found


def neighbours(graph: Graph) -> Neighbours:
    """The edges of ``graph`` as bit masks."""
    return Neighbours(
        predecessors=tuple(mask_of(found) for found in graph.predecessors),
        successors=tuple(mask_of(found) for found in graph.successors()),
    )


def all_lower_sets(graph: Graph) -> Iterator[int]:
    """Every lower set, the empty one and V among them, by ascending size.

    There are between n + 1 and 2**n of them, so take no more than you can use.
    """
    edges = neighbours(graph)
    level = {0}
    for _ in range(len(graph) + 1):
        yield from sorted(level)
        level = {
            mask | 1 << vertex
            for mask in level
            for vertex in range(len(graph))
            if not mask >> vertex & 1 and not edges.predecessors[vertex] & ~mask
        }


def pruned_lower_sets(graph: Graph) -> tuple[int, ...]:
    """The family of Sec. 4.3: for each vertex, all that it can be reached from, and itself.

    The empty set and V are added: the first starts every sequence, and with several sinks the
    second is not in the family otherwise (correction 7).

    Returns:
      Distinct masks by ascending size.
    """
    reaching: list[int] = []
    for vertex, predecessors in enumerate(graph.predecessors):
        mask = 1 << vertex
        for predecessor in predecessors:
            mask |= reaching[predecessor]
        reaching.append(mask)
    family = {0, (1 << len(graph)) - 1, *reaching}
    return tuple(sorted(family, key=lambda mask: (mask.bit_count(), mask)))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlockMemory:
    r"""Eq. 2 for one block, term by term, in bytes.

    Attributes:
      cached_bytes: (i) M(U_{i-1}), the caches of the blocks before.
      block_bytes: (ii) 2 M(V_i), values and gradients of the block.
      gradient_bytes: (iii) M(delta-plus(L_i) \ L_i), gradients of later blocks still to be read.
      cache_bytes: (iv) M(delta-minus(delta-plus(L_i)) \ L_i), values of later blocks still to be
        read.
    """

    cached_bytes: int
    block_bytes: int
    gradient_bytes: int
    cache_bytes: int

    @property
    def total_bytes(self) -> int:
        """Eq. 2."""
        return self.cached_bytes + self.block_bytes + self.gradient_bytes + self.cache_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """A canonical strategy and its figures.

    Attributes:
      lower_sets: L_1, ..., L_k = V as tuples of vertices.
      blocks: Eq. 2 for each block.
      peak_bytes: the most that any block takes: the peak without liveness analysis.
      live_peak_bytes: the peak when every array is freed after its last reader.
      paper_overhead_seconds: Eq. 1, which charges the last block.
      overhead_seconds: time of the recomputation as executed, the last block free.
    """

    lower_sets: tuple[tuple[int, ...], ...]
    blocks: tuple[BlockMemory, ...]
    peak_bytes: int
    live_peak_bytes: int
    paper_overhead_seconds: float
    overhead_seconds: float


def check_sequence(graph: Graph, sequence: Sequence[int]) -> None:
    """Raises ValueError unless ``sequence`` is L_1 < ... < L_k = V, all of them lower sets."""
    edges = neighbours(graph)
    for before, after in itertools.pairwise((0, *sequence)):
        if before & ~after or before == after:
            raise ValueError(f"{members(after)} does not strictly contain {members(before)}.")
        if not edges.is_lower(after):
            outside = members(edges.before(after) & ~after)
            raise ValueError(
                f"{members(after)} is not a lower set: it lacks vertex {outside[0]}, which it "
                "needs."
            )
    if not sequence or sequence[-1] != edges.everything:
        raise ValueError("The last lower set of a sequence must hold every vertex.")


def evaluate(graph: Graph, sequence: Sequence[int]) -> Strategy:
    """The figures of the canonical strategy for L_1 < ... < L_k = V, given as bit masks.

    Raises:
      ValueError: ``sequence`` is not an increasing sequence of lower sets that ends in V.
    """
    check_sequence(graph, sequence)
    edges = neighbours(graph)

    def values(mask: int) -> int:
        return sum(graph.bytes[vertex] for vertex in members(mask))

    def gradients(mask: int) -> int:
        return sum(graph.cotangent_bytes[vertex] for vertex in members(mask))

    blocks = []
    forgotten: list[tuple[int, ...]] = []
    cached = previous = 0
    for lower in sequence:
        block = lower & ~previous
        later = edges.after(lower) & ~lower
        blocks.append(
            BlockMemory(  # Eq. 2
                cached_bytes=values(cached),
                block_bytes=values(block) + gradients(block),
                gradient_bytes=gradients(later),
                # delta-plus of L_i, not of L_i's complement (correction 8).
                cache_bytes=values(edges.before(edges.after(lower)) & ~lower),
            )
        )
        boundary = edges.boundary(lower)
        forgotten.append(members(block & ~boundary))
        cached |= boundary  # U_i, the union of d(L_1) ... d(L_i)
        previous = lower

    def seconds(vertices: Iterable[tuple[int, ...]]) -> float:
        return math.fsum(graph.seconds[vertex] for found in vertices for vertex in found)

    return Strategy(
        lower_sets=tuple(members(lower) for lower in sequence),
        blocks=tuple(blocks),
        peak_bytes=max(block.total_bytes for block in blocks),
        live_peak_bytes=_live_peak_bytes(graph, edges, sequence, cached),
        paper_overhead_seconds=seconds(forgotten),  # Eq. 1
        overhead_seconds=seconds(forgotten[:-1]),  # Eq. 1 as executed (correction 6)
    )


def _live_peak_bytes(graph: Graph, edges: Neighbours, sequence: Sequence[int], cached: int) -> int:
    """The peak of the strategy with liveness analysis.

    The gradient of v is computed at the step of v, from the gradients of its readers and from
    everything these read. Every array is freed after its last reader.
    """
    blocks = [members(lower & ~before) for before, lower in itertools.pairwise((0, *sequence))]
    reads = [edges.before(edges.successors[vertex]) for vertex in range(len(graph))]
    live = peak = 0

    # Forward: what is cached stays, and so does the last block, which is never forgotten.
    stays = cached | mask_of(blocks[-1])
    for block in blocks:
        inside = mask_of(block)
        pending = Counter(p for v in block for p in graph.predecessors[v] if inside >> p & 1)
        for vertex in block:
            live += graph.bytes[vertex]
            peak = max(peak, live)
            for read in graph.predecessors[vertex]:
                if inside >> read & 1:
                    pending[read] -= 1
            for done in {vertex, *graph.predecessors[vertex]}:
                if inside >> done & 1 and not pending[done] and not stays >> done & 1:
                    live -= graph.bytes[done]

    # Backward: values are read by the steps that need them, and by recomputation.
    recomputed = [
        tuple(v for v in block if not cached >> v & 1) if position < len(blocks) - 1 else ()
        for position, block in enumerate(blocks)
    ]
    readers = Counter(read for mask in reads for read in members(mask))
    readers.update(p for block in recomputed for v in block for p in graph.predecessors[v])
    gradient_readers = [len(found) for found in graph.predecessors]
    # A value that no backward step reads is not held.
    for vertex in members(stays):
        if not readers[vertex]:
            live -= graph.bytes[vertex]
    for block, again in zip(reversed(blocks), reversed(recomputed), strict=True):
        for vertex in again:
            live += graph.bytes[vertex]
            peak = max(peak, live)
            for read in graph.predecessors[vertex]:
                readers[read] -= 1
                if not readers[read]:
                    live -= graph.bytes[read]
            if not readers[vertex]:
                live -= graph.bytes[vertex]
        for vertex in reversed(block):
            live += graph.cotangent_bytes[vertex]
            peak = max(peak, live)
            for read in members(reads[vertex]):
                readers[read] -= 1
                if not readers[read]:
                    live -= graph.bytes[read]
            for reader in members(edges.successors[vertex]):
                gradient_readers[reader] -= 1
                if not gradient_readers[reader]:
                    live -= graph.cotangent_bytes[reader]
            if not gradient_readers[vertex]:
                live -= graph.cotangent_bytes[vertex]
    assert live == 0, "every array has a last reader"
    return peak


def schedule_of(graph: Graph, sequence: Sequence[int]) -> Schedule:
    """The schedule of the canonical strategy: a region per block, which keeps its boundary.

    The last region is free, as nothing in it is ever forgotten. So is a region that holds a vertex
    with side effects, which must not run twice; the paper has no such vertices.
    """
    check_sequence(graph, sequence)
    edges = neighbours(graph)
    regions = []
    for before, lower in itertools.pairwise((0, *sequence)):
        block = members(lower & ~before)
        free = lower == sequence[-1] or any(graph.pinned[vertex] for vertex in block)
        kept = members(edges.boundary(lower) & ~before)
        regions.append(Region(vertices=block, kept=() if free else kept, checkpointed=not free))
    return Schedule(regions=tuple(regions))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    r"""The terms of a step from each of the earlier lower sets, L, to one of them, L'.

    Attributes:
      inside: whether L is a proper part of L'.
      boundary_bytes: M(d(L') \ L), what the step adds to the caches.
      block_bytes: terms (ii), (iii) and (iv) of Eq. 2.
      forgotten: T(V' \ d(L')), in units.
    """

    inside: np.ndarray
    boundary_bytes: np.ndarray
    block_bytes: np.ndarray
    forgotten: np.ndarray


class Family:
    """Lower sets by ascending size, from the empty one to V, as arrays.

    Attributes:
      masks: the lower sets.
      total: T(V), in units.
    """

    def __init__(self, graph: Graph, masks: Sequence[int], units: Sequence[int]) -> None:
        """Lays out ``masks``, with the time of each vertex in whole ``units``."""
        edges = neighbours(graph)
        self.masks = tuple(masks)
        self.total = sum(units)
        self._values = np.asarray(graph.bytes, dtype=float)
        self._units = np.asarray(units, dtype=float)
        both = self._values + np.asarray(graph.cotangent_bytes, dtype=float)
        self._inside = _rows(self.masks, len(graph))
        self._sizes = self._inside.sum(axis=1)
        self._boundaries = _rows([edges.boundary(mask) for mask in self.masks], len(graph))
        self._block = self._inside @ both
        self._time = self._inside @ self._units
        # Terms (iii) and (iv) depend only on L'.
        later = _rows([edges.after(mask) & ~mask for mask in self.masks], len(graph))
        caches = _rows([edges.before(edges.after(mask)) & ~mask for mask in self.masks], len(graph))
        self._after = later @ (both - self._values) + caches @ self._values

    def __len__(self) -> int:
        return len(self.masks)

    def steps_to(self, target: int) -> Terms:
        """The terms of the steps from lower sets 0, ..., ``target`` - 1 to ``target``."""
        before = self._inside[:target]
        boundary = self._boundaries[target]
        kept = boundary * self._values
        forgettable = boundary * self._units
        # T(V' \ d(L')) = T(L' \ L) - T(d(L')) + T(d(L') & L)
        time = self._time[target] - self._time[:target] - forgettable.sum() + before @ forgettable
        return Terms(
            inside=before @ self._inside[target] == self._sizes[:target],
            boundary_bytes=kept.sum() - before @ kept,
            block_bytes=self._block[target] - self._block[:target] + self._after[target],
            forgotten=time,
        )


def _rows(masks: Sequence[int], count: int) -> np.ndarray:
    width = (count + 7) // 8
    packed = np.frombuffer(
        b"".join(mask.to_bytes(width, "little") for mask in masks), dtype=np.uint8
    ).reshape(len(masks), width)
    return np.unpackbits(packed, axis=1, count=count, bitorder="little").astype(float)


def time_units(graph: Graph, most: int) -> tuple[int, ...]:
    """Each vertex's seconds as whole units, so that sums are exact and tables have few keys.

    Args:
      graph: whose ``seconds`` to count.
      most: the largest total. If the seconds are whole multiples of some power of two and fit, the
        units are exact; else the total is about ``most`` units and each vertex is rounded.
    """
    ratios = [float(second).as_integer_ratio() for second in graph.seconds]
    scale = max(denominator for _, denominator in ratios)  # all are powers of two
    exact = [numerator * (scale // denominator) for numerator, denominator in ratios]
    common = math.gcd(*exact) or 1
    if sum(exact) <= most * common:
        return tuple(number // common for number in exact)
    total = graph.forward_seconds
    return tuple(round(second / total * most) for second in graph.seconds)
