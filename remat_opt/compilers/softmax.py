"""Softmax in float32 whose weights a product reads in bfloat16: attention in mixed precision.

If the weights are rounded, XLA for TPU stores the exponentials, beside the scores, which stay until
all exponentials are computed. From then on only the exponentials are read, also backward. What the
product's gradient writes is as narrow as the weights, and everything after it, up to the products
that made the scores, is computed as those read it. (If the weights are not rounded, only the scores
are stored, and a cotangent as wide as they are.)

If the row maxima are separate arrays, there is only one large array, of scores or exponentials:
whatever reads the others computes them. So ``transform`` stores the maxima wherever they are
computed. A GPT of three layers then takes 2,217 MiB on v5e instead of 2,632, and 904 instead of
1,144 with every layer under a checkpoint; the maxima are 1 MiB.

No checkpoint keeps these row statistics there. They are written above the scores while those
exist, and as long as they are kept they split the free memory around them. Twelve layers take 1,562
MiB with maxima kept under one checkpoint for every two or three layers, 1,162 without; with an
update of donated parameters in the same program, 1,568 and 1,214.

Scores that a product writes in bfloat16 wait themselves on TPU, and no barrier is needed, if they
are only widened. If they are masked or scaled in float32, the exponentials wait, twice as large.

XLA for NVIDIA stores the exponentials if the scores are narrower than they are, as those of a
product in bfloat16 that are widened for the softmax: then it is they that wait for the backward
pass, and take twice the bytes of the scores. Scores that a product writes in float32 wait
themselves. (Three layers of 8 heads and 1,024 tokens on h200: 712 and 792 MiB; with a softmax in
bfloat16 517.)

Where exponentials are cheaper to compute again than to read, it keeps the narrow scores instead.
Its estimate compares memory traffic with the work of a block of threads, which takes a power of
two of a row's elements, so it depends on the device. Seen with causal attention, by bytes of
bandwidth for each core and cycle (A100 13, H100 13, H200 18, B200 28): never stored for A100,
always for B200, and for H200 if there are fewer than 512 rows for each core or rows are no power
of two long. (h200, two layers: 65 x 1,024 rows of 1,024 take 1,000 MiB, 66 x 1,024 take 752.) For
H100 a few rows that are no power of two long are stored, which is not modelled.

Likewise it stores what a ``log_softmax`` exponentiates, the logits minus the maximum of their row,
if labels' elements are gathered from the result and a row fits into one block of threads. (4,096
rows of 8,192 bfloat16 logits and their loss: 204 MiB, 140 if the loss is a ``logsumexp`` minus
labels' logits, as in optax.) If no gradient reaches the logits, as in distillation those of the
teacher, one kernel computes the whole ``log_softmax``, and the result is stored, whatever is done
with it. XLA for TPU stores it of logits that are as wide, whatever is done with the result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from remat_opt.compilers.compiler import Rules
from remat_opt.compilers.row_gathers import is_row_gather
from remat_opt.compilers.transcendental import dear
from remat_opt.device import Device, GpuTarget
from remat_opt.operation import ArrayType
from remat_opt.program.record import Equation, Program

#: Operations after which a value is still the weights: exponentials divided, masked, rounded.
_WEIGHTS = frozenset(
    "convert_element_type div mul name reduce_precision reshape select_n transpose".split()
)
#: Operations after which a value is still a row's maximum, or minus infinity if it has none.
_MAXIMUM = frozenset(
    "broadcast_in_dim convert_element_type max reshape select_n stop_gradient".split()
)
#: The longest rows that a kernel normalises at once, by platform.
_LONGEST_ROWS = {"cuda": 16384, "tpu": 8192}
#: From so many rows for each core on, cores are never idle.
_ROWS_OF_CORE = 512
#: Bytes of memory traffic for each core and cycle from which on exponentials are stored, with fewer
#: rows than that and with as many.
_FAST_MEMORY, _FASTER_MEMORY = 18.0, 21.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Softmax:
    """A softmax between two products.

    Attributes:
      maxima: the largest score of each row.
      sums: of each row's exponentials.
      exponentials: the value that is summed and divided.
      waiting: what is stored for the backward pass: the exponentials, or the result of an expensive
        function that they are computed from.
      weights: what becomes of it, which the product reads.
    """

    maxima: int
    sums: int
    exponentials: int
    waiting: int
    weights: int


def rounded(program: Program, rules: Rules) -> Iterator[Softmax]:
    """Each softmax whose weights are narrower than its exponentials when products read them.

    For XLA for NVIDIA those whose scores are narrower, too, for XLA for TPU all but those whose
    scores are only widened; none for XLA for CPU.
    """
    narrow = rules.has("scores_widened")
    if not (narrow or rules.has("softmax")):
        return
    maker, readers = program.makers(), program.readers()
    arrays = {"dot_general", *(dear(rules.platform) if rules.has("transcendental") else ())}
    for equation, maxima in _exponentials(program, maker):
        (exponentials,) = equation.outputs
        if narrow:
            waiting = _waiting(program, exponentials, maker, arrays)
        else:
            scores = _origin(program, exponentials, maker, {"dot_general"})
            subtracted_from, came_as = _as_they_came(program, equation, maker)
            is_widened = _is_narrower(program, scores, exponentials) and subtracted_from != came_as
            waiting = None if is_widened else exponentials
        if waiting is None:
            continue
        if sums := list(_sums(program, exponentials, readers)):
            for weights in _narrower(program, exponentials, readers):
                yield Softmax(
                    maxima=maxima,
                    sums=sums[0],
                    exponentials=exponentials,
                    waiting=waiting,
                    weights=weights,
                )


def exponentials(program: Program) -> Iterator[int]:
    """Those of each softmax."""
    for equation, _ in _exponentials(program, program.makers()):
        yield equation.outputs[0]


def scores(program: Program) -> set[int]:
    """What products write that exponentials are computed from, element by element."""
    maker = program.makers()
    found = (
        _origin(program, equation.outputs[0], maker, {"dot_general"})
        for equation, _ in _exponentials(program, maker)
    )
    return {value for value in found if value is not None}


def is_computed_again(kind: ArrayType, device: Device) -> bool:
    """Whether exponentials are computed again for the backward pass, from narrower scores.

    Args:
      kind: of the exponentials; the last axis is summed.
      device: what is compiled for.
    """
    target = device.target
    if not isinstance(target, GpuTarget):
        return False
    length = kind.shape[-1]
    block = 1 << (length - 1).bit_length()
    traffic = device.memory_bandwidth / (target.core_count * target.clock_hertz) * block / length
    few = kind.size // length < _ROWS_OF_CORE * target.core_count
    return traffic < (_FAST_MEMORY if few else _FASTER_MEMORY)


def shifted(program: Program, rules: Rules, active: Set[int]) -> Iterator[tuple[int, int]]:
    """What each ``log_softmax`` exponentiates, if it is stored, and the logits as they came.

    Args:
      program: a traced function.
      rules: those about the compiler.
      active: the values that gradients reach.
    """
    if not rules.has("logits_shifted"):
        return
    maker, readers = program.makers(), program.readers()
    for equation, _ in _exponentials(program, maker):
        (value,) = equation.value_inputs
        _, logits = _as_they_came(program, equation, maker)
        if program.types[value].shape[-1] > _LONGEST_ROWS[rules.platform]:
            continue
        if rules.platform == "tpu":
            wide = program.types[logits].bytes >= program.types[value].bytes
            found = wide and is_subtracted_from(program, value, readers)
        elif value not in active:
            found = is_subtracted_from(program, value, readers)
        else:
            found = is_picked_from(program, value, maker, readers)
        if found:
            yield value, logits


def summed(program: Program) -> Iterator[tuple[int, int]]:
    """Products whose results' exponentials are only summed, as those of a cross-entropy.

    Between a product and the exponentials there may be a bias, a conversion or a mask.

    Returns:
      The number of the product's equation, and what is exponentiated.
    """
    maker, readers = program.makers(), program.readers()
    for equation, _ in _exponentials(program, maker):
        (exponentials,), (shifted,) = equation.outputs, equation.value_inputs
        reading = {program.equations[index].operation.primitive for index in readers[exponentials]}
        logits = _origin(program, exponentials, maker, {"dot_general"})
        if logits is not None and reading == {"reduce_sum"}:
            yield maker[logits], shifted


def is_subtracted_from(program: Program, value: int, readers: Mapping[int, Sequence[int]]) -> bool:
    """Whether something is subtracted from a value, as in a ``log_softmax``."""
    reading = (program.equations[index] for index in readers.get(value, ()))
    return any(one.operation.primitive == "sub" and one.inputs[0] == value for one in reading)


def is_picked_from(
    program: Program, value: int, maker: Mapping[int, int], readers: Mapping[int, Sequence[int]]
) -> bool:
    """Whether elements of rows are gathered from a value minus something of its rows."""
    size = program.types[value].size
    pending = [value]
    while pending:
        for index in readers.get(pending.pop(), ()):
            equation = program.equations[index]
            if is_row_gather(program, maker, equation):
                return True
            if equation.operation.primitive in {"reshape", "sub"}:
                pending += [one for one in equation.outputs if program.types[one].size == size]
    return False


def _exponentials(program: Program, maker: Mapping[int, int]) -> Iterator[tuple[Equation, int]]:
    """The exponentials of scores minus the maximum of their row, with the maxima."""
    for equation in program.equations:
        if equation.operation.primitive == "exp":
            maxima = _maxima(program, equation, maker)
            if maxima is not None:
                yield equation, maxima


def _maxima(program: Program, equation: Equation, maker: Mapping[int, int]) -> int | None:
    """The row maxima, if an exponential is of scores minus the maximum of their row."""
    (operand,) = equation.inputs
    if not isinstance(operand, int) or operand not in maker:
        return None
    difference = program.equations[maker[operand]]
    if difference.operation.primitive != "sub" or len(difference.value_inputs) != 2:
        return None
    scores, subtracted = difference.value_inputs
    pending = [subtracted]
    while pending:
        value = pending.pop()
        if value not in maker:
            continue
        found = program.equations[maker[value]]
        if found.operation.primitive == "reduce_max":
            (reduced,) = found.value_inputs
            if _unmasked(program, reduced, maker) == _unmasked(program, scores, maker):
                return found.outputs[0]
            return None
        if found.operation.primitive in _MAXIMUM:
            pending += found.value_inputs
    return None


def _unmasked(program: Program, value: int, maker: Mapping[int, int]) -> int:
    """What a value is where no mask replaces it by a constant."""
    while value in maker and program.equations[maker[value]].operation.primitive == "select_n":
        chosen = [
            one
            for one in program.equations[maker[value]].inputs[1:]
            if isinstance(one, int) and not _is_constant(program, one, maker)
        ]
        if len(chosen) != 1:
            break
        (value,) = chosen
    return value


def _is_constant(program: Program, value: int, maker: Mapping[int, int]) -> bool:
    """Whether a value is one number everywhere."""
    if value not in maker:
        return False
    equation = program.equations[maker[value]]
    return equation.operation.primitive == "broadcast_in_dim" and not any(
        program.types[one].size > 1 for one in equation.value_inputs
    )


def _sums(
    program: Program, exponentials: int, readers: Mapping[int, Sequence[int]]
) -> Iterator[int]:
    """The sums of some exponentials, perhaps of those that a mask leaves."""
    for index in readers.get(exponentials, ()):
        equation = program.equations[index]
        if equation.operation.primitive == "reduce_sum":
            yield equation.outputs[0]
        elif equation.operation.primitive == "select_n":
            for one in readers.get(equation.outputs[0], ()):
                if program.equations[one].operation.primitive == "reduce_sum":
                    yield program.equations[one].outputs[0]


def _waiting(
    program: Program, exponentials: int, maker: Mapping[int, int], arrays: Collection[str]
) -> int | None:
    """What is stored of a softmax on a GPU, if not just what a product writes.

    Args:
      program: a traced function.
      exponentials: those of the softmax.
      maker: what makes each value.
      arrays: the operations whose results are arrays.
    """
    origin = _origin(program, exponentials, maker, arrays)
    if origin is None:
        return None
    if _is_narrower(program, origin, exponentials):
        return exponentials
    is_product = program.equations[maker[origin]].operation.primitive == "dot_general"
    return None if is_product else origin


def _as_they_came(
    program: Program, equation: Equation, maker: Mapping[int, int]
) -> tuple[int, int]:
    """The scores that maxima are subtracted from for some exponentials, and before a conversion."""
    (difference,) = equation.value_inputs
    scores = program.equations[maker[difference]].value_inputs[0]
    made = program.equations[maker[scores]] if scores in maker else None
    if made is not None and made.operation.primitive == "convert_element_type":
        return scores, made.value_inputs[0]
    return scores, scores


def _is_narrower(program: Program, scores: int | None, exponentials: int) -> bool:
    """Whether an array of scores, if there is one, takes less than their exponentials."""
    return scores is not None and program.types[scores].bytes < program.types[exponentials].bytes


def _origin(
    program: Program, value: int, maker: Mapping[int, int], arrays: Collection[str]
) -> int | None:
    """The array that a value is computed from, element by element."""
    equations = (program.equations[maker[one]] for one in behind(program, value, maker))
    return next((one.outputs[0] for one in equations if one.operation.primitive in arrays), None)


def behind(program: Program, value: int, maker: Mapping[int, int]) -> Iterator[int]:
    """A computed value, and those of its size that it is computed from.

    Args:
      program: a traced function.
      value: one that an equation makes.
      maker: what makes each value.
    """
    size = program.types[value].size
    pending, seen = [value], {value}
    while pending:
        made = pending.pop()
        yield made
        for one in program.equations[maker[made]].value_inputs:
            if one in maker and one not in seen and program.types[one].size == size:
                seen.add(one)
                pending.append(one)


def _narrower(
    program: Program, exponentials: int, readers: Mapping[int, Sequence[int]]
) -> Iterator[int]:
    """What products read of some exponentials, if it is narrower than they are."""
    full = program.types[exponentials]
    pending, seen = [exponentials], {exponentials}
    while pending:
        weights = pending.pop()
        reading = [program.equations[index] for index in readers.get(weights, ())]
        primitives = {equation.operation.primitive for equation in reading}
        if "dot_general" in primitives and program.types[weights].bytes < full.bytes:
            yield weights
        for equation in reading:
            if equation.operation.primitive in _WEIGHTS:
                for value in equation.outputs:
                    if value not in seen and program.types[value].size == full.size:
                        seen.add(value)
                        pending.append(value)
