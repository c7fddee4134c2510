"""One device's part of a program on a mesh: each array cut down to the part held there.

We know how arguments are split, and what the user prescribes (constraints, ``shard_map``, types
with explicit sharding). For all other values we ask the compiler. It decides in a separate pass,
before it partitions anything. So the program is lowered with every value as a result, this one pass
runs, and we read what it wrote at the results. Nothing is compiled, and no device is needed. Inner
programs (the body of a ``scan``, a branch, a custom rule) are treated likewise, with their inputs
split as found.

The result is a program whose types are those of one device's part. Code that counts bytes or FLOPs
works on it as on any other. Running it or taking derivatives needs the whole program.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes
from remat_opt.operation import ArrayType, Body, Operation
from remat_opt.program.record import Equation, Placement, Program, Spec
from remat_opt.program.tracing import inner_program, operation

#: Equations that run one inner program, or one of several, on exactly their inputs.
_CALLS = frozenset(
    "checkpoint closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr "
    "custom_vmap_call jit pjit remat2 xla_metadata_call".split()
)


def per_device(program: Program) -> Program:
    """One device's part of the program; the program itself without a mesh."""
    if program.placement is None or program.is_part:
        return program
    return _Partitioner(program.placement).local(program)


def specs(program: Program) -> dict[int, Spec]:
    """How the values of a program are split, for those that are; none without a mesh."""
    return {} if program.placement is None else _Partitioner(program.placement).specs(program)


def argument_shardings(program: Program) -> tuple[NamedSharding | None, ...]:
    """How constants and arguments are laid out, in this order; None for each without a mesh.

    If nothing says so, it follows from how the compiler splits what is computed from them.
    """
    given = (*program.constants, *program.arguments)
    placement = program.placement
    if placement is None:
        return (None,) * len(given)
    found: Mapping[int, Spec] = {}
    if None in placement.specs:
        found = specs(program)
    return tuple(
        _sharding(placement, found.get(value, ()) if spec is None else spec)
        for value, spec in zip(given, placement.specs, strict=True)
    )


def is_split(program: Program) -> bool:
    """Whether any array in one device's part of a program is split."""
    return any(
        one.operation.primitive == "shard_map"
        or (one.placement is not None and any(map(_is_split, one.placement.specs)))
        for one in program.equations
    )


def body_per_device(body: Program, equation: Equation) -> Program:
    """One device's part of a ``scan``'s body or a branch, if the equation is in such a program.

    Args:
      body: the whole body.
      equation: the ``scan`` or ``cond``.
    """
    placement = equation.placement
    if placement is None:
        return body
    specs = _body_specs(equation, 0, placement.specs)
    assert specs is not None, "how the inputs of a body are split is known"
    return per_device(_placed(body, placement, specs))


def share_inside(equation: Equation) -> float:
    """One device's average share of what is computed inside an equation."""
    if equation.placement is None:
        return 1.0
    if equation.operation.primitive == "shard_map":
        return 1 / equation.placement.devices
    whole = _made_inside(operation(equation.jax_equation))
    return _made_inside(equation.operation) / whole if whole else 1.0


def _made_inside(one: Operation) -> int:
    # The body of a map is one device's part in any case.
    if not one.bodies or one.primitive == "shard_map":
        return one.output_bytes
    return sum(_made_inside(inner) for body in one.bodies for inner in body.operations)


class _Partitioner:
    """Cuts programs down to one device's part; equal inner programs are looked at once."""

    def __init__(self, placement: Placement) -> None:
        self._mesh, self._axes = placement.mesh, placement.axes
        self._bodies: dict[Any, tuple[Operation, ...]] = {}

    def local(self, program: Program) -> Program:
        """One device's part of the program."""
        specs = self.specs(program)
        types = tuple(_part(kind, specs.get(value, ())) for value, kind in enumerate(program.types))
        return dataclasses.replace(
            program,
            types=types,
            is_part=True,
            splits=specs,
            added_up=_added_up(program, specs),
            equations=tuple(self._equation(one, types, specs) for one in program.equations),
        )

    def specs(self, program: Program) -> dict[int, Spec]:
        """How values are split."""
        assert program.placement is not None, "the program is on a mesh"
        given = (*program.constants, *program.arguments)
        returned: list[int] = []

        def run(*values: Any) -> list[Any]:
            returned.clear()
            environment = dict(zip(given, values, strict=True))
            for equation in program.equations:
                inputs = [
                    environment[atom] if isinstance(atom, int) else atom.value
                    for atom in equation.inputs
                ]
                results = internals.bind(equation.jax_equation, equation.name_stack, inputs)
                environment.update(zip(equation.outputs, results, strict=True))
            returned.extend(
                value
                for value, result in environment.items()
                if program.types[value].shape and hasattr(result, "dtype")
            )
            return [environment[value] for value in returned]

        placement = program.placement
        arguments = [
            jax.ShapeDtypeStruct(
                kind.shape,
                kind.dtype,
                weak_type=getattr(kind, "weak_type", False),
                sharding=None if spec is None else _sharding(placement, spec),
            )
            for kind, spec in zip(placement.kinds, placement.specs, strict=True)
        ]
        found = _jax_meshes.propagated(run, arguments)
        specs = {value: spec for value, spec in zip(returned, found, strict=True) if any(spec)}
        return {**_as_read(program, specs), **specs}

    def _equation(
        self, equation: Equation, types: Sequence[ArrayType], specs: dict[int, Spec]
    ) -> Equation:
        kinds = [variable.aval for variable in equation.jax_equation.invars]
        placement = Placement(
            mesh=self._mesh,
            axes=self._axes,
            kinds=tuple(kinds),
            specs=tuple(
                specs.get(atom, ((),) * len(types[atom].shape)) if isinstance(atom, int) else None
                for atom in equation.inputs
            ),
        )
        whole = equation.operation
        inputs = tuple(
            types[atom] if isinstance(atom, int) else kind
            for atom, kind in zip(equation.inputs, whole.inputs, strict=True)
        )
        outputs = tuple(types[value] for value in equation.outputs)
        return dataclasses.replace(
            equation,
            operation=dataclasses.replace(
                whole,
                inputs=inputs,
                outputs=outputs,
                bodies=self._local_bodies(equation, placement),
            ),
            placement=placement,
        )

    def _local_bodies(self, equation: Equation, placement: Placement) -> tuple[Body, ...]:
        """One device's part of an equation's inner programs."""
        bodies = equation.operation.bodies
        if not bodies or not any(map(_is_split, placement.specs)):
            return bodies
        found = []
        jaxprs = internals.inner_jaxprs(equation.jax_equation.params)
        for number, (body, (_, jaxpr)) in enumerate(zip(bodies, jaxprs, strict=True)):
            specs = _body_specs(equation, number, placement.specs)
            if specs is None or len(specs) != len(internals.parts(jaxpr)[2]):
                found.append(body)
                continue
            key = internals.describe(jaxpr), specs
            if key not in self._bodies:
                program = self.local(_placed(inner_program(jaxpr, (), ""), placement, specs))
                self._bodies[key] = tuple(one.operation for one in program.equations)
            found.append(dataclasses.replace(body, operations=self._bodies[key]))
        return tuple(found)


#: In these, devices add up the gradients of one iteration, or in one branch.
_LOOPS = frozenset({"scan", "while", "cond"})


def _added_up(program: Program, specs: Mapping[int, Spec]) -> dict[int, int]:
    """The differentiated arguments whose gradients devices add up; see ``Program.added_up``.

    An array that is read has a gradient that sums over everything made of it, such as the rows of a
    product. So devices add up their parts if what is made of it is split along axes of the mesh
    along which it is not.

    Args:
      program: a traced function.
      specs: how its values are split.
    """
    readers = program.readers()

    def axes(value: int) -> set[str]:
        return {name for dimension in specs.get(value, ()) for name, _ in dimension}

    def summed(value: int) -> int | None:
        """The form of a value in which it is read by something that is split further."""
        for index in readers.get(value, ()):
            equation = program.equations[index]
            primitive = equation.operation.primitive
            if primitive == "shard_map":
                spread = _jax_meshes.map_of(equation.jax_equation).spread
                if any(spread[p] for p, atom in enumerate(equation.inputs) if atom == value):
                    return value
            elif primitive in _LOOPS:
                continue
            elif any(axes(made) - axes(value) for made in equation.outputs):
                return value
            elif len(equation.value_inputs) == 1 and len(equation.outputs) == 1:
                # Another form of it: transposed, converted, gathered.
                found = summed(equation.outputs[0])
                if found is not None:
                    return found
        return None

    found = {value: summed(value) for value in program.differentiated}
    return {value: read for value, read in found.items() if read is not None}


def _as_read(program: Program, specs: Mapping[int, Spec]) -> dict[int, Spec]:
    """How values that depend on no argument are split: like what is made of them in that shape.

    The compiler copies them for each reader, and the copy at the program's result is not split.
    """
    varying = {*program.constants, *program.arguments}
    for equation in program.equations:
        if not varying.isdisjoint(equation.value_inputs):
            varying.update(equation.outputs)
    found: dict[int, Spec] = {}
    for equation in reversed(program.equations):
        for result in equation.outputs:
            spec = specs.get(result) or found.get(result)
            if spec is None:
                continue
            extents = program.types[result].shape
            for value in equation.value_inputs:
                if value not in varying and program.types[value].shape == extents:
                    found[value] = spec
    return found


def _placed(program: Program, placement: Placement, specs: Sequence[Spec | None]) -> Program:
    """An inner program whose inputs are split as they are outside.

    Args:
      program: the inner program.
      placement: holds the mesh.
      specs: how its inputs are split.
    """
    constants = (None,) * len(program.constants)
    return dataclasses.replace(
        program,
        placement=dataclasses.replace(placement, kinds=program.kinds, specs=(*constants, *specs)),
    )


def _scan_specs(equation: Equation, specs: Sequence[Spec | None]) -> tuple[Spec | None, ...]:
    """How the inputs of a ``scan``'s body are split: entries like the arrays they come from.

    Args:
      equation: the ``scan``.
      specs: how its inputs are split.
    """
    scan = internals.scan_of(equation.jax_equation)
    whole = scan.constants + scan.carries
    entries = (None if spec is None else spec[1:] for spec in specs[whole:])
    return (*specs[:whole], *entries)


def _body_specs(
    equation: Equation, number: int, specs: tuple[Spec | None, ...]
) -> tuple[Spec | None, ...] | None:
    """How the inputs of one of its inner programs are split; None if unknown."""
    primitive, params = equation.operation.primitive, equation.operation.params
    if primitive == "scan":
        return _scan_specs(equation, specs)
    if primitive in _CALLS:
        return specs
    if primitive == "cond":
        return specs[1:]
    if primitive == "while":
        first, second = params["cond_nconsts"], params["body_nconsts"]
        own = specs[:first] if number == 0 else specs[first : first + second]
        return (*own, *specs[first + second :])
    return None


def _is_split(spec: Spec | None) -> bool:
    return spec is not None and any(spec)


def _sharding(placement: Placement, spec: Spec) -> NamedSharding:
    """A spec in JAX's terms. JAX has none for part of a mesh axis: there nothing is split."""
    sizes = dict(placement.axes)
    names = (
        tuple(name for name, _ in axis) or None
        if all(sizes[name] == size for name, size in axis)
        else None
        for axis in spec
    )
    return NamedSharding(placement.mesh, PartitionSpec(*names))


def _part(kind: ArrayType, spec: Spec) -> ArrayType:
    """One device's part of an array; the largest one if they differ."""
    ways = [math.prod(size for _, size in axis) for axis in spec]
    ways += [1] * (len(kind.shape) - len(ways))
    shape = tuple(-(-extent // way) for extent, way in zip(kind.shape, ways, strict=False))
    return dataclasses.replace(kind, shape=shape)
