"""Checkpoints in places where they save little: what they recompute is all needed at once."""

from __future__ import annotations

from collections.abc import Iterator

from remat_opt import _jax_checkpoints
from remat_opt import _jax_internals as internals
from remat_opt.linting.survey import Checkpoint, Finding, Survey, flops, row

#: With at least this share of all FLOPs, a checkpoint counts as around everything.
_NEARLY_ALL = 0.95
#: The same for a checkpoint around a loop: besides the loop there is at most a head.
_MOST = 0.75
#: Up to this share of a checkpoint's FLOPs, what follows it is negligible.
_NEXT_TO_NOTHING = 0.01


def round_everything(found: Survey) -> Iterator[Finding]:
    """One checkpoint around the whole loss: it is recomputed as soon as the forward pass ends.

    A policy that keeps something does help, except if a loop does the work: the policy says what
    the loop keeps, but the rest is recomputed for all its iterations at once.
    """
    total = sum(map(flops, found.row))
    for one in found.row:
        checkpoint = found.checkpoint_at(one)
        if checkpoint is None:
            continue
        loop = _loop_of(checkpoint)
        if checkpoint.flops < (_MOST if loop else _NEARLY_ALL) * max(total, 1):
            continue
        if any(other.outer is checkpoint for other in found.checkpoints):
            continue
        if checkpoint.policy is not None and _keeps_something(found, checkpoint) and not loop:
            continue
        remedy = (
            "put the checkpoint, with its policy, around the body of the scan"
            if loop
            else "put one around each block but the last, or decorate the loss with optimal_remat"
        )
        what = "the scan that does the work" if loop else "the whole of it"
        yield Finding(
            check="round-everything",
            message=f"a checkpoint is around {what}: when it is computed again, all of its values "
            "are in memory at once, which costs a forward pass and saves next to nothing",
            remedy=remedy,
            source=checkpoint.source,
        )


def round_the_last(found: Survey) -> Iterator[Finding]:
    """A checkpoint around the last block: it is recomputed right after it was computed.

    That changes little, but not always nothing. As compiled, the temporaries of four blocks went
    down by up to 20 % with the checkpoint (TPU), or up by 10 %. More than some values of that one
    block it cannot save.
    """
    numbers = [n for n, one in enumerate(found.row) if found.checkpoint_at(one) is not None]
    if len(numbers) < 2:
        return
    last = found.checkpoint_at(found.row[numbers[-1]])
    assert last is not None, "it is among the checkpoints"
    after = sum(map(flops, found.row[numbers[-1] + 1 :]))
    has_inner = any(one.outer is last for one in found.checkpoints)
    if last.flops and after <= _NEXT_TO_NOTHING * last.flops and not has_inner:
        block = "loop" if _loop_of(last) else "block"
        remedy = "leave it off, and compile both ways with remat_opt.measure to see the difference"
        if block == "loop":
            remedy = "leave it off, or put it around the body of that loop"
        yield Finding(
            check="round-the-last",
            message=f"a checkpoint is around the last {block}: the backward pass begins with that "
            f"{block}, so it is computed again as soon as it has been computed. At most, that "
            "saves a few of its own values",
            remedy=remedy,
            source=last.source,
        )


def _loop_of(checkpoint: Checkpoint) -> bool:
    """Whether most of what a checkpoint computes is in a loop."""
    inside = row(internals.parts(checkpoint.body)[3])
    loops = sum(flops(one) for one in inside if one.primitive.name == "scan")
    return loops >= _NEARLY_ALL * max(checkpoint.flops, 1)


def _keeps_something(found: Survey, checkpoint: Checkpoint) -> bool:
    """Whether a policy keeps any value; a policy of names must list one that exists."""
    if checkpoint.listed is None:
        return not _jax_checkpoints.saves_nothing(checkpoint.policy)
    return any(
        _jax_checkpoints.name_of(one) in checkpoint.listed
        for block in found.blocks
        if block.checkpoint is checkpoint
        for one in block.equations
    )
