"""What the memory of a compiled step is spent on: every array counts towards one share.

Arguments exist throughout: parameters, the optimizer's state, and inputs such as the batch; so do
the *results* that are not in donated arguments. Of the temporaries, *activations* are made going
forward and read going backward; *recomputed* is what is computed again for the backward pass, by
``jax.checkpoint``, a plan, or the compiler of its own accord. Rematerialisation trades these two
for one another. *Gradients* are what the backward pass hands to the optimizer. Everything else is
*workspace*: what lives within one pass only, and copies. Between arrays there may be *holes*.

The names that JAX gives to instructions show which pass they are part of.
"""

from __future__ import annotations

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from remat_opt.measurement.buffers import Buffer, CompiledMemory
from remat_opt.naming import in_words
from remat_opt.scopes import is_scope, origin

Share = Literal[
    "parameters",
    "optimizer state",
    "inputs",
    "results",
    "activations",
    "recomputed",
    "gradients",
    "workspace",
    "holes",
]
#: All shares; those held throughout come first.
SHARES: tuple[Share, ...] = get_args(Share)
#: The shares held throughout.
RESIDENT: tuple[Share, ...] = SHARES[:4]

#: Found in the names of what compilers recompute of their own accord.
_OWN = ".remat"

_TRANSFORMED = re.compile(r"\b(?:jvp|transpose|vmap|checkpoint|remat|custom_[jv][vj]p)\(")
_CALL = re.compile(r"p?jit\((\w*)\)+$")
#: Parts of names that say how something runs, not what it belongs to.
_HOW = frozenset(
    "body branch checkpoint closed_call cond rematted_computation remat remat2 while".split()
)
_DIGITS = re.compile(r"\d+")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Similar arrays in one share.

    Attributes:
      share: the share they count towards.
      bytes: their total size.
      count: how many there are.
      label: what makes them: a primitive in words, a function, or the argument's name; with "again"
        if the compiler recomputes it of its own accord.
      type: element type and shape, such as ``f32[8,4]``.
      module: the modules that make them, with ``*`` for numbers that differ.
      source: the user's line, as ``file.py:line (function)``; "" if unknown.
    """

    share: Share
    bytes: int
    count: int
    label: str
    type: str
    module: str
    source: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shares:
    """Where the memory of a compiled step goes.

    Attributes:
      at_peak: bytes of each share at the peak, including holes: all that the device must have.
      timelines: int64, shape (steps,): for each share of temporaries, the bytes alive.
      peak_step: the step at which most is alive.
      held: what is alive then, largest first.
    """

    at_peak: Mapping[Share, int]
    timelines: Mapping[Share, NDArray[np.int64]]
    peak_step: int
    held: tuple[Held, ...]


def shares(memory: CompiledMemory, roles: Mapping[str, Share]) -> Shares:
    """Divides the memory of a step.

    Args:
      memory: as compiled.
      roles: by the name of each argument, such as ``params['w']``, the share it counts towards. An
        argument without an entry uses the first entry that begins with the same word.
    """
    words: dict[str, Share] = {}
    for name, role in roles.items():
        words.setdefault(_word(name), role)
    timelines: dict[Share, NDArray[np.int64]] = {
        share: np.zeros(len(memory.instructions), np.int64) for share in SHARES[4:8]
    }
    alive: list[tuple[Share, Buffer]] = []
    backward = min(
        (
            buffer.first_step
            for buffer in memory.buffers
            if any(origin(name).phase == "backward" for name in buffer.made_by)
        ),
        default=0,
    )
    for buffer in memory.buffers:
        if buffer.allocation != "temporary" or not buffer.counts:
            continue
        share = _share(buffer, backward)
        timelines[share][buffer.first_step : buffer.last_step + 1] += buffer.size_bytes
        if buffer.first_step <= memory.peak_step <= buffer.last_step:
            alive.append((share, buffer))
    for buffer in _resident(memory):
        name = buffer.op_name
        of_argument = roles.get(name) or words.get(_word(name), "inputs")
        alive.append((of_argument if buffer.allocation == "argument" else "results", buffer))
    at_peak: dict[Share, int] = dict.fromkeys(SHARES, 0)
    for share, buffer in alive:
        at_peak[share] += buffer.size_bytes
    at_peak["holes"] = memory.heap_bytes - memory.peak_live_bytes
    return Shares(
        at_peak=at_peak,
        timelines=timelines,
        peak_step=memory.peak_step,
        held=_together(alive),
    )


def _share(buffer: Buffer, backward: int) -> Share:
    """The share of a temporary; ``backward`` is the step at which the backward pass begins."""
    if buffer.first_step == buffer.last_step:
        # Nothing reads it later: scratch memory, such as a library's for a product.
        return "workspace"
    made = next((origin(name).phase for name in buffer.made_by), "other")
    if not buffer.made_by and buffer.first_step < backward:
        # The compiler's own: a copy, such as one padded for a product.
        made = "forward"
    if made == "recomputed" or (_OWN in buffer.instruction and made == "forward"):
        return "recomputed"
    read = {origin(name).phase for name in buffer.read_by}
    if made == "forward" and read & {"backward", "recomputed"}:
        return "activations"
    if made == "backward" and read == {"other"}:
        return "gradients"
    return "workspace"


def _resident(memory: CompiledMemory) -> list[Buffer]:
    """Arguments, and results in separate places: one for each allocation, with its size."""
    places: defaultdict[int, list[Buffer]] = defaultdict(list)
    for buffer in memory.buffers:
        if buffer.allocation != "temporary":
            places[buffer.allocation_number].append(buffer)
    found = []
    for inside in places.values():
        size_bytes = max(one.offset_bytes + one.size_bytes for one in inside)
        named = [one for one in inside if one.kind == inside[0].allocation] or inside
        found.append(dataclasses.replace(named[0], size_bytes=size_bytes))
    return found


def _together(alive: Sequence[tuple[Share, Buffer]]) -> tuple[Held, ...]:
    """Arrays of one share, line and type, from modules that differ only in their numbers."""
    groups: defaultdict[tuple[str, ...], list[tuple[Held, Buffer]]] = defaultdict(list)
    for share, buffer in alive:
        one = _held(share, buffer)
        like = _DIGITS.sub("*", one.module), _DIGITS.sub("*", one.label)
        groups[share, one.type, one.source, *like].append((one, buffer))
    found = []
    for (_, _, _, module, label), members in groups.items():
        one = members[0][0]
        found.append(
            dataclasses.replace(
                one,
                bytes=sum(buffer.size_bytes for _, buffer in members),
                count=len(members),
                module=one.module if _all_equal(m.module for m, _ in members) else module,
                label=one.label if _all_equal(m.label for m, _ in members) else label,
            )
        )
    return tuple(sorted(found, key=lambda one: (-one.bytes, one.share, one.module, one.label)))


def _all_equal(texts: Iterable[str]) -> bool:
    return len(set(texts)) == 1


def _held(share: Share, buffer: Buffer) -> Held:
    name = buffer.made_by[0] if buffer.made_by else buffer.op_name
    label, module = name, ""
    if share not in RESIDENT or buffer.kind != "argument":
        module, label = module_and_label(name)
        if not label:
            label = buffer.instruction
        elif "/" not in name:
            # Named after the argument it is made from.
            label = f"copy of {label}"
        if _OWN in buffer.instruction:
            label = f"{label}, again"
    return Held(
        share=share,
        bytes=buffer.size_bytes,
        count=1,
        label=label,
        type=buffer.type,
        module=module,
        source=buffer.source,
    )


def module_and_label(op_name: str) -> tuple[str, str]:
    """The modules and the operation, from an ``op_name``.

    >>> module_and_label("jit(step)/transpose(jvp(Net))/Block_0/jit(relu)/max")
    ('Net/Block_0', 'relu')
    >>> module_and_label("jit(step)/jvp(Net)/Block_0/dot_general")
    ('Net/Block_0', 'matrix product')
    """
    # The compiled function comes first.
    parts = _TRANSFORMED.sub("", op_name).split("/")
    parts = [part for part in parts if part]
    if not parts:
        return "", ""
    label, between = parts[-1], parts[1:-1]
    if len(parts) > 1:
        label = in_words(label)
    if between and (call := _CALL.match(between[-1])) is not None and call[1].strip("_"):
        label = call[1].strip("_")
    modules = [part.rstrip(")") if not _CALL.match(part) else "" for part in between]
    # An einsum has a separate scope for its operands.
    kept = [
        part
        for part in modules
        if part and part not in _HOW and "->" not in part and not is_scope(part)
    ]
    return "/".join(kept), label


def _word(name: str) -> str:
    return re.split(r"[.\[]", name, maxsplit=1)[0]
