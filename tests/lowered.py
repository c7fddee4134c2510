"""What JAX hands to a compiler, to tell programs apart without compiling them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax


def operations(fn: Callable[..., Any], *args: Any) -> list[str]:
    """The operations of ``jax.jit(fn)``, in order, without names of values and functions.

    Two programs with the same operations are the same to a compiler. Checkpoints that are not
    differentiated leave no trace.
    """
    text = jax.jit(fn).lower(*args).as_text()
    return re.sub(r"[%@]\w+(:\d+)?(#\d+)?|module", "", text).splitlines()
