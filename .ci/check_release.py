"""Checks the files of a release: one version in all of them, and what each must and must not hold.

`python .ci/check_release.py [--tag] FILE...`; `--tag` also refuses placeholders of the address.
`python .ci/check_release.py --import` checks what the installed package costs to import.
"""

import email
import re
import sys
import tarfile
import time
import zipfile
from pathlib import Path

from package_metadata import ROOT, stated

MOST_BYTES = 8_000_000
"""Of a file: the bundled model is most of it."""
MOST_SECONDS = 0.2
"""Of the processor, for importing the package, whose parts are imported when they are used."""
KERNELS = "_mlx_mmfree_native/__init__.py"
SOURCES = (".cpp", ".h", ".in", "CMakeLists.txt", ".clang-format")


def check(file: Path) -> list[str]:
    """Returns what is wrong with a file."""
    version = stated("__version__")
    faults = []
    if not file.name.startswith(f"mlx_mmfree-{version}"):
        faults.append("its name has another version than version.py")
    if file.stat().st_size > MOST_BYTES:
        faults.append(f"it has {file.stat().st_size:,} bytes, more than {MOST_BYTES:,}")
    if file.suffix == ".whl":
        with zipfile.ZipFile(file) as wheel:
            names = wheel.namelist()
            described = wheel.read(f"mlx_mmfree-{version}.dist-info/METADATA").decode()
            kernels = wheel.read(KERNELS).decode() if KERNELS in names else None
        is_pure = file.name.endswith("-none-any.whl")
        if is_pure == (kernels is not None):
            faults.append("only a wheel of one system holds kernels, and each of these does")
        wanted = {"mlx_mmfree/py.typed", f"mlx_mmfree-{version}.dist-info/licenses/NOTICE"}
        own = ("mlx_mmfree/", "_mlx_mmfree_native/", f"mlx_mmfree-{version}.dist-info/")
        others = [name for name in names if not name.startswith(own) or name.endswith(SOURCES)]
    else:
        with tarfile.open(file) as archive:
            names = [name.partition("/")[2] for name in archive.getnames()]
            stored = archive.extractfile(f"mlx_mmfree-{version}/PKG-INFO")
            assert stored is not None
            described = stored.read().decode()
        kernels = None
        wanted = {"mlx_mmfree/native/CMakeLists.txt", "pyproject.toml", "LICENSE", "NOTICE"}
        needed = ".ci/package_metadata.py"
        others = [
            name
            for name in names
            if name.startswith((".", "tests/", "examples/", "build/"))
            and name not in (".ci", needed)
        ]
    faults += [f"it lacks {each}" for each in wanted if not any(n.startswith(each) for n in names)]
    folders = sorted({name.partition("/")[0] for name in others})
    faults += [f"it holds files of {folder}, which are no part of it" for folder in folders]
    return faults + check_metadata(described, kernels)


def check_metadata(described: str, kernels: str | None) -> list[str]:
    """Returns what is wrong with a description of the package.

    Args:
        described: The text of `METADATA` or `PKG-INFO`.
        kernels: The module that says with which MLX the kernels were built; `None` without kernels.
    """
    faults = []
    metadata = email.message_from_string(described)
    page = metadata.get_payload()
    assert isinstance(page, str)
    if relative := re.findall(r"\]\((?!https?://)[^)]*\)", re.sub(r"`[^`\n]*`", "", page)):
        faults.append(f"its page has links that lead nowhere, such as {relative[0]}")
    repository = stated("REPOSITORY")
    if not any(repository in url for url in metadata.get_all("Project-URL", [])):
        faults.append("it does not name the repository")
    required = [each for each in metadata.get_all("Requires-Dist", []) if re.match("mlx[^-]", each)]
    built = re.search(r'^MLX_VERSION = "(.+)"$', kernels, re.MULTILINE) if kernels else None
    for each in required:
        if "extra ==" in each:
            continue
        is_exact = f"=={built[1]}" in each if built else "==" not in each.partition(";")[0]
        if not is_exact:
            wanted = (
                f"exactly MLX {built[1]}, which its kernels need" if built else "a range of MLX"
            )
            faults.append(f"it must require {wanted}, but has {each}")
    if not required:
        faults.append("it does not require MLX")
    return faults


def check_import() -> list[str]:
    """Returns what is wrong with `import mlx_mmfree`: a command must answer `--help` at once."""
    start = time.process_time()
    import mlx_mmfree

    seconds = time.process_time() - start
    faults = []
    if seconds > MOST_SECONDS:
        faults.append(f"importing {mlx_mmfree.__name__} takes {seconds:.2f} s of the processor")
    loaded = {"mlx.core", "numpy", "jinja2", "tokenizers", "huggingface_hub"} & sys.modules.keys()
    return faults + [f"importing it imports {name} too" for name in sorted(loaded)]


def unfilled(repository: str, page: str) -> list[str]:
    """Returns which files do not hold the address of the repository yet.

    Args:
        repository: The address that version.py states.
        page: The README.
    """
    faults = []
    if "/OWNER/" in repository:
        faults.append("version.py must state the address of the repository, but OWNER stands there")
    owner = repository.split("/")[-2]
    for line in (f"git clone {repository} ", f"brew install {owner}/"):
        if line not in page:
            faults.append(
                f"README.md must have '{line.strip()}', the address that version.py states"
            )
    return faults


def main(*arguments: str) -> None:
    if arguments == ("--import",):
        if faults := check_import():
            sys.exit("\n".join(faults))
        return
    files = [name for name in arguments if name != "--tag"]
    version = stated("__version__")
    changelog = (ROOT / ".github/CHANGELOG.md").read_text(encoding="utf-8")
    faults = [f"{file}: {fault}" for file in files for fault in check(Path(file))]
    if f"\n## {version}\n" not in changelog:
        faults.append(f"CHANGELOG.md has no section for {version}")
    if "--tag" in arguments:
        faults += unfilled(stated("REPOSITORY"), (ROOT / "README.md").read_text(encoding="utf-8"))
    if faults:
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main(*sys.argv[1:])
