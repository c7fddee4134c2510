"""Values of equation parameters and literals, as Python text."""

from __future__ import annotations

import dataclasses
import enum
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jax import lax

#: Literal arrays of at most this many elements are written out.
MOST_ELEMENTS = 64


class UnprintableError(Exception):
    """A value that has no text; the message says what it is."""


def text(value: Any) -> str:
    """The Python text of a value, for code that imports jax, jnp, lax and np.

    Raises:
      UnprintableError: it has none, as for a function or a mesh.

    >>> text((1, None, np.dtype("float32"), float("-inf")))
    '(1, None, jnp.float32, -jnp.inf)'
    """
    if isinstance(value, np.generic):
        return text(value.item())
    if isinstance(value, str):
        return quoted(value)
    if value is None or isinstance(value, bool | bytes):
        return repr(value)
    if isinstance(value, enum.Enum):
        return f"{_of_lax(type(value))}.{value.name}"
    if isinstance(value, float):
        return _number(value, repr(float(value)))
    if isinstance(value, int | complex):
        return repr(value)
    if isinstance(value, np.dtype):
        return dtype_text(str(value))
    if isinstance(value, type) and issubclass(value, np.generic):
        return dtype_text(str(np.dtype(value)))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
        return _record(type(value), fields)
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        usual: Mapping[str, Any] = getattr(value, "_field_defaults", {})
        fields = {k: one for k, one in value._asdict().items() if k not in usual or one != usual[k]}
        return _record(type(value), fields)
    if isinstance(value, tuple | list):
        inside = ", ".join(map(text, value))
        return f"({inside},)" if len(value) == 1 else f"({inside})"
    primitive = f"{getattr(value, 'name', '')}_p"
    if getattr(lax, primitive, None) is value:
        return f"lax.{primitive}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{text(key)}: {text(one)}" for key, one in value.items()) + "}"
    raise UnprintableError(f"{value!r:.60} ({type(value).__name__})")


def quoted(name: str) -> str:
    """A string in double quotes.

    >>> quoted("tanh_1")
    '"tanh_1"'
    """
    return json.dumps(name)


def dtype_text(name: str) -> str:
    """A dtype as an attribute of ``jax.numpy``.

    Raises:
      UnprintableError: it is not one, as for random keys.

    >>> dtype_text("bfloat16"), dtype_text("bool")
    ('jnp.bfloat16', 'jnp.bool_')
    """
    if not name.isidentifier():
        raise UnprintableError(f"the dtype {name}")
    if name == "float0":
        return "jax.dtypes.float0"
    return "jnp.bool_" if name == "bool" else f"jnp.{name}"


def constant_text(value: Any, dtype: str, *, weak: bool) -> str:
    """A literal of a program: a Python number if its type is weak, else one of its dtype.

    Raises:
      UnprintableError: it is a large array.

    >>> constant_text(np.float32(0.1), "float32", weak=True)
    '0.1'
    >>> constant_text(np.array([1, 2]), "int32", weak=False)
    'np.array([1, 2], jnp.int32)'
    """
    array = np.asarray(value)
    if array.size > MOST_ELEMENTS:
        raise UnprintableError(f"an array of {array.size} elements")
    if array.ndim:
        # By rows, each number with all digits of its dtype.
        return f"np.array({_rows(array)}, {dtype_text(dtype)})"
    number = _scalar(array)
    return number if weak or dtype == "bool" else f"{dtype_text(dtype)}({number})"


def _rows(array: np.ndarray) -> str:
    if not array.ndim:
        return _scalar(array)
    return "[" + ", ".join(_rows(np.asarray(row)) for row in array) + "]"


def _scalar(array: np.ndarray) -> str:
    value = array[()]
    if array.dtype.kind in "biu":
        return repr(value.item())
    if array.dtype.kind == "c":
        return repr(complex(value))
    # The shortest text that reads back as the same float32.
    written = str(value) if array.dtype.kind == "f" else repr(float(value))
    return _number(float(value), written if "." in written or "e" in written else f"{written}.0")


def _number(value: float, written: str) -> str:
    if math.isnan(value):
        return "jnp.nan"
    if math.isinf(value):
        return "jnp.inf" if value > 0 else "-jnp.inf"
    return written


def _record(kind: type, fields: Mapping[str, Any]) -> str:
    inside = ", ".join(f"{name}={text(value)}" for name, value in fields.items())
    return f"{_of_lax(kind)}({inside})"


def _of_lax(kind: type) -> str:
    if getattr(lax, kind.__name__, None) is not kind:
        raise UnprintableError(f"a {kind.__name__}")
    return f"lax.{kind.__name__}"
