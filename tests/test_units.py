"""Amounts of bytes, seconds, FLOPs and shares, read and written."""

from __future__ import annotations

import doctest
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remat_opt import units
from remat_opt.errors import RematError, UnitError
from remat_opt.units import (
    format_bytes,
    format_flops,
    format_seconds,
    format_share,
    parse_bytes,
)


@pytest.mark.parametrize(
    ("amount", "expected_bytes"),
    [
        ("6GiB", 6 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        (" 0.1 gb ", 100_000_000),
        (".5KiB", 512),
        ("10.b", 10),
        ("512", 512),
        ("1_000", 1000),
        ("0 B", 0),
        ("1.9 B", 1),
        (0, 0),
        (12, 12),
        (np.int64(7), 7),
    ],
)
def test_reads_bytes(amount: Any, expected_bytes: int) -> None:
    result = parse_bytes(amount)
    assert result == expected_bytes
    assert type(result) is int


@pytest.mark.parametrize(
    ("amount", "message"),
    [
        ("", "'' is not an amount of bytes"),
        ("-1 GB", "'-1 GB' is not an amount of bytes"),
        ("GB", "'GB' is not an amount"),
        ("6 apples", "'6 apples' has the unknown unit 'apples': write an amount such as"),
        ("6G", r"did you mean GiB \(powers of 1024\) or GB \(powers of 1000\)\?"),
        ("6gi", "did you mean GiB"),
        ("0.5", "'0.5' has a fraction but no unit"),
        ("1e9", "unknown unit 'e'|not an amount of bytes"),
        (-1, "-1 bytes is negative"),
        (0.5, r"0.5 \(float\) is not an amount of bytes"),
        (True, "True is not an amount of bytes"),
        (None, "NoneType"),
    ],
)
def test_refuses_what_is_no_amount_of_bytes(amount: Any, message: str) -> None:
    with pytest.raises(UnitError, match=message) as caught:
        parse_bytes(amount)
    assert isinstance(caught.value, RematError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("amount_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (360 * 1024**2, "360 MiB"),
        (1056 * 1024**2, "1.03 GiB"),
        (1024**3 - 1, "1.00 GiB"),
        (int(15.75 * 1024**3), "15.8 GiB"),
        (-3 * 1024**2, "-3.00 MiB"),
        (5000 * 1024**5, "5000 PiB"),
    ],
)
def test_writes_bytes(amount_bytes: int, text: str) -> None:
    assert format_bytes(amount_bytes) == text


@given(st.integers(min_value=0, max_value=2**50))
def test_bytes_survive_writing_and_reading_to_three_digits(amount_bytes: int) -> None:
    assert math.isclose(parse_bytes(format_bytes(amount_bytes)), amount_bytes, rel_tol=0.006)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3e-10, "0.30 ns"),
        (1.25e-3, "1.25 ms"),
        (0.9999999, "1.00 s"),
        (59.4, "59.4 s"),
        (59.7, "1 min 0 s"),
        (93, "1 min 33 s"),
        (7384, "2 h 3 min"),
        (-0.02, "-20.0 ms"),
        (math.inf, "inf s"),
    ],
)
def test_writes_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("flops", "text"),
    [(0, "0 FLOP"), (999, "999 FLOP"), (2.5e12, "2.50 TFLOP"), (3e22, "30000 EFLOP")],
)
def test_writes_flops(flops: float, text: str) -> None:
    assert format_flops(flops) == text


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0, "0 %"),
        (0.0001, "<0.1 %"),
        (-0.0001, ">-0.1 %"),
        (0.053, "5.3 %"),
        (0.99999, "100 %"),
        (1.26, "126 %"),
        (math.inf, "inf %"),
    ],
)
def test_writes_shares(share: float, text: str) -> None:
    assert format_share(share) == text


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(units).failed == 0
