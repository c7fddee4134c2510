"""What ``transform`` must write so that a compiler does as planned, by equation and value.

``transform`` knows how to write each of these, but nothing about compilers. This file says which of
them pay, and where.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from remat_opt.compilers import (
    draws,
    entry_gathers,
    joins,
    logits,
    pooling,
    product_sums,
    reordered,
    row_gathers,
    softmax,
    squares,
    transcendental,
    turns,
)
from remat_opt.compilers.compiler import Rules
from remat_opt.operation import CHECKPOINTS
from remat_opt.program.record import Program

#: What computes all its cotangents at once, as its user wrote it.
_CALLS = CHECKPOINTS | {"custom_vjp_call"}


class Place(enum.Enum):
    """Where a program runs.

    TOP: by itself.
    ITERATION: in a loop that is opened, under a checkpoint around all of it.
    LOOP: in one, without that.
    BRANCH: in a ``cond`` that is opened.
    """

    TOP = enum.auto()
    ITERATION = enum.auto()
    LOOP = enum.auto()
    BRANCH = enum.auto()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """What to write differently.

    Attributes:
      apart: equations whose constants the compiler is not to share.
      waiting: equations whose derivative must not start before their cotangent is there.
      picking: gathers whose gradient is to be elementwise.
      summing: gathers of one element of each row that are to be sums over rows.
      flat: gathers that are to read their operand as a flat array.
      joined: for products, the concatenation that each reads, if its pieces are to have cotangents
        of their own.
      whole: equations whose results are to be stored as arrays.
      partner: for the first of two products that are summed up the second.
      unmerged: for products that must not be merged with an earlier one, the position of the input
        that both read.
      squares: products of a value with itself.
      symmetric: those of them whose gradient is to be a single product.
      one_cotangent: products whose result is to have one array as its cotangent.
      biases: for products the arguments that are added to them.
      weight_place: for products the place of the input that is an argument, of some form.
      parts_added: whether the parts of a weight's gradient are added one by one.
      ordered: whether no gradient of a product or a bias may be put off.
      calls: checkpoints by hand, and calls with a derivative rule of their own, none of whose
        cotangents may be put off.
      before_loops: whether gradients of what follows a loop must exist before it runs backward.
      twice: by their last, equations that run again once for a product and once for their own
        derivatives.
      stored: whether a checkpointed region's outputs must be stored.
      together: whether a region's outputs must all exist before the next one begins.
      starts: products that read nothing of those before them, and must wait for them all the same.
      copied: arguments that are copied wherever they pass a barrier.
      turned: slices of arguments that are to turn these first, so that the axis along which they
        are taken comes first.
      starts_in_turn: such products and lookups that are to run one by one in a region, as are their
        gradients.
      branches_in_turn: whether what a region and later ones read waits for what it passes on, as do
        its cotangents for one another.
      draws_in_turn: draws of random bits that are to run one by one in a region.
      in_turn: whether every product waits until the parts of its weight's gradient from later
        products are added.
      stacked: whether what waits for the backward pass does so in stacks. What a barrier returns
        would wait there beside what it was given, and forward and backward pass are apart anyway.
    """

    apart: frozenset[int]
    waiting: frozenset[int]
    picking: frozenset[int]
    summing: frozenset[int]
    flat: frozenset[int]
    joined: Mapping[int, joins.Join]
    whole: frozenset[int]
    partner: Mapping[int, int]
    unmerged: Mapping[int, int]
    squares: frozenset[int]
    symmetric: frozenset[int]
    one_cotangent: frozenset[int]
    biases: Mapping[int, int]
    weight_place: Mapping[int, int]
    parts_added: bool
    ordered: bool
    calls: frozenset[int]
    before_loops: bool
    twice: Mapping[int, tuple[int, ...]]
    stored: bool
    together: bool
    starts: frozenset[int]
    copied: frozenset[int]
    turned: frozenset[int]
    starts_in_turn: frozenset[int]
    branches_in_turn: bool
    draws_in_turn: frozenset[int]
    in_turn: bool
    stacked: bool


def rewrites(
    program: Program, rules: Rules, *, recomputes: bool, place: Place = Place.TOP
) -> Rewrites:
    """What pays for a program.

    Args:
      program: a traced function.
      rules: those about the compiler that is expected. On another the results are
        the same, and the memory may not be.
      recomputes: whether anything is under a checkpoint of its own.
      place: where it runs. In a branch XLA for NVIDIA puts off no gradients, and to order them
        costs an array as large as the widest layer (16 of 92 MiB).
    """
    runs_again = place is Place.ITERATION
    ordered = (
        (recomputes or runs_again) and place is not Place.BRANCH and rules.has("gradients_in_turn")
    )
    sums = dict(product_sums.stored_sums(program, rules))
    maxima: set[int] = set()
    if rules.has("maxima_stored"):
        maker = program.makers()
        maxima = {maker[one.maxima] for one in softmax.rounded(program, rules)}
    starts = turns.starts(program)
    scattered = reordered.scattered_entries(program, rules)
    turned = reordered.turned(program, rules, scattered) if recomputes else frozenset[int]()
    return Rewrites(
        apart=frozenset(
            index
            for index in (pooling.activations(program) if rules.has("zeros_apart") else ())
            if pooling.can_be_kept_apart(program.equations[index].operation)
        ),
        waiting=frozenset(pooling.searches(program) if rules.has("searches_wait") else ()),
        picking=row_gathers.picking(program, rules),
        summing=row_gathers.summing(program, rules),
        flat=entry_gathers.flattening(program, rules),
        joined=joins.joins(program) if rules.has("pieces_apart") else {},
        whole=frozenset({*sums, *maxima}),
        partner={min(pair): max(pair) for pair in sums.values()}
        if rules.has("partners_wait")
        else {},
        unmerged=_unmerged(program, rules, ordered=ordered),
        squares=frozenset(index for index, _ in squares.squares(program))
        if ordered
        else frozenset(),
        symmetric=squares.once(program, rules),
        one_cotangent=logits.one_cotangent(program, rules),
        biases=product_sums.biases(program) if ordered else {},
        weight_place=turns.weight_places(program) if ordered else {},
        parts_added=rules.has("parts_added"),
        ordered=ordered,
        calls=frozenset(
            index
            for index, equation in enumerate(program.equations)
            if equation.operation.primitive in _CALLS
        )
        if rules.has("calls_in_turn")
        else frozenset(),
        before_loops=rules.has("loops_in_turn"),
        twice=transcendental.twice(program, rules, in_loop=place in (Place.ITERATION, Place.LOOP))
        if recomputes or runs_again
        else {},
        stored=rules.has("boundaries_stored"),
        together=rules.has("outputs_together"),
        starts=starts if recomputes and rules.has("starts_wait") else frozenset(),
        turned=frozenset(
            index
            for index, equation in enumerate(program.equations if turned else ())
            if not turned.isdisjoint(equation.outputs)
        ),
        copied=frozenset(argument for entry, argument in scattered.items() if entry not in turned),
        starts_in_turn=starts if rules.has("starts_in_turn") else frozenset(),
        branches_in_turn=rules.has("branches_in_turn"),
        draws_in_turn=draws.draws(program) if rules.has("draws_in_turn") else frozenset(),
        in_turn=rules.has("parts_in_turn"),
        stacked=place is Place.LOOP,
    )


def _unmerged(program: Program, rules: Rules, *, ordered: bool) -> dict[int, int]:
    found = turns.unmerged(program) if ordered and rules.has("products_apart") else {}
    return found | dict.fromkeys(squares.apart(program, rules), 1)
