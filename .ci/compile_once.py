"""Runs a C++ compiler, unless it has made an object file of the same text with the same flags before.

`.ci/run` installs the library several times, each time from a new folder and with new copies of the
headers. CMake starts this before the compiler (`CMAKE_CXX_COMPILER_LAUNCHER`); the first argument is
the folder of object files. A call that makes no object file, or from which CMake learns where headers
lie (`-v`), is passed on.
"""

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

# options with a path after them, which adds nothing to the preprocessed text
PATH_OPTIONS = ("-I", "-isystem", "-include", "-MT", "-MF", "-o", "-c")


def compile_once(cache: Path, command: list[str]) -> int:
    """Leaves the object file and the list of headers; returns the compiler's status."""
    if not {"-c", "-o"} < set(command) or {"-v", "c++-header"} & set(command):
        return subprocess.call(command)
    target = Path(command[command.index("-o") + 1])
    # a compiled header is not used where the text is asked for
    preprocessor = [*command, "-E", "-P"]
    at = preprocessor.index("-o")
    del preprocessor[at : at + 2]
    text = subprocess.run(preprocessor, stdout=subprocess.PIPE, check=False)
    if text.returncode:
        return text.returncode
    flags = [
        argument
        for before, argument in zip(["", *command], command, strict=False)
        if before not in PATH_OPTIONS and not argument.startswith(PATH_OPTIONS)
    ]
    digest = hashlib.sha256("\0".join(flags).encode() + b"\0" + text.stdout).hexdigest()
    known = cache / digest
    if not known.exists():
        if status := subprocess.call(command):
            return status
        new = cache / f"{digest}.{os.getpid()}"
        shutil.copyfile(target, new)
        new.rename(known)
        return 0
    shutil.copyfile(known, target)
    return 0


if __name__ == "__main__":
    sys.exit(compile_once(Path(sys.argv[1]), sys.argv[2:]))
