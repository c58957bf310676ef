"""Writes what a release has beside its packages: sums, notes and the formula of Homebrew.

`python .ci/release_files.py FOLDER` reads the wheels and the source distribution of the folder and
writes `SHA256SUMS`, `NOTES.md` (the changelog's section) and `mmfree.rb` into it.
"""

import hashlib
import re
import sys
from pathlib import Path

from package_metadata import ROOT, absolute, stated

PYTHON = 13
"""The minor version of the formula's Python, or the newest one with a wheel where this one has none."""
SYSTEMS = {
    "MACOS_ARM": "macosx_14_0_arm64",
    "LINUX_INTEL": "manylinux_2_35_x86_64",
    "LINUX_ARM": "manylinux_2_35_aarch64",
}


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def notes() -> str:
    """The section of this version in the changelog, with links that lead somewhere."""
    version = stated("__version__")
    changelog = (ROOT / ".github/CHANGELOG.md").read_text(encoding="utf-8")
    found = re.search(
        rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", changelog, re.DOTALL | re.MULTILINE
    )
    assert found, f"CHANGELOG.md has no section for {version}"
    # the changelog lies in a folder, from which its links begin
    section = found[1].strip().replace("](../", "](")
    return absolute(section, stated("REPOSITORY"), f"v{version}") + "\n"


def formula(wheels: list[Path]) -> str:
    """The formula for the wheels. A system without a wheel is left out of it.

    Raises:
        SystemExit: No wheel is for one of the systems.
    """
    version, repository = stated("__version__"), stated("REPOSITORY")
    text = (ROOT / ".github/homebrew/mmfree.rb").read_text(encoding="utf-8")
    minors = {int(found[1]) for each in wheels if (found := re.search("-cp3([0-9]+)-", each.name))}
    if not minors:
        sys.exit("no wheel is for one system, so that the formula has nothing to install")
    minor = PYTHON if PYTHON in minors else max(minors)
    python, tag = f"3.{minor}", f"cp3{minor}"
    for system, platform in SYSTEMS.items():
        block = re.compile(
            rf"^ *# begin {system}\n(.*?)^ *# end {system}\n", re.DOTALL | re.MULTILINE
        )
        name = f"mlx_mmfree-{version}-{tag}-{tag}-{platform}.whl"
        wheel = next((each for each in wheels if each.name == name), None)
        if wheel is None:
            text = block.sub("", text)
            continue
        address = f"{repository}/releases/download/v{version}/{name}"
        text = block.sub(
            lambda match, address=address, wheel=wheel: (
                match[1].replace("@URL@", address).replace("@SHA256@", sha256(wheel))
            ),
            text,
        )
    for name, value in (("REPOSITORY", repository), ("VERSION", version), ("PYTHON", python)):
        text = text.replace(f"@{name}@", value)
    assert "@" not in re.sub(r"python@3", "", text), "a field of the formula was not filled"
    return text


def main(folder: str) -> None:
    target = Path(folder)
    wheels = sorted(target.glob("*.whl"))
    (target / "NOTES.md").write_text(notes(), encoding="utf-8")
    (target / "mmfree.rb").write_text(formula(wheels), encoding="utf-8")
    files = [*wheels, *sorted(target.glob("*.tar.gz")), target / "mmfree.rb"]
    sums = "".join(f"{sha256(file)}  {file.name}\n" for file in files)
    (target / "SHA256SUMS").write_text(sums, encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
