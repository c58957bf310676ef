"""A folder for a process goes with it, at the latest when the next one needs such a folder."""

import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from mlx_mmfree.files import writing
from mlx_mmfree.files.writing import try_lock

_PROCESS = """
import sys, tempfile
from mlx_mmfree.files.writing import new_scratch_folder

tempfile.tempdir = sys.argv[1]
(new_scratch_folder() / "file").touch()
print("made", flush=True)
sys.stdin.read()
"""


def process(folder: Path) -> "subprocess.Popen[bytes]":
    started = subprocess.Popen(
        [sys.executable, "-c", _PROCESS, str(folder)],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert started.stdout is not None
    assert started.stdout.readline() == b"made\n"
    return started


def test_folders_of_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "mlx_mmfree-scratch-mine").mkdir()
    with process(tmp_path) as ended:
        [made] = tmp_path.glob("mlx_mmfree-scratch-????????")
        ended.communicate()
    assert not made.exists()
    with process(tmp_path) as killed:
        [left] = tmp_path.glob("mlx_mmfree-scratch-????????")
        assert writing.new_scratch_folder() != left
        assert (left / "file").exists()
        killed.kill()
    assert left.exists()
    writing.new_scratch_folder()
    assert not left.exists()
    assert (tmp_path / "mlx_mmfree-scratch-mine").exists()


def test_a_locked_parent_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any user of the machine can lock the folder of temporary files."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    handle = try_lock(tmp_path)
    made: list[Path] = []
    maker = Thread(target=lambda: made.append(writing.new_scratch_folder()), daemon=True)
    maker.start()
    maker.join(60)
    assert handle is not None and made and made[0].is_dir()


def test_a_folder_that_is_removed_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    removed: list[Path] = []

    def lock_late(folder: Path) -> int | None:
        if not removed:
            removed.append(folder)
            folder.rmdir()
        return try_lock(folder)

    monkeypatch.setattr(writing, "try_lock", lock_late)
    made = writing.new_scratch_folder()
    assert made.is_dir() and removed != [made]
