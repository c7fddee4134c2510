"""What JAX and its compiler know of meshes, under names of our own, as in ``_jax_internals``.

``propagated`` runs one compiler pass by itself; JAX ships it but has no call for it. Each function
here has a contract test in ``tests/test_jax_contracts.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir.dialects import sdy

from remat_opt._jax_internals import inner_jaxprs, parts

_Result = TypeVar("_Result")


def mesh_of(value: Any) -> Any | None:
    """The mesh that an array, tracer or shape is laid out on (abstract for a tracer), or None.

    Also None inside a ``shard_map``, where an array is one device's part.
    """
    sharding = _sharding_of(value)
    if not isinstance(sharding, jax.sharding.NamedSharding) or sharding.mesh.empty:
        return None
    return None if sharding.mesh.abstract_mesh.manual_axes else sharding.mesh


def split_of(value: Any) -> tuple[tuple[str, ...], ...] | None:
    """For each axis of an array, the mesh axes that split it; None if that cannot be known.

    For a tracer we know only what its type says: the mesh axes with explicit sharding.
    """
    sharding = _sharding_of(value)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return None
    mesh = sharding.mesh.abstract_mesh
    if isinstance(_primal(value), jax.core.Tracer) and not mesh.are_all_axes_explicit:
        return None
    entries = (*sharding.spec, *[None] * (len(value.shape) - len(sharding.spec)))
    if jax.sharding.PartitionSpec.UNCONSTRAINED in entries:
        return None
    return tuple(
        () if entry is None else entry if isinstance(entry, tuple) else (entry,)
        for entry in entries
    )


def _primal(value: Any) -> Any:
    """The array under the tracers of derivatives taken outside ``jax.jit``."""
    while isinstance(value, jax.core.Tracer) and hasattr(value, "primal"):
        value = value.primal
    return value


def _sharding_of(value: Any) -> Any:
    value = _primal(value)
    if isinstance(value, jax.core.Tracer):
        return getattr(jax.typeof(value), "sharding", None)
    return getattr(value, "sharding", None)


def knows_a_mesh(kind: Any) -> bool:
    """Whether the type of an array names a mesh, as one device's part in a ``shard_map`` does."""
    sharding = getattr(kind, "sharding", None)
    return sharding is not None and not sharding.mesh.empty


def is_a_part(kind: Any) -> bool:
    """Whether an array is one device's part, in a ``shard_map``, along any axis of its mesh."""
    return knows_a_mesh(kind) and bool(kind.sharding.mesh.manual_axes)


def varying_over(kind: Any) -> frozenset[str]:
    """The axes of a ``shard_map`` that an array varies over, as far as its type says."""
    told = getattr(getattr(kind, "mat", None), "varying", ())
    return frozenset(map(str, told))


def within_a_mesh() -> bool:
    """Whether a mesh of several devices was set around, as by ``jax.set_mesh``."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.size > 1


def explicit_mesh_of(value: Any) -> contextlib.AbstractContextManager[Any]:
    """Enters the mesh of an array with explicit sharding; does nothing for any other array.

    The gradient of a slice is put into zeros. JAX 0.12 makes these without a mesh unless the slice
    was taken in one.
    """
    mesh = jax.typeof(value).sharding.mesh
    if mesh.empty or not mesh.are_all_axes_explicit:
        return contextlib.nullcontext()
    entered: contextlib.AbstractContextManager[Any] = jax.sharding.use_abstract_mesh(mesh)
    return entered


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Map:
    """What a ``shard_map`` equation says.

    Attributes:
      body: the jaxpr that each device runs, of its parts of the inputs to its parts of the outputs.
      mesh: the mesh, with devices or abstract.
      in_specs: how each input is split.
      out_specs: how each output is.
      axes: the mesh axes that it is mapped over.
      check_vma: whether types say over which axes values vary.
    """

    body: Any
    mesh: Any
    in_specs: tuple[Any, ...]
    out_specs: tuple[Any, ...]
    axes: frozenset[str]
    check_vma: bool

    @property
    def over_all_axes(self) -> bool:
        """Whether the body sees one device's part: no axis of the mesh is left to the compiler."""
        mapped = self.axes.union(self.mesh.abstract_mesh.manual_axes)
        return all(name in mapped or size == 1 for name, size in self.mesh.shape.items())

    @property
    def spread(self) -> tuple[bool, ...]:
        """For each input, whether several devices are given the same part, and add up gradients."""
        found = []
        for spec in self.in_specs:
            split = {
                name for axis in spec for name in (axis if isinstance(axis, tuple) else (axis,))
            }
            found.append(any(self.mesh.shape[name] > 1 for name in self.axes - split))
        return tuple(found)

    def around(
        self, body: Callable[..., Any], in_specs: tuple[Any, ...], out_specs: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """The same ``shard_map`` around another body, of inputs and outputs split like this."""
        found: Callable[..., Any] = jax.shard_map(
            body,
            mesh=self.mesh,
            in_specs=in_specs,
            out_specs=out_specs,
            axis_names=self.axes,
            check_vma=self.check_vma,
        )
        return found


def map_of(equation: Any) -> Map:
    """Reads a ``shard_map`` equation."""
    params = equation.params
    return Map(
        body=params["jaxpr"],
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axes=frozenset(params["newly_manual_axes"]),
        check_vma=bool(params["check_vma"]),
    )


def parts_of(equation: Any, result: Any) -> int:
    """Into how many parts maps split a result of an equation; 1 if none makes it.

    Args:
      equation: a ``shard_map``, or one with a program inside.
      result: one of its variables.
    """
    position = equation.outvars.index(result)
    if equation.primitive.name == "shard_map":
        said = map_of(equation)
        axes = (axis if isinstance(axis, tuple) else (axis,) for axis in said.out_specs[position])
        names = (name for group in axes for name in group if name is not None)
        return math.prod(said.mesh.shape[name] for name in names)
    for _, jaxpr in inner_jaxprs(equation.params):
        *_, equations, outputs = parts(jaxpr)
        if len(outputs) == len(equation.outvars):
            inside = outputs[position]
            makers = (one for one in equations if any(inside is made for made in one.outvars))
            return max((parts_of(one, inside) for one in makers), default=1)
    return 1


def within_map(equation: Any, run: Callable[[], _Result]) -> _Result:
    """Calls a function where the body of a ``shard_map`` equation, or a part of it, can be traced.

    There the axes of the mesh have names, and types are those of one device's part.
    """
    found: list[_Result] = []

    def body() -> tuple[()]:
        found.append(run())
        return ()

    jax.eval_shape(map_of(equation).around(body, (), ()))
    return found[0]


def meshes_in(equations: Iterable[Any]) -> Iterator[Any]:
    """The meshes that constraints and ``shard_map`` name, in inner programs too."""
    for equation in equations:
        for value in equation.params.values():
            mesh = value.mesh if isinstance(value, jax.sharding.NamedSharding) else value
            if isinstance(mesh, jax.sharding.Mesh | jax.sharding.AbstractMesh) and not mesh.empty:
                yield mesh
        for _, jaxpr in inner_jaxprs(equation.params):
            yield from meshes_in(parts(jaxpr)[3])


def propagated(
    fn: Callable[..., Any], arguments: Sequence[Any]
) -> list[tuple[tuple[tuple[str, int], ...], ...]]:
    """How the compiler splits the results of a function over a mesh.

    The function is lowered, and only the compiler's sharding propagation runs.

    Args:
      fn: returns a flat list of arrays.
      arguments: shapes, with shardings if there are any.

    Returns:
      For each axis of each result, the mesh axes that split it and into how many parts.
    """
    traced = jax.jit(fn).trace(*arguments)
    count = len(jax.tree.leaves(traced.out_info))
    if not count:
        return []
    module = _lowered_anywhere(traced).compiler_ir()
    with module.context:
        passes = "builtin.module(inline,sdy-propagation-pipeline)"
        passmanager.PassManager.parse(passes).run(module.operation)
        sizes: dict[str, dict[str, int]] = {}
        results: Any = None
        for operation in module.body.operations:
            if operation.operation.name == "sdy.mesh":
                axes = map(sdy.MeshAxisAttr, sdy.MeshAttr(operation.attributes["mesh"]).axes)
                name = f"@{ir.StringAttr(operation.attributes['sym_name']).value}"
                sizes[name] = {axis.name: axis.size for axis in axes}
            elif operation.operation.name == "func.func" and operation.sym_name.value == "main":
                results = operation.attributes["res_attrs"]
        assert results is not None, "every module has a main function with results"
        # Tokens of ordered effects come before results.
        return [_split_of_result(ir.DictAttr(one), sizes) for one in list(results)[-count:]]


def _lowered_anywhere(traced: Any) -> Any:
    """Lowered for the first platform that works: kernels may be written for just one."""
    *others, last = "cpu", "tpu", "cuda"
    for platform in others:
        with contextlib.suppress(Exception):
            return traced.lower(lowering_platforms=(platform,))
    return traced.lower(lowering_platforms=(last,))


def _split_of_result(
    attributes: Any, sizes: Mapping[str, Mapping[str, int]]
) -> tuple[tuple[tuple[str, int], ...], ...]:
    if "sdy.sharding" not in attributes:
        return ()
    sharding = sdy.TensorShardingAttr(attributes["sdy.sharding"])
    found = []
    part: Any
    for dimension in map(sdy.DimensionShardingAttr, sharding.dimension_shardings):
        axes = []
        for axis in map(sdy.AxisRefAttr, dimension.axes):
            part = axis.sub_axis_info
            size = sizes[str(sharding.mesh_or_ref)][axis.name] if part is None else part[1]
            axes.append((axis.name, int(size)))
        found.append(tuple(axes))
    return tuple(found)
