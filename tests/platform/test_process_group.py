"""The processes of a group wait for each other before MLX connects them."""

import subprocess
import sys
from pathlib import Path
from threading import Thread

import pytest

from mlx_mmfree.platform.process_group import start_group, wait_for_group
from tests.process_group import ROOT

PRINTED = "import os; print(os.environ['MLX_MMFREE_GROUP_FOLDER'], os.environ['MLX_RANK'])"


def test_a_process_waits_for_all_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hosts.json").write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    monkeypatch.setenv("MLX_MMFREE_GROUP_FOLDER", str(tmp_path))
    monkeypatch.setenv("MLX_RANK", "1")
    waiting = Thread(target=wait_for_group, daemon=True)
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    (tmp_path / "here-0").touch()
    waiting.join()
    assert (tmp_path / "here-1").exists()


def test_a_process_does_not_wait_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hosts.json").write_text('[["127.0.0.1:1"], ["127.0.0.1:2"]]')
    monkeypatch.setenv("MLX_MMFREE_GROUP_FOLDER", str(tmp_path))
    monkeypatch.setenv("MLX_RANK", "1")
    wait_for_group(timeout_s=0.01)


def test_groups_in_one_folder_do_not_meet(tmp_path: Path) -> None:
    folders = set()
    for _ in range(2):
        processes = start_group(
            [sys.executable, "-c", PRINTED], 2, tmp_path, cwd=ROOT, stdout=subprocess.PIPE
        )
        own = {process.communicate()[0].split()[0] for process in processes}
        assert len(own) == 1
        folders |= own
    assert len(folders) == 2
