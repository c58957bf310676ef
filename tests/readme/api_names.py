"""The list of all public names with the files that define them: python -m tests.readme.api_names"""

import importlib
import re
from pathlib import Path

from tests.public_names import PublicName, packages, public_names
from tests.readme.documents import ROOT

PAGE = ROOT / "mlx_mmfree" / "API.md"
HEAD = """# API reference

All public names, by package, each with the first sentence of its docstring. They lead to the files whose
docstrings have formulas, shapes, arguments, errors, sources and examples. Back to [how it is
built](README.md).

```sh
python -c "import mlx_mmfree; help(mlx_mmfree.BitLinear)"
pip install ".[docs]" && PYTHONPATH=. python .ci/api/build.py api
```

The first line prints such a docstring. The second makes HTML of all of them, in a minute: open
`api/index.html`. [The workflow for Linux](../.github/workflows/linux.yml) makes it for each push, and
publishes it on GitHub Pages where the variable `PUBLISH_API_REFERENCE` of the repository is `true`.

`python -m tests.readme.api_names` writes this page.
"""


def text() -> str:
    """The page, with a section for each package."""
    parts = [HEAD]
    for package in packages():
        names = "\n".join(map(_line, sorted(public_names(package), key=_lowered)))
        parts.append(f"## `{package.__name__}`\n\n{names}\n")
    return "\n".join(parts)


def _line(name: PublicName) -> str:
    file = Path(str(importlib.import_module(name.home).__file__))
    link = f"[`{name.name}`]({file.relative_to(PAGE.parent).as_posix()})"
    return f"- {link}: {first_sentence(name)}"


def first_sentence(name: PublicName) -> str:
    """The first sentence of a docstring, with formulas as code."""
    paragraph = " ".join(name.documentation.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", paragraph)[0].rstrip(":")
    return re.sub(r":math:`([^`]*)`", r"`\1`", sentence)


def _lowered(name: PublicName) -> str:
    return name.name.lower()


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
