"""Rows as a DataFrame. pandas is imported only when one is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from remat_opt.errors import MissingPackageError


def of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A DataFrame with one line per row.

    Raises:
      MissingPackageError: pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise MissingPackageError("A DataFrame", package="pandas") from None
    return pandas.DataFrame(list(rows))
