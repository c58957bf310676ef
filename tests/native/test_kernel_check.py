"""Builds the kernels without MLX and runs them: under sanitizers, and for Arm in an emulator."""

import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

import pytest

from mlx_mmfree.native import sources

SOURCES = Path(__file__).parents[2] / "mlx_mmfree/native"
CHECK = Path(__file__).with_name("kernel_check.cpp")
THREAD_CHECK = Path(__file__).with_name("thread_check.cpp")
THREADS = [
    "blas/shared_gemm.cpp",
    "runtime/operation_times.cpp",
    "runtime/thread_pool.cpp",
    "runtime/workspace.cpp",
]
# checks of every pointer and reference would take minutes to compile in unrolled loops
SANITIZERS = [
    "-O1",
    "-g1",
    "-fsanitize=address,undefined",
    "-fno-sanitize=null,object-size,pointer-overflow,alignment",
    "-fno-sanitize-recover=all",
]
X86 = {
    "instruction_sets/avx512_vnni.cpp": [
        *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mfma"),
        *("-Wno-uninitialized", "-Wno-maybe-uninitialized"),
    ],
    "instruction_sets/avx_vnni.cpp": ["-mavx2", "-mfma", "-mf16c", "-mavxvnni"],
    "instruction_sets/avx2.cpp": ["-mavx2", "-mfma", "-mf16c"],
}
# this is how the Zig compiler spells it
ARM = {
    "instruction_sets/arm_features.cpp": [],
    "instruction_sets/neon_dotprod.cpp": ["-mcpu=generic+v8_2a+dotprod"],
    "instruction_sets/neon_i8mm.cpp": ["-mcpu=generic+v8_2a+dotprod+i8mm"],
}


# these files know neither MLX nor Python, and hold for every processor
PORTABLE = [
    file.relative_to(SOURCES).as_posix()
    for file in sources.sources(SOURCES)
    if file.suffix == ".cpp"
    and not any(name in file.read_text() for name in ('"mlx/', "nanobind/"))
    and file.relative_to(SOURCES).as_posix() not in {**X86, **ARM}
]
FLAGS = ["-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]


def includes(folder: Path, root: Path = SOURCES) -> list[str]:
    """The flags with which everything compiles, once lists of what there is are in the folder."""
    sources.write_lists(folder, root)
    operations = sorted(
        file.name.removesuffix("_check.h")
        for file in CHECK.parent.glob("*_check.h")
        if (root / file.name.removesuffix("_check.h")).is_dir()
    )
    headers = [f'#include "{operation}_check.h"' for operation in operations]
    sources.write_list(folder / "checks.h", headers, "MMFREE_CHECKS", operations)
    return [f"-I{root}", f"-I{folder}", f"-I{CHECK.parent}"]


def build(
    compiler: list[str],
    flags: list[str],
    extra: dict[str, list[str]],
    folder: Path,
    root: Path = SOURCES,
    main: Path = CHECK,
) -> Path:
    """Compiles the kernels and a program, each file with its own flags."""
    objects = []
    commands = []
    flags = [*flags, *includes(folder, root)]
    for number, name in enumerate([*PORTABLE, *extra, str(main)]):
        objects.append(str(folder / f"{number}.o"))
        own = extra.get(name, [])
        commands.append([*compiler, *FLAGS, *flags, *own, "-c", root / name, "-o", objects[-1]])
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(run, commands))
    program = folder / "kernel_check"
    run([*compiler, *flags, *objects, "-pthread", "-o", str(program)])
    return program


def run(command: list) -> str:
    process = subprocess.run(command, capture_output=True, text=True, timeout=1100, check=False)
    assert process.returncode == 0, process.stdout + process.stderr
    return process.stdout


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_the_check_knows_the_kernels(tmp_path: Path) -> None:
    # the slow tests below run it
    run(["c++", *FLAGS, "-fsyntax-only", *includes(tmp_path), CHECK])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sanitizers are used on Linux")
def test_kernels_under_sanitizers(tmp_path: Path) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler")
    is_x86 = platform.machine() == "x86_64"
    program = build(["c++"], SANITIZERS, X86 if is_x86 else {}, tmp_path)
    assert run([str(program), "portable"]).splitlines()[-2:] == ["portable", "threads"]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param(["-O1"], id="plain"),
        pytest.param(["-O1", "-g1", "-fsanitize=thread"], id="sanitized", marks=pytest.mark.slow),
    ],
)
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.skipif(sys.platform != "linux", reason="sanitizers are used on Linux")
def test_threads(flags: list[str], tmp_path: Path) -> None:
    program = tmp_path / "thread_check"
    files = [THREAD_CHECK, *(SOURCES / name for name in THREADS)]
    run(["c++", *FLAGS, *flags, *includes(tmp_path), *files, "-pthread", "-o", program])
    assert run([program]) == "threads\n"


@pytest.mark.slow
def test_arm_kernels_in_an_emulator(tmp_path: Path) -> None:
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("qemu-user is not installed")
    if find_spec("ziglang") is None:
        pytest.skip("ziglang is not installed")
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    program = build(zig, ["-O2", "-static"], ARM, tmp_path)
    wanted = ["neon_i8mm", "neon_dotprod", "portable"]
    assert run([emulator, "-cpu", "max", str(program), *wanted]).split() == [*wanted, "threads"]
    # a processor without these instructions
    oldest = run([emulator, "-cpu", "cortex-a53", str(program), "portable"])
    assert oldest.split() == ["portable", "threads"]
