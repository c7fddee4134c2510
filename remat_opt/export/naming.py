"""Names for a program's values: arguments after their paths, others after what makes them."""

from __future__ import annotations

import builtins
import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from remat_opt.program.record import Equation, Program

_SHORT = {
    "add_any": "sum",
    "broadcast_in_dim": "wide",
    "checkpoint": "block",
    "conv_general_dilated": "conv",
    "convert_element_type": "cast",
    "cond": "chosen",
    "custom_jvp_call": "activation",
    "dot_general": "dot",
    "dynamic_slice": "part",
    "dynamic_update_slice": "updated",
    "integer_pow": "power",
    "reduce_max": "largest",
    "reduce_sum": "sum",
    "reduce_window_max": "pooled",
    "reduce_window_sum": "pooled",
    "select_n": "selected",
    "stop_gradient": "stopped",
    "transpose": "transposed",
    "while": "loop",
}
#: Names that exported code imports or defines.
RESERVED = frozenset(
    set("checkpoint_name constants count functools jax jnp lax np with_layout_constraint".split())
    | set(keyword.kwlist)
    | set(dir(builtins))
)


def identifier(text: str) -> str:
    """The text as a Python name.

    >>> identifier("params['Block_0'].kernel")
    'params_block_0_kernel'
    """
    word = re.sub(r"\W+", "_", text).strip("_").lower() or "value"
    word = f"v_{word}" if word[0].isdigit() else word
    return f"{word}_" if word in RESERVED else word


def snake_case(text: str) -> str:
    """The name of a module or function as a Python function name.

    >>> snake_case("BatchNorm"), snake_case("_layer_norm")
    ('batch_norm', 'layer_norm')
    """
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", text).strip("_")
    return identifier(words) if words else ""


def word_of(equation: Equation) -> str:
    """A word for what an equation makes."""
    primitive = equation.operation.primitive
    if primitive == "custom_jvp_call":
        return rule_name(equation.jax_equation.params)
    return _SHORT.get(primitive) or identifier(primitive)


class Distinct:
    """Gives each name once, with a number if it is taken.

    Args:
      taken: names that are in use.
      elsewhere: those of the other kind, whose number may grow: functions for values, and values
        for functions.
      told: called with every name that is given.
    """

    def __init__(
        self,
        taken: Iterable[str] = (),
        elsewhere: Set[str] = frozenset(),
        told: set[str] | None = None,
    ) -> None:
        self._taken = set(taken) | RESERVED
        self._elsewhere = elsewhere
        self._told: set[str] = set() if told is None else told
        self._counts: Counter[str] = Counter()

    def is_free(self, wanted: str) -> bool:
        """Whether nothing has this name."""
        return wanted not in self._taken and wanted not in self._elsewhere

    def name(self, wanted: str, *, numbered: bool = False) -> str:
        """A name like the wanted one.

        Args:
          wanted: an identifier.
          numbered: whether to give it a number even if it is free.
        """
        found = wanted
        while numbered or not self.is_free(found):
            self._counts[wanted] += 1
            found = f"{wanted}_{self._counts[wanted]}"
            numbered = False
        self._taken.add(found)
        self._told.add(found)
        return found


def value_names(program: Program, arguments: Sequence[str], distinct: Distinct) -> dict[int, str]:
    """A name for every value of a program.

    Args:
      program: the program.
      arguments: names of its arguments.
      distinct: the names in use.
    """
    found = dict(zip(program.arguments, arguments, strict=True))
    for value in program.constants:
        found[value] = distinct.name("constant", numbered=True)
    for equation in program.equations:
        for value in equation.outputs:
            found[value] = distinct.name(word_of(equation), numbered=True)
    return found


def rule_name(params: Mapping[str, Any]) -> str:
    """The name of the function that a ``custom_jvp_call`` calls, if its program shows it."""
    body = params["call_jaxpr"]
    equations = getattr(body, "jaxpr", body).eqns
    name = equations[0].params.get("name") if len(equations) == 1 else None
    return identifier(name) if isinstance(name, str) else "activation"
