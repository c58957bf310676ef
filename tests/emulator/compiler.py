"""Checks the texts of Metal kernels with clang, and reads the machine code that it makes of them.

There is no compiler of Metal outside macOS. The clang of the package `ziglang` compiles a text for
arm64 with `declarations.h` in place of Metal's library.
"""

import functools
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

DECLARATIONS = Path(__file__).with_name("declarations.h")
# What clang would take: lambdas, and words that Metal's language leaves out.
FORBIDDEN = re.compile(
    r"\[[&=\w, ]*\]\s*\([^()]*\)\s*\{|\b(?:double|goto|new|delete|throw|try|virtual|long long)\b"
)
# arithmetic of halves is in hardware, as on GPUs
FLAGS = """
    --target=aarch64-linux-gnu -march=armv8.2-a+fp16 -std=c++14 -O2 -nostdinc -nostdinc++
    -fno-exceptions -fno-rtti -ffp-contract=off -fno-vectorize -fno-slp-vectorize -Wno-unknown-attributes
    -fno-math-errno -fno-integrated-as -fsigned-char -Werror=c++17-extensions
    -Xclang -cl-single-precision-constant
"""


class KernelError(RuntimeError):
    """The kernel does not compile, or does what Metal does not define."""


def unavailable() -> str | None:
    """Returns why there is no clang, or None."""
    if importlib.util.find_spec("ziglang") is None:
        return "the package ziglang holds the compiler and is not installed"
    return None


def zig(*arguments: str) -> str:
    """Runs a tool of the package `ziglang` and returns what it prints."""
    found = subprocess.run([_program(), *arguments], capture_output=True, text=True)
    if found.returncode:
        raise KernelError(f"the kernel does not compile:\n{found.stderr}")
    return found.stdout


@functools.cache
def _program() -> str:
    """The package's program itself, since `python -m ziglang` would start Python for each kernel."""
    package = importlib.util.find_spec("ziglang")
    assert package is not None and package.origin is not None
    return str(Path(package.origin).with_name("zig"))


def without_attributes(text: str) -> str:
    """A kernel's text without what C++ does not know; words that Metal does not know are errors."""
    if found := FORBIDDEN.search(text):
        raise KernelError(f"the kernel does not compile: {found[0]!r} is not in Metal")
    return re.sub(r"\[\[.*?\]\]", "", text)


def check(texts: Iterable[str]) -> None:
    """Raises `KernelError` unless every text compiles."""
    _compiled(texts, "-fsyntax-only")


def machine_codes(texts: Iterable[str]) -> list[str]:
    """The machine code of each kernel for arm64, as text."""
    functions = _compiled(texts, "-S", "-o", "-").split("-- Begin function ")
    kernels = {}
    for function in functions:
        if found := re.match(r"_ZN\d+text_(\d+)_\w*custom_kernel_", function):
            kernels[int(found[1])] = function
    return [kernels[n] for n in sorted(kernels)]


def _compiled(texts: Iterable[str], *arguments: str) -> str:
    # threadgroup memory has one address for all threads, as what is static has
    plain = (
        re.sub(r"\bthreadgroup (\w+ \w+\[)", r"static threadgroup \1", without_attributes(text))
        for text in texts
    )
    source = "".join(f"namespace text_{n}_ {{\n{text}\n}}\n" for n, text in enumerate(plain))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernels.cpp"
        file.write_text(source)
        return zig("clang", *FLAGS.split(), "-include", str(DECLARATIONS), str(file), *arguments)


@dataclass(frozen=True)
class Loop:
    """An innermost loop of machine code.

    Attributes:
        instructions: Each with its operands.
    """

    instructions: tuple[str, ...]

    @property
    def count(self) -> int:
        """The number of instructions of a processor that has one number in a register.

        An instruction for several numbers counts for each of them, as a GPU's threads have no such
        instructions. What only copies a register or a constant to a register does not count: it is
        there because the multiply-add of arm64 overwrites an operand and takes no constants. Nor does
        what only widens a half, which a GPU's multiply-add takes as it is.
        """
        return sum(_numbers(each) for each in self.instructions if not _COPY.match(each))

    @property
    def slow(self) -> list[str]:
        """The shifts by amounts that are not constants, the divisions and the calls."""
        return [each for each in self.instructions if _SLOW.match(each)]


# of 32 bits, which is what the kernels compute with, in a register
_LANES = {"16b": 4, "8b": 2, "4s": 4, "2s": 2, "2d": 4, "8h": 8, "4h": 4}
_COPY = re.compile(
    r"mov\tv\d+\.16b, v|dup\tv\d+\.4s, |fmov\t[sv][\w.]+, [s#]|movi\t|movk?\tw\d+, "
    r"|fcvt\ts\d+, h|fcvtl2?\t"
)
_SLOW = re.compile(r"(?:ls[lr]|asr|ror)\tw?x?\d+, [wx]\d+, [wx]\d+|[us]r?shl\t|\w+div\t|blr?\t")
_PRODUCT = re.compile(r"fn?m(?:la|ls|add|sub)\t|fadd\t|simdgroup_multiply")


def hot_loop(code: str) -> Loop:
    """The innermost loop with the most multiplications and additions of floats."""

    def products(loop: Loop) -> int:
        return sum(_numbers(each) for each in loop.instructions if _PRODUCT.match(each))

    return max(_innermost_loops(code), key=products)


def _numbers(instruction: str) -> int:
    name, _, operands = instruction.partition("\t")
    found = re.match(r"v\d+\.(\w+)", operands)
    if name.startswith(("ld", "st")) or found is None:
        return 1
    return _LANES.get(found[1], 1)


def _innermost_loops(code: str) -> list[Loop]:
    return _loops(code, lambda lines: True)


def loops_around(code: str, instruction: str) -> list[Loop]:
    """The loops that have an instruction, where no loop within has it."""
    return _loops(code, lambda lines: any(line.startswith(instruction) for line in lines))


def _loops(code: str, is_meant: Callable[[list[str]], bool]) -> list[Loop]:
    """The lines between a label and the last jump back to it, where no such loop lies within."""
    lines = [line.split("//")[0].strip() for line in code.splitlines()]
    labels = {line[:-1]: n for n, line in enumerate(lines) if re.fullmatch(r"\.L\w+:", line)}
    last_jump: dict[int, int] = {}
    for n, line in enumerate(lines):
        jump = re.match(r"(?:b|b\.\w+|cbn?z|tbn?z)\t(?:.*, )?(\.L\w+)$", line)
        if jump and labels[jump[1]] <= n:
            last_jump[labels[jump[1]]] = n
    meant = {start: stop for start, stop in last_jump.items() if is_meant(lines[start : stop + 1])}
    return [
        Loop(tuple(line for line in lines[start : stop + 1] if line and line[0] != "."))
        for start, stop in meant.items()
        if not any(start < other and meant[other] <= stop for other in meant)
    ]
