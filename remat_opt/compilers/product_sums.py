"""Matrix products and convolutions, and the sums of two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from remat_opt.compilers.compiler import Rules
from remat_opt.operation import PRODUCTS
from remat_opt.program.record import Program

#: Operations after which a value is still the product, or a part of it.
_PARTS = frozenset({"convert_element_type", "reshape", "slice", "split", "squeeze", "unstack"})
#: Operations after which a value is still a bias.
_SHAPED = frozenset({"broadcast_in_dim", "convert_element_type", "reshape"})
_SUMS = frozenset({"add", "add_any", "sub"})


def shaped(program: Program, values: Iterable[int]) -> set[int]:
    """The values, and everything that is only these in another type or shape, or literals."""
    found = set(values)
    for equation in program.equations:
        if equation.operation.primitive in _SHAPED and found.issuperset(equation.value_inputs):
            found.update(equation.outputs)
    return found


def biases(program: Program) -> dict[int, int]:
    """For equations that make products, the smaller argument added to each."""
    made = {
        equation.outputs[0]: index
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive in PRODUCTS
    }
    argument_of = {value: value for value in program.arguments}
    found: dict[int, int] = {}
    for equation in program.equations:
        primitive, read = equation.operation.primitive, equation.value_inputs
        if primitive in _SHAPED and len(read) == 1 and read[0] in argument_of:
            argument_of[equation.outputs[0]] = argument_of[read[0]]
        elif primitive in _PARTS and len(read) == 1 and read[0] in made:
            made.update(dict.fromkeys(equation.outputs, made[read[0]]))
        elif primitive == "add":
            of = [made[value] for value in read if value in made]
            added = [argument_of[value] for value in read if value in argument_of]
            size = program.types[equation.outputs[0]].size
            if len(of) == len(added) == 1 and program.types[added[0]].size < size:
                found.setdefault(of[0], added[0])
    return found


def stored_sums(program: Program, rules: Rules) -> Iterator[tuple[int, tuple[int, int]]]:
    """Each sum of two products that only such sums read, as in the gates of a recurrent cell.

    Between a product and the sum there may be a bias, or a split into gates. XLA for NVIDIA
    computes such a sum in whatever reads it, in the backward pass too, and stores both products for
    that (in parts, if it has split their contraction). ``transform`` makes it store the sum.
    Backward, both products read one cotangent, and XLA merges the two products that give the
    gradients of their weights. Other compilers are not known to do so.

    Returns:
      The number of the sum's equation, and those of the products, in the order they are read.
    """
    if not rules.has("product_sums"):
        return
    made = {
        equation.outputs[0]: index
        for index, equation in enumerate(program.equations)
        if equation.operation.primitive in PRODUCTS
    }
    biases = shaped(program, program.arguments)
    sums: dict[int, tuple[int, int]] = {}
    # Products that something else reads.
    others: set[int] = set()
    for index, equation in enumerate(program.equations):
        primitive, read = equation.operation.primitive, equation.value_inputs
        of = [made[value] for value in read if value in made]
        if not of:
            continue
        if primitive in _SUMS and len(read) == 2 and len(set(of)) == 2:
            sums[index] = of[0], of[1]
        elif (primitive in _PARTS and len(of) == 1) or (
            primitive in _SUMS and len(of) == 1 and biases.issuperset(set(read) - made.keys())
        ):
            made.update(dict.fromkeys(equation.outputs, of[0]))
        else:
            others.update(of)
    others.update(made[value] for value in program.output_values if value in made)
    # If a sum does not count, its other product is also read by something else.
    while spoilt := [index for index, pair in sums.items() if not others.isdisjoint(pair)]:
        for index in spoilt:
            others.update(sums.pop(index))
    yield from sums.items()


def sums_in_products(program: Program) -> dict[int, int]:
    """For the results of products that are only added to other products, the sums they go into.

    XLA for TPU adds to a product what was summed before it as it writes the product, and stores
    only the sum. So in a sum of many, each product but the first writes the sum so far. A bias, a
    conversion or a reshape may come between a product and the sum.
    """
    reads = Counter(program.output_values)
    for equation in program.equations:
        reads.update(equation.value_inputs)
    given = shaped(program, program.arguments)
    #: For each value that is a product, or a sum of products, the products that write it.
    writers: dict[int, tuple[int, ...]] = {}
    sums: set[int] = set()
    found: dict[int, int] = {}
    for equation in program.equations:
        primitive = equation.operation.primitive
        read = [value for value in equation.value_inputs if value not in given]
        if primitive in PRODUCTS:
            writers[equation.outputs[0]] = (equation.outputs[0],)
        elif (
            read
            and (primitive in _SUMS or primitive in _SHAPED - {"broadcast_in_dim"})
            and all(value in writers and reads[value] == 1 for value in read)
        ):
            # Of two sums the later one is not stored by itself.
            new = [value for value in read if value not in sums] or [max(read)]
            written = tuple(product for value in new for product in writers[value])
            (result,) = equation.outputs
            writers[result] = written
            if len(read) > 1:
                found.update(dict.fromkeys(written, result))
            if len(read) > 1 or not sums.isdisjoint(read):
                sums.add(result)
    return found
