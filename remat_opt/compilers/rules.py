"""The rules about compilers, by name: on which each bears, and what it says.

A rule is something that one compiler was seen to do and that the arithmetic of fusion alone would
not tell. Its code is in the file named here; that file, or the one that calls it, asks
``Compiler.has`` for the rule's name, so each can be switched off. ``python -m benchmarks.ablation``
prints what that does to errors and plans: a rule stays as long as it helps at least two networks
and hurts none of those that only judge.

To say something new of a compiler, add a row here, and the code to the file of its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from remat_opt.device import Platform

_NVIDIA: Final[frozenset[Platform]] = frozenset({"cuda"})
_TPU: Final[frozenset[Platform]] = frozenset({"tpu"})
_CPU: Final[frozenset[Platform]] = frozenset({"cpu"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something that compilers do.

    Attributes:
      platforms: whose compilers do it.
      kind: ``stored`` (which values are arrays, and how large), ``cotangents`` (which of them are
        arrays), ``beside`` (what a step holds beside the graph), ``heap`` (what laying arrays out
        adds) or ``rewrite`` (what ``transform`` writes so that the compiler does as planned).
      file: where its code is, in this folder.
      says: what they do, or are made to do.
    """

    platforms: frozenset[Platform]
    kind: str
    file: str
    says: str


def _rule(platforms: frozenset[Platform], kind: str, file: str, says: str) -> Rule:
    return Rule(platforms=platforms, kind=kind, file=file, says=says)


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        # ------------------------------------------------------------------- what is stored
        "operands_fused": _rule(
            _TPU, "stored", "storage", "Products compute elementwise operands as they read them."
        ),
        "operands_rounded": _rule(
            _TPU,
            "stored",
            "operands",
            "What only products read is stored as they read it: rounded.",
        ),
        "forms_completed": _rule(
            _TPU,
            "stored",
            "operands",
            "Of a product that is biased and scaled, that form is stored.",
        ),
        "concatenations": _rule(
            _TPU, "stored", "storage", "A concatenation that is read twice is stored."
        ),
        "tiles": _rule(_TPU, "stored", "compiler", "Arrays are padded to tiles of 8 x 128 words."),
        "matrix_axes": _rule(
            _TPU, "stored", "matrix_axes", "The axes of batched matrices are stored innermost."
        ),
        "lanes": _rule(
            _TPU, "stored", "lanes", "Convolutions' channels or batch are innermost, rows gathered."
        ),
        "softmax": _rule(
            _TPU, "stored", "softmax", "Of a softmax that is rounded, the exponentials are stored."
        ),
        "transcendental": _rule(
            _NVIDIA | _CPU, "stored", "transcendental", "Dear functions are not computed twice."
        ),
        "slices_read_parts": _rule(
            _NVIDIA | _TPU, "stored", "storage", "To compute a slice again, a part is read."
        ),
        "readers_recounted": _rule(
            _NVIDIA | _TPU, "stored", "storage", "What only goes into one array has one reader."
        ),
        "prologues": _rule(
            _NVIDIA, "stored", "prologues", "Products compute cheap operands as they read them."
        ),
        "product_sums": _rule(
            _NVIDIA, "stored", "product_sums", "The sum of two products is stored, not the two."
        ),
        "stored_for_sums": _rule(
            _CPU, "stored", "cpu_sums", "What a sum multiplies is stored: it computes no more."
        ),
        "divisors": _rule(
            _CPU, "stored", "cpu_sums", "Behind batched products, divisors are stored in full."
        ),
        "widened": _rule(
            _CPU, "stored", "cpu_sums", "What products read and write in bfloat16 is float32."
        ),
        # ---------------------------------------------------------------------- cotangents
        "cotangents_fused": _rule(
            _TPU, "cotangents", "cotangents", "Products compute cotangents that sums give."
        ),
        "cotangents_rounded": _rule(
            _TPU, "cotangents", "cotangents", "Between two products a cotangent is rounded."
        ),
        "values_overwritten": _rule(
            _NVIDIA, "cotangents", "cotangents", "The cotangent of logits takes their place."
        ),
        "values_go": _rule(
            _NVIDIA, "cotangents", "overwriting", "Cotangents take the place of values that go."
        ),
        "cotangents_pass": _rule(
            _NVIDIA, "cotangents", "cotangents", "Between elementwise steps they are no arrays."
        ),
        "sums_share": _rule(
            _NVIDIA | _TPU | _CPU, "cotangents", "sums", "What is summed up has one cotangent."
        ),
        "squares": _rule(
            _NVIDIA, "cotangents", "sums", "What is multiplied with itself has a cotangent twice."
        ),
        "sums_beside": _rule(
            _NVIDIA, "cotangents", "vertices", "A kernel that sums writes over nothing it reads."
        ),
        "broadcast_cotangents": _rule(
            _CPU, "cotangents", "cotangents", "The cotangent of what is only summed is no array."
        ),
        # -------------------------------------------------------------------------- beside
        "pooling_zeros": _rule(
            _NVIDIA, "beside", "pooling", "A max pooling's gradient shares zeros with a relu."
        ),
        "pooling_places": _rule(
            _NVIDIA, "beside", "pooling", "A max pooling's gradient finds places again."
        ),
        "pooling_search": _rule(
            _CPU, "beside", "pooling", "A max pooling's places are searched for among coordinates."
        ),
        "weights_copied": _rule(
            _NVIDIA, "beside", "convolutions", "Weights of convolutions are copied, and wait."
        ),
        "operands_padded": _rule(
            _NVIDIA, "beside", "convolutions", "Operands with more padding behind are copied."
        ),
        "operands_first": _rule(
            _NVIDIA, "beside", "turns", "A product's operand goes before its cotangent comes."
        ),
        "row_scatters": _rule(
            _NVIDIA, "beside", "row_gathers", "The gradient of picking from rows is not in place."
        ),
        "shared_weights": _rule(
            _NVIDIA | _TPU | _CPU,
            "beside",
            "shared_weights",
            "The gradient of a weight that several products read has parts.",
        ),
        "transposed_operands": _rule(
            _CPU, "beside", "cpu_sums", "What a convolution reads is transposed for its gradient."
        ),
        "transposed_cotangents": _rule(
            _CPU, "beside", "cpu_sums", "For a weight's gradient the cotangent is transposed."
        ),
        "entries_rounded": _rule(
            _TPU,
            "beside",
            "operands",
            "A stack that a loop's products read is rounded ahead of it.",
        ),
        "copies": _rule(
            _TPU, "beside", "copies", "Every copy to vector memory has a signal of its own."
        ),
        # ---------------------------------------------------------------------------- heap
        "heap_in_order": _rule(
            _TPU, "heap", "heap", "Arrays are placed in the order in which they are made."
        ),
        "vector_memory": _rule(
            _TPU, "heap", "heap", "What is small and soon read stays in vector memory."
        ),
        "heap_by_size": _rule(
            _NVIDIA | _CPU, "heap", "heap", "The largest arrays, or the longest lived, come first."
        ),
        # ------------------------------------------------------------------------ rewrites
        "zeros_apart": _rule(
            _NVIDIA, "rewrite", "pooling", "A relu before a max pooling has zeros of its own."
        ),
        "searches_wait": _rule(
            _NVIDIA, "rewrite", "pooling", "A pooling's places are found when they are needed."
        ),
        "rows_picked": _rule(
            _NVIDIA, "rewrite", "row_gathers", "The gradient of picking from rows is elementwise."
        ),
        "picked_narrow": _rule(
            _TPU, "rewrite", "row_gathers", "What is picked is picked before it is widened."
        ),
        "gradients_in_turn": _rule(
            _NVIDIA, "rewrite", "rewrites", "Weights' and biases' gradients come in their turn."
        ),
        "activations_late": _rule(
            _NVIDIA, "rewrite", "turns", "A dear activation is computed with its cotangent."
        ),
        "loops_in_turn": _rule(
            _TPU, "rewrite", "rewrites", "Gradients come before the loop that runs backward next."
        ),
        "partners_wait": _rule(
            _NVIDIA, "rewrite", "product_sums", "Two products that are summed run together."
        ),
        "maxima_stored": _rule(
            _TPU, "rewrite", "softmax", "The maxima of a softmax's rows are arrays."
        ),
        "boundaries_stored": _rule(
            _CPU, "rewrite", "rewrites", "What a region hands on is an array."
        ),
        "parts_in_turn": _rule(
            _CPU, "rewrite", "rewrites", "Products wait until later parts are added."
        ),
    }
)
