"""How the arguments of a function are laid out on a mesh, as arrays, shapes and tracers say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from remat_opt import _jax_meshes
from remat_opt.program.record import Placement, Spec


def placement_of(
    values: Sequence[Any], kinds: Sequence[Any], equations: Iterable[Any]
) -> Placement | None:
    """How values are laid out.

    Args:
      values: arrays, tracers or shapes.
      kinds: their JAX types.
      equations: those of the jaxpr that reads them: if no value mentions a mesh, a constraint may.

    Returns:
      None if there is no mesh of several devices.
    """
    meshes = [mesh for value in values if (mesh := _jax_meshes.mesh_of(value)) is not None]
    # A mesh of devices says more than an abstract one.
    mesh = next((one for one in meshes if isinstance(one, jax.sharding.Mesh)), None)
    mesh = mesh or next(iter(meshes), None) or next(_jax_meshes.meshes_in(equations), None)
    if mesh is None or mesh.size == 1 or mesh.abstract_mesh.manual_axes:
        return None
    sizes = dict(mesh.shape)

    def spec(value: Any) -> Spec | None:
        names = _jax_meshes.split_of(value)
        if names is None or not sizes.keys() >= {name for axis in names for name in axis}:
            return None
        return tuple(tuple((name, sizes[name]) for name in axis) for axis in names)

    return Placement(
        mesh=mesh, axes=tuple(sizes.items()), kinds=tuple(kinds), specs=tuple(map(spec, values))
    )
