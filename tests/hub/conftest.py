"""Fixtures that several tests of checkpoints share."""

from pathlib import Path

import pytest

from mlx_mmfree.hub.checkpoint import pack_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of packed formats, which are kept for small checkpoints too."""
    monkeypatch.setattr(pack_cache, "MIN_SOURCE_BYTES", 0)
    monkeypatch.setenv("MLX_MMFREE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
