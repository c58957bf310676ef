"""Plants faults into the texts of Metal kernels."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from mlx_mmfree.ops.backend import self_check
from tests.emulator.emulator import Emulator, KernelError

BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SIMD_BARRIER = "simdgroup_barrier(mem_flags::mem_threadgroup);"


class Fault(NamedTuple):
    """The fault that a check must find.

    Attributes:
        check: Raises an error if the kernel is wrong.
        old: A part of the kernel's text.
        new: What it is replaced by.
        which: The occurrence of `old` that is replaced, from 0.
    """

    check: Callable[[], None]
    old: str
    new: str
    which: int


def assert_seen(
    fault: Fault, kernel: str, emulated: Emulator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asserts that the text has the faulty line, and that the check sees the fault."""
    edited = []

    def edit(text: str) -> str:
        parts = text.split(fault.old)
        if f"custom_kernel_{kernel}_" not in text or len(parts) < fault.which + 2:
            return text
        edited.append(kernel)
        before, after = parts[: fault.which + 1], parts[fault.which + 1 :]
        return fault.old.join(before) + fault.new + fault.old.join(after)

    # the check of users' machines would see most of these first
    monkeypatch.setattr(self_check, "_difference", lambda *_: self_check._Finding(None))
    monkeypatch.setattr(self_check, "_checks", {})
    emulated.edit = edit
    with pytest.raises((AssertionError, KernelError)) as seen:
        fault.check()
    assert "does not compile" not in str(seen.value)
    assert edited
