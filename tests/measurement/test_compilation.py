"""Compiling for devices, attached or not, and reading what the compiler says."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import topologies

import remat_opt.device
from remat_opt.device import AttachedTarget, Device, get_device
from remat_opt.errors import (
    CompileError,
    DeviceError,
    MissingPackageError,
    PlanFileError,
    RematError,
)
from remat_opt.measurement import compilation
from remat_opt.measurement import compile_only as _compile_only
from remat_opt.measurement.compilation import (
    Measurement,
    attached_device,
    compile_for,
    compiler_options,
    measure,
    resolve_device,
)
from remat_opt.recomputation import Recomputation
from tests.devices import needs_cuda_plugin, needs_libtpu

MIB = 1024**2


DEVICES = [
    "cpu",
    pytest.param("h200", marks=[pytest.mark.cuda, needs_cuda_plugin]),
    pytest.param("v5e", marks=[pytest.mark.tpu, needs_libtpu]),
]
AWAY = DEVICES[1:]


def plain(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight) + x
    return jnp.sum(x * x)


def chain(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
    """The same in regions of four layers, each under its own ``jax.checkpoint``."""

    @jax.checkpoint
    def region(weights: Sequence[jax.Array], x: jax.Array) -> jax.Array:
        for weight in weights:
            x = jnp.tanh(x @ weight) + x
        return x

    for start in range(0, len(weights), 4):
        x = region(weights[start : start + 4], x)
    return jnp.sum(x * x)


def layer_shapes(*, rows: int, width: int, layers: int = 16) -> tuple[list[Any], Any]:
    weight = jax.ShapeDtypeStruct((width, width), jnp.float32)
    return [weight] * layers, jax.ShapeDtypeStruct((rows, width), jnp.float32)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` in a fresh process, like a user's program with only these settings."""
    package = Path(remat_opt.device.__file__).parent
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("JAX_", "TPU_", "TF_", "XLA_", "ALLOW_MULTIPLE"))
    }
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        env={**inherited, "PYTHONPATH": str(package.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


class TestFigures:
    """Temporary bytes of 16 layers of ``tanh(x @ w) + x``: plain and as a chain of regions."""

    @staticmethod
    def temporary_mib(device: str, *, rows: int, width: int) -> list[float]:
        shapes = layer_shapes(rows=rows, width=width)
        records = [measure(jax.grad(fn), *shapes, device=device) for fn in (plain, chain)]
        return [record.temporary_bytes / MIB for record in records]

    def test_cpu(self) -> None:
        # Activations of 4 MiB. Both with and without the option that JAX 0.10 needs.
        assert self.temporary_mib("cpu", rows=2048, width=512) == pytest.approx([132, 48], abs=0.01)

    @pytest.mark.cuda
    @needs_cuda_plugin
    def test_h200(self) -> None:
        # Activations of 32 MiB.
        assert self.temporary_mib("h200", rows=8192, width=1024) == pytest.approx(
            [1056, 384], abs=0.03
        )

    @pytest.mark.slow
    @pytest.mark.versions
    @pytest.mark.tpu
    @needs_libtpu
    def test_v5e(self) -> None:
        # libtpu's fusion differs somewhat from version to version.
        plain_mib, chain_mib = self.temporary_mib("v5e", rows=65536, width=128)
        assert 660 < plain_mib < 700
        assert 160 < chain_mib < 210


@pytest.mark.parametrize("device", DEVICES)
class TestArguments:
    """What may be passed, on every kind of device; small programs only."""

    def test_only_shapes_and_dtypes_matter(self, device: str) -> None:
        def fn(tree: dict[str, Any], scale: float) -> Any:
            return jnp.sum(tree["a"]) * scale

        given = [
            jnp.ones((64, 128)),
            np.ones((64, 128)),  # float64, which jit reads as float32
            jax.ShapeDtypeStruct((64, 128), jnp.float32),
        ]
        first, *others = [measure(fn, {"a": a, "b": None}, 2.0, device=device) for a in given]
        assert first.argument_bytes >= 64 * 128 * 4
        assert others == [first, first]
        assert first.device == device

    def test_a_function_without_arrays_is_compiled_for_the_device_too(self, device: str) -> None:
        compiled = compile_for(lambda x: jnp.full(5, x), 3.0, device=device)
        places = jax.tree.leaves(compiled.output_shardings)[0].device_set
        assert {place.platform for place in places} == {
            {"cpu": "cpu", "h200": "gpu", "v5e": "tpu"}[device]
        }

    def test_static_and_donated_arguments_and_keys(self, device: str) -> None:
        def fn(x: jax.Array, times: int, key: jax.Array, *, mode: str) -> jax.Array:
            return x * times + jax.random.normal(key, x.shape) if mode == "noisy" else x

        record = measure(
            fn,
            jnp.ones((256, 128)),
            2,
            jax.random.key(0),
            mode="noisy",
            device=device,
            static_argnums=1,
            static_argnames="mode",
            donate_argnums=0,
        )
        assert record.alias_bytes == record.output_bytes == 256 * 128 * 4
        assert record.device_bytes == (record.argument_bytes + record.temporary_bytes)


@pytest.mark.slow
@pytest.mark.versions
@pytest.mark.parametrize("device", AWAY)
def test_offloaded_residuals_are_host_bytes(device: str) -> None:
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def body(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            x = checkpoint_name(jnp.sin(x @ weight), "kept")
            return jnp.sin(x @ weight), None

        x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy), x, weights)
        return jnp.sum(x)

    shapes = (
        jax.ShapeDtypeStruct((4, 256, 256), jnp.float32),
        jax.ShapeDtypeStruct((512, 256), jnp.float32),
    )
    record = measure(jax.grad(loss), *shapes, device=device)
    assert record.host_bytes >= 4 * 512 * 256 * 4


@pytest.mark.parametrize("device", AWAY)
def test_refuses_arguments_spread_without_a_mesh(device: str) -> None:
    spread = SimpleNamespace(
        shape=(8, 8), dtype=jnp.dtype("float32"), sharding=SimpleNamespace(num_devices=4)
    )
    with pytest.raises(
        DeviceError,
        match=r"shape \(8, 8\) is spread over several devices by a SimpleNamespace, which has no "
        r"mesh .* Give it a NamedSharding",
    ):
        measure(jnp.sum, spread, device=device)


@pytest.mark.parametrize("device", ["cpu", AWAY[1]])
def test_flops_where_the_compiler_counts_them(device: str) -> None:
    record = measure(jnp.matmul, jnp.ones((256, 512)), jnp.ones((512, 128)), device=device)
    assert record.flops == pytest.approx(2 * 256 * 512 * 128, rel=0.01)


@pytest.mark.cuda
@needs_cuda_plugin
class TestGpu:
    """What is particular to NVIDIA GPUs."""

    def test_no_flops(self) -> None:
        assert measure(jnp.sin, jnp.ones(8), device="h200").flops is None

    @pytest.mark.parametrize(
        "name",
        [n for n in remat_opt.device.available() if get_device(n).platform == "cuda"],
    )
    def test_every_known_gpu_can_be_compiled_for(self, name: str) -> None:
        record = measure(jnp.matmul, jnp.ones((256, 256)), jnp.ones((256, 256)), device=name)
        assert record.output_bytes == 256 * 256 * 4
        assert record.device == name
        assert "cuda" in record.compiler_version

    def test_says_so_where_memory_does_not_suffice(self) -> None:
        small = dataclasses.replace(get_device("h200"), name="small", memory_bytes=2**20)
        record = measure(jnp.sin, jnp.ones((1024, 1024)), device=small)
        assert record.notes == ("needs 8.00 MiB, more than the 1.00 MiB of NVIDIA H200 SXM 141GB",)


@pytest.mark.tpu
@needs_libtpu
class TestTpu:
    """What is particular to TPUs."""

    @pytest.mark.parametrize(
        "name", [n for n in remat_opt.device.available() if get_device(n).platform == "tpu"]
    )
    def test_every_known_tpu_can_be_compiled_for(self, name: str) -> None:
        record = measure(jnp.sin, jnp.ones((256, 256)), device=name)
        assert record.output_bytes == 256 * 256 * 4
        assert record.compiler_version.count("\n") == 0

    def test_out_of_memory_gives_the_compilers_figures(self) -> None:
        shapes = layer_shapes(rows=2**20, width=1024, layers=6)
        with pytest.raises(CompileError, match=r"does not fit TPU v5e .*: the compiler needs") as e:
            measure(jax.grad(plain), *shapes, device="v5e")
        assert e.value.available_bytes == get_device("v5e").memory_bytes
        assert e.value.needed_bytes is not None
        assert e.value.needed_bytes > e.value.available_bytes
        assert "RESOURCE_EXHAUSTED" in e.value.compiler_message
        assert e.value.compiler_message in str(e.value)


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("for HLO temporaries (20.5G) exceeds available HBM (15.75G).", (20.5, 15.75)),
        ("Ran out of memory in memory space hbm. Used 20.5G of 15.75G hbm. E", (20.5, 15.75)),
        ("something else", None),
    ],
)
def test_reads_figures_out_of_a_refusal(text: str, figures: tuple[float, float] | None) -> None:
    error = compilation._compile_error(RuntimeError(text), get_device("v5e"))
    assert text in str(error)
    assert error.device == "v5e"
    if figures is None:
        assert (error.needed_bytes, error.available_bytes) == (None, None)
    else:
        assert error.needed_bytes == figures[0] * 1024**3
        assert error.available_bytes == figures[1] * 1024**3


@pytest.mark.parametrize(
    ("device", "hidden", "message"),
    [
        ("v5p", "libtpu", "Compiling for a TPU needs the package libtpu.*'remat_opt\\[tpu\\]'"),
        ("a100", "jax_plugins", "Compiling for an NVIDIA GPU needs.*'remat_opt\\[cuda\\]'"),
    ],
)
def test_a_missing_package_names_the_extra(
    device: str, hidden: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def find_spec(name: str) -> None:
        assert name == hidden

    def not_found(name: str) -> None:
        assert name.startswith(hidden)
        raise ModuleNotFoundError(name)

    def not_implemented(*args: object, **kwargs: object) -> None:
        raise NotImplementedError("topology not implemented for cuda")

    _compile_only._tpu_devices.cache_clear()
    _compile_only._gpu_devices.cache_clear()
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib, "import_module", not_found)
    monkeypatch.setattr(topologies, "get_topology_desc", not_implemented)
    with pytest.raises(MissingPackageError, match=message) as caught:
        measure(jnp.sin, jnp.ones(8), device=device)
    assert isinstance(caught.value, ImportError)
    assert isinstance(caught.value, RematError)


class TestProductsOfMatrices:
    """An attached GPU takes the library's; XLA for one that is not would take its own."""

    OPTION = "xla_gpu_enable_triton_gemm"

    def options(self, device: Device, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        class Lowered:
            given: dict[str, Any] | None = None

            def compile(self, compiler_options: Any) -> str:
                self.given = compiler_options
                return "compiled"

        monkeypatch.setattr(compilation, "_jax_device", lambda device: jax.devices("cpu")[0])
        lowered: Any = Lowered()
        found: Any = compilation._compile(lowered, device)
        assert found == "compiled"
        return lowered.given or {}

    def test_they_are_left_to_the_library(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("XLA_FLAGS", raising=False)
        assert self.options(get_device("h200"), monkeypatch) == {self.OPTION: False}

    def test_unless_flags_say_otherwise(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XLA_FLAGS", f"--{self.OPTION}=true")
        assert self.options(get_device("h200"), monkeypatch) == {}

    def test_an_attached_device_decides_itself(self, monkeypatch: pytest.MonkeyPatch) -> None:
        attached = dataclasses.replace(get_device("h200"), target=AttachedTarget())
        assert self.options(attached, monkeypatch) == {}

    def test_others_have_no_such_option(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.options(get_device("v5e"), monkeypatch) == {}

    def test_what_the_compiler_refuses_is_an_error(self, monkeypatch: pytest.MonkeyPatch) -> None:
        class Lowered:
            def compile(self, compiler_options: Any) -> str:
                raise jax.errors.JaxRuntimeError("INTERNAL: no luck")

        monkeypatch.setattr(compilation, "_jax_device", lambda device: jax.devices("cpu")[0])
        refused: Any = Lowered()
        with pytest.raises(CompileError, match="no luck"):
            compilation._compile(refused, get_device("h200"))


class TestCompilerOptions:
    """The option without which JAX 0.10 undoes rematerialisation on a CPU."""

    NEEDED = jax.__version_info__ < (0, 11)

    def test_only_where_needed(self) -> None:
        assert bool(compiler_options(get_device("cpu"))) is self.NEEDED
        assert compiler_options(get_device("h200")) == {}

    def test_the_record_says_so(self) -> None:
        notes = measure(jnp.sin, jnp.ones(8), device="cpu").notes
        assert [note.split(":")[0] for note in notes] == [
            "compiled with xla_disable_hlo_passes=cse_barrier_expander"
        ] * self.NEEDED

    @pytest.mark.skipif(not NEEDED, reason="JAX 0.11 and later need no option")
    def test_keeps_what_the_user_disabled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = "--xla_disable_hlo_passes=fusion,cse_barrier_expander --xla_other=1"
        monkeypatch.setenv("XLA_FLAGS", flags)
        assert compiler_options(get_device("cpu")) == {
            "xla_disable_hlo_passes": "fusion,cse_barrier_expander"
        }

    def test_a_users_jit_takes_them(self) -> None:
        options = compiler_options(get_device("cpu")) or None
        shapes = layer_shapes(rows=256, width=128, layers=8)
        place = jax.devices("cpu")[0]
        with jax.default_device(place):
            temporary_bytes = [
                jax.jit(jax.grad(fn), compiler_options=options)
                .lower(*shapes)
                .compile()
                .memory_analysis()
                .temp_size_in_bytes
                for fn in (plain, chain)
            ]
        assert temporary_bytes[1] < temporary_bytes[0]


class TestAttached:
    """What ``jax.devices()`` shows, as a record."""

    @staticmethod
    def pretend(
        monkeypatch: pytest.MonkeyPatch, *, platform: str, kind: str, stats: dict[str, int] | None
    ) -> None:
        place = SimpleNamespace(
            platform=platform,
            device_kind=kind,
            client=SimpleNamespace(platform_version="PJRT C API"),
            memory_stats=lambda: stats,
        )
        monkeypatch.setattr("jax.devices", lambda: [place])

    @pytest.mark.parametrize(
        ("platform", "kind", "name"),
        [
            ("tpu", "TPU v5 lite", "v5e"),
            ("tpu", "TPU v5", "v5p"),
            ("tpu", "TPU v6 lite", "v6e"),
            ("gpu", "NVIDIA H200", "h200"),
            ("gpu", "NVIDIA H100 80GB HBM3", "h100"),
            ("gpu", "NVIDIA A100-SXM4-80GB", "a100"),
            ("cpu", "cpu", "cpu"),
        ],
    )
    def test_a_known_kind(
        self, monkeypatch: pytest.MonkeyPatch, platform: str, kind: str, name: str
    ) -> None:
        self.pretend(monkeypatch, platform=platform, kind=kind, stats=None)
        device = attached_device()
        assert device.name == name
        assert device.title == get_device(name).title
        assert device.target == AttachedTarget()
        assert device.flops_per_second == get_device(name).flops_per_second

    def test_an_unknown_kind_is_the_smallest_of_its_platform_with_its_own_memory(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stats = {"bytes_limit": 10**10}
        self.pretend(monkeypatch, platform="gpu", kind="NVIDIA L40S", stats=stats)
        device = attached_device()
        assert (device.name, device.title) == ("cuda", "NVIDIA L40S")
        assert device.memory_bytes == 10**10
        assert device.flops_per_second == get_device("a100").flops_per_second

    def test_an_unknown_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pretend(monkeypatch, platform="neuron", kind="NC_v3", stats=None)
        with pytest.raises(DeviceError, match=r"shows 'NC_v3', about which nothing is known: pass"):
            attached_device()

    def test_resolves(self) -> None:
        h200 = get_device("h200")
        assert resolve_device(h200) is h200
        assert resolve_device("h200") is h200
        assert resolve_device("attached") == attached_device()
        with pytest.raises(DeviceError, match="Unknown device 'h3'"):
            resolve_device("h3")

    @pytest.mark.skipif(jax.default_backend() != "cpu", reason="a GPU or TPU is attached")
    def test_is_the_default(self) -> None:
        arguments = (jnp.sin, jnp.ones(8))
        assert measure(*arguments) == measure(*arguments, device="cpu")


class TestRecord:
    """A measurement as plain data."""

    RECORD = Measurement(
        device="h200",
        argument_bytes=10,
        output_bytes=4,
        temporary_bytes=100,
        host_bytes=0,
        alias_bytes=4,
        flops=None,
        recomputation=Recomputation(
            asked_products=3,
            compiled_products=2,
            early_values=1,
            compiler_values=0,
            merged=("Net/layer/dot_general",),
        ),
        compile_seconds=1.5,
        jax_version="0.12",
        compiler_version="x",
        notes=("a",),
    )

    def test_survives_json(self) -> None:
        data = json.loads(json.dumps(self.RECORD.to_dict()))
        assert Measurement.from_dict(data) == self.RECORD
        assert Measurement.from_dict(data).compile_seconds == 1.5

    def test_device_bytes(self) -> None:
        assert self.RECORD.device_bytes == 110

    def test_the_time_it_took_is_no_part_of_equality(self) -> None:
        assert dataclasses.replace(self.RECORD, compile_seconds=2.0) == self.RECORD

    @pytest.mark.parametrize(
        "change",
        [
            lambda data: data.pop("flops"),
            lambda data: data.update(extra=1),
            lambda data: data.update(temporary_bytes="100"),
            lambda data: data.update(temporary_bytes=-1),
            lambda data: data.update(temporary_bytes=True),
            lambda data: data.update(argument_bytes=None),
            lambda data: data.update(notes="a"),
            lambda data: data.update(device=None),
            lambda data: data.pop("recomputation"),
            lambda data: data.update(recomputation=1),
            lambda data: data["recomputation"].pop("early_values"),
            lambda data: data["recomputation"].update(early_values=-1),
            lambda data: data["recomputation"].update(compiled_products=4),
            lambda data: data["recomputation"].update(merged="a"),
            lambda data: data["recomputation"].update(not_kept=[1]),
        ],
    )
    def test_refuses_edited_data(self, change: Callable[[dict[str, Any]], object]) -> None:
        data = self.RECORD.to_dict()
        change(data)
        with pytest.raises(PlanFileError, match="measurement"):
            Measurement.from_dict(data)


MEASURE_AFTER_USE = """
    import os, sys
    import jax, jax.numpy as jnp
    jnp.ones(3).sum().block_until_ready()
    before, environment = jax.devices(), dict(os.environ)
    from remat_opt.measurement.compilation import measure
    record = measure(jnp.sin, jnp.ones((256, 256)), device={device!r})
    assert record.output_bytes == 256 * 256 * 4
    assert jax.devices() == before
    assert dict(os.environ) == environment
    print(float(jnp.ones(3).sum()))
"""


@pytest.mark.slow
@pytest.mark.versions
class TestOtherProcesses:
    """Compiling for an absent device, in programs like those of users."""

    @pytest.mark.parametrize("device", AWAY)
    @pytest.mark.parametrize("environment", [{}, {"JAX_PLATFORMS": "cpu"}], ids=["bare", "cpu"])
    def test_after_jax_is_in_use(self, device: str, environment: dict[str, str]) -> None:
        result = run_python(MEASURE_AFTER_USE.format(device=device), **environment)
        assert result.returncode == 0, result.stderr
        assert result.stdout == "3.0\n"
        if environment:
            # Without it, JAX itself complains that there is neither a GPU nor a TPU.
            assert result.stderr == ""

    @pytest.mark.tpu
    @needs_libtpu
    def test_two_processes_at_once(self) -> None:
        # This process keeps libtpu loaded while the other one loads it.
        measure(jnp.sin, jnp.ones((256, 256)), device="v5e")
        result = run_python(MEASURE_AFTER_USE.format(device="v5e"), JAX_PLATFORMS="cpu")
        assert result.returncode == 0, result.stderr

    def test_plug_ins_are_loaded_only_when_asked_for(self) -> None:
        code = """
            import jax.numpy as jnp
            from remat_opt.measurement.compilation import measure
            measure(jnp.sin, jnp.ones(8), device="cpu")
            maps = open("/proc/self/maps").read()
            assert "libtpu" not in maps
        """
        result = run_python(code, JAX_PLATFORMS="cpu")
        assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("platform", "device", "more", "expected"),
    [
        # 1,589 of heap with 1,323 alive at its peak: reported as 1,855, and a peak of 1,323.
        ("tpu", "v5e", {"peak_memory_in_bytes": 1323 + 25}, 1589),
        # Host memory, or temporaries in results' buffers, in the peak: what is reported stands,
        ("tpu", "v5e", {"peak_memory_in_bytes": 9000}, 1855),
        # unless the compiler tells more: all of it, and arguments and outputs, padded to 32.
        (
            "tpu",
            "v5e",
            {
                "peak_memory_in_bytes": 9000,
                "total_allocation_bytes": 1589 + 32,
                "indefinite_allocations": 32,
            },
            1589,
        ),
        ("cuda", "h200", {"peak_memory_in_bytes": 1323}, 1855),
    ],
)
def test_fragmentation_is_not_counted_twice(
    platform: str, device: str, more: dict[str, int], expected: int
) -> None:
    memory = SimpleNamespace(
        temp_size_in_bytes=1855,
        argument_size_in_bytes=10,
        output_size_in_bytes=20,
        alias_size_in_bytes=5,
        **more,
    )
    target = get_device(device)
    assert target.platform == platform
    assert compilation._temporary_bytes(memory, target) == expected
