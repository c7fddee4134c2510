"""Machines to plan and compile for: memory, rates, bandwidths, and how to compile for them.

A table of plain numbers with their public source; no JAX here. Rates and bandwidths are peaks from
data sheets. A plan only compares recomputations with one another and with one forward pass, so a
factor common to all does not matter.

What float32 means. JAX multiplies float32 matrices at its *default precision*, and the "float32"
rate here is that of what really runs: one bfloat16 pass on a TPU, TF32 on an NVIDIA GPU from Ampere
on (jax issues 1856 and 12008), float32 on a CPU. If you set ``jax_default_matmul_precision`` to
something slower, register a device of your own.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, Literal

from remat_opt.errors import DeviceError
from remat_opt.units import format_bytes

Platform = Literal["cpu", "cuda", "tpu"]

_GIB: Final = 1024**3
_TERA: Final = 10**12
_GIGA: Final = 10**9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttachedTarget:
    """Compile with the backend that JAX has for the device's platform in this process."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TpuTarget:
    """Compile with libtpu for a TPU that need not be attached.

    Attributes:
      topology: name of a slice: the pod that is meant, or the smallest that every supported libtpu
        accepts (that of JAX 0.10 refuses a single chip). What is not sharded runs on one device.
    """

    topology: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuTarget:
    """What XLA needs to know to compile for an NVIDIA GPU that need not be attached.

    These are the fields of XLA's ``GpuTargetConfigProto`` that change what is compiled, found by
    leaving out one at a time and compiling. Leaving out a field that is the same on every supported
    GPU (see ``to_proto_text``) crashes the compiler. Everything else in the proto (rates of single
    units, versions, names) changes no temporary bytes.

    Attributes:
      core_count: streaming multiprocessors.
      fpus_per_core: float32 units in each of them.
      clock_hertz: boost clock.
      shared_memory_per_core_bytes: shared memory of one multiprocessor.
      shared_memory_per_block_bytes: the most that one block may ask for.
      l2_cache_bytes: second-level cache.
      compute_capability: (major, minor).
      architecture_specific: whether to use the instructions of just this architecture
        (``sm_90a`` rather than ``sm_90``), as XLA does on Hopper and later.
      devices: how many GPUs there are, eight in a machine.
    """

    core_count: int
    fpus_per_core: int
    clock_hertz: int
    shared_memory_per_core_bytes: int
    shared_memory_per_block_bytes: int
    l2_cache_bytes: int
    compute_capability: tuple[int, int]
    architecture_specific: bool
    devices: int = 1

    def to_proto_text(self, *, title: str, memory_bytes: int, memory_bandwidth: float) -> str:
        """Writes a ``GpuTargetConfigProto`` in text format.

        Args:
          title: what XLA should call the GPU: letters, digits, spaces and dots.
          memory_bytes: its memory; XLA's own passes save memory when this is short.
          memory_bandwidth: bytes per second.
        """
        major, minor = self.compute_capability
        feature = "ACCELERATED_FEATURES" if self.architecture_specific else "NONE"
        return f"""\
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {self.shared_memory_per_block_bytes}
  shared_memory_per_core: {self.shared_memory_per_core_bytes}
  core_count: {self.core_count}
  fpus_per_core: {self.fpus_per_core}
  clock_rate_ghz: {self.clock_hertz / _GIGA}
  l2_cache_size: {self.l2_cache_bytes}
  memory_bandwidth: {int(memory_bandwidth)}
  device_memory_size: {memory_bytes}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "{title}"
"""


Target = AttachedTarget | TpuTarget | GpuTarget
CompilerOption = str | bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One machine, as JAX counts devices: a GPU, a TPU chip (half a chip on TPU7x), a CPU.

    Attributes:
      name: what users write, such as ``"h200"``, or ``"v5e:4x4"`` for one of a pod's.
      title: what people call it.
      platform: whose compiler is used.
      memory_bytes: device memory a program can use.
      memory_bandwidth: bytes per second between the device and its memory.
      flops_per_second: dense rates by dtype name; read it through :meth:`flops_rate`. The
        rate of "float32" is that at JAX's default matmul precision (see the module).
      host_bandwidth: bytes per second between device and host memory, one way.
      source: the public documents that the figures come from.
      target: how to compile for it.
      network_bandwidth: bytes per second that it sends to the other devices of a mesh, over all its
        links; by default the same as to the host.
      compiler_options: what its compiler is told, as ``jax.jit(compiler_options=)`` takes it.
    """

    name: str
    title: str
    platform: Platform
    memory_bytes: int
    memory_bandwidth: float
    flops_per_second: Mapping[str, float]
    host_bandwidth: float
    source: str
    target: Target
    network_bandwidth: float = 0.0
    compiler_options: Mapping[str, CompilerOption] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.network_bandwidth:
            object.__setattr__(self, "network_bandwidth", self.host_bandwidth)
        word = self.name.partition(":")[0]
        if not word.isidentifier() or self.name != self.name.lower():
            raise DeviceError(
                f"A device's name is a lower-case word such as 'h200', not {self.name!r}."
            )
        if "float32" not in self.flops_per_second:
            raise DeviceError(
                f"The device {self.name!r} has no rate for float32: give one in "
                "flops_per_second (it also stands in for integers)."
            )
        figures = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth": self.memory_bandwidth,
            "host_bandwidth": self.host_bandwidth,
            "network_bandwidth": self.network_bandwidth,
            **{f"flops_per_second[{k!r}]": v for k, v in self.flops_per_second.items()},
        }
        for field, figure in figures.items():
            if not figure > 0:
                raise DeviceError(
                    f"The device {self.name!r} has {field} = {figure}: it must be positive."
                )
        # A copy that nobody can change: the record is shared by everyone who asks for it.
        for field in ("flops_per_second", "compiler_options"):
            object.__setattr__(self, field, MappingProxyType(dict(getattr(self, field))))

    def __hash__(self) -> int:
        return hash((self.name, self.platform, self.memory_bytes, self.target))

    def __reduce__(self) -> tuple[object, ...]:
        # A mapping proxy cannot be pickled or deep-copied; a dict can.
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {n: dict(v) if isinstance(v, MappingProxyType) else v for n, v in fields.items()}
        return _rebuild, (plain,)

    @property
    def attached(self) -> bool:
        """Whether programs are compiled by a backend that JAX has in this process."""
        return isinstance(self.target, AttachedTarget)

    @property
    def option_words(self) -> tuple[str, ...]:
        """What its compiler is told, each as ``name=value``."""
        return tuple(f"{name}={value}" for name, value in self.compiler_options.items())

    def told(self, options: Mapping[str, CompilerOption]) -> Device:
        """The same device, its compiler told this as well."""
        return dataclasses.replace(self, compiler_options={**self.compiler_options, **options})

    def flops_rate(self, dtype: object) -> float:
        """Floating-point operations per second for matrix products of ``dtype``.

        A dtype that the table lacks gets the device's slowest rate: underestimating a computation
        would keep the wrong values.

        Args:
          dtype: the dtype's name, or anything whose ``str`` is that, such as a NumPy dtype.
        """
        rate = self.flops_per_second.get(str(dtype))
        return min(self.flops_per_second.values()) if rate is None else rate

    def __str__(self) -> str:
        return f"{self.title} ({self.name}, {format_bytes(self.memory_bytes)})"


def _rebuild(fields: Mapping[str, object]) -> Device:
    return Device(**fields)  # type: ignore[arg-type]


def get_device(name: str) -> Device:
    """Looks a device up by name.

    Args:
      name: as listed by :func:`available`, in any case. A TPU slice or a number of GPUs may follow,
        as in ``"v5e:4x4"`` and ``"h200:8"``: then it is one of these. Attached devices are not in
        the table: ``measurement.resolve_device("attached")`` finds them.

    Raises:
      DeviceError: no device has that name.
    """
    word, colon, pod = name.lower().partition(":") if isinstance(name, str) else ("", "", "")
    device = _devices.get(word)
    if device is None:
        raise DeviceError(
            f"Unknown device {name!r}. Known: {', '.join(available())}; or 'attached' for "
            "what jax.devices() shows. remat_opt.device.register(Device(...)) adds one."
        )
    return _one_of_pod(device, pod) if colon else device


def _one_of_pod(device: Device, pod: str) -> Device:
    match device.target:
        case TpuTarget() if re.fullmatch(r"\d+(x\d+)+", pod):
            target: Target = TpuTarget(topology=f"{device.name}:{pod}")
        case GpuTarget() as gpu if re.fullmatch(r"[1-9]\d*", pod):
            target = dataclasses.replace(gpu, devices=int(pod))
        case _:
            raise DeviceError(
                f"There is no device '{device.name}:{pod}'. For TPUs give the slice, as in "
                "'v5e:4x4'; for GPUs give their number, as in 'h200:8'. Attached devices are "
                "used as they are."
            )
    return dataclasses.replace(device, name=f"{device.name}:{pod}", target=target)


def available() -> tuple[str, ...]:
    """The names of all known devices: those of this file first, then registered ones."""
    return tuple(_devices)


def register(device: Device) -> None:
    """Adds a device to the table, for this process.

    Args:
      device: its name must be new: replacing an entry would change the plans of code that relies
        on it.

    Raises:
      DeviceError: a different device has that name.
    """
    if device.name == "attached":
        raise DeviceError("The name 'attached' means what jax.devices() shows: choose another.")
    known = _devices.get(device.name)
    if known is not None and known != device:
        raise DeviceError(
            f"The device name {device.name!r} is taken ({known.title}): take another."
        )
    _devices[device.name] = device


def _tensor_core_rates(*, tf32: float, bf16: float, f64: float, byte: float) -> dict[str, float]:
    return {
        "float64": f64,
        "float32": tf32,
        "bfloat16": bf16,
        "float16": bf16,
        "int8": byte,
        "uint8": byte,
    }


def _tpu_rates(bf16: float, *, byte: float, float8: float) -> dict[str, float]:
    # float32 at default precision is one bfloat16 pass.
    return {
        "float32": bf16,
        "bfloat16": bf16,
        "float16": bf16,
        "int8": byte,
        "uint8": byte,
        "float8_e4m3fn": float8,
        "float8_e5m2": float8,
    }


# Between devices: NVLink one way, and all links of the TPU interconnect, from the same pages.
_XLA_SPECS: Final = "XLA's GPU target {file} (github.com/openxla/xla, target_config/specs)"
_TPU_DOCS: Final = (
    "cloud.google.com/tpu/docs/{page}; memory: what libtpu's compiler calls available HBM; "
    "host bandwidth: jax-ml.github.io/scaling-book/tpus"
)

_HOPPER_RATES: Final = {
    **_tensor_core_rates(tf32=494.5 * _TERA, bf16=989.5 * _TERA, f64=67 * _TERA, byte=1979 * _TERA),
    "float8_e4m3fn": 1979.0 * _TERA,
    "float8_e5m2": 1979.0 * _TERA,
}
_HOPPER_TARGET: Final = GpuTarget(
    core_count=132,
    fpus_per_core=128,
    clock_hertz=1_980_000_000,
    shared_memory_per_core_bytes=233_472,
    shared_memory_per_block_bytes=232_448,
    l2_cache_bytes=52_428_800,
    compute_capability=(9, 0),
    architecture_specific=True,
)

_KNOWN: Final = (
    Device(
        name="cpu",
        title="CPU",
        platform="cpu",
        # Nominal, so that a plan for "cpu" is the same on every machine.
        memory_bytes=64 * _GIB,
        memory_bandwidth=50 * _GIGA,
        flops_per_second={
            "float32": 1.0 * _TERA,
            "float64": 0.5 * _TERA,
            # Converted to float32 and back on most CPUs.
            "bfloat16": 0.5 * _TERA,
            "float16": 0.5 * _TERA,
        },
        # Device memory is host memory: moving a value costs a copy, at half the bandwidth.
        host_bandwidth=25 * _GIGA,
        source="nominal: eight cores with AVX2 at 4 GHz, two channels of DDR4-3200",
        target=AttachedTarget(),
    ),
    Device(
        name="a100",
        title="NVIDIA A100 SXM 80GB",
        platform="cuda",
        memory_bytes=85_100_068_864,
        memory_bandwidth=2_039_040_000_000,
        flops_per_second=_tensor_core_rates(
            tf32=156 * _TERA, bf16=312 * _TERA, f64=19.5 * _TERA, byte=624 * _TERA
        ),
        host_bandwidth=32 * _GIGA,
        network_bandwidth=300 * _GIGA,
        source=f"NVIDIA A100 data sheet; {_XLA_SPECS.format(file='a100_sxm_80')}",
        target=GpuTarget(
            core_count=108,
            fpus_per_core=64,
            clock_hertz=1_410_000_000,
            shared_memory_per_core_bytes=167_936,
            shared_memory_per_block_bytes=166_912,
            l2_cache_bytes=41_943_040,
            compute_capability=(8, 0),
            architecture_specific=False,
        ),
    ),
    Device(
        name="h100",
        title="NVIDIA H100 SXM 80GB",
        platform="cuda",
        memory_bytes=84_942_979_072,
        memory_bandwidth=3_352_320_000_000,
        flops_per_second=_HOPPER_RATES,
        host_bandwidth=64 * _GIGA,
        network_bandwidth=450 * _GIGA,
        source=f"NVIDIA H100 data sheet (dense rates); {_XLA_SPECS.format(file='h100_sxm')}",
        target=_HOPPER_TARGET,
    ),
    Device(
        name="h200",
        title="NVIDIA H200 SXM 141GB",
        platform="cuda",
        memory_bytes=151_397_597_184,
        memory_bandwidth=4_800_000_000_000,
        flops_per_second=_HOPPER_RATES,
        host_bandwidth=64 * _GIGA,
        network_bandwidth=450 * _GIGA,
        source=f"NVIDIA H200 data sheet (dense rates); {_XLA_SPECS.format(file='h200')}",
        target=_HOPPER_TARGET,
    ),
    Device(
        name="b200",
        title="NVIDIA B200",
        platform="cuda",
        memory_bytes=191_514_411_008,
        memory_bandwidth=7_672_320_000_000,
        flops_per_second={
            **_tensor_core_rates(
                tf32=1125 * _TERA, bf16=2250 * _TERA, f64=37 * _TERA, byte=4500 * _TERA
            ),
            "float8_e4m3fn": 4500.0 * _TERA,
            "float8_e5m2": 4500.0 * _TERA,
        },
        host_bandwidth=64 * _GIGA,
        network_bandwidth=900 * _GIGA,
        source=(
            "NVIDIA HGX B200 data sheet (dense rates, an eighth of the board); "
            + _XLA_SPECS.format(file="b200")
        ),
        target=GpuTarget(
            core_count=148,
            fpus_per_core=128,
            clock_hertz=1_965_000_000,
            shared_memory_per_core_bytes=233_472,
            shared_memory_per_block_bytes=232_448,
            l2_cache_bytes=132_644_864,
            compute_capability=(10, 0),
            architecture_specific=True,
        ),
    ),
    Device(
        name="v5e",
        title="TPU v5e",
        platform="tpu",
        memory_bytes=int(15.75 * _GIB),
        memory_bandwidth=819 * _GIGA,
        flops_per_second=_tpu_rates(197 * _TERA, byte=393 * _TERA, float8=197 * _TERA),
        host_bandwidth=16 * _GIGA,
        network_bandwidth=200 * _GIGA,
        source=_TPU_DOCS.format(page="v5e"),
        target=TpuTarget(topology="v5e:2x2"),
    ),
    Device(
        name="v5p",
        title="TPU v5p",
        platform="tpu",
        memory_bytes=int(95.73 * _GIB),
        memory_bandwidth=2765 * _GIGA,
        flops_per_second=_tpu_rates(459 * _TERA, byte=918 * _TERA, float8=459 * _TERA),
        host_bandwidth=16 * _GIGA,
        network_bandwidth=600 * _GIGA,
        source=_TPU_DOCS.format(page="v5p"),
        target=TpuTarget(topology="v5p:2x2x1"),
    ),
    Device(
        name="v6e",
        title="TPU v6e (Trillium)",
        platform="tpu",
        memory_bytes=int(31.24 * _GIB),
        memory_bandwidth=1638 * _GIGA,
        flops_per_second=_tpu_rates(918 * _TERA, byte=1836 * _TERA, float8=918 * _TERA),
        host_bandwidth=32 * _GIGA,
        network_bandwidth=448 * _GIGA,
        source=_TPU_DOCS.format(page="v6e"),
        target=TpuTarget(topology="v6e:2x2"),
    ),
    Device(
        name="tpu7x",
        title="TPU7x (Ironwood), one of a chip's two devices",
        platform="tpu",
        memory_bytes=int(94.74 * _GIB),
        # Half of the chip's figures: JAX shows each of the two chiplets as a device.
        memory_bandwidth=3690 * _GIGA,
        flops_per_second=_tpu_rates(1153.5 * _TERA, byte=1153.5 * _TERA, float8=2307 * _TERA),
        host_bandwidth=16 * _GIGA,
        network_bandwidth=600 * _GIGA,
        source=f"{_TPU_DOCS.format(page='tpu7x')} (as v5p, for want of a figure)",
        target=TpuTarget(topology="tpu7x:2x2x1"),
    ),
)

_devices: dict[str, Device] = {}
for _device in _KNOWN:
    register(_device)
