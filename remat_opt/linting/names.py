"""Names that keep nothing: misspelt, given to nothing, or bypassed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from remat_opt import _jax_checkpoints
from remat_opt import _jax_internals as internals
from remat_opt.linting.survey import Block, Checkpoint, Finding, Survey, line_of

#: Primitives that read no input going backward: a value that only these read is not needed.
_NEEDS_NOTHING = frozenset(
    "add add_any broadcast_in_dim concatenate convert_element_type copy name neg pad "
    "reduce_sum reshape rev slice squeeze sub transpose".split()
)
#: Primitives that turn an array into another one with the same values.
_MOVES = frozenset("convert_element_type reshape squeeze transpose".split())


def names_without_values(found: Survey) -> Iterator[Finding]:
    """A policy lists a name that no value under its checkpoint has."""
    for checkpoint in found.checkpoints:
        there = {
            name
            for block in _inside(found, checkpoint)
            for equation in block.equations
            if (name := _jax_checkpoints.name_of(equation)) is not None
        }
        missing = sorted((checkpoint.listed or frozenset()) - there)
        if missing:
            known = f"; the names there are {_quoted(sorted(there))}" if there else ""
            yield Finding(
                check="name-without-value",
                message=f"the policy lists {_quoted(missing)}, but no value under its checkpoint "
                f"has that name{known}: what was meant is recomputed",
                remedy="give the value that name with checkpoint_name, inside this checkpoint, or "
                "take the name out of the policy",
                source=checkpoint.source,
            )


def values_without_readers(found: Survey) -> Iterator[Finding]:
    """The result of ``checkpoint_name`` is thrown away, and the value itself is used."""
    for block in found.blocks:
        for equation in block.equations:
            name = _jax_checkpoints.name_of(equation)
            (output,) = equation.outvars if name is not None else (None,)
            if name is None or block.readers(output) or block.is_result(output):
                continue
            yield Finding(
                check="name-unread",
                message=f"nothing reads what checkpoint_name(..., {name!r}) returns, so there is "
                "nothing of this name to keep",
                remedy=f"use its result: x = checkpoint_name(x, {name!r})",
                source=line_of(equation),
            )


def values_passed_by(found: Survey) -> Iterator[Finding]:
    """A value is kept by name, but computed again for a reader that bypasses the name."""
    for block in found.blocks:
        if block.checkpoint is None:
            continue
        for equation in block.equations:
            name = _jax_checkpoints.name_of(equation)
            if (
                name is None
                or not block.checkpoint.saves(name)
                or not block.readers(equation.outvars[0])
            ):
                continue
            others = [
                one
                for one in block.readers(equation.invars[0])
                if one is not equation and one.primitive.name not in _NEEDS_NOTHING
            ]
            if others:
                yield Finding(
                    check="name-passed-by",
                    message=f"{name!r} is kept, but {others[0].primitive.name} at "
                    f"{line_of(others[0]) or 'an unknown line'} reads the value without the name, "
                    "so the value is computed again for it",
                    remedy="let everything that follows read the result of checkpoint_name",
                    source=line_of(equation),
                )


def values_kept_twice(found: Survey) -> Iterator[Finding]:
    """A value is kept, and so is a reshaped or converted copy of it."""
    for block in found.blocks:
        checkpoint = block.checkpoint
        if checkpoint is None:
            continue
        makers = {output: one for one in block.equations for output in one.outvars}
        for equation in block.equations:
            name = _jax_checkpoints.name_of(equation)
            if (
                name is None
                or not checkpoint.saves(name)
                or not _needed(block, checkpoint, equation)
            ):
                continue
            origin = next(
                (
                    one
                    for one in _before_moves(makers, equation)
                    if _jax_checkpoints.saves(checkpoint.policy, one)
                ),
                None,
            )
            if origin is not None and _needed(block, checkpoint, origin):
                yield Finding(
                    check="kept-twice",
                    message=f"{name!r} is kept, and so is the value at {line_of(origin)}, of which "
                    "it is only a reshaped or converted copy: both are stored",
                    remedy="keep one of them: name the one that the backward pass reads, and take "
                    "the other out of the policy",
                    source=line_of(equation),
                )


def _before_moves(makers: Mapping[Any, Any], equation: Any) -> Iterator[Any]:
    """The equations whose results an equation reads through one or more moves, nearest first."""
    moved = False
    while not isinstance(equation.invars[0], internals.Literal):
        equation = makers.get(equation.invars[0])
        if equation is None:
            return
        if moved:
            yield equation
        if equation.primitive.name not in _MOVES | {"name"}:
            return
        moved = moved or equation.primitive.name in _MOVES


def _needed(block: Block, checkpoint: Checkpoint, equation: Any) -> bool:
    """Whether the backward pass needs an equation's result, perhaps after a move."""

    def needs(reader: Any) -> bool:
        name = _jax_checkpoints.name_of(reader)
        if reader.primitive.name in _MOVES or (name is not None and not checkpoint.saves(name)):
            return _needed(block, checkpoint, reader)
        return reader.primitive.name not in _NEEDS_NOTHING

    return any(map(needs, block.readers(equation.outvars[0])))


def _inside(found: Survey, checkpoint: Checkpoint) -> Iterator[Block]:
    """Everything that runs under a checkpoint; its policy enters loops, calls and checkpoints."""
    for block in found.blocks:
        around = block.checkpoint
        while around is not None and around is not checkpoint:
            around = around.outer
        if around is checkpoint:
            yield block


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))
