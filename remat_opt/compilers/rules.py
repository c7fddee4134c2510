"""The rules about compilers, by name: which compilers each applies to, and what it says.

A rule is something that a compiler was seen to do and that the arithmetic of fusion alone does not
predict. Its code is in the file named here. That file, or the one that calls it, asks
``Compiler.has`` for the rule's name, so each rule can be switched off. ``python -m
benchmarks.ablation`` prints what that does to errors and plans: a rule stays as long as it helps at
least two networks and hurts none of the networks that only judge.

To add something new about a compiler, add a row here, and the code to the file of its kind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from remat_opt.device import CompilerOption, Device, Platform

#: The options with which XLA for TPU keeps to the order of a program.
IN_ORDER: Final[Mapping[str, CompilerOption]] = MappingProxyType({"xla_memory_scheduler": "bfs"})

_NVIDIA: Final[frozenset[Platform]] = frozenset({"cuda"})
_TPU: Final[frozenset[Platform]] = frozenset({"tpu"})
_CPU: Final[frozenset[Platform]] = frozenset({"cpu"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Something that compilers do.

    Attributes:
      platforms: the platforms whose compilers do it.
      kind: ``stored`` (which values are arrays, and how large), ``cotangents`` (which of them are
        arrays), ``beside`` (what a step holds in addition to the graph), ``heap`` (what laying out
        arrays adds), ``time`` (what it takes to compute again) or ``rewrite`` (what ``transform``
        writes so that the compiler follows the plan).
      file: where its code is, in this folder.
      says: what they do, or are made to do.
      since: the first version of JAX that was seen to come with such a compiler.
      told: compiler options without which it does not hold.
    """

    platforms: frozenset[Platform]
    kind: str
    file: str
    says: str
    since: tuple[int, ...] = ()
    told: Mapping[str, CompilerOption] = dataclasses.field(default_factory=dict)

    def holds_for(self, device: Device) -> bool:
        """Whether it is about the device's compiler, as that is told."""
        return device.platform in self.platforms and self.told.items() <= (
            device.compiler_options.items()
        )


def _rule(
    platforms: frozenset[Platform],
    kind: str,
    file: str,
    says: str,
    *,
    since: tuple[int, ...] = (),
    told: Mapping[str, CompilerOption] = MappingProxyType({}),
) -> Rule:
    return Rule(platforms=platforms, kind=kind, file=file, says=says, since=since, told=told)


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
            "What only products read is stored rounded, as they read it.",
        ),
        "forms_completed": _rule(
            _TPU,
            "stored",
            "operands",
            "A product that is biased and scaled is stored in that form.",
        ),
        "concatenations": _rule(
            _TPU, "stored", "storage", "A concatenation that is read twice is stored."
        ),
        "pieces_stored": _rule(
            _TPU,
            "stored",
            "joins",
            "If a product reads a concatenation, its pieces are stored.",
        ),
        "tiles": _rule(
            _TPU, "stored", "compiler", "Arrays are padded to tiles of 8 x 128 elements."
        ),
        "matrix_axes": _rule(
            _TPU, "stored", "matrix_axes", "The axes of batched matrices are stored innermost."
        ),
        "lanes": _rule(
            _TPU,
            "stored",
            "lanes",
            "Innermost are a convolution's channels or batch, and gathered rows.",
        ),
        "vector_products": _rule(
            _TPU,
            "stored",
            "vector_products",
            "Products with a vector are sums, and outer products elementwise.",
        ),
        "rows_grouped": _rule(
            _TPU,
            "stored",
            "grouped_rows",
            "Rows looked up in groups are padded group by group, and regrouped.",
        ),
        "softmax": _rule(
            _TPU, "stored", "softmax", "A softmax that is rounded stores its exponentials."
        ),
        "scores_widened": _rule(
            _NVIDIA, "stored", "softmax", "A softmax of narrower scores stores its exponentials."
        ),
        "logits_shifted": _rule(
            _NVIDIA | _TPU,
            "stored",
            "softmax",
            "A log-softmax stores its logits minus the maximum of their row.",
        ),
        "picked_stored": _rule(
            _TPU, "stored", "row_gathers", "Unchanged, what is picked from rows is stored."
        ),
        "indices_listed": _rule(
            _NVIDIA,
            "stored",
            "entry_gathers",
            "Unchanged, indices along one axis are stored with those along all others.",
        ),
        "operands_again": _rule(
            _NVIDIA,
            "stored",
            "batched_products",
            "Batched products compute elementwise operands in each order that they read.",
        ),
        "transcendental": _rule(
            _NVIDIA | _TPU | _CPU,
            "stored",
            "transcendental",
            "Expensive functions are not computed twice.",
        ),
        "operands_stored": _rule(
            _TPU,
            "stored",
            "transcendental",
            "Unchanged, what products read of a float32 erfc is stored.",
            since=(0, 12),
        ),
        "flat_operands": _rule(
            _NVIDIA,
            "stored",
            "flat_products",
            "A narrow erfc of a product with several axes of rows is stored with its operand.",
        ),
        "sums_split": _rule(
            _NVIDIA, "stored", "sums", "What long sums and something else read is stored."
        ),
        "draws_stored": _rule(_NVIDIA, "stored", "draws", "What is drawn is drawn once."),
        "words_stored": _rule(
            _CPU, "stored", "draws", "Random number generators store two words a number."
        ),
        "rows_computed": _rule(
            _CPU, "stored", "storage", "Looked-up rows are computed as they are read."
        ),
        "rows_fused": _rule(
            _NVIDIA,
            "stored",
            "storage",
            "What is looked up, or added up at places, is computed there.",
        ),
        "slices_read_parts": _rule(
            _NVIDIA | _TPU, "stored", "storage", "Recomputing a slice reads only a part."
        ),
        "spectra_whole": _rule(
            _TPU,
            "stored",
            "spectra",
            "A Fourier transform of real numbers is stored with both halves.",
        ),
        "places_stored": _rule(
            _TPU, "stored", "places", "What is read at two places, one through a slice, is stored."
        ),
        "places_spread": _rule(
            _TPU,
            "beside",
            "places",
            "Slices that overlap have cotangents of their own, until these are added up.",
        ),
        "reread_backward": _rule(
            _NVIDIA | _TPU,
            "stored",
            "storage",
            "What is made of more than three arrays is stored if the backward pass reads it, too.",
        ),
        "places_apart": _rule(
            _NVIDIA,
            "stored",
            "places",
            "All slices but one of an expensive function that a kernel reads in slices are.",
        ),
        "strides_stored": _rule(
            _TPU, "stored", "strides", "A slice with strides along either of the last two axes is."
        ),
        "strides_spread": _rule(
            _TPU,
            "beside",
            "strides",
            "The cotangent of a slice with strides is as large as what was sliced.",
        ),
        "readers_recounted": _rule(
            _NVIDIA | _TPU, "stored", "storage", "A value that ends up in one array has one reader."
        ),
        "product_sums": _rule(
            _NVIDIA, "stored", "product_sums", "The sum of two products is stored, not the two."
        ),
        "sums_in_products": _rule(
            _TPU, "stored", "product_sums", "A product adds others to itself as it is written."
        ),
        "stored_for_sums": _rule(
            _CPU, "stored", "cpu_sums", "Sums only multiply: their operands are stored."
        ),
        "divisors": _rule(
            _CPU, "stored", "cpu_sums", "Divisors that batched products need are stored in full."
        ),
        "widened": _rule(_CPU, "stored", "cpu_sums", "bfloat16 products read and write float32."),
        # ---------------------------------------------------------------------- cotangents
        "cotangents_fused": _rule(
            _TPU, "cotangents", "cotangents", "Products compute the cotangents of sums themselves."
        ),
        "cotangents_rounded": _rule(
            _TPU, "cotangents", "cotangents", "A cotangent between two products is rounded."
        ),
        "factors_share": _rule(
            _TPU,
            "cotangents",
            "cotangents",
            "The factors of a product's operand share the operand's cotangent.",
        ),
        "products_stay": _rule(
            _NVIDIA,
            "cotangents",
            "overwriting",
            "Nothing is written over what products of matrices write.",
        ),
        "rows_scattered": _rule(
            _NVIDIA,
            "cotangents",
            "row_gathers",
            "The gradient of picking from rows is scattered into all of them, as it is.",
        ),
        "orders": _rule(
            _NVIDIA,
            "cotangents",
            "batched_products",
            "Batched products of several axes read their cotangent in two orders.",
        ),
        "algorithms": _rule(
            _NVIDIA,
            "cotangents",
            "batched_products",
            "A product with an algorithm reads its cotangent in that type.",
        ),
        "cotangents_pass": _rule(
            _NVIDIA | _TPU,
            "cotangents",
            "cotangents",
            "Between elementwise steps, no cotangent is stored.",
        ),
        "sums_share": _rule(
            _NVIDIA | _TPU | _CPU, "cotangents", "sums", "The terms of a sum share one cotangent."
        ),
        "squares": _rule(
            _TPU | _CPU, "cotangents", "squares", "A value multiplied by itself has two cotangents."
        ),
        "broadcast_cotangents": _rule(
            _CPU, "cotangents", "cotangents", "A value that is only summed has no stored cotangent."
        ),
        "whole_cotangents": _rule(
            _TPU,
            "cotangents",
            "joins",
            "Unchanged, the cotangent of a concatenation that a product reads is one array.",
        ),
        # -------------------------------------------------------------------------- beside
        "pooling_zeros": _rule(
            _NVIDIA, "beside", "pooling", "Max pooling's gradient shares zeros with a relu."
        ),
        "pooling_search": _rule(
            _CPU, "beside", "pooling", "Max pooling's maxima are searched for among coordinates."
        ),
        "weights_copied": _rule(
            _NVIDIA,
            "beside",
            "convolutions",
            "Convolution weights are copied, and the copies wait.",
        ),
        "operands_padded": _rule(
            _NVIDIA, "beside", "convolutions", "Operands with more padding at the end are copied."
        ),
        "operands_transposed": _rule(
            _NVIDIA,
            "beside",
            "convolutions",
            "The gradient of a kernel with holes, or that is transposed, reads its operand and "
            "cotangent transposed.",
        ),
        "operands_spread": _rule(
            _NVIDIA,
            "beside",
            "convolutions",
            "A transposed convolution writes its operand with zeros in between.",
        ),
        "operands_first": _rule(
            _NVIDIA, "beside", "turns", "A product's operand is freed before its cotangent."
        ),
        "shared_weights": _rule(
            _NVIDIA | _TPU | _CPU,
            "beside",
            "shared_weights",
            "A weight that several products read has a gradient in parts.",
        ),
        "transposed_operands": _rule(
            _CPU, "beside", "cpu_sums", "A convolution's operand is transposed for its gradient."
        ),
        "transposed_cotangents": _rule(
            _CPU, "beside", "cpu_sums", "A weight's gradient transposes the cotangent."
        ),
        "zeros_shared": _rule(
            _NVIDIA, "beside", "lookups", "Gradients of looked-up rows begin with the same zeros."
        ),
        "tables_first": _rule(
            _NVIDIA,
            "beside",
            "scheduling",
            "The zeros for a table's gradient come before what allocates more.",
        ),
        "zeros_first": _rule(
            _CPU, "beside", "lookups", "Zeros that looked-up rows' gradients are added to."
        ),
        "entries_rounded": _rule(
            _TPU,
            "beside",
            "operands",
            "A stack that a loop's products read is rounded before the loop.",
        ),
        "entries_sliced": _rule(
            _NVIDIA,
            "beside",
            "stacks",
            "Of a loop's stacks only what products read is copied; the rest reads them there.",
        ),
        "entries_taken": _rule(
            _NVIDIA,
            "beside",
            "stacks",
            "Products read entries of a loop's stacks there, with a larger workspace.",
            since=(0, 11),
        ),
        "runs_when_read": _rule(
            _NVIDIA,
            "beside",
            "stacks",
            "In an iteration, what runs again does so when it is read, if that takes less.",
            since=(0, 12),
        ),
        "entries_reordered": _rule(
            _TPU,
            "beside",
            "reordered",
            "An argument that is read entry by entry is copied, with its entries one by one.",
        ),
        "entries_in_place": _rule(
            _TPU, "beside", "stacks", "An iteration reads what it keeps where it lies."
        ),
        "scores_copied": _rule(
            _TPU, "beside", "copies", "Scores that a region hands on are copied to another order."
        ),
        "copies": _rule(
            _TPU, "beside", "copies", "Every copy to vector memory has its own signal."
        ),
        "logits_apart": _rule(
            _CPU,
            "beside",
            "logits",
            "Unchanged, two kernels compute the cotangent of logits, from what stays until then.",
        ),
        "starts_first": _rule(
            _CPU, "beside", "scheduling", "Unchanged, what no product leads to runs first."
        ),
        "conversions_first": _rule(
            _NVIDIA, "beside", "scheduling", "Weights are converted before what is larger runs."
        ),
        "updates_wait": _rule(
            _NVIDIA,
            "beside",
            "scheduling",
            "Updates wait while activations take less than they.",
        ),
        "sums_wait": _rule(
            _NVIDIA | _TPU | _CPU,
            "beside",
            "scheduling",
            "Updates of gradients that devices add up wait for the end of the backward pass.",
        ),
        "operands_gathered": _rule(
            _NVIDIA | _TPU | _CPU,
            "beside",
            "gathers",
            "An operand split along an axis that splits the result elsewhere is gathered.",
        ),
        "gathered_in_loops": _rule(
            _NVIDIA | _CPU, "beside", "gathers", "Loops gather such operands, too."
        ),
        "sums_put_off": _rule(
            _NVIDIA,
            "beside",
            "put_off",
            "Behind checkpoints by hand, what sums over devices are computed from waits.",
        ),
        "scattered_put_off": _rule(
            _TPU,
            "beside",
            "put_off",
            "Behind checkpoints by hand, what scattered sums are computed from waits.",
        ),
        "updates_fused": _rule(
            _TPU,
            "beside",
            "scheduling",
            "An update that runs in its turn computes its gradient, which is no array.",
            told=IN_ORDER,
        ),
        # ---------------------------------------------------------------------------- heap
        "heap_in_order": _rule(
            _TPU, "heap", "heap", "Arrays are placed in the order in which they are made."
        ),
        "vector_memory": _rule(
            _TPU, "heap", "heap", "Small arrays that are read soon stay in vector memory."
        ),
        "heap_by_size": _rule(
            _NVIDIA | _CPU, "heap", "heap", "The largest or longest-lived arrays are placed first."
        ),
        "results_lend": _rule(
            _NVIDIA | _CPU,
            "heap",
            "heap",
            "Arrays lie in result buffers until results are written.",
        ),
        # ---------------------------------------------------------------------------- time
        "convolution_time": _rule(
            _NVIDIA,
            "time",
            "convolutions",
            "Convolutions take twice their roofline's time, and more for holes filled with zeros.",
        ),
        # ------------------------------------------------------------------------ rewrites
        "zeros_apart": _rule(
            _NVIDIA, "rewrite", "pooling", "A relu before a max pooling has its own zeros."
        ),
        "searches_wait": _rule(
            _NVIDIA, "rewrite", "pooling", "A pooling's maxima are found when they are needed."
        ),
        "rows_picked": _rule(
            _NVIDIA, "rewrite", "row_gathers", "The gradient of picking from rows is elementwise."
        ),
        "entries_flat": _rule(
            _NVIDIA,
            "rewrite",
            "entry_gathers",
            "What entries are taken from along one axis is read as a flat array.",
        ),
        "entries_turned": _rule(
            _TPU,
            "rewrite",
            "reordered",
            "In plans an argument's entries are read one by one, each with a copy of its own.",
        ),
        "picks_summed": _rule(
            _TPU, "rewrite", "row_gathers", "Picking from a row is a sum over it."
        ),
        "pieces_apart": _rule(
            _TPU,
            "rewrite",
            "joins",
            "The pieces of an operand that is a concatenation have cotangents of their own.",
        ),
        "parts_added": _rule(
            _NVIDIA | _TPU | _CPU,
            "rewrite",
            "rewrites",
            "The parts of a weight's gradient are added one by one.",
        ),
        "gradients_in_turn": _rule(
            _NVIDIA, "rewrite", "rewrites", "Gradients of weights and biases come in turn."
        ),
        "calls_in_turn": _rule(
            _NVIDIA | _TPU,
            "rewrite",
            "rewrites",
            "Gradients of checkpoints by hand and custom rules come in turn.",
        ),
        "products_apart": _rule(
            _NVIDIA, "rewrite", "turns", "Products of one operand are not merged into one."
        ),
        "squares_apart": _rule(
            _NVIDIA,
            "rewrite",
            "squares",
            "The gradients of a value multiplied by itself are not merged into one product.",
        ),
        "squares_once": _rule(
            _TPU | _CPU,
            "rewrite",
            "squares",
            "The gradient of a symmetric product of a value with itself is one product.",
        ),
        "loops_in_turn": _rule(
            _TPU, "rewrite", "rewrites", "Gradients come before the next loop's backward pass."
        ),
        "starts_wait": _rule(
            _NVIDIA | _TPU | _CPU,
            "rewrite",
            "turns",
            "What starts from arguments waits for what is before it in the plan.",
        ),
        "branches_in_turn": _rule(
            _NVIDIA | _TPU,
            "rewrite",
            "rewrites",
            "Branches that begin at a value run backward in turn.",
        ),
        "starts_in_turn": _rule(
            _CPU,
            "rewrite",
            "turns",
            "In a region, what starts from arguments runs one by one, and so do its gradients.",
        ),
        "logits_together": _rule(
            _CPU,
            "rewrite",
            "logits",
            "The cotangent of logits whose exponentials are summed is one array.",
        ),
        "draws_in_turn": _rule(
            _CPU,
            "rewrite",
            "draws",
            "In a region, random bits are drawn one after the other, each where they are read.",
        ),
        "functions_again": _rule(
            _NVIDIA,
            "rewrite",
            "transcendental",
            "An expensive function before a product is computed twice, and not stored.",
        ),
        "partners_wait": _rule(
            _NVIDIA, "rewrite", "product_sums", "Two products that are summed run together."
        ),
        "maxima_stored": _rule(
            _TPU, "rewrite", "softmax", "The row maxima of a softmax are stored."
        ),
        "boundaries_stored": _rule(
            _CPU, "rewrite", "rewrites", "The outputs of a region are stored."
        ),
        "outputs_together": _rule(
            _TPU, "rewrite", "rewrites", "No output of a region is put off until later ones ran."
        ),
        "parts_in_turn": _rule(
            _CPU, "rewrite", "rewrites", "Products wait until later parts are added."
        ),
    }
)


def not_yet(version: tuple[int, ...]) -> frozenset[str]:
    """The rules that do not hold for the compilers of a version of JAX, by name."""
    return frozenset(name for name, rule in RULES.items() if version < rule.since)
