"""Which axis of an array is innermost, if it goes through several loops.

XLA for TPU stores the two innermost dimensions of an array in tiles of 8 x 128 elements, and may
choose others for each loop, which it copies the array between. Said in advance, it takes the last
axis if that fills tiles, else the last one that does.

On a mesh, devices put together their parts of an entry of a stack. XLA for NVIDIA wants the axis
along which it is split outermost, and stores the whole stack once more in that order, unless it is
told how to lay out the entry.
"""

from __future__ import annotations

from collections.abc import Sequence

from remat_opt.compilers.compiler import LANES, Compiler
from remat_opt.device import Platform
from remat_opt.operation import ArrayType


def innermost(platform: Platform, shape: Sequence[int]) -> int:
    """The axis to put innermost."""
    last = len(shape) - 1
    if platform != "tpu":
        return last
    return next((axis for axis in range(last, -1, -1) if not shape[axis] % LANES), last)


def fills_tiles(compiler: Compiler, kind: ArrayType) -> bool:
    """Whether an array laid out like that is not padded, if it lies in tiles."""
    if not kind.shape or not compiler.has("tiles"):
        return bool(kind.shape)
    return not kind.shape[innermost(compiler.device.platform, kind.shape)] % LANES


def is_transposed_whole(platform: Platform, split: Sequence[Sequence[str]]) -> bool:
    """Whether a whole stack is stored in another order for an entry that is split like this."""
    return platform == "cuda" and any(split[1:])
