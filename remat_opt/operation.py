"""One equation of a program as plain data: what a cost rule may look at.

Nothing here imports jax. ``tracing`` turns each jaxpr equation into an Operation;
``costs`` turns an Operation into FLOPs and bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from typing import Any

# Bits that an element takes in memory, if the name does not end in the bit count. float0, the type
# of an integer's tangent, is carried as bool.
_BITS = {"bool": 8, "bfloat16": 16, "float0": 8, "[('float0', 'V')]": 8}

# "uint32", "float8_e4m3fn", "int4", "complex64": the first number is the bit count.
_NUMBERED = re.compile(r"(?:u?int|float|complex)(\d+)(?:_\w+)?")

# uint32 words in a PRNG key. The dtype's name holds only JAX's short tag of the
# generator: threefry, the two hardware generators and the one that does not split.
_KEY_WORDS = {"fry": 2, "rbg": 4, "urbg": 4}

# For a user's own generator: the size of the default one's key.
_USUAL_KEY_WORDS = 2


@functools.lru_cache(maxsize=256)
def _element_bits(dtype: str) -> int:
    """Bits one element of ``dtype`` takes.

    Raises:
      ValueError: JAX has no dtype of that name.
    """
    if dtype in _BITS:
        return _BITS[dtype]
    if numbered := _NUMBERED.fullmatch(dtype):
        return int(numbered[1])
    if dtype.startswith("key<"):
        return 32 * _KEY_WORDS.get(dtype[len("key<") : -1], _USUAL_KEY_WORDS)
    raise ValueError(
        f"The size of an element of dtype {dtype!r} is not known. Known are bool, (u)int, float "
        "and complex with a bit count (int4, float8_e4m3fn, ...), bfloat16, and PRNG keys "
        "such as key<fry>; remat_opt.operation holds the table."
    )


#: Matrix products and convolutions: their derivatives are products too.
PRODUCTS = frozenset({"dot_general", "conv_general_dilated"})

#: What writes, or adds up, updates at computed places.
SCATTERS = frozenset(
    {"scatter", "scatter-add", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max"}
)

#: Names of ``jax.checkpoint`` in a jaxpr.
CHECKPOINTS = frozenset({"checkpoint", "remat", "remat2"})

#: Equations that put arrays side by side.
ASSEMBLED = frozenset({"concatenate", "stack"})


#: How many turns a ``while`` of unknown length counts as. One would be too few: what runs once
#: needs no loop, and a plan would recompute it for the price of one turn.
GUESSED_TURNS = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArrayType:
    """Shape and dtype of one array.

    Attributes:
      shape: extent of each axis; () for a scalar.
      dtype: numpy-style name, e.g. ``"float32"``, ``"bfloat16"``, ``"key<fry>"``.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes the array takes; elements narrower than a byte are packed.

        Packing is what GPU and TPU do for int4; the last byte is rounded up. A PRNG
        key counts as its words (``key<fry>``: two uint32).

        Raises:
          ValueError: the dtype's element size is not known.
        """
        return -(-self.size * _element_bits(self.dtype) // 8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """A program inside an operation: the loop body of a scan, a branch of a cond, ...

    Attributes:
      operations: its equations, in order; inner programs nest.
      repeats: how often one run of the operation runs it: the length of a scan, the turns of a
        ``while`` that counts up to a constant, else 1.
      guessed: whether ``repeats`` is ``GUESSED_TURNS``, as for a ``while`` of unknown length.
    """

    operations: tuple[Operation, ...]
    repeats: int = 1
    guessed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One jaxpr equation.

    Attributes:
      primitive: JAX's name for what it computes, e.g. ``"dot_general"``.
      inputs: types of the arrays it reads, literals included, in order.
      outputs: types of the arrays it makes, in order.
      params: the equation's parameters as JAX has them. A cost rule may read their attributes
        (``dimension_numbers.lhs_spec``) without importing jax.
      bodies: the programs among its parameters, in order: scan's body; while's
        condition and body; each branch of a cond; what a call calls; the combiner of a
        ``reduce`` or a ``scatter-add``.
    """

    primitive: str
    inputs: tuple[ArrayType, ...]
    outputs: tuple[ArrayType, ...]
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    bodies: tuple[Body, ...] = ()

    @property
    def input_bytes(self) -> int:
        """Bytes of everything it reads; a value read twice counts twice."""
        return sum(array_type.bytes for array_type in self.inputs)

    @property
    def output_bytes(self) -> int:
        """Bytes of everything it makes."""
        return sum(array_type.bytes for array_type in self.outputs)

    @property
    def output_size(self) -> int:
        """Elements of everything it makes."""
        return sum(array_type.size for array_type in self.outputs)
