"""Checks the files of a release: one version in all of them, and what each must and must not hold."""

import re
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 8_000_000
"""Of a file: the packaged model is most of it."""


def stated_version() -> str:
    """The version that the library states, which every file and the changelog must have."""
    text = (ROOT / "mlx_mmfree/version.py").read_text()
    found = re.search(r'__version__ = "(.+)"', text)
    assert found, "version.py states no version"
    return found[1]


def check(file: Path) -> list[str]:
    """Returns what is wrong with a file."""
    faults = []
    if not file.name.startswith(f"mlx_mmfree-{stated_version()}"):
        faults.append("its name has another version than version.py")
    if file.stat().st_size > MOST_BYTES:
        faults.append(f"it has {file.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            names = wheel.namelist()
        wanted = {"mlx_mmfree/", "_mlx_mmfree_native/", f"mlx_mmfree-{stated_version()}.dist-info/"}
        others = [name for name in names if not name.startswith(tuple(wanted))]
    else:
        with tarfile.open(file) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
        wanted = {"mlx_mmfree/native/CMakeLists.txt", "pyproject.toml", "LICENSE", "NOTICE"}
        others = [name for name in names if name.startswith((".", "tests/", "examples/", "build/"))]
    faults += [f"it lacks {each}" for each in wanted if not any(n.startswith(each) for n in names)]
    rooms = sorted({name.partition("/")[0] for name in others})
    return faults + [f"it holds {room}, which is no part of it" for room in rooms]


def main(*files: str) -> None:
    changelog = (ROOT / ".github/CHANGELOG.md").read_text()
    faults = [f"{file}: {fault}" for file in files for fault in check(Path(file))]
    if f"\n## {stated_version()}" not in changelog:
        faults.append(f"CHANGELOG.md has no section for {stated_version()}")
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
