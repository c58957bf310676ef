"""A disk that cannot take what is to be written is refused with the numbers that were compared."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_mmfree.files.writing import check_space


def test_too_little_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=7_000_000))
    with pytest.raises(
        OSError, match=r"^5\.0 MB are needed and 16\.0 MB stay free, but only 7\.0 MB are free$"
    ):
        check_space(tmp_path, 5_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=21_000_000))
    check_space(tmp_path, 5_000_000)


def test_a_disk_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_RDONLY))
    with pytest.raises(OSError, match="Read-only file system"):
        check_space(tmp_path, 1)


def test_a_folder_that_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(PermissionError, match="Permission denied"):
        check_space(tmp_path, 1)
