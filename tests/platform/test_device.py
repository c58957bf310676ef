"""Device, memory and thread facts."""

import os
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlx_mmfree.platform import control_group, device, threads

GIB = 2**30


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


@pytest.fixture
def version_2(tmp_path: Path) -> tuple[Path, Path]:
    """A group with a loose limit inside one with a tight limit."""
    write(tmp_path / "fs/outer", memory__max=f"{4 * GIB}", memory__current=f"{3 * GIB}")
    write(tmp_path / "fs/outer", memory__stat=f"anon 5\ninactive_file {GIB}")
    write(tmp_path / "fs/outer", cpu__max="150000 100000")
    write(tmp_path / "fs/outer/inner", memory__max=f"{8 * GIB}", memory__current=f"{GIB}")
    write(tmp_path / "fs/outer/inner", cpu__max="max 100000")
    write(tmp_path, cgroup="0::/outer/inner")
    return tmp_path / "fs", tmp_path / "cgroup"


def test_limits_of_version_2(version_2: tuple[Path, Path]) -> None:
    assert control_group.memory_limit_bytes(*version_2) == 4 * GIB
    assert control_group.free_memory_bytes(*version_2) == 2 * GIB
    assert control_group.cpu_limit(*version_2) == 1.5


def test_limits_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "memory", memory__limit_in_bytes=f"{GIB}", memory__usage_in_bytes="1024")
    write(tmp_path / "cpu,cpuacct", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    # the process sees its group's path outside the container, where nothing is mounted
    write(tmp_path, cgroup="4:memory:/docker/12\n2:cpu,cpuacct:/docker/12\n9:name=systemd:/")
    groups = tmp_path, tmp_path / "cgroup"
    assert control_group.memory_limit_bytes(*groups) == GIB
    assert control_group.free_memory_bytes(*groups) == GIB - 1024
    assert control_group.cpu_limit(*groups) is None


def test_no_control_groups(tmp_path: Path) -> None:
    groups = tmp_path / "none", tmp_path / "none"
    assert control_group.memory_limit_bytes(*groups) is None
    assert control_group.free_memory_bytes(*groups) is None
    assert control_group.cpu_limit(*groups) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"OPENBLAS_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, 3),
        ({"OPENBLAS_NUM_THREADS": "0", "OMP_NUM_THREADS": "5,2"}, 5),
        ({"OMP_NUM_THREADS": "many"}, 2),
        ({"OMP_NUM_THREADS": "007"}, 7),
        ({"OMP_NUM_THREADS": "\u00b2"}, 2),
        ({"OPENBLAS_NUM_THREADS": "100000000000"}, threads.MAX_THREADS),
        ({"OPENBLAS_NUM_THREADS": "9" * 5000}, threads.MAX_THREADS),
        ({}, 2),
    ],
)
def test_thread_count(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: int
) -> None:
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "cpu_limit", lambda: 2.5)
    assert threads.thread_count() == expected


def test_threads_never_fall_to_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(threads, "cpu_limit", lambda: 0.25)
    assert threads.thread_count() == 1


def test_device_info_of_this_machine() -> None:
    facts = device.device_info()
    on_cpu = mx.default_device() == mx.Device(mx.cpu)
    assert facts.backend == ("cpu" if on_cpu else "metal" if sys.platform == "darwin" else "cuda")
    assert facts.name
    assert GIB // 4 < facts.memory_bytes <= 2**46
    if facts.available_bytes is not None:
        assert 0 < facts.available_bytes < facts.memory_bytes


def test_device_info_of_a_mac(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mx, "default_device", lambda: mx.Device(mx.gpu))
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    facts = {
        "device_name": "Apple M2",
        "memory_size": 16 * GIB,
        "max_recommended_working_set_size": 11 * GIB,
    }
    monkeypatch.setattr(mx, "device_info", lambda of: facts)
    monkeypatch.setattr(device, "available_memory_bytes", lambda: None)
    assert device.device_info() == device.DeviceInfo(
        "Apple M2", "metal", 16 * GIB, 11 * GIB, available_bytes=None
    )


def test_available_memory(version_2: tuple[Path, Path], tmp_path: Path) -> None:
    write(tmp_path, meminfo=f"MemTotal: {8 * GIB // 1024} kB\nMemAvailable: {GIB // 1024} kB")
    memory_info = tmp_path / "meminfo"
    assert device.available_memory_bytes(memory_info, version_2[0]) == GIB
    # a group mounted as the whole tree, as inside a container
    write(tmp_path / "small", memory__max="5000", memory__current="1000")
    assert device.available_memory_bytes(memory_info, tmp_path / "small") == 4000
    assert device.available_memory_bytes(tmp_path / "missing") is None
