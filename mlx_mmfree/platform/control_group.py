"""The limits that a Linux container sets for this process (control groups, versions 1 and 2)."""

from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
SELF = Path("/proc/self/cgroup")


def cpu_limit(root: Path = ROOT, membership: Path = SELF) -> float | None:
    """How many cores' worth of time the process may use; `None` without a limit.

    Args:
        root: The folder where the control groups are mounted.
        membership: The file that names the groups of the process.
    """
    limits = []
    for group in _groups(root, membership, "cpu"):
        if fields := _read(group / "cpu.max").split():
            quota, period = fields
        else:
            quota, period = _read(group / "cpu.cfs_quota_us"), _read(group / "cpu.cfs_period_us")
        # version 2 says "max" for no limit, version 1 says -1
        if quota.isdecimal() and period.isdecimal():
            limits.append(int(quota) / int(period))
    return min(limits, default=None)


def memory_limit_bytes(root: Path = ROOT, membership: Path = SELF) -> int | None:
    """How much memory the groups of the process may hold, in bytes; `None` without a limit."""
    return min((limit for limit, _ in _memory(root, membership)), default=None)


def free_memory_bytes(root: Path = ROOT, membership: Path = SELF) -> int | None:
    """How much memory the groups may still take, in bytes; `None` without a limit.

    Cached files that were not read lately count as free, since the kernel drops them when it needs
    capacity.
    """
    return min((max(0, limit - used) for limit, used in _memory(root, membership)), default=None)


def _memory(root: Path, membership: Path) -> list[tuple[int, int]]:
    """The limit and the used memory, in bytes, of every group that has a limit."""
    found = []
    for group in _groups(root, membership, "memory"):
        limit = _read(group / "memory.max") or _read(group / "memory.limit_in_bytes")
        used = _read(group / "memory.current") or _read(group / "memory.usage_in_bytes")
        lines = [line.split() for line in _read(group / "memory.stat").splitlines()]
        cached = dict(line for line in lines if len(line) == 2).get("inactive_file", "0")
        if limit.isdecimal() and used.isdecimal():
            found.append((int(limit), int(used) - int(cached)))
    return found


def _groups(root: Path, membership: Path, controller: str) -> list[Path]:
    """The folders of the process's group and of the groups that contain it."""
    folders = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / controllers if controllers else root
        group = mount / path.lstrip("/")
        folders += [group, *(parent for parent in group.parents if parent.is_relative_to(mount))]
    return folders


def _read(file: Path) -> str:
    """The text of a file; empty if it is missing or cannot be read."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
