"""One device's compiler, as this room sees it: which rules hold, and what an array takes."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
from collections.abc import Collection, Sequence
from typing import Final

from remat_opt.compilers.rules import RULES
from remat_opt.device import Device, Platform
from remat_opt.errors import RematError
from remat_opt.operation import ArrayType

#: A TPU's tile: sublanes x lanes, seen in programs compiled for v5e, v5p and v6e as T(8,128) for
#: elements of 32 bits, T(8,128)(2,1) for those of 16 and T(32,128)(4,1) for those of 8.
SUBLANES: Final = 8
#: Elements in a row of a tile.
LANES: Final = 128
_WORD_BYTES: Final = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Which rules hold, whatever the compiler is told.

    Attributes:
      platform: the compiler's platform.
      off: names of ``RULES`` that are switched off.

    Raises:
      RematError: there is no rule of that name.
    """

    platform: Platform
    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _check_names(self.off)

    @classmethod
    def none(cls, platform: Platform) -> Rules:
        """No rule: nothing is written differently for the compiler."""
        return cls(platform=platform, off=frozenset(RULES))

    def has(self, rule: str) -> bool:
        """Whether a rule holds here: it is about this compiler, and not switched off."""
        found = RULES[rule]
        return self.platform in found.platforms and not found.told and rule not in self.off


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Compiler:
    """What compiles for a device.

    Attributes:
      device: the device.
      off: names of ``RULES`` that are switched off.

    Raises:
      RematError: there is no rule of that name.
    """

    device: Device
    off: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        _check_names(self.off)

    @property
    def rules(self) -> Rules:
        """The rules that hold."""
        return Rules(platform=self.device.platform, off=self.off)

    def has(self, rule: str) -> bool:
        """Whether a rule holds here."""
        return rule not in self.off and RULES[rule].holds_for(self.device)

    def buffer_bytes(
        self,
        kind: ArrayType,
        innermost: Sequence[int] | None = None,
        lanes: Collection[int] | None = None,
    ) -> int:
        """Bytes that one array takes in device memory, padding included.

        A TPU stores the two innermost dimensions of an array in tiles of 8 x 128 elements, or 32 x
        128 if they are of 8 bits; what does not fill its tiles is padded. Tiles of 1, 2 and 4 x 128
        hold what has no more rows, but no fewer than make up 32 bits. The compiler chooses which
        dimensions are innermost, among those longer than 1: we assume the two that pad least.

        Args:
          kind: the array's type.
          innermost: the axes of which two are innermost, if not of all
            (``compilers.matrix_axes``).
          lanes: the axes that may be in the lanes, if not all (``compilers.lanes``).
        """
        if not self.has("tiles"):
            return kind.bytes
        shape = [size for size in kind.shape if size > 1]
        if len(shape) < 2 or not kind.size:
            return kind.bytes
        packing = max(1, _WORD_BYTES * kind.size // kind.bytes)
        axes = innermost or [axis for axis, size in enumerate(kind.shape) if size > 1]
        choices = [
            (kind.shape[row], kind.shape[lane])
            for row, lane in itertools.permutations(axes, 2)
            if lanes is None or lane in lanes
        ] or list(itertools.permutations(shape, 2))
        growth = min(
            _padded(size, tile_rows(size, packing)) / size * (_padded(lanes, LANES) / lanes)
            for size, lanes in choices
        )
        return round(kind.bytes * growth)


def tile_rows(size: int, packing: int) -> int:
    """The rows of the tiles for so many rows, of which so many make up a word."""
    most = SUBLANES * (packing if packing >= _WORD_BYTES else 1)
    return min(most, max(packing, 1 << (size - 1).bit_length()))


def _padded(size: int, tile: int) -> int:
    return -(-size // tile) * tile


def _check_names(off: frozenset[str]) -> None:
    for name in sorted(off - RULES.keys()):
        near = difflib.get_close_matches(name, RULES, n=1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        raise RematError(f"There is no rule {name!r} about compilers.{meant}")
