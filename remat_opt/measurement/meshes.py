"""Meshes to compile for: of attached devices, or of a pod that you do not have.

The shardings of arguments say which mesh they are for. If that mesh is abstract, or its devices are
not those to compile for, its axes are mapped onto the latter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from remat_opt import _jax_internals as internals
from remat_opt import _jax_meshes
from remat_opt import device as device_table
from remat_opt.device import Device
from remat_opt.errors import DeviceError
from remat_opt.measurement.compile_only import compile_only_devices

#: Our names for JAX's platforms, if different.
PLATFORMS = {"gpu": "cuda"}

#: Our names for ``jax.Device.device_kind``: the full text for a TPU, part of it for a GPU.
_TPU_KINDS = {
    "TPU v5 lite": "v5e",
    "TPU v5e": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6 lite": "v6e",
    "TPU v6e": "v6e",
    "TPU7x": "tpu7x",
}
_GPU_KINDS = {
    "A100-SXM": "a100",
    "A100 SXM": "a100",
    "H100 80GB HBM3": "h100",
    "H100 SXM": "h100",
    "H200": "h200",
    "B200": "b200",
}


def known_name(device_kind: str) -> str | None:
    """Our table's name for the device that JAX calls this."""
    if device_kind in _TPU_KINDS:
        return _TPU_KINDS[device_kind]
    kinds = (name for part, name in _GPU_KINDS.items() if part in device_kind)
    return next(kinds, None)


def make_mesh(
    device: str | Device,
    axis_shapes: Sequence[int],
    axis_names: Sequence[str],
    axis_types: Sequence[AxisType] | None = None,
) -> Mesh:
    """Makes a mesh of devices that need not be attached, for shardings to plan and compile with.

    Args:
      device: a pod, such as ``"v5e:4x4"``, ``"v5p:4x4x4"`` or ``"h200:8"``. For GPUs
        the name alone is enough.
      axis_shapes: as for ``jax.make_mesh``, like what follows.
      axis_names: likewise.
      axis_types: likewise; by default all ``AxisType.Auto``.

    Returns:
      The mesh. Arrays cannot be put on such devices: use ``jax.ShapeDtypeStruct`` with a
      ``NamedSharding``.

    Raises:
      DeviceError: there is no such device, or there are too few for the mesh.
      MissingPackageError: its compiler is not installed.
    """
    found = device_table.get_device(device) if isinstance(device, str) else device
    count = math.prod(axis_shapes)
    if found.attached:
        raise DeviceError(
            f"{found} is what is attached: jax.make_mesh makes a mesh of it. This one is for "
            "devices that are not, such as 'v5e:4x4' or 'h200:8'."
        )
    places = _enough(compile_only_devices(found, count), count, found)
    return jax.make_mesh(
        tuple(axis_shapes),
        tuple(axis_names),
        axis_types=tuple(axis_types or (AxisType.Auto,) * len(axis_names)),
        devices=places,
    )


def mesh_of(tree: Any) -> Any | None:
    """The mesh of several devices that a tree is laid out on; concrete before abstract ones.

    Args:
      tree: arrays, shapes and whatever else functions receive.
    """
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(tree))
    found = [
        one.mesh for one in shardings if isinstance(one, NamedSharding) and one.num_devices > 1
    ]
    return next((one for one in found if isinstance(one, Mesh)), next(iter(found), None))


def mesh_in(closed: Any) -> Mesh | None:
    """The first mesh of several devices that equations name, as ``shard_map`` does; None without.

    Args:
      closed: a jaxpr.
    """
    named = _jax_meshes.meshes_in(internals.parts(closed)[3])
    return next((one for one in named if isinstance(one, Mesh) and one.size > 1), None)


def device_of(mesh: Any) -> Device | None:
    """The device that a mesh is made of, if known and not the attached one.

    Args:
      mesh: a mesh of devices, or an abstract one; None for no mesh.
    """
    told = None if mesh is None else mesh.abstract_mesh.abstract_device
    if told is None or told.device_kind == jax.devices()[0].device_kind:
        return None
    name = known_name(told.device_kind)
    return None if name is None else device_table.get_device(name)


def on_device(mesh: Any, device: Device, places: Sequence[Any]) -> Mesh:
    """The mesh itself if it is made of these devices, else its axes laid over them.

    Args:
      mesh: a mesh of devices, or an abstract one.
      device: the device compiled for.
      places: JAX's devices of that kind.

    Raises:
      DeviceError: there are too few.
    """
    if isinstance(mesh, Mesh) and mesh.devices.flat[0].device_kind == places[0].device_kind:
        return mesh
    chosen = np.array(_enough(places, mesh.size, device)).reshape(tuple(mesh.shape.values()))
    return Mesh(chosen, mesh.axis_names, axis_types=mesh.axis_types)


def placed(tree: Any, mesh: Mesh) -> Any:
    """A tree with shapes in place of arrays, laid out on a mesh as the arrays are on theirs.

    What is on no mesh is left to the compiler.
    """

    def of(leaf: Any) -> Any:
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            return leaf
        aval = jax.eval_shape(lambda x: x, leaf)
        own = getattr(leaf, "sharding", None)
        sharding = None
        if isinstance(own, NamedSharding):
            sharding = NamedSharding(mesh, own.spec, memory_kind=_memory_kind(own))
        return jax.ShapeDtypeStruct(
            aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding
        )

    return jax.tree.map(of, tree)


def _memory_kind(sharding: NamedSharding) -> str | None:
    return sharding.memory_kind if sharding.memory_kind == "pinned_host" else None


def _enough(places: Sequence[Any], count: int, device: Device) -> Sequence[Any]:
    if len(places) >= count:
        return places[:count]
    more = (
        "jax_num_cpu_devices makes more of a CPU"
        if device.platform == "cpu"
        else "a slice is named with the device, as in 'v5e:4x4'"
    )
    raise DeviceError(
        f"A mesh of {count} devices needs as many, and of {device} there are {len(places)}: {more}."
    )
