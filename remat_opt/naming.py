"""What to call a value, in words that the program's author knows."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Mapping

#: The file names under which a notebook's kernel compiles each cell.
_CELL_FOLDER = re.compile(r"ipykernel_\d+/")

#: Transformations in a name stack, ``vmap(Net)``, and where they end.
_TRANSFORMED = re.compile(r"\w+\(|\)")

#: What primitives do, if their names do not say it.
_WORDS: Mapping[str, str] = {
    "add": "sum",
    "add_any": "sum",
    "broadcast_in_dim": "broadcast",
    "concatenate": "concatenation",
    "conv_general_dilated": "convolution",
    "convert_element_type": "conversion",
    "cumsum": "running sum",
    "custom_jvp_call": "function with a derivative of its own",
    "custom_vjp_call": "function with a derivative of its own",
    "div": "quotient",
    "dot_general": "matrix product",
    "dynamic_slice": "slice",
    "dynamic_update_slice": "update of a slice",
    "exp": "exponential",
    "gather": "lookup",
    "integer_pow": "power",
    "log": "logarithm",
    "logistic": "sigmoid",
    "max": "maximum",
    "min": "minimum",
    "mul": "product",
    "pow": "power",
    "reduce_max": "maximum",
    "reduce_min": "minimum",
    "reduce_sum": "sum",
    "reduce_window_max": "max pooling",
    "reduce_window_sum": "sum pooling",
    "rsqrt": "inverse square root",
    "scatter-add": "sum of scattered values",
    "select_n": "choice",
    "sqrt": "square root",
    "sub": "difference",
    "transpose": "transposition",
}

_SHORT = {"float": "f", "bfloat": "bf", "uint": "u", "int": "i", "complex": "c"}


def short_type(dtype: str, shape: tuple[int, ...]) -> str:
    """A type as jaxprs write it.

    >>> short_type("bfloat16", (8, 128))
    'bf16[8,128]'
    """
    name = re.sub(r"^(bfloat|float|uint|int|complex)", lambda m: _SHORT[m[0]], dtype)
    return f"{name}[{','.join(map(str, shape))}]"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ValueName:
    """What to call one value of a program.

    Attributes:
      what: what it is, such as ``relu of Block_3/BatchNorm_0``.
      module: path of the module it is computed in, such as ``Net/Block_3``; "" if there is none.
      source: the user's own line, as ``file.py:line (function)``; "" if unknown.
      shape: its extents.
      dtype: type of its elements.
      primitive: that of the equation that makes it.
    """

    what: str
    module: str
    source: str
    shape: tuple[int, ...]
    dtype: str
    primitive: str

    @property
    def title(self) -> str:
        """What it is, with its extents, in one line.

        >>> name = ValueName(
        ...     what="relu of Block_3/BatchNorm_0",
        ...     module="Net/Block_3",
        ...     source="net.py:12 (Block.__call__)",
        ...     shape=(64, 112, 112, 96),
        ...     dtype="float32",
        ...     primitive="max",
        ... )
        >>> name.title
        'relu of Block_3/BatchNorm_0, 64x112x112x96 float32'
        >>> name.label
        'max f32[64,112,112,96]'
        """
        return f"{self.what}, {extents(self.shape, self.dtype)}"

    @property
    def label(self) -> str:
        """Primitive, dtype and shape, as a jaxpr writes them."""
        return f"{self.primitive} {short_type(self.dtype, self.shape)}"


def in_words(primitive: str) -> str:
    """What a primitive makes.

    >>> in_words("dot_general"), in_words("erf_inv")
    ('matrix product', 'erf inv')
    """
    return _WORDS.get(primitive, primitive.replace("_", " "))


def extents(shape: tuple[int, ...], dtype: str) -> str:
    """A type in words.

    >>> extents((64, 128), "float32"), extents((), "int32")
    ('64x128 float32', 'scalar int32')
    """
    return f"{'x'.join(map(str, shape)) or 'scalar'} {dtype}"


def modules_of(name_stack: str) -> tuple[str, ...]:
    """The modules in a name stack, outermost first, without transformations.

    >>> modules_of("vmap(Net)/vmap()/Block_0")
    ('Net', 'Block_0')
    """
    return tuple(filter(None, _TRANSFORMED.sub("", name_stack).split("/")))


def file_title(path: str) -> str:
    """The name of a file in a traceback; for a notebook's cell, its number if known.

    >>> file_title("/home/me/net.py"), file_title("/tmp/ipykernel_12/3456789.py")
    ('net.py', 'cell')
    """
    path = path.replace("\\", "/")
    if not _CELL_FOLDER.search(path):
        return path.rsplit("/", 1)[-1]
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    # IPython finds the number in this way for its own tracebacks.
    numbers = getattr(getattr(shell, "compile", None), "_filename_map", {})
    number = numbers.get(path)
    return "cell" if number is None else f"cell {number}"
