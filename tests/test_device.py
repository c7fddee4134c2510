"""The table of devices: complete, consistent, and open to users."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from typing import Any

import pytest

from remat_opt import device as device_table
from remat_opt.device import (
    AttachedTarget,
    GpuTarget,
    TpuTarget,
    available,
    get_device,
    register,
)
from remat_opt.errors import DeviceError

TARGETS = {"cpu": AttachedTarget, "cuda": GpuTarget, "tpu": TpuTarget}


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of the table, so that a test may register devices."""
    monkeypatch.setattr(device_table, "_devices", dict(device_table._devices))


def test_knows_the_devices_the_readme_promises() -> None:
    assert {"cpu", "a100", "h100", "h200", "v5e", "v5p", "v6e"} <= set(available())


@pytest.mark.parametrize("name", available())
def test_every_device_is_complete(name: str) -> None:
    device = get_device(name)
    assert device.name == name
    assert device.title in str(device)
    assert device.source
    assert isinstance(device.target, TARGETS[device.platform])
    assert device.flops_rate("bfloat16") > 0
    # A value is never cheaper to fetch from the host than from device memory.
    assert device.host_bandwidth < device.memory_bandwidth
    assert isinstance(device.memory_bytes, int)


def test_a_name_may_be_written_in_any_case() -> None:
    assert get_device("H200") is get_device("h200")


@pytest.mark.parametrize("name", ["h300", "", "attached", None])
def test_an_unknown_name_lists_the_known_ones(name: Any) -> None:
    with pytest.raises(DeviceError, match=f"Unknown device {name!r}. Known: cpu, a100, h100"):
        get_device(name)


def test_a_dtype_without_a_rate_gets_the_slowest() -> None:
    h200 = get_device("h200")
    assert h200.flops_rate("bfloat16") == 989.5e12
    assert (
        h200.flops_rate("int4") == h200.flops_rate("float64") == min(h200.flops_per_second.values())
    )


def test_devices_are_values() -> None:
    h200 = get_device("h200")
    for twin in (copy.deepcopy(h200), pickle.loads(pickle.dumps(h200))):
        assert twin == h200
        assert hash(twin) == hash(h200)
    with pytest.raises(TypeError):
        h200.flops_per_second["float32"] = 1.0  # type: ignore[index]


@pytest.mark.usefixtures("table")
def test_users_can_register_a_device_of_their_own() -> None:
    mine = dataclasses.replace(get_device("a100"), name="a100_40", memory_bytes=40 * 1024**3)
    register(mine)
    register(mine)
    assert get_device("a100_40") is mine
    assert available()[-1] == "a100_40"


@pytest.mark.usefixtures("table")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "h200"}, "The device name 'h200' is taken"),
        ({"name": "attached"}, "The name 'attached' means what jax.devices"),
        ({"name": "My GPU"}, "lower-case word such as 'h200', not 'My GPU'"),
        ({"memory_bytes": 0}, "memory_bytes = 0: it must be positive"),
        ({"host_bandwidth": float("nan")}, "host_bandwidth = nan: it must be positive"),
        ({"flops_per_second": {"bfloat16": 1.0}}, "no rate for float32"),
        ({"flops_per_second": {"float32": -1.0}}, r"flops_per_second\['float32'\] = -1"),
    ],
)
def test_refuses_a_bad_device(changes: dict[str, object], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        register(dataclasses.replace(get_device("a100"), **changes))


def test_the_target_text_of_a_gpu_holds_its_figures() -> None:
    a100 = get_device("a100")
    assert isinstance(a100.target, GpuTarget)
    text = a100.target.to_proto_text(
        title=a100.title,
        memory_bytes=a100.memory_bytes,
        memory_bandwidth=a100.memory_bandwidth,
    )
    assert "core_count: 108\n" in text
    assert "clock_rate_ghz: 1.41\n" in text
    assert "device_memory_size: 85100068864\n" in text
    assert "memory_bandwidth: 2039040000000\n" in text
    assert "{ major: 8 minor: 0 feature_extension: NONE }" in text
    assert text.count("{") == text.count("}")


def test_one_of_a_pod() -> None:
    chip = get_device("V5E:4x4")
    assert chip.name == "v5e:4x4"
    assert chip.target == TpuTarget(topology="v5e:4x4")
    assert chip.memory_bytes == get_device("v5e").memory_bytes
    gpu = get_device("h200:8")
    assert isinstance(gpu.target, GpuTarget)
    assert gpu.target.devices == 8
    assert "h200:8" not in available()


@pytest.mark.parametrize("name", ["v5e:16", "v5e:", "h200:0", "h200:2x2", "cpu:8"])
def test_refuses_what_is_no_pod(name: str) -> None:
    with pytest.raises(DeviceError, match=f"There is no device '{name}'. For TPUs give the slice"):
        get_device(name)


def test_without_a_figure_the_network_is_as_fast_as_the_host() -> None:
    device = dataclasses.replace(get_device("cpu"), name="mine", network_bandwidth=0.0)
    assert device.network_bandwidth == device.host_bandwidth
    assert get_device("v5e").network_bandwidth == 2e11
