"""Changes the backends of operations until a test ends."""

from typing import Any

import pytest

from mlx_mmfree.ops.backend.dispatch import operations


def change_backend(
    monkeypatch: pytest.MonkeyPatch, operation: str, backend: str, **changes: Any
) -> None:
    """Gives a backend other functions or another kind of device, see `ops.backend.dispatch.Backend`."""
    changed = operations()[operation]
    usual = changed.backends[backend]
    monkeypatch.setitem(changed.backends, backend, usual._replace(**changes))
    monkeypatch.setattr(changed, "usable", {})
