"""Order of gradients: what the products of a step wait for, so that none is put off."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from remat_opt import _jax_internals as internals
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Program
from remat_opt.program.tracing import is_inexact
from remat_opt.transform.barriers import stored
from remat_opt.transform.steps import Rewriting, Step


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ties:
    """What waits for what in a step, by equation.

    Attributes:
      before: arguments that pass a barrier together with the equation's inputs.
      behind: values whose cotangents go on together with those of the equation's outputs.
      after: arguments that pass a barrier together with the equation's outputs.
      inputs: positions of inputs none of whose cotangents goes on before all are computed.
      follows: a value that passes a barrier together with the equation's inputs.
      partners: a product whose inputs pass the barrier together with those of this one.
    """

    before: Mapping[int, frozenset[int]]
    behind: Mapping[int, frozenset[int]]
    after: Mapping[int, frozenset[int]]
    inputs: Mapping[int, tuple[int, ...]]
    follows: Mapping[int, int]
    partners: Mapping[int, int]


def ties(rewriting: Rewriting, step: Step) -> Ties:
    """Finds what waits for what in a step."""
    before, behind = _multiplied_again(rewriting, step)
    for index in rewriting.ways.one_cotangent.intersection(step.equations):
        behind.setdefault(index, frozenset())
    return Ties(
        before=before,
        behind=_with_followers(rewriting, step, _with_biases(rewriting, step, behind)),
        after=_before_starts(rewriting, step),
        inputs=_tied_inputs(rewriting, step),
        follows=_before_draws(rewriting, step),
        partners=_partners(rewriting, before),
    )


def _partners(rewriting: Rewriting, before: Mapping[int, frozenset[int]]) -> dict[int, int]:
    """For products that pass a barrier with arguments, later ones that they are summed with.

    Both read one cotangent, so XLA for NVIDIA computes the parts of their weights' gradients as one
    array. If one of the two were only added in its turn, that of the layer below for instance, the
    array would be there until then, at each step of a recurrent layer.
    """
    return {
        first: second
        for first, second in rewriting.ways.partner.items()
        if first in before and second in before
    }


def _tied_inputs(rewriting: Rewriting, step: Step) -> dict[int, tuple[int, ...]]:
    """For each equation whose gradients must not be put off, the positions of those inputs."""
    ways = rewriting.ways
    found = {}
    for index in step.equations:
        equation = rewriting.program.equations[index]
        product = equation.operation.primitive in PRODUCTS and index not in ways.squares
        if (product and ways.ordered) or index in ways.calls:
            places = [p for p, atom in enumerate(equation.inputs) if atom in rewriting.summed]
            if len(places) > 1:
                found[index] = tuple(places)
    return found


def _with_biases(
    rewriting: Rewriting, step: Step, behind: Mapping[int, frozenset[int]]
) -> dict[int, frozenset[int]]:
    """What to tie to products' outputs, with those biases whose gradients must not be put off.

    Their gradients are small sums that are read only at the end. XLA for NVIDIA would hold a whole
    cotangent until then, unless the sum is part of a kernel that something waits for.
    """
    found = dict(behind)
    if rewriting.ways.ordered:
        for index in step.equations:
            bias = rewriting.ways.biases.get(index)
            outputs = rewriting.program.equations[index].outputs
            if bias in step.inputs and rewriting.summed.issuperset((bias, *outputs)):
                found[index] = found.get(index, frozenset()) | {bias}
    return found


def _with_followers(
    rewriting: Rewriting, step: Step, behind: Mapping[int, frozenset[int]]
) -> dict[int, frozenset[int]]:
    """What to tie to equations' outputs, together with what is read after a loop.

    Then its gradients exist before the loop runs backward. XLA for TPU would compute that of a
    head's weights after the loop, and hold everything it reads until then.
    """
    found = dict(behind)
    for index in _loops(rewriting, step):
        later = [i for i in step.equations if i > index]
        read = {v for i in later for v in step.values_read_by(rewriting.program, i)}
        made = {v for i in later for v in rewriting.program.equations[i].outputs}
        own = rewriting.program.equations[index].outputs
        tied = rewriting.summed.intersection(read).difference(made, own)
        if tied and not rewriting.summed.isdisjoint(own):
            found[index] = found.get(index, frozenset()) | tied
    return found


def _before_starts(rewriting: Rewriting, step: Step) -> dict[int, frozenset[int]]:
    """What passes a barrier with equations' outputs: arguments that the step's next start reads.

    So of several lookups each begins when what is made of the one before it is there, and has its
    gradient before that of the one before it begins. XLA for CPU would look all rows up at once,
    and make the cotangents of all of them at once.
    """
    found: dict[int, frozenset[int]] = {}
    arguments = rewriting.summed.intersection(rewriting.program.arguments)
    last: int | None = None
    for index in step.equations:
        if index in rewriting.ways.starts_in_turn and last is not None:
            read = arguments.intersection(step.values_read_by(rewriting.program, index))
            if read:
                found[last] = found.get(last, frozenset()) | read
        if not rewriting.summed.isdisjoint(rewriting.program.equations[index].outputs):
            last = index
    return found


def _before_draws(rewriting: Rewriting, step: Step) -> dict[int, int]:
    """For draws of random bits, the last product before them, or what the step reads.

    A draw reads a key, and nothing else. XLA for CPU would draw for all layers at once, and hold
    the bits until each is read. Behind the barrier something must read the product as well: XLA
    drops from a barrier what nothing reads.
    """
    found: dict[int, int] = {}
    made = rewriting.summed.intersection(step.inputs).difference(rewriting.program.arguments)
    last = max(made, default=None)
    for index in step.equations:
        if index in rewriting.ways.draws_in_turn and last is not None:
            found[index] = last
        equation = rewriting.program.equations[index]
        outputs = rewriting.summed.intersection(equation.outputs)
        if outputs and equation.operation.primitive in PRODUCTS:
            last = max(outputs)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """A step, and the groups of values that pass a barrier around it.

    Attributes:
      step: the step.
      delayed: a group before it whose cotangents pass none.
      before: a group before it.
      after: groups after it.
    """

    step: Step
    delayed: Sequence[int]
    before: Sequence[int]
    after: Sequence[Sequence[int]]


def in_turn(rewriting: Rewriting, steps: Sequence[Step]) -> Iterator[Turn]:
    """Steps in order, each with the groups of values that pass a barrier before and after it.

    What both a step and later ones read passes a barrier before the later ones, if it has a
    cotangent (``summed``). So the cotangent is summed step by step. XLA would hold every reader's
    contribution, or whatever it is a slice of, until the last has arrived, and then add them all at
    once. Arguments pass the barrier together with what the step passes on: their contributions,
    which nothing else waits for, are added before the step's own turn comes. What a step makes for
    later ones passes a barrier as well where rules say so: each value alone, or all together.
    """
    last_reader = {value: number for number, step in enumerate(steps) for value in step.inputs}
    for number, step in enumerate(steps):
        delayed, before = _in_order(rewriting, steps[number - 1], step) if number else ([], [])
        after = _renewed(rewriting, step, number, last_reader)
        made = [v for v in step.outputs if last_reader.get(v, 0) > number]
        if rewriting.ways.stored and step.checkpointed:
            after[:0] = [[v] for v in made]
        elif rewriting.ways.together and len(made) > 1:
            after[:0] = [made]
        yield Turn(step=step, delayed=delayed, before=before, after=after)


def _renewed(
    rewriting: Rewriting, step: Step, number: int, last_reader: Mapping[int, int]
) -> list[list[int]]:
    """What passes a barrier after a step, group by group, before later steps read it.

    It is what both the step and later steps read, if it has a cotangent. Arguments pass together
    with what the step passes on: their gradients from later steps exist before the step's own turn.
    So do other values where a rule says so, which else pass alone: of two branches that begin at a
    value and end in the loss, the compiler might run the first one first, backward too.
    If the step has a loop, so do all arguments that later steps read.

    Args:
      rewriting: what holds for all steps.
      step: one of them.
      number: its number.
      last_reader: for each value, the number of the last step that reads it.
    """

    def is_read_later(value: int) -> bool:
        return value in rewriting.summed and last_reader.get(value, 0) > number

    arguments = set(rewriting.program.arguments)
    groups = [[value] for value in step.inputs if value not in arguments and is_read_later(value)]
    passed_on = list(filter(is_read_later, step.outputs))
    if groups and passed_on and rewriting.ways.branches_in_turn:
        groups = [[*itertools.chain(*groups), *passed_on]]
    own = arguments if list(_loops(rewriting, step)) else arguments.intersection(step.inputs)
    weights = [v for v in rewriting.program.arguments if v in own and is_read_later(v)]
    if weights:
        groups.append([*weights, *passed_on])
    return groups


def _in_order(rewriting: Rewriting, before: Step, step: Step) -> tuple[list[int], list[int]]:
    """What passes a barrier between two steps, so that what starts in the second waits.

    It is what the second step's starts (``Rewrites.starts``) read, together with something that the
    first passes on. Backward, they have their gradients before it is the first step's turn. But
    those of tables, in which lookups start, wait for nothing: all of a step would be there at once.
    If something starts in the first, all that it passes on is computed before the second runs: the
    end of a tower, too, which only a later step reads. What would be copied to pass a barrier
    (``Rewrites.copied``) does not, if it has no cotangent and the start waits for something else.

    Args:
      rewriting: what holds for all steps.
      before: a step.
      step: the one after it.

    Returns:
      What waits while its cotangents do not, and what waits as its cotangents do.
    """
    starts, program = rewriting.ways.starts, rewriting.program
    passed_on = [value for value in before.outputs if value in rewriting.summed]
    if not (starts and passed_on):
        return [], []
    waited_for = passed_on[-1:] if starts.isdisjoint(before.all_equations()) else passed_on
    read: set[int] = set()
    tables: set[int] = set()
    here = starts.intersection(step.all_equations())
    maker = program.makers() if here else {}
    copied = rewriting.ways.copied - rewriting.summed
    for start in here:
        found = tables if program.equations[start].operation.primitive == "gather" else read
        inputs = step.inputs_for(program, start, maker)
        if not rewriting.summed.isdisjoint(inputs):
            inputs = tuple(v for v in inputs if v not in copied)
        found.update(v for v in inputs if is_inexact(program.types[v]) and v not in waited_for)
    delayed, both = sorted(tables - read), [*sorted(read), *waited_for]
    return ([*delayed, *waited_for] if delayed else []), (both if len(both) > 1 else [])


def _loops(rewriting: Rewriting, step: Step) -> Iterator[int]:
    """The loops of a step before which gradients must exist, if that can be written."""
    if not (rewriting.ways.before_loops and internals.TIES_SCANS):
        return
    for index in step.equations:
        if rewriting.program.equations[index].operation.primitive == "scan":
            yield index
    for inner in step.inside:
        yield from _loops(rewriting, inner)


def _multiplied_again(
    rewriting: Rewriting, step: Step
) -> tuple[dict[int, frozenset[int]], dict[int, frozenset[int]]]:
    """For products of a step, the arguments that other products of it also read.

    They pass a barrier together with the other operand. So, backward, the product adds its part to
    their cotangent before it passes on the other one. XLA would compute the parts of all products,
    such as the steps of a recurrent network, before it adds the first two. An operand without a
    cotangent, such as the batch, would get one there. Then the barrier goes behind the product
    instead, which gets its cotangent only once the later parts are added. XLA for CPU needs both:
    it would compute the parts of a layer whose input nothing waits for, and add them later.

    Returns:
      What to tie to a product's inputs, if an earlier product reads it, and to its outputs, if a
      later one does.
    """
    if not rewriting.ways.parts_added:
        return {}, {}
    program, summed = rewriting.program, rewriting.summed
    arguments = summed.intersection(program.arguments)
    order = [i for i in step.equations if program.equations[i].operation.primitive in PRODUCTS]
    to_inputs: dict[int, frozenset[int]] = {}
    to_outputs: dict[int, frozenset[int]] = {}
    # Tie a product by its inputs if all of them have a cotangent, else by its outputs.
    reads = {i: step.values_read_by(program, i) for i in order}
    by_inputs = {i for i in order if summed.issuperset(reads[i])}
    by_outputs = set(order) if rewriting.ways.in_turn else set(order) - by_inputs
    for indices, tied, found in (
        (order, by_inputs, to_inputs),
        (order[::-1], by_outputs, to_outputs),
    ):
        seen: set[int] = set()
        for index in indices:
            read = arguments.intersection(reads[index])
            if not seen.isdisjoint(read) and index in tied:
                found[index] = read & seen
            seen |= read
    return to_inputs, to_outputs


def with_partner(
    program: Program, partner: int, inputs: Sequence[Any], environment: Mapping[int, Any]
) -> Sequence[Any]:
    """A product's inputs, delayed until those of the product it is summed with exist.

    XLA for NVIDIA would compute the product for all steps of a recurrent layer as soon as the layer
    below is done, and hold the results, or their pieces, until their partners are ready.
    """
    waited_for = set(program.equations[partner].value_inputs).difference(program.arguments)
    if not waited_for <= environment.keys():
        return inputs
    return stored(*inputs, *(environment[value] for value in sorted(waited_for)))[: len(inputs)]
