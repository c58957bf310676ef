"""Writes the texts of the Metal kernels to files, for Metal's compiler on a Mac."""

import shlex
from pathlib import Path

import mlx.core as mx

from ...errors import UsageError
from ...files.writing import new_folder, writing
from .inspection import fallback_texts, kernel_texts

SCRIPT = "compile.sh"
# what MLX puts before each text
_PREAMBLE = '#include "mlx/backend/metal/kernels/utils.h"\n'
_SCRIPT = """#!/bin/sh
# Compiles every kernel with the Metal compiler of Xcode, and prints those that do not compile.
cd "$(dirname "$0")" || exit 1
failed=0
for file in *.metal; do
  xcrun -sdk macosx metal -std=metal3.1 -I {include} -c "$file" -o /dev/null || {{
    echo "$file does not compile"
    failed=$((failed + 1))
  }}
done
echo "$failed of {count} kernels do not compile"
[ "$failed" -eq 0 ]
"""


def write_kernel_files(folder: Path) -> int:
    """Writes each kernel to a file `.metal`, and a script that compiles them all.

    Args:
        folder: A folder that does not exist or is empty.

    Returns:
        The number of kernels.

    Raises:
        UsageError: There are files in the folder, or it is a file.
        CheckpointError: The folder cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(
            f"[doctor] '--dump-kernels' must be a new or empty folder but '{folder}' is neither."
        )
    texts = kernel_texts() | fallback_texts()
    include = Path(mx.__file__).parent / "include"
    script = _SCRIPT.format(include=shlex.quote(str(include)), count=len(texts))
    with writing("doctor", folder), new_folder(folder) as new:
        for number, (name, text) in enumerate(sorted(texts.items())):
            # the ends of names, types of arguments, may be longer than a file's name can be
            short = name.removeprefix("custom_kernel_")[:80]
            (new / f"{number:03}_{short}.metal").write_text(f"{_PREAMBLE}{text}")
        (new / SCRIPT).write_text(script)
    return len(texts)
