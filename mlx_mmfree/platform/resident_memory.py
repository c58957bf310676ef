"""How much memory this process has had in use."""

import resource
import sys
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

BYTES_PER_GB = 10**9
"""The unit in which sizes of memory are shown and given."""

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class ResidentMemory(NamedTuple):
    """The memory of a process at this moment.

    Attributes:
        anonymous_bytes: Memory of its own, which the system can only move to a swap disk.
        mapped_bytes: Pages of mapped files, programs among them, which the system drops when it needs
            capacity, and reads again.
    """

    anonymous_bytes: int
    mapped_bytes: int


def resident_memory() -> ResidentMemory | None:
    """The memory of this process, or `None` where the system does not tell the kinds apart."""
    fields = _status()
    if "RssAnon" not in fields or "RssFile" not in fields:
        return None
    return ResidentMemory(fields["RssAnon"], fields["RssFile"])


def peak_resident_bytes() -> int:
    """The most memory that was resident at once since this program began."""
    # getrusage on Linux begins with the peak of the program that started this one
    if "VmHWM" in (fields := _status()):
        return fields["VmHWM"]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def forget_peak() -> None:
    """Lets `peak_resident_bytes` begin anew, where the system is Linux and permits it."""
    with suppress(OSError):
        if REFERENCES.exists():
            # the number stands for the peak alone
            REFERENCES.write_text("5")


def _status() -> dict[str, int]:
    """The sizes in bytes that Linux lists for this process; none elsewhere."""
    lines = STATUS.read_text().splitlines() if STATUS.exists() else []
    sizes = (line.split() for line in lines if line.endswith(" kB"))
    return {name.rstrip(":"): int(size) * 1024 for name, size, _ in sizes}
