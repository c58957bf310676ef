"""Tells whether this system and this Python can run MLX, also where MLX cannot be imported."""

import platform
import subprocess
import sys
from dataclasses import dataclass

OLDEST_PYTHON = (3, 11)
OLDEST_MACOS = 14


@dataclass(frozen=True)
class Host:
    """The system and the Python that run this process.

    Attributes:
        system: `Darwin`, `Linux` or another name.
        machine: The type of the processor, such as `arm64` or `x86_64`.
        python: The major and minor version of Python.
        macos: The version of macOS; empty on other systems.
        is_translated: Whether Rosetta runs an Intel program on Apple silicon.
    """

    system: str
    machine: str
    python: tuple[int, int]
    macos: str = ""
    is_translated: bool = False


def current_host() -> Host:
    """Describes the running system."""
    system = platform.system()
    return Host(
        system=system,
        machine=platform.machine(),
        python=sys.version_info[:2],
        macos=platform.mac_ver()[0],
        is_translated=system == "Darwin" and _runs_under_rosetta(),
    )


def problems(host: Host | None = None) -> list[str]:
    """The problems that keep MLX from running here, each with the way out; empty if all is well.

    Args:
        host: The system to check. Default: the running one.
    """
    host = host or current_host()
    found = []
    if host.python < OLDEST_PYTHON:
        wanted, got = (".".join(map(str, v)) for v in (OLDEST_PYTHON, host.python))
        found.append(f"Python {wanted} or newer is needed but this is {got}.")
    if host.is_translated:
        found.append(
            "This Python is an Intel program that Rosetta translates. Install an arm64 Python, "
            "make a new virtual environment with it, and install again."
        )
    elif host.system == "Darwin" and host.machine != "arm64":
        found.append("MLX needs a Mac with Apple silicon; this one has an Intel processor.")
    if host.macos and int(host.macos.split(".")[0]) < OLDEST_MACOS:
        found.append(f"MLX needs macOS {OLDEST_MACOS} or newer but this is {host.macos}.")
    if host.system == "Linux" and host.machine not in ("x86_64", "aarch64"):
        found.append(f"MLX has no packages for Linux on {host.machine}; build it from source.")
    if host.system not in ("Darwin", "Linux"):
        found.append(f"{host.system} is not supported: use macOS, or Linux.")
    return found


def _runs_under_rosetta() -> bool:
    answer = subprocess.run(
        ["sysctl", "-in", "sysctl.proc_translated"], capture_output=True, text=True, check=False
    )
    return answer.stdout.strip() == "1"
