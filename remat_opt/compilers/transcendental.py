"""Transcendental functions whose results compilers store because recomputing is expensive.

Most elementwise results are recomputed inside each kernel that reads them. XLA for CPU never does
so with a transcendental function, and XLA for NVIDIA only with one that takes a few instructions
there, such as an exponential, or the polynomial of an ``erf``. A ``tanh`` that is read forward and
backward, as in a GELU, is stored beside what is made of it. (Unchanged functions, compiled for
h200: without this, a GPT was predicted 5 % too small, ViT-B/16 15 %; with it, both are within 2 %.
With exponentials included, the GPT was 13 % too large. Of layers ``(u * f(u)) @ w``, those with
``erfc``, ``sin``, ``tanh``, ``pow`` and ``atan2`` took 872 MiB, all others 616.)

XLA for TPU recomputes all but ``sin``, ``cos`` and, in bfloat16, ``erfc``, as in an exact GELU. (Of
layers ``(u * f(u)) @ w``, these took 1,600 MiB, and ``sin`` and ``cos`` 2,816 in float32, all
others 832 and 1,536.) In float32 it computes an ``erfc`` again for its derivative, but in the
unchanged function not for products: what these read is stored as well, rounded.

Where such a function runs again for the backward pass, as part of what a product reads, it need not
be stored (``functions_again``): it is computed for the product, and once more for its own
derivative, from what it is made of. For that all of it, from the arrays that it is made of to what
the product reads, is under one more checkpoint. If what the product reads is kept, the function
runs again for its derivative alone.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from remat_opt import costs
from remat_opt.compilers.compiler import Compiler, Rules
from remat_opt.compilers.effects import Effect, Figures, kept_by_name
from remat_opt.compilers.operands import as_operand
from remat_opt.device import Platform
from remat_opt.operation import PRODUCTS, Operation
from remat_opt.program.dataflow import ALIASES, Dataflow, unaliased
from remat_opt.program.record import Program
from remat_opt.schedule import Region, Schedule

if TYPE_CHECKING:
    from remat_opt.compilers.storage import Storage

_DEAR = frozenset(
    "atan2 cbrt cos div erf erfc exp exp2 expm1 log log1p logistic pow rem rsqrt sin sqrt tan "
    "tanh".split()
)
_CHEAP = frozenset("cbrt div erf exp exp2 expm1 log log1p logistic rem rsqrt sqrt tan".split())
#: Those whose derivative reads the result alone.
_FROM_RESULT = frozenset("cbrt exp exp2 expm1 logistic rsqrt sqrt tan tanh".split())
_DEAR_ON: Mapping[Platform, frozenset[str]] = {
    "cpu": _DEAR,
    "cuda": _DEAR - _CHEAP,
    "tpu": frozenset({"cos", "erfc", "sin"}),
}


def dear(platform: Platform) -> frozenset[str]:
    """The primitives whose results are not computed twice."""
    return _DEAR_ON[platform]


def is_dear(operation: Operation, platform: Platform) -> bool:
    """Whether an operation's result is not computed twice."""
    if platform == "tpu" and operation.primitive == "erfc":
        return operation.outputs[0].dtype != "float32"
    return operation.primitive in dear(platform)


def stored(flow: Dataflow, compiler: Compiler) -> set[int]:
    """The results of transcendental functions that are read twice, forward or backward.

    Args:
      flow: of the program.
      compiler: which one it is.
    """
    if not compiler.has("transcendental"):
        return set()
    reads: Counter[int] = Counter()
    found: set[int] = set()
    for index, equation in enumerate(flow.program.equations):
        if flow.is_alias(index):
            continue
        reads.update(flow.reads(index))
        reads.update(flow.derivative_reads(index))
        if is_dear(equation.operation, compiler.device.platform):
            found.update(equation.outputs)
    return {value for value in found if reads[value] > 1}


def twice(program: Program, rules: Rules, *, in_loop: bool = False) -> dict[int, tuple[int, ...]]:
    """What is computed twice in the backward pass, once for a product and once for its derivative.

    Args:
      program: a traced function.
      rules: those about its compiler.
      in_loop: whether it is the body of an opened loop. Its arguments may lie in stacks, and an
        entry would be copied; so what begins at one as large as the result is left out.

    Returns:
      By the equation that makes what a product reads, all equations that compute it from arguments,
      results of products and reductions, and smaller values, in order. One of them is expensive,
      and nothing else reads what they make on the way. It is not a last one whose derivative reads
      what the product reads, which one array serves: computed twice, what that is made of would be
      there beside it. (Least memory for eight steps of Runge and Kutta with ``tanh(x @ w + b)`` on
      h200: 195 MiB, computed twice 307.)
    """
    if not rules.has("functions_again"):
        return {}
    primitives, maker = dear(rules.platform), program.makers()
    if not any(one.operation.primitive in primitives for one in program.equations):
        return {}
    readers = program.readers()
    for value in program.output_values:
        # No equation: none of those that make something on the way.
        readers.setdefault(value, []).append(-1)
    found = {}
    for equation in program.equations:
        if equation.operation.primitive != "dot_general":
            continue
        for read in equation.value_inputs:
            value = unaliased(program, maker, read)
            group = _elementwise(program, maker, readers, value)
            if (
                _is_worth_it([program.equations[i].operation.primitive for i in group], primitives)
                and len(program.equations[group[-1]].outputs) == 1
                and not (in_loop and _begins_at_argument(program, group))
            ):
                found[group[-1]] = group
    return found


def _is_worth_it(group: Sequence[str], dear: Set[str]) -> bool:
    """Whether one of these primitives is expensive, and more than what a product reads waits."""
    *on_the_way, last = group or ("",)
    return not dear.isdisjoint(on_the_way) or last in dear - _FROM_RESULT


def _begins_at_argument(program: Program, group: Sequence[int]) -> bool:
    """Whether elementwise equations read an argument as large as what they make."""
    read = {value for index in group for value in program.equations[index].value_inputs}
    (result,) = program.equations[group[-1]].outputs
    size = program.types[result].bytes
    return any(program.types[one].bytes >= size for one in read.intersection(program.arguments))


def _elementwise(
    program: Program, maker: Mapping[int, int], readers: Mapping[int, Sequence[int]], value: int
) -> tuple[int, ...]:
    """The elementwise equations that make a value, if nothing else reads what they make on the way.

    They begin at arguments, at results of products and reductions, and at what is smaller than the
    value, such as a bias. None if the value is made of anything else.
    """
    types = program.types
    group: set[int] = set()
    last = maker.get(value, -1)
    # From the last equation back: whatever reads an equation comes before it.
    pending = [-last] if last >= 0 else []
    while pending:
        index = -heapq.heappop(pending)
        if index in group:
            continue
        equation = program.equations[index]
        fusion = costs.cost(equation.operation).fusion
        if equation.operation.primitive in PRODUCTS or fusion is costs.Fusion.REDUCTION:
            continue
        if fusion is not costs.Fusion.FUSIBLE and equation.operation.primitive not in ALIASES:
            return ()
        if equation.effects or equation.operation.primitive.startswith("random_"):
            return ()
        if index != last and not all(
            group.issuperset(readers.get(one, ())) for one in equation.outputs
        ):
            return ()
        group.add(index)
        for one in equation.value_inputs:
            if one in maker and types[one].size >= types[value].size:
                heapq.heappush(pending, -maker[one])
    return tuple(sorted(group))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Twice(Effect):
    """What is computed twice is no array on the way, unless a checkpoint keeps it by name.

    Attributes:
      groups: for what a product reads the vertices on the way to it.
      starts: the vertices that it is made of.
      in_loop_too: those of the groups that are written so in the body of an opened loop.
      reads_stacks: whether products read what is kept where it lies, if in a stack.
      in_stacks: whether those that are kept lie in stacks: an entry would be copied.
    """

    groups: Mapping[int, tuple[int, ...]]
    starts: Mapping[int, tuple[int, ...]]
    in_loop_too: frozenset[int]
    reads_stacks: bool
    in_stacks: bool = False

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Leaves them out where all of a group runs again in one region."""
        if schedule.unchanged:
            return
        kept = set(kept_by_name(schedule.regions))
        for leaf in _run_again(schedule.regions):
            there = set(leaf.vertices)
            for last, others in self.groups.items():
                # Where what a product reads is kept, the rest runs again for its derivative alone;
                # if that lies in a stack, only where it need not be copied.
                starts: tuple[int, ...] = ()
                if self.in_stacks and not (self.reads_stacks and last in kept):
                    starts = (last, *self.starts[last])
                unnamed = kept.isdisjoint((*others, *starts))
                alone = not leaf.checkpointed and len(there) == 1 + len(others)
                if last in there and there.issuperset(others) and unnamed and not alone:
                    figures.bytes[list(others)] = 0

    def in_loop(self) -> Effect:
        """The same where what is kept lies in stacks."""
        groups = {one: others for one, others in self.groups.items() if one in self.in_loop_too}
        return dataclasses.replace(self, groups=groups, in_stacks=True)

    def as_written(self) -> Effect:
        """Nothing: only plans compute it twice."""
        return Effect()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operands(Effect):
    """What products read of an expensive function, beside what that is made of, if unchanged.

    Attributes:
      bytes: by the vertices of the latter.
    """

    bytes: Mapping[int, int]

    def change(self, figures: Figures, schedule: Schedule) -> None:
        """Adds it."""
        for vertex, size in self.bytes.items() if schedule.unchanged else ():
            figures.bytes[vertex] += size


def _operands(storage: Storage) -> Iterator[Operands]:
    """The operands that XLA for TPU makes of a float32 ``erfc`` and stores, rounded."""
    flow, compiler = storage.flow, storage.compiler
    if not compiler.has("operands_stored"):
        return
    made: set[int] = set()
    found: dict[int, int] = {}
    for index, equation in enumerate(flow.program.equations):
        operation = equation.operation
        read = made.intersection(flow.reads(index))
        if operation.primitive == "erfc" and not is_dear(operation, "tpu"):
            made.update(equation.outputs)
        elif read and operation.primitive in PRODUCTS:
            for value in read:
                kind = flow.program.types[value]
                size = compiler.buffer_bytes(as_operand(kind))
                found.update((vertex, size) for vertex in storage.holders(value)[-1:])
        elif read and flow.costs[index].fusion is costs.Fusion.FUSIBLE:
            made.update(equation.outputs)
    if found:
        yield Operands(bytes=found)


def _run_again(regions: Sequence[Region], again: bool = False) -> Iterator[Region]:
    """The regions without regions inside that run again."""
    for region in regions:
        if region.inside:
            yield from _run_again(region.inside, again or region.checkpointed)
        elif again or region.checkpointed:
            yield region


def effects(storage: Storage) -> Iterator[Effect]:
    """What depends on the schedule."""
    yield from _twice(storage)
    yield from _operands(storage)


def on_the_way(storage: Storage) -> Iterator[tuple[int, tuple[int, ...], set[int]]]:
    """What is computed ``twice`` where something on the way to it is stored.

    Args:
      storage: what is stored.

    Yields:
      The vertex of what a product reads, the equations that compute it, the vertices on the way.
    """
    program, vertex_of = storage.flow.program, storage.vertex_of
    for last, group in twice(program, storage.compiler.rules).items():
        found = {
            vertex_of[one]
            for index in group[:-1]
            for one in program.equations[index].outputs
            if one in vertex_of
        }
        value = storage.result(last)
        if value in vertex_of and found:
            yield vertex_of[value], group, found


def _twice(storage: Storage) -> Iterator[Twice]:
    """What is computed twice, and so not stored."""
    flow, compiler, vertex_of = storage.flow, storage.compiler, storage.vertex_of
    types = flow.program.types
    groups, starts = {}, {}
    in_loop_too = set()
    for vertex, group, others in on_the_way(storage):
        size = types[storage.result(group[-1])].size
        read = {
            vertex_of[one]
            for index in group
            for one in flow.reads(index)
            if one in vertex_of and types[one].size >= size
        }
        read_backward = {
            vertex
            for index in group
            for one in flow.derivative_reads(index)
            for vertex in storage.holders(one)
        }
        begins_at = read.difference(others)
        if not begins_at <= read_backward:
            # What it begins at waits in its place.
            continue
        groups[vertex] = tuple(sorted(others))
        starts[vertex] = tuple(sorted(begins_at))
        if not _begins_at_argument(flow.program, group):
            in_loop_too.add(vertex)
    if groups:
        yield Twice(
            groups=groups,
            starts=starts,
            in_loop_too=frozenset(in_loop_too),
            reads_stacks=compiler.has("entries_taken"),
        )
