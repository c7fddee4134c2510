"""Devices to compile for without having them.

``jax.experimental.topologies`` makes such devices in the running process, even when JAX is imported
and its backends are up, so no subprocess is needed. It does need a loaded compiler plug-in, and
this file loads one late, quietly, and only on request:

1.  JAX's own backends come up first (``jax.devices()``), as the user's settings say. A
    plug-in loaded before that would take part in choosing the user's default backend.
2.  The plug-in is loaded under a few environment variables, which are put back after, so
    that programs the user starts later see none of them. A variable that is set already
    is left as it is.
3.  libtpu: JAX loads it when a TPU topology is first asked for.
4.  CUDA: with ``JAX_PLATFORMS=cpu`` JAX has loaded the plug-in by step 1. Without it, and
    without a GPU, JAX has tried and given up, since the plug-in's check of driver-side
    library versions fails; the topology is then "not implemented". The plug-in's own
    ``initialize()`` with that check skipped registers it after all. JAX does not look
    for new backends once step 1 is done, so the user's backends stay what they are.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jax.experimental import topologies

from remat_opt.device import Device, GpuTarget, TpuTarget
from remat_opt.errors import CompileError, DeviceError, MissingPackageError

_CUDA_PLUGINS = ("xla_cuda13", "xla_cuda12")

#: The most GPUs in one machine.
_GPUS_OF_MACHINE = 8

#: XLA's C++ logs: only fatal ones are useful here, since failures also come as exceptions.
_QUIET_XLA = {"TF_CPP_MIN_LOG_LEVEL": "3"}

_TPU_ENVIRONMENT = {
    **_QUIET_XLA,
    "TPU_STDERR_LOG_LEVEL": "3",
    "TPU_MIN_LOG_LEVEL": "3",
    # Without a TPU, do not ask Google Cloud's metadata server about it: that takes minutes.
    "TPU_SKIP_MDS_QUERY": "1",
    # Without these two, libtpu complains on stderr. The topology's name, not this, decides what is
    # compiled for.
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    # Only one process may hold /tmp/libtpu_lockfile, which guards the chips. Compiling touches no
    # chip, so it must neither fail while others train or compile, nor keep them out.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}

_CUDA_ENVIRONMENT = {**_QUIET_XLA, "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}


def compile_only_devices(device: Device, count: int = 1) -> tuple[Any, ...]:
    """JAX devices that programs can be lowered and compiled for, but not run on.

    Args:
      device: one with a TPU or GPU target.
      count: how many are needed. GPUs come in this number; TPUs in that of the slice.

    Raises:
      MissingPackageError: the compiler plug-in is not installed.
      DeviceError: the device has no target of this kind.
      CompileError: the plug-in cannot be loaded or refuses the target.
    """
    jax.devices()
    try:
        match device.target:
            case TpuTarget(topology=topology):
                return _tpu_devices(topology)
            case GpuTarget() as target:
                return _gpu_devices(
                    target.to_proto_text(
                        title=device.title,
                        memory_bytes=device.memory_bytes,
                        memory_bandwidth=device.memory_bandwidth,
                    ),
                    max(target.devices, count),
                )
    except (jax.errors.JaxRuntimeError, NotImplementedError, OSError) as error:
        raise CompileError(
            f"The compiler for {device} cannot be used: {error}",
            device=device.name,
            compiler_message=str(error),
        ) from error
    raise DeviceError(f"{device} is compiled for by the backend it is attached to.")


@functools.cache
def _tpu_devices(topology: str) -> tuple[Any, ...]:
    if importlib.util.find_spec("libtpu") is None and "TPU_LIBRARY_PATH" not in os.environ:
        raise MissingPackageError("Compiling for a TPU", package="libtpu", extra="tpu")
    with _environment(_TPU_ENVIRONMENT):
        return tuple(topologies.get_topology_desc(topology, platform="tpu").devices)


@functools.cache
def _gpu_devices(target_config: str, count: int) -> tuple[Any, ...]:
    # One partition: the number of processes, and the GPUs of each.
    shape = f"1x{-(-count // _GPUS_OF_MACHINE)}x{min(count, _GPUS_OF_MACHINE)}"
    with _environment(_CUDA_ENVIRONMENT):
        try:
            description = topologies.get_topology_desc(
                shape, platform="cuda", target_config=target_config, topology=shape
            )
        except NotImplementedError:
            _load_cuda_plugin()
            description = topologies.get_topology_desc(
                shape, platform="cuda", target_config=target_config, topology=shape
            )
    return tuple(description.devices)


def _load_cuda_plugin() -> None:
    for name in _CUDA_PLUGINS:
        try:
            plugin = importlib.import_module(f"jax_plugins.{name}")
        except ModuleNotFoundError:
            continue
        plugin.initialize()
        return
    raise MissingPackageError(
        "Compiling for an NVIDIA GPU", package="jax-cuda13-plugin", extra="cuda"
    )


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets those environment variables that are not yet set, and unsets them at the end."""
    added = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in added})
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
