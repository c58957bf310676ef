"""The house: folders are not crowded, files and functions are short, imports make no circles."""

import ast
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest

import mlx_mmfree
from mlx_mmfree import ops
from mlx_mmfree.hub.checkpoint.weight_format import weight_formats
from mlx_mmfree.models import architectures

ROOT = Path(mlx_mmfree.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
FOLDERS = sorted(file.parent for file in ROOT.rglob("__init__.py"))
MOST_FILES = 20
"""Files of a folder that a newcomer can look over."""
MOST_ON_FLOOR = 15
"""Files of one floor of a folder."""
MOST_LINES = 500
"""Lines of code of a file."""
CATALOGUES = {"channel_mixers", "cli", "models", "ops", "spatial_mixers", "token_mixers"}
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
    floors = _floors(folder)
    assert floors.total() <= MOST_FILES
    assert max(floors.values(), default=0) <= MOST_ON_FLOOR


@pytest.mark.parametrize("folder", FOLDERS, ids=_name)
def test_a_folder_says_what_it_is_for(folder: Path) -> None:
    described = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert described and described.partition("\n")[0].endswith(".")


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _lines(nodes: Iterable[Any]) -> set[int]:
    return {line for node in nodes for line in range(node.lineno, node.end_lineno + 1)}


@cache
def _code(file: Path) -> set[int]:
    """The numbers of the lines that are neither blank nor a comment nor a text that documents."""
    source = file.read_text()
    texts = _lines(node for node in ast.walk(ast.parse(source)) if _is_text(node))
    stripped = (line.strip() for line in source.splitlines())
    return {n for n, line in enumerate(stripped, 1) if line and line[0] != "#"} - texts


def _functions() -> dict[str, int]:
    """The lines of code of each function, by its path and line."""
    return {
        f"{_name(file)}:{node.lineno}": len(_code(file) & _lines([node]))
        for file in FILES
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def _importers() -> dict[Path, set[Path]]:
    """Which files import from each file that is not a folder's list of names."""
    found: dict[Path, set[Path]] = {file: set() for file in FILES if file.stem != "__init__"}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            folder = file.parents[node.level - 1]
            base = folder.joinpath(*(node.module or "").split("."))
            names = [
                base.with_suffix(".py"),
                *((base / a.name).with_suffix(".py") for a in node.names),
            ]
            for name in found.keys() & {*names}:
                found[name].add(file)
    return found


def test_no_file_is_long() -> None:
    # the text that is copied beside weights for mlx-lm is one file for all architectures
    lengths = {_name(file): len(_code(file)) for file in FILES if file.stem != "mmfree_model"}
    assert {name: length for name, length in lengths.items() if length > MOST_LINES} == {}


def test_functions_are_short() -> None:
    lengths = _functions()
    assert {name: length for name, length in lengths.items() if length > 75} == {}
    assert median(lengths.values()) <= 8


def test_only_its_record_names_a_weight_format() -> None:
    """Code that reads or writes checkpoints asks the records of `hub.checkpoint.formats`."""
    own = ROOT / "hub" / "checkpoint" / "formats"
    # some are names of architectures, of operations or of this library too
    names = "|".join({*weight_formats()} - {*architectures(), *vars(ops), "mmfree"})
    named = re.compile(rf"(?<![a-z_])_?({names})(?!\.py)")
    imported = re.compile(r"\bforms(\.\w+)? import")
    found = [
        f"{_name(file)}:{number}"
        for file in FILES
        if file.parent != own and file.stem != "mmfree_model"
        for number, line in enumerate(file.read_text().splitlines(), 1)
        if number in _code(file)
        if imported.search(line) or (file.is_relative_to(ROOT / "hub") and named.search(line))
    ]
    assert found == []


def test_circles() -> None:
    """No file imports from one that, over any number of files, imports from it."""
    importers = _importers()
    arrows = {(file, other) for file, found in importers.items() for other in found & {*importers}}
    # an arrow at an end is in no circle
    while True:
        ends = {file for file, _ in arrows} ^ {other for _, other in arrows}
        remaining = {arrow for arrow in arrows if not ends & {*arrow}}
        if remaining == arrows:
            break
        arrows = remaining
    assert sorted(_name(file) for file, _ in arrows) == []


def test_floors_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("from .a import x\nfrom ..other import y")
    (tmp_path / "c.py").write_text("from . import b\nfrom .a import x")
    (tmp_path / "d.py").write_text("import numpy")
    assert _floors(tmp_path) == {0: 2, 1: 1, 2: 1}
