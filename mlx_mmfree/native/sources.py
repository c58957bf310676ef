"""Tells the build which folders there are, and from which sources it was made.

Run by CMake as a script, without the package. A folder with `bindings.cpp` adds functions to the
module; one with `loops.h` has a table of kernels for each instruction set.
"""

import sys
from hashlib import blake2b
from pathlib import Path

FOLDER = Path(__file__).parent


def sources(folder: Path = FOLDER) -> list[Path]:
    """Returns the C++ files in a fixed order. An installed package has none."""
    return sorted([*folder.glob("*/*.cpp"), *folder.glob("*/*.h"), *folder.glob("*.cpp")])


def digest(folder: Path = FOLDER) -> str | None:
    """Returns a name for the content of the sources, or `None` if there are none."""
    files = sources(folder)
    if not files:
        return None
    total = blake2b(digest_size=8)
    for file in files:
        for part in (file.relative_to(folder).as_posix().encode(), file.read_bytes()):
            total.update(len(part).to_bytes(8, "little") + part)
    return total.hexdigest()


def write_lists(target: Path, folder: Path = FOLDER) -> None:
    """Writes `bindings_list.h` and `kernel_tables.h`, which the sources include."""
    with_bindings = [file.parent.name for file in sorted(folder.glob("*/bindings.cpp"))]
    with_loops = [file.parent.name for file in sorted(folder.glob("*/loops.h"))]
    write_list(target / "bindings_list.h", [], "MMFREE_BINDINGS", with_bindings)
    includes = [f'#include "{name}/loops.h"' for name in with_loops]
    tables = [f"{name.title().replace('_', '')}Kernels" for name in with_loops]
    write_list(target / "kernel_tables.h", includes, "MMFREE_KERNEL_TABLES", tables)


def write_list(file: Path, includes: list[str], macro: str, items: list[str]) -> None:
    """Writes a header with a macro that calls another macro with each item."""
    lines = [*includes, f"#define {macro}(X) {' '.join(f'X({item})' for item in items)}"]
    text = "#pragma once\n" + "\n".join(lines) + "\n"
    # an untouched file is not compiled again
    if not file.exists() or file.read_text() != text:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


if __name__ == "__main__":
    write_lists(Path(sys.argv[1]))
    print(digest())
