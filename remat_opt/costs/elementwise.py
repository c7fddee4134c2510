"""Elementwise operations: every output element comes from the inputs' same element.

XLA counts one FLOP per output element for those that the hardware has, and one transcendental for
those with a series or a table; complex numbers count as one element. The special functions at the
bottom have no instruction of their own: their figures are what the CPU compiler of JAX 0.10 expands
them to for float32, and other versions and devices differ by up to a few times. In half precision
the CPU compiler counts its conversions to float32 and back as well; GPU and TPU do not need them,
so they are left out here.
"""

from __future__ import annotations

from remat_opt.costs.records import Cost, Fusion
from remat_opt.costs.registry import Rule, parameter, register
from remat_opt.operation import Operation


def _elementwise(operation: Operation, flops: int, transcendentals: int) -> Cost:
    """The cost of a number of FLOPs and transcendentals for each output element."""
    return Cost(
        flops=flops * operation.output_size,
        transcendentals=transcendentals * operation.output_size,
        bytes_read=operation.input_bytes,
        bytes_written=operation.output_bytes,
        fusion=Fusion.FUSIBLE,
    )


@register(
    *("abs", "ceil", "floor", "is_finite", "neg", "round", "sign", "square"),
    *("add", "add_any", "sub", "mul", "div", "rem", "max", "min", "clamp", "mulhi", "reciprocal"),
    *("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to"),
    *("and", "or", "xor", "not", "clz", "population_count"),
    *("shift_left", "shift_right_arithmetic", "shift_right_logical"),
    *("complex", "real", "imag", "conj"),
    *("bitcast_convert_type", "reduce_precision"),
)
def arithmetic(operation: Operation) -> Cost:
    """One FLOP an element."""
    return _elementwise(operation, 1, 0)


@register(
    *("atan", "atan2", "cbrt", "cos", "erf", "exp", "expm1", "log", "log1p"),
    *("pow", "rsqrt", "sin", "sqrt", "tan", "tanh"),
)
def transcendental(operation: Operation) -> Cost:
    """One transcendental an element and no FLOPs."""
    return _elementwise(operation, 0, 1)


@register("convert_element_type")
def conversion(operation: Operation) -> Cost:
    """One FLOP an element, or nothing if only the weak type changes."""
    same = operation.inputs[0].dtype == operation.outputs[0].dtype
    return _elementwise(operation, 0 if same else 1, 0)


@register("select_n")
def selection(operation: Operation) -> Cost:
    """One select an element; choosing by an integer takes a comparison for each select."""
    which, *cases = operation.inputs
    selects = len(cases) - 1
    return _elementwise(operation, selects if which.dtype == "bool" else 2 * selects, 0)


@register("integer_pow")
def integer_power(operation: Operation) -> Cost:
    """Multiplications of a power by repeated squaring, and a division if it is negative."""
    exponent = int(parameter(operation, "y"))
    magnitude = abs(exponent)
    if magnitude == 0:
        return _elementwise(operation, 0, 0)
    squarings = magnitude.bit_length() - 1
    products = magnitude.bit_count() - 1
    return _elementwise(operation, squarings + products + (exponent < 0), 0)


# FLOPs and transcendentals per element that the CPU compiler expands to.
_EXPANDED = {
    "acos": (3, 2),
    "acosh": (7, 4),
    "asin": (3, 2),
    "asinh": (11, 3),
    "atanh": (6, 2),
    "cosh": (3, 2),
    "exp2": (1, 1),
    "logistic": (3, 1),
    "log2": (1, 1),
    "nextafter": (23, 0),
    "one_minus_square": (3, 0),
    "sinh": (10, 3),
    "bessel_i0e": (83, 1),
    "bessel_i1e": (83, 1),
    "digamma": (73, 3),
    "erf_inv": (37, 2),
    "erfc": (60, 1),
    "lgamma": (52, 4),
    "zeta": (122, 11),
}

# These loop until the series converges; the figures are for one turn, and a guess.
_ITERATED = {
    "igamma": (268, 6),
    "igammac": (268, 6),
    "igamma_grad_a": (268, 6),
    "random_gamma_grad": (268, 6),
    "polygamma": (230, 16),
    "random_gamma": (664, 8),
    "regularized_incomplete_beta": (259, 16),
}


def _expansion(flops: int, transcendentals: int) -> Rule:
    """The rule of a function that takes that many FLOPs and transcendentals an element."""

    def special_function(operation: Operation) -> Cost:
        return _elementwise(operation, flops, transcendentals)

    return special_function


def _iteration(flops: int, transcendentals: int) -> Rule:
    """The same for a function with a loop inside: it does not fuse and is a guess."""

    def iterated_function(operation: Operation) -> Cost:
        return Cost(
            flops=flops * operation.output_size,
            transcendentals=transcendentals * operation.output_size,
            bytes_read=operation.input_bytes,
            bytes_written=operation.output_bytes,
            fusion=Fusion.OPAQUE,
            estimated=True,
        )

    return iterated_function


for _name, _counts in _EXPANDED.items():
    register(_name)(_expansion(*_counts))
for _name, _counts in _ITERATED.items():
    register(_name)(_iteration(*_counts))
