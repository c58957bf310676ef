"""Builds the API reference from the docstrings of all public names; any warning is an error."""

import argparse
import inspect
import shutil
import sys
import tempfile
from pathlib import Path

from sphinx.cmd.build import main as sphinx
from sphinx.ext.napoleon import GoogleDocstring

import mlx_mmfree
from tests.public_names import PublicName, packages, public_names

HERE = Path(__file__).parent
EXAMPLES = """
Examples take for granted `import mlx.core as mx`, `import mlx.nn as nn`, `import numpy as np`, and the
names of `mlx_mmfree` and of the package that the page belongs to. The tests run them.
"""


def write_pages(folder: Path) -> None:
    """Writes a page for each public name, one for each package and the first page."""
    modules = packages()
    names = [name for module in modules for name in public_names(module)]
    for name in names:
        page = folder / name.package.rpartition(".")[2] / f"{name.name}.rst"
        page.parent.mkdir(exist_ok=True)
        page.write_text(_name_page(name), encoding="utf-8")
    for module in modules:
        short = module.__name__.rpartition(".")[2]
        text = _title(module.__name__) + f"{inspect.getdoc(module)}\n\n"
        text += _table([name for name in names if name.package == module.__name__])
        text += _tree(f"{short}/{name.name}" for name in public_names(module))
        (folder / f"{short}.rst").write_text(text, encoding="utf-8")
    text = _title("mlx_mmfree") + _module_text("mlx_mmfree") + EXAMPLES + "\n"
    text += _table([name for name in names if name.name in mlx_mmfree.__all__])
    text += _tree(module.__name__.rpartition(".")[2] for module in modules)
    (folder / "index.rst").write_text(text, encoding="utf-8")


def _name_page(name: PublicName) -> str:
    text = _title(name.name) + f".. py:currentmodule:: {name.package}\n\n"
    if inspect.isclass(name.value):
        text += f".. autoclass:: {name.package}::{name.name}\n"
        text += "   :members:\n   :special-members: __call__\n   :show-inheritance:\n"
    elif inspect.isfunction(name.value):
        text += f".. autofunction:: {name.package}::{name.name}\n"
    else:
        text += f".. py:data:: {name.name}\n\n{_indented(str(GoogleDocstring(name.documentation)))}"
    if name.home != name.package:
        text += f"\n.. rubric:: {name.home}\n\n{_module_text(name.home)}"
    return text


def _module_text(name: str) -> str:
    return f".. automodule:: {name}\n   :no-index:\n\n"


def _title(text: str) -> str:
    return f"{text}\n{'=' * len(text)}\n\n"


def _table(names: list[PublicName]) -> str:
    rows = [
        f"   * - :py:obj:`{name.name} <{name.package}.{name.name}>`\n     - {_summary(name)}\n"
        for name in sorted(names, key=lambda name: name.name.lower())
    ]
    return ".. list-table::\n   :widths: 30 70\n\n" + "".join(rows) + "\n"


def _summary(name: PublicName) -> str:
    paragraph = " ".join(name.documentation.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].removesuffix(".") + "."


def _tree(pages: object) -> str:
    return ".. toctree::\n   :hidden:\n\n" + "".join(f"   {page}\n" for page in pages) + "\n"


def _indented(text: str) -> str:
    return "".join(f"   {line}".rstrip() + "\n" for line in text.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="the folder of the pages, which is replaced")
    out = parser.parse_args().out
    if out.exists() and not (out / "objects.inv").exists():
        parser.error(f"'{out}' must be new, or hold pages from before that are replaced.")
    with tempfile.TemporaryDirectory() as work:
        pages = Path(work) / "pages"
        pages.mkdir()
        write_pages(pages)
        options = ["-q", "-j", "2", "-W", "--keep-going", "-d", f"{work}/doctrees"]
        status = sphinx([*options, "-c", str(HERE), str(pages), f"{work}/html"])
        if status == 0:
            shutil.rmtree(out, ignore_errors=True)
            shutil.move(f"{work}/html", out)
    return status


if __name__ == "__main__":
    sys.exit(main())
