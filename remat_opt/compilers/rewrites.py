"""What ``transform`` must write so that a compiler does as planned, by equation and value.

``transform`` knows how to write each of these, but nothing about compilers. This file says which of
them pay, and where.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from remat_opt.compilers import pooling, product_sums, row_gathers, softmax, turns
from remat_opt.compilers.compiler import Rules
from remat_opt.program.record import Program


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewrites:
    """What to write differently.

    Attributes:
      apart: equations whose constants the compiler must not share.
      waiting: equations whose derivative must not start before their cotangent exists.
      picking: gathers whose gradient should be elementwise, with the dtype they should read.
      whole: equations whose results must be stored as arrays.
      partner: for the first of two summed products, the second.
      biases: for products, the arguments added to them.
      weight_place: for products, the position of the input that is an argument, in some form.
      activations: operands of products that may be computed together with their cotangents.
      ordered: whether no gradient of a product or a bias may be put off.
      before_loops: whether gradients of what follows a loop must exist before it runs backward.
      stored: whether a checkpointed region's outputs must be stored.
      in_turn: whether every product waits until the parts of its weight's gradient from later
        products are added.
    """

    apart: frozenset[int]
    waiting: frozenset[int]
    picking: Mapping[int, str]
    whole: frozenset[int]
    partner: Mapping[int, int]
    biases: Mapping[int, int]
    weight_place: Mapping[int, int]
    activations: Sequence[turns.Activation]
    ordered: bool
    before_loops: bool
    stored: bool
    in_turn: bool


def rewrites(
    program: Program, rules: Rules, *, recomputes: bool, in_branch: bool = False
) -> Rewrites:
    """What pays for a program.

    Args:
      program: a traced function.
      rules: those about the expected compiler. On another one the results are the same, but the
        memory may not be.
      recomputes: whether anything is under a checkpoint.
      in_branch: whether the program is a branch of a ``cond``. XLA for NVIDIA puts off no gradients
        there, and ordering them costs an array as large as the widest layer (16 of 92 MiB).
    """
    ordered = recomputes and not in_branch and rules.has("gradients_in_turn")
    sums = dict(product_sums.stored_sums(program, rules))
    maxima: set[int] = set()
    if rules.has("maxima_stored"):
        maker = program.makers()
        maxima = {maker[one.maxima] for one in softmax.rounded(program, rules)}
    return Rewrites(
        apart=frozenset(
            index
            for index in (pooling.activations(program) if rules.has("zeros_apart") else ())
            if pooling.can_be_kept_apart(program.equations[index].operation)
        ),
        waiting=frozenset(pooling.searches(program) if rules.has("searches_wait") else ()),
        picking=row_gathers.picking(program, rules),
        whole=frozenset({*sums, *maxima}),
        partner={min(pair): max(pair) for pair in sums.values()}
        if rules.has("partners_wait")
        else {},
        biases=product_sums.biases(program) if ordered else {},
        weight_place=turns.weight_places(program) if ordered else {},
        activations=tuple(turns.activations(program, rules)) if ordered else (),
        ordered=ordered,
        before_loops=rules.has("loops_in_turn"),
        stored=rules.has("boundaries_stored"),
        in_turn=rules.has("parts_in_turn"),
    )
