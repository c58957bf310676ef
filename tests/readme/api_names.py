"""The list of all public names with the files that define them: python -m tests.readme.api_names"""

import importlib
from pathlib import Path

from tests.public_names import PublicName, packages, public_names
from tests.readme.documents import ROOT

PAGE = ROOT / "mlx_mmfree" / "API.md"
HEAD = """# API reference

All public names, by package. Each leads to the file whose docstring has its formula, shapes, errors,
source and an example. Back to [how it is built](README.md).

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
        names = ", ".join(map(_link, sorted(public_names(package), key=_lowered)))
        parts.append(f"## `{package.__name__}`\n\n{names}\n")
    return "\n".join(parts)


def _link(name: PublicName) -> str:
    file = Path(str(importlib.import_module(name.home).__file__))
    return f"[`{name.name}`]({file.relative_to(PAGE.parent).as_posix()})"


def _lowered(name: PublicName) -> str:
    return name.name.lower()


if __name__ == "__main__":
    PAGE.write_text(text(), encoding="utf-8")
