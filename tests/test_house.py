"""The folders of the package: none is crowded, and each says what it is for."""

import ast
from collections import Counter
from pathlib import Path

import pytest

import mlx_mmfree

ROOT = Path(mlx_mmfree.__file__).parent
FOLDERS = sorted(file.parent for file in ROOT.rglob("__init__.py"))
MOST_FILES = 15
"""Files of one floor that a newcomer can look over."""
CATALOGUES = {"channel_mixers", "cli", "models", "spatial_mixers", "token_mixers"}
"""Folders in which each file is one of a kind, which a newcomer finds by its name."""


def _imports(file: Path) -> set[Path]:
    """The files of the same folder that a file imports from."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            found |= {file.with_name(f"{name.partition('.')[0]}.py") for name in names}
    return found


def _floors(folder: Path) -> Counter[int]:
    """How many files stand on each floor: one above the highest file that they import from."""
    files = {file: _imports(file) for file in folder.glob("*.py") if file.stem != "__init__"}
    floors: dict[Path, int] = {}

    def floor(file: Path) -> int:
        if file not in floors:
            floors[file] = 0
            below = [floor(other) for other in files[file] & files.keys()]
            floors[file] = 1 + max(below, default=-1)
        return floors[file]

    return Counter(floor(file) for file in files)


def _name(folder: Path) -> str:
    return folder.relative_to(ROOT.parent).as_posix()


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f.name not in CATALOGUES], ids=_name)
def test_a_folder_is_not_crowded(folder: Path) -> None:
    assert max(_floors(folder).values(), default=0) <= MOST_FILES


@pytest.mark.parametrize("folder", FOLDERS, ids=_name)
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    described = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert described and described.partition("\n")[0].endswith(".")


def test_floors_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("from .a import x\nfrom ..other import y")
    (tmp_path / "c.py").write_text("from . import b\nfrom .a import x")
    (tmp_path / "d.py").write_text("import numpy")
    assert _floors(tmp_path) == {0: 2, 1: 1, 2: 1}
