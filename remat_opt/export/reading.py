"""What the printer must know about an equation: its origin, and what its parameters say."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jax
import numpy as np

from remat_opt import _jax_internals as internals
from remat_opt.compilers import tiles
from remat_opt.device import Platform
from remat_opt.export.layout import WIDTH
from remat_opt.export.literals import UnprintableError, quoted
from remat_opt.program import bodies
from remat_opt.program.record import Atom, Constant, Equation, Program
from remat_opt.program.tracing import inner_program


def has_usual_type(equation: Equation) -> bool:
    """Whether a product's result has its operands' dtype, as by default."""
    wanted = equation.jax_equation.params["preferred_element_type"]
    return wanted is not None and {str(wanted)} == {
        kind.dtype for kind in equation.operation.inputs
    }


def scan_options(scan: internals.Scan) -> list[str]:
    """What a ``scan`` says besides its lengths, as keyword arguments."""
    options = ["reverse=True"] if scan.reverse else []
    return options + ([f"unroll={scan.unroll}"] if scan.unroll > 1 else [])


def scan_inputs(scan: internals.Scan, inputs: Sequence[str]) -> tuple[str, str, str]:
    """Its constants, its carry and its stacked inputs, each as a list."""
    first, last = scan.constants, scan.constants + scan.carries
    constants, carry, stacked = inputs[:first], inputs[first:last], inputs[last:]
    # Carries and stacks are arrays, as in the program.
    return (
        f"[{', '.join(map(_array, constants))}]",
        f"[{', '.join(map(_array, carry))}]",
        f"[{', '.join(map(_array, stacked))}]",
    )


def _array(written: str) -> str:
    return written if written.isidentifier() else f"jnp.asarray({written})"


def scan_reach(equation: Equation, scan: internals.Scan, summed: Set[int]) -> str:
    """Where derivatives go, in the form that ``planned_scan`` takes."""
    given = {
        place
        for place, atom in enumerate(equation.inputs)
        if isinstance(atom, int) and atom in summed
    }
    inputs, outputs = bodies.reached(equation, given)
    first, last = scan.constants, scan.constants + scan.carries
    reads = sorted(n if n < first else n - scan.carries for n in inputs if not first <= n < last)
    carried = sorted(n - first for n in inputs if first <= n < last)
    made = sorted(n - scan.carries for n in outputs if n >= scan.carries)
    return f"({reads}, {carried}, {made})"


def scan_hosts(
    equation: Equation, scan: internals.Scan, hosts: Sequence[int], platform: Platform
) -> dict[int, int]:
    """The stacked inputs whose gradients take what waits, as ``scan_in_gradients`` takes them."""
    stacked = equation.operation.inputs[scan.constants + scan.carries :]
    return {
        n: tiles.innermost(platform, one.shape[1:]) for n, one in enumerate(stacked) if n in hosts
    }


def program_of(closed: Any) -> Program:
    """An inner program as a separate program."""
    return inner_program(closed, (), "an inner program")


def same_as(
    program: Program, equation: Equation, places: Sequence[int], literals: Mapping[int, Any]
) -> int | None:
    """The equation in a derivative that repeats the differentiated one, if there is one."""
    given = dict(zip(places, program.arguments[1:], strict=True))

    def is_same(place: int, atom: Atom) -> bool:
        if place in given:
            return atom == given[place]
        return isinstance(atom, Constant) and np.array_equal(atom.value, literals[place])

    for index, one in enumerate(program.equations):
        if (
            one.operation.primitive == equation.operation.primitive
            and len(one.inputs) == len(equation.inputs)
            and one.parameters == equation.parameters
            and all(is_same(place, atom) for place, atom in enumerate(one.inputs))
        ):
            return index
    return None


def policy_text(policy: Any) -> str:
    """A policy of an inner checkpoint.

    Raises:
      UnprintableError: it is not a policy of names.
    """
    for name in dir(jax.checkpoint_policies):
        if getattr(jax.checkpoint_policies, name) is policy:
            return f"jax.checkpoint_policies.{name}"
    names = internals.saved_names(policy)
    if names is None:
        raise UnprintableError("a policy that is a function of the user's")
    inside = ", ".join(map(quoted, names))
    return f"jax.checkpoint_policies.save_only_these_names({inside})"


def where_from(equation: Equation) -> str:
    """Where an equation comes from, for a comment."""
    source = internals.source_line(equation.jax_equation)
    words = re.sub(r"\s+", " ", "  ".join(filter(None, (equation.module, source))))
    return words[: WIDTH - 10]
