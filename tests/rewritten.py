"""Plans that write something differently, though small programs fit as they are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

from remat_opt import planning
from remat_opt.compilers import joins
from remat_opt.recent import Recent
from remat_opt.schedule import plain

#: Sweeps of their own: those of other tests may leave a function as it is.
_SWEEPS: Recent = Recent(200)


@contextlib.contextmanager
def always_rewritten() -> Iterator[None]:
    """No plan leaves a function as it is: what recomputes nothing is written differently, too.

    Nor does it matter how many columns arrays have.
    """
    with (
        mock.patch.object(planning, "unchanged", plain),
        mock.patch.object(planning, "_sweeps", _SWEEPS),
        mock.patch.object(joins, "LANES", 1),
    ):
        yield
