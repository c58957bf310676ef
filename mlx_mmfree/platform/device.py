"""Describes the device that MLX computes on, and the memory of the machine."""

import os
from dataclasses import dataclass
from pathlib import Path

import mlx.core as mx

from . import control_group

MEMORY_INFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class DeviceInfo:
    """The device that MLX computes on.

    Attributes:
        name: Its name in the system.
        backend: `metal`, `cuda` or `cpu`.
        memory_bytes: All of its memory. On Apple silicon and on a CPU that is the machine's memory.
        working_set_bytes: The most memory that Metal recommends to keep resident; `None` elsewhere.
        available_bytes: The memory that can be taken now without swapping; `None` if that is not known.
    """

    name: str
    backend: str
    memory_bytes: int
    working_set_bytes: int | None
    available_bytes: int | None


def device_info() -> DeviceInfo:
    """Describes MLX's default device."""
    device = mx.default_device()
    facts = mx.device_info(device)
    accelerator = "metal" if mx.metal.is_available() else "cuda"
    backend = "cpu" if device == mx.Device(mx.cpu) else accelerator
    memory = int(facts.get("memory_size") or facts.get("total_memory") or system_memory_bytes())
    working_set = facts.get("max_recommended_working_set_size")
    return DeviceInfo(
        name=str(facts["device_name"]),
        backend=backend,
        memory_bytes=memory,
        working_set_bytes=int(working_set) if working_set else None,
        available_bytes=None if backend == "cuda" else available_memory_bytes(),
    )


def system_memory_bytes() -> int:
    """The memory of the machine, or the limit of its container if that is less."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min(installed, control_group.memory_limit_bytes() or installed)


def available_memory_bytes(
    memory_info: Path = MEMORY_INFO, cgroups: Path = control_group.ROOT
) -> int | None:
    """The memory that a Linux system, or its container, can still give; `None` on other systems.

    Args:
        memory_info: The kernel's account of the memory.
        cgroups: The folder where the control groups are mounted.
    """
    try:
        lines = memory_info.read_text().splitlines()
    except OSError:
        return None
    amounts = dict(line.split(":", 1) for line in lines)
    if "MemAvailable" not in amounts:
        return None
    available = int(amounts["MemAvailable"].split()[0]) * 1024
    free = control_group.free_memory_bytes(cgroups)
    return available if free is None else min(available, free)
