"""What the real compiler says a function needs, for a device that need not be attached.

A program is compiled, not run. The compiler's buffer assignment then gives exact bytes:
arguments, outputs, and *temporary bytes*, which are what a plan is about.

Three things to know about the figures:

*   The compiler's own ``peak_memory_in_bytes`` is not used: on a CPU it does not move with
    what is kept, and it counts host bytes in. :attr:`Measurement.device_bytes`, the sum of
    the parts, is what has to fit.
*   FLOPs are the compiler's count: it takes the body of a loop once, and the compiler for
    NVIDIA GPUs gives none.
*   On a CPU, JAX before 0.11 undoes rematerialisation (see :func:`compiler_options`). The program
    is measured with that turned off, and the record says so in ``notes``.

The compiled program itself shows whether the program's recomputation survived the compiler
(``recomputation``); the compiler's own files show what is alive when (``buffers``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from remat_opt import _jax_internals as internals
from remat_opt import device as device_table
from remat_opt.device import AttachedTarget, CompilerOption, Device
from remat_opt.errors import CompileError, DeviceError, PlanFileError
from remat_opt.measurement import meshes
from remat_opt.measurement.buffers import CompiledMemory
from remat_opt.measurement.compile_only import compile_only_devices
from remat_opt.measurement.dump import dump_folder, read_memory
from remat_opt.measurement.survival import survival
from remat_opt.progress import doing
from remat_opt.recomputation import Recomputation, in_brackets, is_recomputation
from remat_opt.units import format_bytes

#: On an attached NVIDIA device XLA times its own products against the library's, and took the
#: library's in every program that was run on one. Where nothing can be timed it takes its own, into
#: which it fuses what the library reads as arrays: up to half of the memory is missing then.
_TRITON_PRODUCTS = "xla_gpu_enable_triton_gemm"

#: The device that an unknown machine of each platform counts as: the smallest of its kind, so that
#: no plan asks too much of it.
_GENERIC_DEVICES = {"cpu": "cpu", "cuda": "a100", "tpu": "v5e"}

#: The packages that hold the compiler of a platform; the first one installed counts. Not libtpu:
#: ``TPU_LIBRARY_PATH`` may name another, and it reports its own version.
_COMPILER_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "cpu": ("jaxlib",),
    "cuda": ("jax-cuda13-pjrt", "jax-cuda12-pjrt"),
    "tpu": (),
}

_DISABLED_PASSES = "xla_disable_hlo_passes"
#: The compiler's own rematerialisation pass, used if memory runs short, by platform, if it can be
#: left out: XLA for TPU has a different one.
OWN_REMATERIALISATION = {"cuda": "rematerialization"}
_BARRIER_PASS = "cse_barrier_expander"
_BARRIER_NOTE = (
    f"compiled with {_DISABLED_PASSES}={_BARRIER_PASS}: without it, JAX {jax.__version__} on "
    "CPU merges recomputation with what it repeats, and needs as much memory as the plain "
    "function"
)

#: An amount as libtpu writes it, in powers of 1024.
_FIGURE = r"[\d.]+[BKMGT]?"
_OUT_OF_MEMORY = (
    # "... required for HLO temporaries (20.09G) exceeds available HBM (15.75G)"
    re.compile(rf"\((?P<needed>{_FIGURE})\) exceeds available HBM \((?P<available>{_FIGURE})\)"),
    # "Ran out of memory in memory space hbm. Used 20.09G of 15.75G hbm."
    re.compile(rf"Used (?P<needed>{_FIGURE}) of (?P<available>{_FIGURE}) hbm"),
)
_COMPILER_UNITS = {"": 1, "B": 1, "K": 1024, "M": 1024**2, "G": 1024**3, "T": 1024**4}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """What the compiler says about one function on one device.

    Attributes:
      device: name of the device compiled for.
      argument_bytes: arguments, in device memory.
      output_bytes: outputs, in device memory.
      temporary_bytes: everything else in device memory while it runs.
      host_bytes: arguments, outputs and temporaries in host memory, as offloading makes.
      alias_bytes: outputs that reuse the buffers of donated arguments.
      flops: the compiler's count, or None if it gives none. A loop's body counts once.
      recomputation: what the compiler did with the program's recomputation; None if there is none.
      compile_seconds: how long tracing, lowering and compiling took. The only figure that
        differs from one run to the next; not part of equality.
      jax_version: version of JAX.
      compiler_version: what the compiler calls itself.
      notes: what a reader of the figures should know.
      memory: what is alive when, if requested and readable. It is part neither of equality nor of
        the record's plain data.
    """

    device: str
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int
    host_bytes: int
    alias_bytes: int
    flops: int | None
    recomputation: Recomputation | None
    compile_seconds: float = dataclasses.field(compare=False)
    jax_version: str
    compiler_version: str
    notes: tuple[str, ...] = ()
    memory: CompiledMemory | None = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def device_bytes(self) -> int:
        """Device memory that the program needs: arguments, outputs and temporaries."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    def to_dict(self) -> dict[str, Any]:
        """This record as plain data, fit for JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, memory=None))
        del plain["memory"]
        return {**plain, "notes": list(self.notes)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Measurement:
        """Reads what :meth:`to_dict` wrote.

        Raises:
          PlanFileError: a field is missing, unknown or of the wrong type.
        """
        fields = {field.name for field in dataclasses.fields(cls)} - {"memory"}
        if not isinstance(data, Mapping) or set(data) != fields:
            raise PlanFileError(
                f"A measurement has the fields {sorted(fields)}, not {_keys(data)}."
            )
        for name, value in data.items():
            if not _has_type(name, value):
                raise PlanFileError(f"A measurement cannot have {name} = {value!r}.")
        found = data["recomputation"]
        return cls(
            **{
                **data,
                "recomputation": None if found is None else Recomputation.from_plain(found),
                "notes": tuple(data["notes"]),
            }
        )


def measure(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    with_buffers: bool = False,
    as_written: bool = False,
    **kwargs: Any,
) -> Measurement:
    """Compiles ``fn`` as given for a device and reads what the compiler says.

    To learn what training needs, pass the gradient: ``measure(jax.grad(loss), params, batch)``.

    Args:
      fn: any function that ``jax.jit`` takes.
      *args: its arguments: arrays, NumPy arrays, ``jax.ShapeDtypeStruct`` or trees of them.
        Only shapes and dtypes matter.
      device: a name that ``device.available()`` lists, "attached", or a ``Device``.
      static_argnums: as in ``jax.jit``.
      static_argnames: as in ``jax.jit``.
      donate_argnums: as in ``jax.jit``.
      with_buffers: whether to read also what is alive when (``memory``). If it cannot be read, a
        note says why.
      as_written: whether to compile without the compiler's own rematerialisation, if it is among
        ``OWN_REMATERIALISATION``.
      **kwargs: its keyword arguments, likewise.

    Raises:
      DeviceError: the device is unknown or cannot take these arguments.
      MissingPackageError: compiling for it needs a package that is not installed.
      CompileError: the compiler refuses the program, as for lack of memory. Its ``memory`` is what
        was alive when, if that was asked for and the compiler got that far.
    """
    target = _told(fn, device, (args, kwargs))
    start = time.perf_counter()
    jitted = _jitted(fn, static_argnums, static_argnames, donate_argnums)
    memory: CompiledMemory | None = None
    notes: tuple[str, ...] = ()
    name = getattr(fn, "__name__", type(fn).__name__)
    with doing(f"tracing {name}"):
        lowered = _lower(jitted, args, kwargs, target)
    with dump_folder() if with_buffers else contextlib.nullcontext() as folder:
        try:
            with doing(f"compiling {name} for {target.name}"):
                compiled = _compile(lowered, target, folder, as_written)
        except CompileError as error:
            if folder is not None:
                # XLA writes down what it decided before it finds that the program does not fit.
                with contextlib.suppress(CompileError):
                    error.memory = read_memory(lowered.as_text("hlo"), folder, target)
            raise
        seconds = time.perf_counter() - start
        if folder is not None:
            try:
                memory = read_memory(compiled.as_text() or "", folder, target)
            except CompileError as error:
                notes = (str(error),)
    found = _read(lowered, compiled, target, compile_seconds=seconds)
    return dataclasses.replace(found, notes=(*found.notes, *notes), memory=memory)


def compiled_memory(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> CompiledMemory:
    """Compiles ``fn`` for a device and reads what is alive when; see :func:`measure`.

    Raises:
      CompileError: also if what the compiler wrote about memory is missing or cannot be read.
    """
    target = _told(fn, device, (args, kwargs))
    jitted = _jitted(fn, static_argnums, static_argnames, donate_argnums)
    lowered = _lower(jitted, args, kwargs, target)
    with dump_folder() as folder:
        compiled = _compile(lowered, target, folder)
        return read_memory(compiled.as_text() or "", folder, target)


def compile_for(
    fn: Callable[..., Any],
    *args: Any,
    device: str | Device = "attached",
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    donate_argnums: int | Sequence[int] = (),
    **kwargs: Any,
) -> jax.stages.Compiled:
    """Compiles ``fn`` for a device, attached or not; see :func:`measure` for arguments.

    Returns:
      What ``jax.jit(fn).lower(...).compile()`` gives: ``as_text()`` is the program after all
      compiler passes. It can run only if the device is attached.
    """
    target = _told(fn, device, (args, kwargs))
    jitted = _jitted(fn, static_argnums, static_argnames, donate_argnums)
    return _compile(_lower(jitted, args, kwargs, target), target)


def _told(fn: Callable[..., Any], device: str | Device, given: Any) -> Device:
    """The device, its compiler told what the ``jax.jit`` around the function says."""
    found = resolve_device(device, meshes.mesh_of(given))
    return found.told(internals.compiler_options_of(fn))


def _jitted(
    fn: Callable[..., Any],
    static_argnums: int | Sequence[int] | None,
    static_argnames: str | Sequence[str] | None,
    donate_argnums: int | Sequence[int],
) -> jax.stages.Wrapped:
    return jax.jit(
        internals.without_compiler_options(fn),
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
    )


def _lower(
    jitted: jax.stages.Wrapped, args: Any, kwargs: Any, target: Device
) -> jax.stages.Lowered:
    place = _jax_device(target)
    if (mesh := meshes.mesh_of((args, kwargs))) is not None:
        mesh = meshes.on_device(mesh, target, _peers(place, target, mesh.size))
        args, kwargs = meshes.placed((args, kwargs), mesh)
        return jitted.lower(*args, **kwargs)
    if not (target.attached and any(map(_spans_devices, jax.tree.leaves((args, kwargs))))):
        args, kwargs = jax.tree.map(lambda leaf: _placed(leaf, place, target), (args, kwargs))
    # A function without arguments, or with only Python numbers, is not placed by them.
    with jax.default_device(place):
        # Tracing does not depend on devices, so this is done once.
        if (mesh := meshes.mesh_in(jitted.trace(*args, **kwargs).jaxpr)) is not None:
            args, kwargs = meshes.placed((args, kwargs), mesh)
        return jitted.lower(*args, **kwargs)


def _compile(
    lowered: jax.stages.Lowered,
    target: Device,
    folder: Path | None = None,
    as_written: bool = False,
) -> jax.stages.Compiled:
    """The compiled program.

    Args:
      lowered: the program.
      target: the device.
      folder: where XLA should write what it decides about memory, if anywhere.
      as_written: whether to leave out the compiler's own rematerialisation, if possible.
    """
    options = {**target.compiler_options, **compiler_options(target)}
    if target.platform == "cuda" and not target.attached and _TRITON_PRODUCTS not in _flags():
        options.setdefault(_TRITON_PRODUCTS, False)
    if as_written and target.platform in OWN_REMATERIALISATION:
        options |= _without(OWN_REMATERIALISATION[target.platform], options)
    if folder is not None:
        options |= {"xla_dump_to": str(folder), "xla_dump_hlo_as_text": True}
    with jax.default_device(_jax_device(target)):
        try:
            return lowered.compile(compiler_options=options or None)
        except jax.errors.JaxRuntimeError as error:
            raise _compile_error(error, target) from error


def _jax_device(device: Device) -> Any:
    """JAX's object for the device, attached or not."""
    return _attached_jax_device(device) if device.attached else compile_only_devices(device)[0]


def _peers(place: Any, device: Device, count: int) -> Sequence[Any]:
    """The devices over which a mesh of this size can be laid."""
    if device.attached:
        return tuple(place.client.devices())
    return compile_only_devices(device, count)


def _read(
    lowered: jax.stages.Lowered,
    compiled: jax.stages.Compiled,
    device: Device,
    *,
    compile_seconds: float,
) -> Measurement:
    memory = compiled.memory_analysis()
    if memory is None:
        raise CompileError(
            f"The compiler for {device} gives no figures about memory.", device=device.name
        )
    text = compiled.as_text()
    measurement = Measurement(
        device=device.name,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        temporary_bytes=_temporary_bytes(memory, device),
        host_bytes=(
            memory.host_temp_size_in_bytes
            + memory.host_argument_size_in_bytes
            + memory.host_output_size_in_bytes
        ),
        alias_bytes=memory.alias_size_in_bytes,
        flops=_flops(compiled),
        recomputation=survival(lowered.as_text(debug_info=True), text) if text else None,
        compile_seconds=compile_seconds,
        jax_version=jax.__version__,
        compiler_version=compiler_version(device),
    )
    notes = []
    if compiler_options(device):
        notes.append(_BARRIER_NOTE)
    if told := ", ".join(device.option_words):
        notes.append(f"compiled with {told}, as the program must be when it runs")
    if measurement.device_bytes > device.memory_bytes:
        notes.append(
            f"needs {format_bytes(measurement.device_bytes)}, more than the "
            f"{format_bytes(device.memory_bytes)} of {device.title}"
        )
    if measurement.recomputation is not None:
        notes += _recomputation_notes(measurement.recomputation)
    return dataclasses.replace(measurement, notes=tuple(notes))


def _recomputation_notes(found: Recomputation) -> list[str]:
    notes = []
    if found.undone:
        notes.append(
            f"recomputation is undone, in whole or in part: {found.text()}. The memory it was "
            "meant to save is not saved, whatever is predicted. Plan for another budget, or "
            'with verify="compile", which chooses the plan that compiles best'
        )
    if found.compiler_values:
        notes.append(
            f"the compiler's own rematerialisation computes {found.compiler_values} more "
            f"values again{in_brackets(found.not_kept)}, as it does when the device's memory "
            "runs short; a plan with a smaller budget leaves it less to do"
        )
    return notes


def _temporary_bytes(memory: Any, device: Device) -> int:
    """Temporaries in device memory: the size of the compiler's heap.

    XLA for TPU reports the heap plus its fragmentation, although the heap already includes that.
    From JAX 0.11 on it also reports everything it allocates, and how much of it stays allocated
    throughout: arguments and outputs. The rest is the heap, to the byte, with and without donation,
    host memory, loops and a mesh. Before, we must use what is alive at the peak, including
    arguments and outputs: if that is all temporaries, the heap is half the sum of it and the
    reported figure.
    """
    reported: int = memory.temp_size_in_bytes
    if device.platform != "tpu":
        return reported
    allocated: int | None = getattr(memory, "total_allocation_bytes", None)
    if allocated is not None:
        return allocated - int(memory.indefinite_allocations)
    others = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    )
    live = memory.peak_memory_in_bytes - others
    # The peak also counts temporaries in results' buffers, and host memory.
    return (reported + live) // 2 if 0 < live <= reported else reported


def compiler_options(device: Device) -> dict[str, CompilerOption]:
    """Compiler options without which a plan has no effect on a device; usually none.

    On a CPU with JAX before 0.11, the pass ``cse_barrier_expander`` removes the barriers that
    ``jax.checkpoint`` puts around recomputation, and common subexpression elimination then merges
    it with the original. To run there, pass these options on: ``jax.jit(step,
    compiler_options=compiler_options(device))``.
    """
    if device.platform != "cpu" or jax.__version_info__ >= (0, 11):
        return {}
    return _without(_BARRIER_PASS, device.compiler_options)


def _without(one: str, options: Mapping[str, CompilerOption]) -> dict[str, CompilerOption]:
    """Compiler options that leave out one pass, and what other options leave out."""
    # The option replaces XLA_FLAGS, so keep the passes that are disabled there.
    in_flags = ",".join(re.findall(rf"--{_DISABLED_PASSES}=(\S+)", _flags()))
    left_out = str(options.get(_DISABLED_PASSES, in_flags))
    passes = [name for name in left_out.split(",") if name and name != one]
    return {_DISABLED_PASSES: ",".join([*passes, one])}


def _flags() -> str:
    return os.environ.get("XLA_FLAGS", "")


def resolve_device(device: str | Device, mesh: Any = None) -> Device:
    """The device that a user's ``device=`` means.

    Args:
      device: a name that ``device.available()`` lists, "attached", or a ``Device``.
      mesh: the mesh that arguments are laid out on, if any: "attached" then means its devices.

    Raises:
      DeviceError: there is none of that name.
    """
    if isinstance(device, Device):
        return device
    if device == "attached":
        return meshes.device_of(mesh) or attached_device()
    return device_table.get_device(device)


def attached_device() -> Device:
    """The first of ``jax.devices()``, as a record.

    Rates are those of the known device of that kind, or of the smallest known one of its platform.
    Memory is what the backend says a program can have, if it says so (on a CPU: the machine's), so
    that ``budget="fit"`` fits here.

    Raises:
      DeviceError: it is of a platform unknown to this package.
    """
    place = jax.devices()[0]
    platform = meshes.PLATFORMS.get(place.platform, place.platform)
    if platform not in _GENERIC_DEVICES or "rocm" in place.client.platform_version.lower():
        raise DeviceError(
            f"jax.devices() shows {place.device_kind!r}, about which nothing is known: pass "
            f"device= one of {', '.join(device_table.available())}, or a Device of your own."
        )
    name = meshes.known_name(place.device_kind)
    known = device_table.get_device(name or _GENERIC_DEVICES[platform])
    title = known.title if name or platform == "cpu" else place.device_kind
    return dataclasses.replace(
        known,
        name=name or platform,
        title=title,
        memory_bytes=_memory_bytes(place) or known.memory_bytes,
        target=AttachedTarget(),
    )


def _memory_bytes(place: Any) -> int | None:
    if place.platform == "cpu":
        try:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        except (AttributeError, OSError, ValueError):
            return None
    return (place.memory_stats() or {}).get("bytes_limit")


def _attached_jax_device(device: Device) -> Any:
    """JAX's device for an attached one: its default device, if of that platform."""
    default = jax.devices()[0]
    if meshes.PLATFORMS.get(default.platform, default.platform) == device.platform:
        return default
    try:
        return jax.devices(device.platform)[0]
    except RuntimeError as error:
        raise DeviceError(
            f"{device} cannot be compiled for: JAX has no {device.platform} backend in this "
            f"process ({error}). JAX_PLATFORMS may leave it out."
        ) from error


def _placed(leaf: Any, place: Any, device: Device) -> Any:
    """An argument as shape and dtype on ``place``; Python numbers and static values unchanged."""
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    if _spans_devices(leaf):
        raise DeviceError(
            f"An argument of shape {leaf.shape} is spread over several devices by a "
            f"{type(leaf.sharding).__name__}, which has no mesh to map onto the devices of "
            f"{device}. Give it a NamedSharding."
        )
    # eval_shape knows the dtype that jit would give it, such as float32 for NumPy's float64.
    aval = jax.eval_shape(lambda x: x, leaf)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        weak_type=aval.weak_type,
        sharding=jax.sharding.SingleDeviceSharding(place, memory_kind=_memory_kind(leaf)),
    )


def _spans_devices(leaf: Any) -> bool:
    return getattr(getattr(leaf, "sharding", None), "num_devices", 1) > 1


def _memory_kind(leaf: Any) -> str | None:
    """Host memory if the argument is meant to be there, else the device's default."""
    kind = getattr(getattr(leaf, "sharding", None), "memory_kind", None)
    return kind if kind == "pinned_host" else None


def _flops(compiled: jax.stages.Compiled) -> int | None:
    analysis = compiled.cost_analysis()
    flops = analysis.get("flops") if analysis else None
    # -1 means unknown to XLA.
    return None if flops is None or flops < 0 else int(flops)


def compiler_version(device: Device) -> str:
    """What the compiler for a device calls itself."""
    # The compilers for CPU and GPU say nothing useful about themselves; their packages do.
    for package in _COMPILER_PACKAGES[device.platform]:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return f"{package} {importlib.metadata.version(package)}"
    place = _jax_device(device)
    # Several lines, including a build date.
    return " ".join(place.client.platform_version.split())


def _compile_error(error: Exception, device: Device) -> CompileError:
    text = str(error)
    found = next((match for p in _OUT_OF_MEMORY if (match := p.search(text))), None)
    if found is None:
        return CompileError(
            f"The compiler refused the program for {device}: {text}",
            device=device.name,
            compiler_message=text,
        )
    needed_bytes = _compiler_bytes(found["needed"])
    available_bytes = _compiler_bytes(found["available"])
    return CompileError(
        f"The program does not fit {device}: the compiler needs {format_bytes(needed_bytes)} "
        f"and has {format_bytes(available_bytes)}. Its own words: {text}",
        device=device.name,
        needed_bytes=needed_bytes,
        available_bytes=available_bytes,
        compiler_message=text,
    )


def _compiler_bytes(text: str) -> int:
    """Reads the compiler's "15.75G", which is in powers of 1024."""
    number = text.rstrip("BKMGT")
    return int(float(number) * _COMPILER_UNITS[text[len(number) :]])


def _keys(data: object) -> list[str]:
    return sorted(map(str, data)) if isinstance(data, Mapping) else [type(data).__name__]


def _has_type(name: str, value: object) -> bool:
    if name == "recomputation":
        return value is None or is_recomputation(value)
    if name == "notes":
        return isinstance(value, list | tuple) and all(isinstance(note, str) for note in value)
    if name in ("device", "jax_version", "compiler_version"):
        return isinstance(value, str)
    if isinstance(value, bool):
        return False
    if name == "compile_seconds":
        return isinstance(value, int | float) and value >= 0
    return (name == "flops" and value is None) or (isinstance(value, int) and value >= 0)
