"""One equation without inner programs -> the call of ``jax.lax`` that makes it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax import lax

from remat_opt.export.literals import UnprintableError, text


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """A call as text: what is called, and its arguments."""

    fn: str
    arguments: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.fn}({', '.join(self.arguments)})"


#: Functions of ``lax`` that take the inputs and no parameters.
_PLAIN = frozenset(
    """
    abs acos acosh add and asin asinh atan atan2 atanh cbrt ceil clamp clz complex conj cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igamma_grad_a igammac imag
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma
    population_count pow real regularized_incomplete_beta rem round rsqrt select_n
    shift_left shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh
    xor zeta
    """.split()
)
_RENAMED = {
    "and": "bitwise_and",
    "not": "bitwise_not",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "regularized_incomplete_beta": "betainc",
}
#: Parameters that change nothing if they are None or False.
_NEUTRAL = frozenset({"accuracy", "sharding", "out_sharding"})

#: Takes an equation's parameters and its inputs as text to the call.
_Writer = Callable[[Mapping[str, Any], Sequence[str]], Call]


def _write(fn: str, *positional: str, **keywords: str) -> _Writer:
    """A writer: inputs first, then these parameters by position, then these by keyword."""

    def writer(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        given = [text(params[name]) for name in positional]
        named = [f"{word}={text(params[name])}" for word, name in keywords.items()]
        return Call(fn, (*inputs, *given, *named))

    return writer


def _listed(fn: str, *positional: str) -> _Writer:
    """A writer for functions that take their inputs as one list."""

    def writer(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        return Call(fn, (f"[{', '.join(inputs)}]", *(text(params[name]) for name in positional)))

    return writer


def _convert(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    if params["weak_type"]:
        return bound("convert_element_type", params, inputs)
    return Call("lax.convert_element_type", (*inputs, text(params["new_dtype"])))


def _reshape(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    if params["dimensions"] is not None:
        return bound("reshape", params, inputs)
    return Call("lax.reshape", (*inputs, text(params["new_sizes"])))


def _dot_general(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    return Call(
        "lax.dot_general",
        (*inputs, text(params["dimension_numbers"]), *_given(params, _PRODUCT_OPTIONS)),
    )


def _convolution(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    numbers = params["dimension_numbers"]
    options = {
        "lhs_dilation": (1,) * len(params["lhs_dilation"]),
        "rhs_dilation": (1,) * len(params["rhs_dilation"]),
        "feature_group_count": 1,
        "batch_group_count": 1,
    }
    return Call(
        "lax.conv_general_dilated",
        (
            *inputs,
            text(params["window_strides"]),
            text(params["padding"]),
            *(
                f"{key}={text(params[key])}"
                for key, usual in options.items()
                if params[key] != usual
            ),
            f"dimension_numbers={_layouts(numbers)}",
            *_given(params, _PRODUCT_OPTIONS),
        ),
    )


def _layouts(numbers: lax.ConvDimensionNumbers) -> str:
    """Where the dimensions of a convolution are, as ``("NHWC", "HWIO", "NHWC")``."""
    spatial = "DHW"[-(len(numbers.lhs_spec) - 2) :]
    if len(numbers.lhs_spec) - 2 != len(spatial):
        return text(numbers)
    found = []
    for spec, letters in (
        (numbers.lhs_spec, "NC"),
        (numbers.rhs_spec, "OI"),
        (numbers.out_spec, "NC"),
    ):
        by_place = dict(zip(spec, letters + spatial, strict=True))
        found.append("".join(by_place[place] for place in range(len(spec))))
    return text(tuple(found))


_PRODUCT_OPTIONS = ("precision", "preferred_element_type")


def _given(params: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    return [f"{name}={text(params[name])}" for name in names if params.get(name) is not None]


def _dynamic_slice(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    operand, *starts = inputs
    sizes = text(params["slice_sizes"])
    return Call(
        "lax.dynamic_slice",
        (operand, f"[{', '.join(starts)}]", sizes, "allow_negative_indices=False"),
    )


def _dynamic_update_slice(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    operand, update, *starts = inputs
    return Call(
        "lax.dynamic_update_slice",
        (operand, update, f"[{', '.join(starts)}]", "allow_negative_indices=False"),
    )


def _argument_reduction(fn: str) -> _Writer:
    def writer(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        (axis,) = params["axes"]
        return Call(fn, (*inputs, text(axis), text(params["index_dtype"])))

    return writer


def _sort(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    options = (f"{key}={text(params[key])}" for key in ("dimension", "is_stable", "num_keys"))
    return Call("lax.sort", (f"[{', '.join(inputs)}]", *options))


def _barrier(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    return Call("lax.optimization_barrier", (f"[{', '.join(inputs)}]",))


def _window(fn: str, identity: Callable[[Mapping[str, Any]], str]) -> _Writer:
    def writer(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        names = (
            ("window_dimensions", "window_dimensions"),
            ("window_strides", "window_strides"),
            ("padding", "padding"),
            ("base_dilation", "base_dilation"),
            ("window_dilation", "window_dilation"),
        )
        given = [
            f"{word}={text(params[name])}"
            for word, name in names
            if not (word.endswith("dilation") and set(params[name]) == {1})
        ]
        return Call("lax.reduce_window", (*inputs, identity(params), fn, *given))

    return writer


def _scatter(fn: str) -> _Writer:
    def writer(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        names = ("indices_are_sorted", "unique_indices", "mode")
        options = [f"{name}={text(params[name])}" for name in names]
        return Call(fn, (*inputs, text(params["dimension_numbers"]), *options))

    return writer


def _random_bits(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    shape, width = text(params["shape"]), params["bit_width"]
    return Call("jax.random.bits", (*inputs, shape, f"jnp.uint{width}"))


def _random_with_kind(fn: str) -> _Writer:
    def writer(params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
        return Call(fn, (*inputs, f"impl={text(params['impl'].name)}"))

    return writer


_gather = _write(
    "lax.gather",
    "dimension_numbers",
    "slice_sizes",
    indices_are_sorted="indices_are_sorted",
    unique_indices="unique_indices",
    mode="mode",
    fill_value="fill_value",
)

_WRITERS: Mapping[str, _Writer] = (
    {
        "add_any": _write("lax.add"),
        "argmax": _argument_reduction("lax.argmax"),
        "argmin": _argument_reduction("lax.argmin"),
        "broadcast_in_dim": _write("lax.broadcast_in_dim", "shape", "broadcast_dimensions"),
        "concatenate": _listed("lax.concatenate", "dimension"),
        "conv_general_dilated": _convolution,
        "convert_element_type": _convert,
        "copy": _write("jnp.copy"),
        "cumlogsumexp": _write("lax.cumlogsumexp", "axis", "reverse"),
        "cummax": _write("lax.cummax", "axis", "reverse"),
        "cummin": _write("lax.cummin", "axis", "reverse"),
        "cumprod": _write("lax.cumprod", "axis", "reverse"),
        "cumsum": _write("lax.cumsum", "axis", "reverse"),
        "dot_general": _dot_general,
        "dynamic_slice": _dynamic_slice,
        "dynamic_update_slice": _dynamic_update_slice,
        "fft": _write("lax.fft", "fft_type", "fft_lengths"),
        "gather": _gather,
        "integer_pow": _write("lax.integer_pow", "y"),
        "iota": _write("lax.broadcasted_iota", "dtype", "shape", "dimension"),
        "optimization_barrier": _barrier,
        "pad": _write("lax.pad", "padding_config"),
        "random_bits": _random_bits,
        "random_clone": _write("jax.random.clone"),
        "random_fold_in": _write("jax.random.fold_in"),
        "random_split": _write("jax.random.split", "shape"),
        "random_seed": _random_with_kind("jax.random.key"),
        "random_unwrap": _write("jax.random.key_data"),
        "random_wrap": _random_with_kind("jax.random.wrap_key_data"),
        "reshape": _reshape,
        "reduce_precision": _write("lax.reduce_precision", "exponent_bits", "mantissa_bits"),
        "reduce_window_sum": _window("lax.add", lambda params: "0.0"),
        "reduce_window_max": _window("lax.max", lambda params: "-jnp.inf"),
        "reduce_window_min": _window("lax.min", lambda params: "jnp.inf"),
        "rev": _write("lax.rev", "dimensions"),
        "scatter": _scatter("lax.scatter"),
        "slice": _write("lax.slice", "start_indices", "limit_indices", "strides"),
        "sort": _sort,
        "split": _write("lax.split", "sizes", "axis"),
        "squeeze": _write("lax.squeeze", "dimensions"),
        "stack": _listed("lax.stack", "axis"),
        "stop_gradient": _write("lax.stop_gradient"),
        "tile": _write("lax.tile", "reps"),
        "transpose": _write("lax.transpose", "permutation"),
        "unstack": _write("lax.unstack", "axis"),
    }
    | {
        f"reduce_{kind}": _write(f"lax.reduce_{kind}", "axes")
        for kind in ("and", "max", "min", "or", "prod", "sum", "xor")
    }
    | {
        f"scatter{joint}{kind}": _scatter(f"lax.scatter_{kind}")
        for kind in ("add", "max", "min", "mul", "sub")
        for joint in "-_"
    }
)


def call(primitive: str, params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    """The call that makes an equation.

    Args:
      primitive: its name.
      params: its parameters, none of them a program.
      inputs: its inputs as text.

    Raises:
      UnprintableError: there is no such call.

    >>> str(call("reduce_sum", {"axes": (0,), "out_sharding": None}, ["x"]))
    'lax.reduce_sum(x, (0,))'
    """
    for name in _NEUTRAL:
        if params.get(name) is not None:
            raise UnprintableError(f"{name}={params[name]!r:.60}")
    if primitive in _PLAIN:
        return Call(f"lax.{_RENAMED.get(primitive, primitive)}", tuple(inputs))
    writer = _WRITERS.get(primitive)
    return bound(primitive, params, inputs) if writer is None else writer(params, inputs)


def bound(primitive: str, params: Mapping[str, Any], inputs: Sequence[str]) -> Call:
    """The equation as a bound primitive, if no function makes it.

    Raises:
      UnprintableError: JAX does not export it.
    """
    word = primitive.replace("-", "_")
    for where, module in (("lax", lax), ("lax.linalg", jax.lax.linalg)):
        found = getattr(module, f"{word}_p", None)
        if getattr(found, "name", None) == primitive:
            given = [f"{key}={text(value)}" for key, value in params.items()]
            return Call(f"{where}.{word}_p.bind", (*inputs, *given))
    raise UnprintableError(f"the primitive {primitive!r}")
