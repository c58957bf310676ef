"""How much memory this process has had in use."""

import resource
import sys
from pathlib import Path

STATUS = Path("/proc/self/status")


def peak_resident_bytes() -> int:
    """The most memory that was resident at once since this program began."""
    # getrusage on Linux begins with the peak of the program that started this one
    if STATUS.exists():
        fields = dict(line.split(":", 1) for line in STATUS.read_text().splitlines())
        if "VmHWM" in fields:
            return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
