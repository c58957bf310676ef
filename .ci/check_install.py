"""Checks an installed mlx_mmfree: where it is imported from, what it holds, whether it computes."""

import argparse
import fnmatch
import importlib.metadata
import os
import sys
from pathlib import Path


def check(origin: Path, compiled: bool) -> list[str]:
    """Returns what is wrong with the installation, seen from the working directory."""
    # `python -c` and `python -m` put the working directory first, a script its own folder
    sys.path[0] = os.getcwd()
    import mlx.core as mx

    import mlx_mmfree
    from mlx_mmfree import native
    from mlx_mmfree.platform import blas

    faults = []
    path = Path(mlx_mmfree.__file__).resolve()
    if not path.is_relative_to(origin.resolve()):
        faults.append(f"imported from {path} instead of {origin}")
    distribution = importlib.metadata.distribution("mlx-mmfree")
    if distribution.version != mlx_mmfree.__version__:
        faults.append(f"version {mlx_mmfree.__version__} installed as {distribution.version}")
    is_pure = "Root-Is-Purelib: true" in (distribution.read_text("WHEEL") or "")
    if is_pure == compiled:
        faults.append("the wheel is pure Python" if is_pure else "the wheel is not pure Python")
    reason = native.unavailable()
    if compiled and reason:
        faults.append(reason)
    if not compiled and "was not built" not in (reason or ""):
        faults.append(f"the loader should say that the extension was not built, not: {reason}")
    faults += check_files([str(file) for file in distribution.files or ()])
    if mx.default_device() == mx.Device(mx.cpu) and sys.platform == "linux":
        if not blas.bind().symbols:
            faults.append(f"MLX is not bound to OpenBLAS: {blas.bind().reason}")
    return faults


def check_files(files: list[str]) -> list[str]:
    """Returns what is wrong with the list of installed files."""
    faults = [
        f"the wheel holds {file}" for file in files if file.startswith(("tests/", "examples/"))
    ]
    faults += [
        f"the wheel lacks {wanted}"
        for wanted in (
            "mlx_mmfree/py.typed",
            "mlx_mmfree/demo/*.safetensors",
            "*/licenses/LICENSE",
            "*/licenses/NOTICE",
        )
        if not fnmatch.filter(files, wanted)
    ]
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--from", dest="origin", type=Path, required=True)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--compiled", action="store_true")
    kind.add_argument("--pure", action="store_true")
    args = parser.parse_args()
    if faults := check(args.origin, args.compiled):
        sys.exit("\n".join(faults))
    print(f"{Path.cwd()}: {'compiled' if args.compiled else 'pure Python'}, as expected")


if __name__ == "__main__":
    main()
