"""Whether recomputation survived the compiler, from two texts of one program.

The first text is the program as asked for, before any pass. The second is what the compiler made of
it, with instructions in execution order. JAX writes ``rematted_computation`` into the name of
everything that a ``jax.checkpoint`` computes again, and every compiler carries these names along.
So we can find three things:

*   *Merged*: products that are missing. A compiler fuses, splits and renames, but a product of
    matrices or a convolution stays one, on CPU, GPU and TPU alike; where a recomputed one is gone,
    the compiler took it for the one that it repeats, whose result then waits in memory.
*   *Early*: recomputed values that wait while products of the forward pass run. They are computed
    again, but long before the backward pass asks for them, and take the memory that was to be
    saved.
*   The compiler's own rematerialisation, which XLA does where memory runs out: its copies carry
    ``.remat`` in their names.

Doubtful cases are not reported. Products with a vector are left out, since compilers turn them into
sums. If other products are missing too (the program has them twice, or the compiler makes one large
product of several with a common factor), as many recomputed ones may be missing for the same
reason; and a product without a name may be one of them. If a compiler unrolls a loop, this hides
what is missing elsewhere. We say which products were merged if their names show it; the layers of a
loop share one.
"""

from __future__ import annotations

import bisect
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from remat_opt.measurement.hlo_text import Instruction, Module, read_program
from remat_opt.measurement.shares import module_and_label
from remat_opt.recomputation import MOST_PLACES, Recomputation
from remat_opt.scopes import AGAIN, BACKWARD

#: Found in the names of the copies that XLA's own rematerialisation makes.
_OWN = ".remat"

#: Opcodes that make no value, but pass one on.
_HANDING_ON = frozenset(
    "bitcast copy copy-done copy-start get-tuple-element opt-barrier tuple".split()
)

# StableHLO.
_FUNCTION = re.compile(r'\s*func\.func .*?@"?(?P<name>[^"(]+)"?\(')
_ASKED = re.compile(
    r'(?:^ *| = )"?(?:(?:stablehlo\.dot_general|stablehlo\.convolution|chlo\.ragged_dot)\b'
    r'|(?:func\.)?call @"?(?P<called>[^"(]+))'
)
_CONTRACTED = re.compile(r"contracting_dims = \[([\d, ]*)\] x \[([\d, ]*)\]")
_BATCHED = re.compile(r"batching_dims = \[([\d, ]*)\] x \[([\d, ]*)\]")
_OPERANDS = re.compile(r": \(tensor<([^>]*)>, tensor<([^>]*)>\)")
_PLACE = re.compile(r"loc\((#loc\d*)\)$")
_LOCATION = re.compile(r'^(#loc\d*) = loc\("([^"]*)"', re.MULTILINE)


def survival(asked: str, compiled: str) -> Recomputation | None:
    """Compares a program as asked for with what the compiler made of it.

    Args:
      asked: StableHLO text with locations, as ``lowered.as_text(debug_info=True)`` gives it.
      compiled: HLO text of the scheduled program, as ``compiled.as_text()`` gives it.

    Returns:
      What happened to the recomputation; None if there is none, not even the compiler's own.
    """
    if AGAIN not in asked and _OWN not in compiled:
        return None
    before, after = _asked(asked), read_program(compiled)
    asked_names, compiled_names = _product_names(before), _product_names(after)
    wanted, found = Counter(map(_kind, asked_names)), Counter(map(_kind, compiled_names))
    missing = wanted["again"] - found["again"]
    doubtful = found["unnamed"] + max(0, wanted["other"] - found["other"])
    merged = max(0, missing - doubtful)
    gone = _recomputed_places(asked_names) - _recomputed_places(compiled_names)
    own = _compilers_own(after)
    return Recomputation(
        asked_products=wanted["again"],
        compiled_products=wanted["again"] - merged,
        early_values=_early(after),
        compiler_values=len(own),
        merged=tuple(gone)[:MOST_PLACES] if gone.total() == merged else (),
        not_kept=tuple(dict.fromkeys(filter(None, own)))[:MOST_PLACES],
    )


def _recomputed_places(names: Sequence[str]) -> Counter[str]:
    """Where the recomputed ones among some products are, each as often as it occurs."""
    return Counter(_place(name) for name in names if _kind(name) == "again")


def _place(name: str) -> str:
    """What a name refers to, in words.

    >>> _place("jit(step)/jvp(Net)/Block_0/dot_general")
    'matrix product in Net/Block_0'
    """
    name = "/".join(name.split())
    if AGAIN in name:
        # The callers come first, and this name repeats theirs.
        name = AGAIN + name.rpartition(AGAIN)[2]
    module, label = module_and_label(name)
    return f"{label} in {module}" if module else label


def _asked(text: str) -> Module:
    """Products and calls of a StableHLO text; only their number matters."""
    locations = dict(_LOCATION.findall(text))
    functions: dict[str, list[Instruction]] = {}
    body: list[Instruction] = []
    for line in text.splitlines():
        if (opened := _FUNCTION.match(line)) is not None:
            body = functions.setdefault(opened["name"], [])
        elif (match := _ASKED.search(line)) is not None:
            place = _PLACE.search(line)
            body.append(
                Instruction(
                    name="",
                    opcode="",
                    op_name=locations.get(place[1], "") if place else "",
                    operands=(),
                    called=(match["called"],) if match["called"] else (),
                    is_product=not match["called"] and not _has_vector(line),
                )
            )
    return Module(computations=functions, entry="main")


def _has_vector(line: str) -> bool:
    """Whether a product is with a vector: all dimensions of one kind have size one."""
    operands, contracted = _OPERANDS.search(line), _CONTRACTED.search(line)
    if operands is None or contracted is None:
        return False
    batched = _BATCHED.search(line)
    for side in (1, 2):
        sizes = operands[side].split("x")[:-1]
        summed = {int(place) for place in contracted[side].split(",") if place}
        batch = {int(place) for place in batched[side].split(",") if place} if batched else set()
        free = set(range(len(sizes))) - summed - batch
        if any(all(sizes[place] == "1" for place in places) for places in (summed, free)):
            return True
    return False


def _walk(
    module: Module, instruction: Instruction, callers: str = ""
) -> Iterator[tuple[Instruction, str]]:
    """An instruction and everything it calls, each with its own name and its callers' names."""
    name = f"{callers} {instruction.op_name}"
    yield instruction, name
    for called in instruction.called:
        for inner in module.computations.get(called, ()):
            yield from _walk(module, inner, name)


def _kind(name: str) -> str:
    if not name.strip():
        return "unnamed"
    return "again" if AGAIN in name else "other"


def _product_names(module: Module) -> list[str]:
    """The names of all products that run, with those of their callers."""
    return [
        name
        for top in module.computations.get(module.entry, ())
        for instruction, name in _walk(module, top)
        if instruction.is_product
    ]


def _early(module: Module) -> int:
    """Recomputed values that wait while products of the forward pass run."""
    steps = module.computations.get(module.entry, ())
    last_read: dict[str, int] = {}
    # Backwards: what a value is passed on to comes later, so it is known by then.
    for time in range(len(steps) - 1, -1, -1):
        step = steps[time]
        until = last_read.get(step.name, time) if step.opcode in _HANDING_ON else time
        for operand in step.operands:
            last_read[operand] = max(until, last_read.get(operand, until))
    forward = [
        time
        for time, step in enumerate(steps)
        if any(
            inner.is_product and _kind(name) == "other" and BACKWARD not in name
            for inner, name in _walk(module, step)
        )
    ]
    # Constants depend on no argument, so they may be made at any time.
    varying: set[str] = set()
    early = 0
    for time, step in enumerate(steps):
        if step.opcode == "parameter" or not varying.isdisjoint(step.operands):
            varying.add(step.name)
        if AGAIN in step.op_name and step.opcode not in _HANDING_ON and step.name in varying:
            following = bisect.bisect_right(forward, time)
            early += following < len(forward) and forward[following] < last_read.get(step.name, 0)
    return early


def _compilers_own(module: Module) -> list[str]:
    """Where the compiler put copies to save memory; inside a fusion there are no arrays."""
    fused = {
        name
        for body in module.computations.values()
        for instruction in body
        if instruction.opcode == "fusion"
        for name in instruction.called
    }
    return [
        _place(instruction.op_name)
        for name, body in module.computations.items()
        if name not in fused
        for instruction in body
        if _OWN in instruction.name and instruction.opcode not in _HANDING_ON
    ]
