"""Transcendental functions whose results compilers store because recomputing is expensive.

Most elementwise results are recomputed inside each kernel that reads them. XLA for CPU never does
so with a transcendental function, and XLA for NVIDIA only with one that takes a few instructions
there, such as an exponential, or the polynomial of an ``erf``. A ``tanh`` that is read forward and
backward, as in a GELU, is stored beside what is made of it. (Unchanged functions, compiled for
h200: without this, a GPT was predicted 5 % too small, ViT-B/16 15 %; with it, both are within 2 %.
With exponentials included, the GPT was 13 % too large. Of layers ``(u * f(u)) @ w``, those with
``erfc``, ``sin``, ``tanh``, ``pow`` and ``atan2`` took 872 MiB, all others 616.) XLA for TPU
recomputes all of them.
"""

from __future__ import annotations

from collections import Counter

from remat_opt.compilers.compiler import Compiler
from remat_opt.device import Platform
from remat_opt.program.dataflow import Dataflow

_DEAR = frozenset(
    "atan2 cbrt cos div erf erfc exp exp2 expm1 log log1p logistic pow rem rsqrt sin sqrt tan "
    "tanh".split()
)
_CHEAP = frozenset("cbrt div erf exp exp2 expm1 log log1p logistic rem rsqrt sqrt tan".split())


def dear(platform: Platform) -> frozenset[str]:
    """The primitives whose results are not computed twice."""
    return _DEAR if platform == "cpu" else _DEAR - _CHEAP


def stored(flow: Dataflow, compiler: Compiler) -> set[int]:
    """The results of transcendental functions that are read twice, forward or backward.

    Args:
      flow: of the program.
      compiler: which one it is.
    """
    if not compiler.has("transcendental"):
        return set()
    primitives = dear(compiler.device.platform)
    reads: Counter[int] = Counter()
    found: set[int] = set()
    for index, equation in enumerate(flow.program.equations):
        if flow.is_alias(index):
            continue
        reads.update(flow.reads(index))
        reads.update(flow.derivative_reads(index))
        if equation.operation.primitive in primitives:
            found.update(equation.outputs)
    return {value for value in found if reads[value] > 1}
