"""What one link of a chain takes: the figures that a dynamic program over links adds up.

Problem. A link is a run of vertices after which only the last one's value, its state, is read. Say
how much memory and time it takes in each way it can be run: in the first forward pass or again;
for its state alone, saved for its backward step with more links to come, or saved and run
backward at once.

Method. The simulator's rules, applied to the link alone. A value is freed after its last reader in
the link, unless the backward steps read it; the state before the link is counted separately, since
the caller decides whether it stays. What is not needed does not run again.

Why not a ready-made tool: the simulator replays whole schedules; here each link is looked at once
and counted in many.

Complexity: linear in the vertices and edges of the link, and its cotangents once per step.

Guarantee: on a link of one vertex whose backward step reads its own value and the state before it,
the simulator's figures to the byte; otherwise never less.

Left out: keeping part of a link.

Reference: none; the rules are those of ``simulator``.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Sequence

from remat_opt.graph import Graph


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One way of running a link forward.

    Attributes:
      bytes: most memory, without the state before the link.
      bytes_with_input: the same with that state, which is freed after its last reader.
      seconds: the time charged.
    """

    bytes: int
    bytes_with_input: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The figures of a link.

    Attributes:
      state_bytes: the value it ends in.
      waiting_bytes: cotangent of that value, made by the backward steps after the link.
      held_bytes: what it holds once saved, with its own state but not the one before it.
      backward_bytes: most memory of its backward steps, without the state before it.
      first: run in the forward pass, nothing saved.
      first_saved: run in the forward pass and saved.
      again: run again for its state alone.
      again_saved: run again and saved, with more links to come.
      again_last: run again and saved, its backward step next.
      pinned: whether it must run exactly once.
    """

    state_bytes: int
    waiting_bytes: int
    held_bytes: int
    backward_bytes: int
    first: Run
    first_saved: Run
    again: Run
    again_saved: Run
    again_last: Run
    pinned: bool


def measure(graph: Graph, vertices: range, readers: Sequence[int]) -> Link:
    """The figures of one link, by the referee's rules.

    Args:
      graph: what to plan.
      vertices: those of the link.
      readers: the vertices that read its state.
    """
    state = vertices[-1]
    saved = {needed for vertex in vertices for needed in graph.needs[vertex] if needed in vertices}
    internal = sum(graph.internal_bytes[vertex] for vertex in vertices)
    running = _reached(graph, vertices, [state])
    with_internal = [vertex for vertex in vertices if graph.internal_bytes[vertex]]
    tape = _reached(graph, vertices, [*saved, *with_internal])

    def run(chosen: Collection[int], *, save: bool, charged: bool) -> Run:
        bytes_, with_input = (
            _run_bytes(graph, vertices, chosen, saved if save else (), save, counted)
            for counted in (False, True)
        )
        seconds = math.fsum(graph.seconds[vertex] for vertex in chosen) if charged else 0.0
        return Run(bytes=bytes_, bytes_with_input=with_input, seconds=seconds)

    waits = any(graph.cotangent_bytes[reader] for reader in readers)
    return Link(
        state_bytes=graph.bytes[state],
        waiting_bytes=graph.cotangent_bytes[state] if waits else 0,
        held_bytes=sum(graph.bytes[vertex] for vertex in saved | {state}) + internal,
        backward_bytes=_backward_bytes(graph, vertices, saved, waits),
        first=run(vertices, save=False, charged=False),
        first_saved=run(vertices, save=True, charged=False),
        again=run(running, save=False, charged=True),
        again_saved=run(running | tape, save=True, charged=True),
        again_last=run(tape, save=True, charged=True),
        pinned=any(graph.pinned[vertex] for vertex in vertices),
    )


def _reached(graph: Graph, vertices: range, wanted: Sequence[int]) -> frozenset[int]:
    """What must run for the wanted vertices, within the link."""
    pending, reached = list(wanted), set[int]()
    while pending:
        vertex = pending.pop()
        if vertex in vertices and vertex not in reached:
            reached.add(vertex)
            pending += graph.predecessors[vertex]
    return frozenset(reached)


def _run_bytes(
    graph: Graph,
    vertices: range,
    chosen: Collection[int],
    saved: Collection[int],
    with_internal: bool,
    with_input: bool,
) -> int:
    """Most memory while ``chosen`` run forward and ``saved`` stay."""
    readers = Counter(p for vertex in chosen for p in graph.predecessors[vertex])
    entry = vertices[0] - 1
    counted = [vertex for vertex in (entry,) if with_input and vertex >= 0]
    live = sum(graph.bytes[vertex] for vertex in counted)
    most = live
    for vertex in sorted(chosen):
        live += graph.bytes[vertex] + (graph.internal_bytes[vertex] if with_internal else 0)
        # A vertex with a workspace runs exactly once.
        most = max(most, live + graph.forward_workspace_bytes[vertex])
        readers.subtract(graph.predecessors[vertex])
        for read in (*graph.predecessors[vertex], vertex):
            if not readers[read] and read not in saved and (read != entry or with_input):
                live -= graph.bytes[read]
    return most


def _backward_bytes(graph: Graph, vertices: range, saved: Collection[int], waits: bool) -> int:
    """Most memory of the backward steps of a link, with or without its cotangent."""
    sizes = graph.cotangent_bytes
    readers = Counter(n for vertex in vertices for n in graph.needs[vertex])
    live = sum(graph.bytes[vertex] for vertex in saved)
    live += sum(graph.internal_bytes[vertex] for vertex in vertices)
    cotangents = {vertices[-1]: sizes[vertices[-1]]} if waits else {}
    most = live + sum(cotangents.values())
    for vertex in reversed(vertices):
        if sizes[vertex]:
            if graph.turns_in_place(vertex):
                cotangents.pop(vertex, None)
            else:
                cotangents[vertex] = sizes[vertex]
            cotangents.update((read, sizes[read]) for read in graph.predecessors[vertex])
            most = max(most, live + sum(cotangents.values()) + graph.workspace_bytes[vertex])
        cotangents.pop(vertex, None)
        live -= graph.internal_bytes[vertex]
        readers.subtract(graph.needs[vertex])
        live -= sum(graph.bytes[n] for n in graph.needs[vertex] if n in saved and not readers[n])
    return most
