"""What a user is told if planning fails: a warning, and a report to file.

A decorated function must run wherever the function itself does. If a bug in this package prevents
making or following a plan, the function runs unchanged; only memory is lost.
"""

from __future__ import annotations

import contextlib
import platform
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from remat_opt import __version__
from remat_opt import _jax_internals as internals
from remat_opt.errors import GraphError, PlanningWarning, RematError, RewriteError

#: Most characters of a program's text in a report: the equations of a few thousand layers.
_MOST_TEXT = 4_000_000
_UNCHANGED = (
    "The function runs unchanged: its results are the same, and it takes as much memory as without "
    "remat_opt."
)


def is_own_fault(error: Exception) -> bool:
    """Whether an error is about this package's internals, not about the user's request."""
    if isinstance(error, GraphError | RewriteError):
        return True
    # The compiler's and the machine's own failures would occur without us too. Warnings are raised
    # where users turn them into errors.
    not_ours = RematError | Warning | jax.errors.JaxRuntimeError | FloatingPointError
    return not isinstance(error, not_ours)


def warn(
    error: Exception,
    name: str,
    facts: Mapping[str, object],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    stack_level: int,
) -> None:
    """Warns that a function runs without a plan, and says where the report is.

    Args:
      error: what went wrong.
      name: the function's name.
      facts: what was asked for, for the report.
      fn: the function.
      args: its arguments.
      kwargs: likewise.
      stack_level: how far up the stack the warning points.
    """
    if isinstance(error, jax.errors.InconclusiveDimensionOperation):
        warnings.warn(
            f"{name!r} has no plan: its arguments have symbolic shapes, and what takes memory "
            f"depends on sizes. {_UNCHANGED} Export it with the sizes that it is used with.",
            PlanningWarning,
            stacklevel=stack_level + 1,
        )
        return
    where = _written(report(error, name, facts, fn, args, kwargs))
    warnings.warn(
        f"remat_opt failed to plan {name!r}: {_first_line(error)}. {_UNCHANGED} This is a bug in "
        "remat_opt: please file an issue"
        + (
            f" and attach {where}, which holds the function's program but no arrays"
            if where
            else ""
        )
        + '. With errors="raise" it is raised.',
        PlanningWarning,
        stacklevel=stack_level + 1,
    )


def report(
    error: Exception,
    name: str,
    facts: Mapping[str, object],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> str:
    """All that is needed to look into a failure; the arguments are those of ``warn``."""
    told = {
        "function": name,
        "remat_opt": __version__,
        "jax": jax.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "backend": jax.default_backend(),
        **facts,
    }
    lines = [f"{key}: {value}" for key, value in told.items()]
    lines += ["", "".join(traceback.format_exception(error)), ""]
    try:
        lines.append(str(internals.make_jaxpr(fn, *args, **kwargs)[0])[:_MOST_TEXT])
    except Exception as other:
        lines.append(f"The program has no text: {type(other).__name__}: {other}")
    return "\n".join(lines) + "\n"


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _written(text: str) -> str:
    """The file that holds the report; "" if none can be written."""
    with (
        contextlib.suppress(OSError),
        tempfile.NamedTemporaryFile(
            "w", prefix="remat_opt_", suffix=".txt", delete=False, encoding="utf-8"
        ) as file,
    ):
        file.write(text)
        return file.name
    return ""
