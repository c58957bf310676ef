"""How much memory this process has had in use."""

import resource
import sys


def peak_resident_bytes() -> int:
    """Returns the most memory that was resident at once since the process began."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
