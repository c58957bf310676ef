"""Notebooks of `examples/notebooks` hold what their cells printed, and run again."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MOST_BYTES = 200_000


def code_cells(file: Path) -> list[dict[str, Any]]:
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_holds_its_outputs(file: Path) -> None:
    text = file.read_text(encoding="utf-8")
    assert len(text) < MOST_BYTES and json.loads(text)["nbformat"] == 4
    cells = code_cells(file)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    assert sum(bool(cell["outputs"]) for cell in cells) >= 4
    assert not re.search(r"/(?:home|tmp|root|work|Users|var)/", text)


@pytest.mark.slow
@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_a_notebook_runs(file: Path) -> None:
    if "matplotlib" in file.read_text(encoding="utf-8"):
        pytest.importorskip("matplotlib", reason="its curves need the extra 'plot'")
    before = file.read_bytes()
    finished = subprocess.run(
        [sys.executable, str(FOLDER / "run.py"), str(file), "--check"],
        capture_output=True,
        text=True,
    )
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"{file.name}: {len(code_cells(file))} cells ran\n"
    assert file.read_bytes() == before


def test_the_runner_shows_what_jupyter_shows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(FOLDER)
    from run import executed

    cells = [
        {"cell_type": "markdown", "source": ["text"]},
        {"cell_type": "code", "source": ["a = 2\n", "print(a)\n", "a + 1"]},
        {"cell_type": "code", "source": ["b = a"]},
    ]
    first, second = executed({"cells": cells})["cells"][1:]
    assert first["execution_count"] == 1 and second["outputs"] == []
    printed, value = first["outputs"]
    assert printed == {"output_type": "stream", "name": "stdout", "text": ["2\n"]}
    assert value["output_type"] == "execute_result" and value["data"] == {"text/plain": ["3"]}
    with pytest.raises(ZeroDivisionError):
        executed({"cells": [{"cell_type": "code", "source": ["1 / 0"]}]})
