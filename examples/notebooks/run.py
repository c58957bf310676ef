"""Runs the notebooks of this folder from top to bottom and writes what their cells print and draw.

python examples/notebooks/run.py [NOTEBOOK ...] [--check]

It needs neither Jupyter nor IPython, since the cells are plain Python. `--check` runs them and changes
no file.
"""

import argparse
import ast
import base64
import io
import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells, which run in one namespace.

    The first cell that fails ends the run with its error.
    """
    names: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            code = "".join(cell["source"])
            cell = cell | {"execution_count": count, "outputs": _outputs(code, count, names)}
        cells.append(cell)
    return notebook | {"cells": cells}


def _outputs(code: str, count: int, names: dict[str, Any]) -> list[dict[str, Any]]:
    """The printed text of a cell, the value of its last expression, and the pictures that it draws."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    value, printed = None, io.StringIO()
    outputs: list[dict[str, Any]] = []
    with redirect_stdout(printed):
        exec(compile(tree, f"cell {count}", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), f"cell {count}", "eval"), names)
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(text)})
    if value is not None:
        shown = {"data": {"text/plain": _lines(repr(value))}, "metadata": {}}
        outputs.append({"output_type": "execute_result", "execution_count": count} | shown)
    return outputs + _pictures()


def _pictures() -> list[dict[str, Any]]:
    """The open figures of matplotlib, which are closed, as Jupyter shows and closes them."""
    if "matplotlib.pyplot" not in sys.modules:
        return []
    import matplotlib.pyplot as plt

    found = []
    for number in plt.get_fignums():
        file = io.BytesIO()
        plt.figure(number).savefig(file, format="png", dpi=80)
        data = {"image/png": base64.b64encode(file.getvalue()).decode()}
        found.append({"output_type": "display_data", "data": data, "metadata": {}})
    plt.close("all")
    return found


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    notebooks = sorted(FOLDER.glob("*.ipynb"))
    parser.add_argument("notebooks", nargs="*", type=Path, default=notebooks, metavar="NOTEBOOK")
    parser.add_argument("--check", action="store_true", help="change no file")
    args = parser.parse_args()
    files = [file.resolve() for file in args.notebooks]
    # pictures need no screen, and paths of a notebook begin at its folder
    os.environ["MPLBACKEND"] = "agg"
    for file in files:
        os.chdir(file.parent)
        notebook = executed(json.loads(file.read_text(encoding="utf-8")))
        if not args.check:
            text = json.dumps(notebook, indent=1, ensure_ascii=False)
            file.write_text(f"{text}\n", encoding="utf-8")
        print(f"{file.name}: {sum('outputs' in cell for cell in notebook['cells'])} cells ran")


if __name__ == "__main__":
    main()
