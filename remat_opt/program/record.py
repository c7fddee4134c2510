"""A traced function as plain data: values, equations, arguments and outputs.

``tracing`` makes a Program; everything below it (costs, compilers, plans) reads one without
importing jax. What JAX needs to run an equation again is in ``Equation.jax_equation`` and
``Equation.name_stack``, opaque to all but ``transform`` and ``linearization``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from typing import Any

from remat_opt.operation import ArrayType, Operation


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A literal that an equation reads in place; it costs nothing and is never planned."""

    value: Any
    text: str


#: What an equation reads: the number of a value, or a literal.
Atom = int | Constant


#: How an array is split: for each axis, the mesh axes that split it, each with its number of parts.
Spec = tuple[tuple[tuple[str, int], ...], ...]


def axis_names(spec: Spec, sizes: Mapping[str, int]) -> tuple[tuple[str, ...], ...] | None:
    """For each axis of an array, the names of the mesh axes that split it.

    Args:
      spec: how it is split.
      sizes: those of the mesh, by name.

    Returns:
      None if a part of a mesh axis splits it, which JAX has no word for.
    """
    if any(sizes[name] != size for axis in spec for name, size in axis):
        return None
    return tuple(tuple(name for name, _ in axis) for axis in spec)


#: Stands for the layout of arguments that are on a mesh in an unknown way.
UNKNOWN_PLACEMENT = "somewhere on a mesh"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """How some arrays are laid out on a mesh, as far as is known.

    Attributes:
      mesh: JAX's own mesh, of devices or abstract; opaque except to code that asks the compiler.
      axes: names and sizes of its axes.
      kinds: JAX's own types of the whole arrays, likewise opaque.
      specs: how each of the arrays is split; None if unknown.
    """

    mesh: Any
    axes: tuple[tuple[str, int], ...]
    kinds: tuple[Any, ...]
    specs: tuple[Spec | None, ...]

    @property
    def devices(self) -> int:
        """How many devices the mesh has."""
        return math.prod(size for _, size in self.axes)

    @property
    def text(self) -> str:
        """What is known, as text that is the same in every process."""
        if all(spec is None for spec in self.specs):
            return UNKNOWN_PLACEMENT
        return f"{self.axes} {self.specs}"


#: Primitives that pass on one of their inputs unchanged.
_SELECTIONS = frozenset({"max", "min", "reduce_max", "reduce_min"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """One jaxpr equation.

    Attributes:
      operation: primitive, types and parameters; what the costs are computed from.
      inputs: what it reads, in order.
      outputs: the numbers of the values it makes, in order.
      effects: whether it does more than compute its outputs.
      once: whether it must run exactly once: it has effects, communicates in a map inside it, or
        calls back to Python, which takes long and may well be meant to happen once, whatever JAX
        was promised.
      parameters: text of its parameters, the same in every process.
      module: the name stack it was traced under, e.g. ``ResNet/block_3/conv``.
      jax_equation: JAX's own equation, for running it again.
      name_stack: JAX's own name stack, for running it again.
      calls: JAX's equations of the calls that it was inlined from, innermost first.
      placement: how its inputs are laid out, in one device's part of a program on a mesh.
      value_inputs: the numbers of the values among ``inputs``, in order.
    """

    operation: Operation
    inputs: tuple[Atom, ...]
    outputs: tuple[int, ...]
    effects: bool
    once: bool
    parameters: str
    module: str
    jax_equation: Any
    name_stack: Any
    calls: tuple[Any, ...] = ()
    placement: Placement | None = None
    value_inputs: tuple[int, ...] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        read = tuple(atom for atom in self.inputs if isinstance(atom, int))
        object.__setattr__(self, "value_inputs", read)

    @property
    def derivative_reads_kept(self) -> bool:
        """Whether the equation's own derivative can be made to read a kept output.

        JAX's derivative of ``tanh`` reads the output that its rule computes, not the named copy.
        ``transform`` fixes that for equations without inner programs or functions whose inputs and
        outputs are all floating-point numbers. For others, only running the equation again provides
        what its derivative reads.
        """
        kinds = (*self.operation.inputs, *self.operation.outputs)
        return (
            not self.operation.bodies
            and not self.derivative_compares
            and all(kind.dtype.startswith(("float", "bfloat")) for kind in kinds)
        )

    @property
    def derivative_compares(self) -> bool:
        """Whether the equation's own derivative looks for its output among its inputs.

        The derivative of a maximum goes to the inputs equal to it. A kept maximum of recomputed
        inputs may equal none of them, since a compiler need not round the same way twice. So the
        output must come from the same run as the inputs.
        """
        return self.operation.primitive in _SELECTIONS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A function traced at given argument shapes, flat, with nested calls inlined.

    Values are numbered: first the constants, then the arguments, then the outputs of the equations
    in the order they were traced.

    Attributes:
      types: shape and dtype of each value.
      constants: numbers of the closed-over arrays.
      constant_values: those arrays, in the same order.
      arguments: numbers of the flat arguments; last those of ``closed_over``.
      closed_over: tracers that the function closes over, which are also arguments.
      closed_over_names: what the function's code calls these, such as ``batch['image']``; "" if
        unknown.
      differentiated: the arguments that derivatives are taken for.
      equations: in the order they were traced.
      outputs: the flat outputs.
      loss_outputs: how many of the flat outputs, from the first, are differentiated;
        the others are auxiliary.
      input_tree: the tree structure of (positional, keyword) arguments.
      output_tree: the tree structure of the result; leaves that are not arrays are part of it.
      name: the function's name.
      argument_labels: what the function calls its positional arguments, or their positions.
      kinds: JAX's own types of constants and arguments, in this order; opaque.
      placement: how these are laid out on a mesh; None without one.
      is_part: whether types are those of one device's part (``propagation.per_device``) rather than
        of whole arrays.
      splits: in such a part, how the values are split that are.
      communicates_again: whether collectives in it may run again.
      added_up: the differentiated arguments whose gradients devices add up, each with the value
        whose cotangent is added: itself, or what it is gathered or converted to.
    """

    types: tuple[ArrayType, ...]
    constants: tuple[int, ...]
    constant_values: tuple[Any, ...]
    arguments: tuple[int, ...]
    closed_over: tuple[Any, ...]
    differentiated: tuple[int, ...]
    equations: tuple[Equation, ...]
    outputs: tuple[Atom, ...]
    loss_outputs: int
    input_tree: Any
    output_tree: Any
    name: str
    argument_labels: tuple[int | str, ...] = ()
    kinds: tuple[Any, ...] = ()
    placement: Placement | None = None
    is_part: bool = False
    splits: Mapping[int, Spec] = dataclasses.field(default_factory=dict)
    communicates_again: bool = False
    added_up: Mapping[int, int] = dataclasses.field(default_factory=dict)
    closed_over_names: tuple[str, ...] = ()

    def placed_fingerprint(self) -> str:
        """The fingerprint with the known layout of the arguments: what a plan is made for.

        If there is a mesh but the layout is unknown, as under ``jax.jit``, it says so instead.
        """
        fingerprint = self.fingerprint()
        if self.communicates_again:
            fingerprint += " communicates again"
        return fingerprint if self.placement is None else f"{fingerprint} {self.placement.text}"

    @property
    def mesh(self) -> Any:
        """The JAX mesh that it runs on; None without one."""
        return None if self.placement is None else self.placement.mesh

    def axes_of(self, value: int) -> frozenset[str]:
        """The axes of the mesh that split a value, in one device's part of a program."""
        return frozenset(name for axis in self.splits.get(value, ()) for name, _ in axis)

    @property
    def argument_bytes(self) -> int:
        """Bytes of all arguments (parameters and batch); never planned."""
        return sum(self.types[value].bytes for value in self.arguments)

    @property
    def output_values(self) -> tuple[int, ...]:
        """The numbers of the values among the outputs, without literals."""
        return tuple(atom for atom in self.outputs if isinstance(atom, int))

    def makers(self) -> dict[int, int]:
        """For each computed value, the number of the equation that makes it."""
        return {
            value: number
            for number, equation in enumerate(self.equations)
            for value in equation.outputs
        }

    def readers(self) -> dict[int, list[int]]:
        """For each value that equations read, the numbers of these equations, ascending."""
        found: dict[int, list[int]] = {}
        for number, equation in enumerate(self.equations):
            for value in equation.value_inputs:
                found.setdefault(value, []).append(number)
        return found

    def fingerprint(self) -> str:
        """A hash of what the program computes and of what is differentiated.

        Two traces of the same function at the same argument shapes agree, on any host and in any
        process; names, source lines and the arrays' contents are left out.
        """
        digest = hashlib.sha256()

        def add(*words: object) -> None:
            digest.update(("\x1f".join(str(word) for word in words) + "\x1e").encode())

        def atoms(items: tuple[Atom, ...]) -> str:
            return ",".join(str(a) if isinstance(a, int) else a.text for a in items)

        for array_type in self.types:
            add(array_type.dtype, array_type.shape)
        add(self.constants, self.arguments, self.differentiated, self.loss_outputs)
        for equation in self.equations:
            add(
                equation.operation.primitive,
                equation.parameters,
                atoms(equation.inputs),
                equation.outputs,
            )
        add(atoms(self.outputs))
        return digest.hexdigest()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Derivative:
    """What the backward step of one equation reads.

    Attributes:
      inputs: positions of the inputs it reads.
      outputs: positions of the outputs it reads.
      internal_bytes: bytes of residuals that only running the equation provides.
      late_bytes: bytes of those that depend on integers alone, such as where a scatter writes: they
        are there only during the backward step.
      active_outputs: positions of the outputs that carry a derivative.
      assumed: whether JAX could not differentiate the equation, so that all of its
        inputs and outputs are taken as read.
    """

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    internal_bytes: int = 0
    late_bytes: int = 0
    active_outputs: tuple[int, ...] = ()
    assumed: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Linearization:
    """The derivatives on the way from the differentiated arguments to the loss.

    Attributes:
      derivatives: by position of the equation in the program; equations without a backward step are
        absent.
      active_values: numbers of the values that get a cotangent.
    """

    derivatives: dict[int, Derivative]
    active_values: frozenset[int]
