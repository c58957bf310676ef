"""Lets wheels with compiled kernels require exactly the MLX that they were built with.

The kernels load with that MLX alone (`mlx_mmfree/native/loader.py`). A wheel that allowed a range would
lose them without a word when the next MLX is installed. Wheels without kernels keep the range.

`python .ci/pin_mlx.py WHEEL...` replaces the files; it needs the package `wheel`.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

KERNELS = "_mlx_mmfree_native/__init__.py"


def pinned(metadata: str, version: str) -> str:
    """The text of `METADATA`, in which every requirement of MLX names one version."""
    line = re.compile(r"^(Requires-Dist: mlx(?:\[\w+\])?)[<>=!~][^;\n]*(;.*)?$", re.MULTILINE)
    return line.sub(lambda found: f"{found[1]}=={version}{found[2] or ''}", metadata)


def pin(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as work:
        run = [sys.executable, "-m", "wheel"]
        subprocess.run([*run, "unpack", "--dest", work, str(wheel)], check=True)
        (folder,) = Path(work).iterdir()
        if not (folder / KERNELS).exists():
            return
        built = re.search(r'^MLX_VERSION = "(.+)"$', (folder / KERNELS).read_text(), re.MULTILINE)
        assert built, f"{wheel} does not say with which MLX it was built"
        (metadata,) = folder.glob("*.dist-info/METADATA")
        metadata.write_text(
            pinned(metadata.read_text(encoding="utf-8"), built[1]), encoding="utf-8"
        )
        subprocess.run([*run, "pack", "--dest-dir", str(wheel.parent), str(folder)], check=True)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        pin(Path(name))
