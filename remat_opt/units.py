"""Amounts as people write them, and back: bytes, seconds, FLOPs, shares."""

from __future__ import annotations

import math
import operator
import re
from decimal import Decimal
from typing import SupportsIndex

from remat_opt.errors import UnitError

_BYTES_PER_UNIT = {"b": 1}
for _power, _prefix in enumerate("kmgtp", start=1):
    _BYTES_PER_UNIT[f"{_prefix}b"] = 1000**_power
    _BYTES_PER_UNIT[f"{_prefix}ib"] = 1024**_power

_BINARY_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FLOP_UNITS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")
_SECOND_UNITS = (("ns", 1e-9), ("us", 1e-6), ("ms", 1e-3), ("s", 1.0))

_AMOUNT = re.compile(r"\s*(\d[\d_]*(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", re.ASCII)
_EXAMPLES = "write an amount such as 6442450944, '6GiB' (1024**3 bytes) or '1.5 GB' (1000**3 bytes)"


def parse_bytes(amount: str | SupportsIndex) -> int:
    """Reads an amount of bytes.

    Units are B, kB, MB, GB, TB, PB (powers of 1000) and KiB, MiB, GiB, TiB, PiB (powers of
    1024), in any case. A bare "6G" is refused: people mean either. A fraction of a byte is
    dropped, so that a budget is never rounded up.

    >>> parse_bytes("6GiB")
    6442450944
    >>> parse_bytes("1.5 GB")
    1500000000

    Args:
      amount: a whole number of bytes, or text: a number, perhaps a space, and a unit.

    Returns:
      The amount in bytes, at least 0.

    Raises:
      UnitError: it is negative or cannot be read.
    """
    if isinstance(amount, str):
        return _parse_text(amount)
    if isinstance(amount, bool):
        raise UnitError(f"{amount!r} is not an amount of bytes: {_EXAMPLES}")
    try:
        amount_bytes = operator.index(amount)
    except TypeError:
        raise UnitError(
            f"{amount!r} ({type(amount).__name__}) is not an amount of bytes: {_EXAMPLES}"
        ) from None
    if amount_bytes < 0:
        raise UnitError(f"{amount_bytes} bytes is negative: {_EXAMPLES}")
    return amount_bytes


def _parse_text(text: str) -> int:
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise UnitError(f"{text!r} is not an amount of bytes: {_EXAMPLES}")
    number, unit = match.groups()
    if not unit:
        if "." in number:
            raise UnitError(f"{text!r} has a fraction but no unit: {_EXAMPLES}")
        return int(number)
    factor = _BYTES_PER_UNIT.get(unit.lower())
    if factor is None:
        if f"{unit.lower()}b" in _BYTES_PER_UNIT and unit.lower() != "b":
            short = unit[0].upper()
            hint = f"did you mean {short}iB (powers of 1024) or {short}B (powers of 1000)?"
        else:
            hint = _EXAMPLES
        raise UnitError(f"{text!r} has the unknown unit {unit!r}: {hint}")
    # Decimal, since 0.1 GB is a whole number of bytes and a binary float cannot hold it.
    return int(Decimal(number) * factor)


def format_bytes(amount_bytes: int) -> str:
    """Writes an amount of bytes for people, in powers of 1024 and three digits.

    >>> format_bytes(1_320_702_444)
    '1.23 GiB'

    Args:
      amount_bytes: bytes; negative for a saving.
    """
    return _scaled(amount_bytes, _BINARY_UNITS, 1024)


def format_flops(flops: float) -> str:
    """Writes a count of floating-point operations, in powers of 1000 and three digits.

    >>> format_flops(2_500_000_000_000)
    '2.50 TFLOP'

    Args:
      flops: how many operations (not a rate).
    """
    return _scaled(flops, _FLOP_UNITS, 1000)


def format_seconds(seconds: float) -> str:
    """Writes a time, from nanoseconds to hours.

    >>> format_seconds(0.00125), format_seconds(93)
    ('1.25 ms', '1 min 33 s')

    Args:
      seconds: the time in seconds; negative for a saving.
    """
    if not math.isfinite(seconds):
        return f"{seconds} s"
    if seconds == 0:
        return "0 s"
    sign, size = ("-" if seconds < 0 else ""), abs(seconds)
    if round(size) >= 60:
        minutes, rest = divmod(round(size), 60)
        if minutes < 60:
            return f"{sign}{minutes} min {rest} s"
        hours, minutes = divmod(minutes, 60)
        return f"{sign}{hours} h {minutes} min"
    for unit, length in _SECOND_UNITS[:-1]:
        number = _three_digits(size / length)
        if float(number) < 1000:
            return f"{sign}{number} {unit}"
    return f"{sign}{_three_digits(size)} s"


def format_share(share: float) -> str:
    """Writes a share as a percentage, and never writes a small one as nothing.

    >>> format_share(0.053), format_share(0.0001), format_share(0)
    ('5.3 %', '<0.1 %', '0 %')

    Args:
      share: the share as a fraction, 1.0 for all of it.
    """
    percent = share * 100
    if percent == 0:
        return "0 %"
    if 0 < percent < 0.1:
        return "<0.1 %"
    if -0.1 < percent < 0:
        return ">-0.1 %"
    if math.isfinite(percent) and abs(percent) < 99.95:
        return f"{percent:.1f} %"
    return f"{percent:.0f} %"


def _three_digits(number: float) -> str:
    """``number``, at least 0, with about three digits and no exponent."""
    for places, limit in ((2, 9.995), (1, 99.95)):
        if number < limit:
            return f"{number:.{places}f}"
    return f"{number:.0f}"


def _scaled(amount: float, units: tuple[str, ...], step: int) -> str:
    if not math.isfinite(amount):
        return f"{amount} {units[0]}"
    sign, size = ("-" if amount < 0 else ""), abs(amount)
    if round(size) < step:
        return f"{sign}{round(size)} {units[0]}"
    for power, unit in enumerate(units[1:], start=1):
        number = _three_digits(size / step**power)
        # 1023.9 MiB rounds to 1024 MiB, which is better called 1.00 GiB.
        if float(number) < step or unit == units[-1]:
            return f"{sign}{number} {unit}"
    raise AssertionError("the last unit takes any amount")
