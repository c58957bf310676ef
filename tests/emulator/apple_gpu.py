"""Has Metal kernels compiled to the machine code of an Apple GPU (M1), and counts its instructions.

Nothing runs. Mesa's compiler for Apple's GPUs is not Apple's: the kinds and numbers of arithmetic
instructions in a loop are solid, registers and waits less so. It knows no instructions for matrices.

`MLX_MMFREE_APPLE_COMPILER` names the root of a Debian 13 with the packages mesa-opencl-icd and
mesa-drm-shim (26.1, of trixie-backports), ocl-icd-libopencl1, ocl-icd-opencl-dev, gcc, libc6-dev,
clang-19, llvm-19 and llvm-spirv-19: `/` for this system, or a folder that `debootstrap` made, which root
enters by `chroot`.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.emulator.compiler import KernelError, without_attributes
from tests.emulator.emulator import _parameters

VARIABLE = "MLX_MMFREE_APPLE_COMPILER"
_HEADER = Path(__file__).with_name("apple.h")
_PROGRAM = Path(__file__).with_name("apple.c")
# what is measured lies outside of a system of its own
_PATH = "PATH=/usr/bin:/bin"

_CLANG = """
    clang-19 --target=nvptx64-nvidia-cuda -x c++ -std=c++17 -O2 -Xclang -disable-llvm-passes -nostdinc
    -nostdinc++ -fno-exceptions -fno-rtti -fno-math-errno -fno-trapping-math -ffp-contract=on
    -fno-threadsafe-statics -Xclang -cl-single-precision-constant -w -S -emit-llvm
"""
# a GPU's compiler unrolls what it is asked to, and leaves single numbers alone
_OPTIMIZER = """
    opt-19 -passes=internalize,always-inline,globaldce,default<O2>,globaldce
    -internalize-public-api-list=entry -vectorize-slp=false -vectorize-loops=false
    -disable-vector-combine -unroll-threshold=3000 -unroll-full-max-count=64
"""
_MESA = """
    LD_PRELOAD=/usr/lib/x86_64-linux-gnu/libasahi_noop_drm_shim.so RUSTICL_ENABLE=asahi
    AGX_MESA_DEBUG=shaders,shaderdb MESA_SHADER_CACHE_DISABLE=1
"""
_ATTRIBUTES = {
    "thread_index_in_simdgroup": "lane_in_simdgroup()",
    "simdgroup_index_in_threadgroup": "simdgroup_in_group()",
    "simdgroups_per_threadgroup": "simdgroups_of_group()",
    "thread_index_in_threadgroup": "(uint)thread_in_group(0)",
    "thread_position_in_threadgroup": "{0}",
    "threadgroup_position_in_grid": "uint3{(uint)group_in_grid(0), (uint)group_in_grid(1), "
    "(uint)group_in_grid(2)}",
    "thread_position_in_grid": "uint3{(uint)thread_in_grid(0), (uint)thread_in_grid(1), "
    "(uint)thread_in_grid(2)}",
    "threads_per_threadgroup": "uint3{(uint)threads_of_group(0), (uint)threads_of_group(1), 1}",
    "threadgroups_per_grid": "uint3{(uint)groups_of_grid(0), (uint)groups_of_grid(1), 1}",
}
_BFLOAT = """
define internal float @widened(i16 %x) alwaysinline {
  %a = zext i16 %x to i32
  %b = shl i32 %a, 16
  %c = bitcast i32 %b to float
  ret float %c
}
define internal i16 @narrowed(float %x) alwaysinline {
  %a = bitcast float %x to i32
  %b = lshr i32 %a, 16
  %c = and i32 %b, 1
  %d = add i32 %c, 32767
  %e = add i32 %a, %d
  %f = lshr i32 %e, 16
  %g = trunc i32 %f to i16
  %h = fcmp uno float %x, 0.0
  %i = select i1 %h, i16 32704, i16 %g
  ret i16 %i
}
"""
_STATISTICS = re.compile(
    r"shader: (?P<instructions>\d+) instrs, .* (?P<bytes>\d+) code size, (?P<halves>\d+) gprs, "
    r".* (?P<stack>\d+) scratch, (?P<threads>\d+) threads, .* (?P<spills>\d+):(?P<fills>\d+) spills"
)


def unavailable() -> str | None:
    """Returns why nothing can be compiled, or None."""
    root = os.environ.get(VARIABLE)
    if root is None:
        return f"'{VARIABLE}' does not name a system with Mesa's compiler for Apple's GPUs"
    for program in ("clang-19", "opt-19", "llvm-as-19", "llvm-spirv-19", "gcc"):
        if not os.path.lexists(Path(root, "usr/bin", program)):
            return f"'{program}' is not installed in {root}"
    if root != "/" and os.geteuid() != 0:
        return f"only root can enter {root}"
    return None


@dataclass
class Loop:
    """A loop, without the loops within it.

    Attributes:
        instructions: How many one round takes.
        slots: How many slots of issue they take, of which one instruction for 32 bits takes one.
    """

    start: int
    stop: int
    instructions: int = 0
    slots: int = 0


@dataclass(frozen=True)
class Code:
    """A kernel's machine code.

    Attributes:
        loops: In the order of the code, an outer one before those within it.
        outside: What lies in no loop.
        registers: Those of 32 bits that a thread takes.
        threads: How many a threadgroup can have with so many registers.
        stack, spills: What does not fit into registers.
        shared: The bytes of threadgroup memory.
    """

    loops: list[Loop]
    outside: Loop
    instructions: int
    bytes: int
    registers: float
    threads: int
    stack: int
    spills: int
    shared: int
    operations: Counter[str] = field(default_factory=Counter)

    @property
    def of_one_round(self) -> int:
        """The instructions of the whole kernel, if each loop takes one round."""
        return self.outside.instructions + sum(loop.instructions for loop in self.loops)

    @property
    def hot(self) -> Loop:
        """The longest loop without one within it."""
        return max(
            (a for a in self.loops if not any(_is_within(b, a) for b in self.loops)),
            key=lambda loop: loop.instructions,
        )


def machine_code(name: str, text: str, threads: tuple[int, int, int]) -> Code:
    """The machine code of a kernel in threadgroups of `threads`."""
    with tempfile.TemporaryDirectory(dir=_root() / "tmp") as folder:
        file = Path(folder, "kernel")
        file.with_suffix(".cpp").write_text(_as_cpp(name, text))
        shutil.copy(_HEADER, folder)
        within = f"/{file.relative_to(_root())}"
        clang = (*_CLANG.split(), "-include", f"{Path(within).parent}/{_HEADER.name}")
        _run(*clang, f"{within}.cpp", "-o", f"{within}.0.ll")
        code = Path(f"{file}.0.ll").read_text()
        Path(f"{file}.1.ll").write_text(_for_opencl(code, threads))
        _run(*_OPTIMIZER.split(), "-S", f"{within}.1.ll", "-o", f"{within}.2.ll")
        _run("llvm-as-19", f"{within}.2.ll", "-o", f"{within}.bc")
        _run("llvm-spirv-19", "--spirv-max-version=1.3", f"{within}.bc", "-o", f"{within}.spv")
        return _read(_run(*_MESA.split(), _loader(), f"{within}.spv"))


def _root() -> Path:
    return Path(os.environ[VARIABLE])


@cache
def _loader() -> str:
    """The program that has OpenCL compile, itself compiled for the system that has OpenCL."""
    folder = _root() / "tmp"
    source = folder / "mlx_mmfree_apple.c"
    shutil.copy(_PROGRAM, source)
    _run("gcc", "-O1", "-o", "/tmp/mlx_mmfree_apple", f"/tmp/{source.name}", "-lOpenCL")
    return "/tmp/mlx_mmfree_apple"


def _run(*command: str) -> str:
    enter = [] if str(_root()) == "/" else ["chroot", str(_root())]
    done = subprocess.run(
        [*enter, "env", "-i", _PATH, "HOME=/tmp", *command],
        capture_output=True,
        text=True,
        errors="replace",
    )
    if done.returncode:
        raise KernelError(f"{command[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return f"{done.stderr}\n{done.stdout}"


def _as_cpp(name: str, text: str) -> str:
    """The kernel as C++ with the entry that OpenCL calls."""
    parameters = _parameters(text, name)
    instance = re.search(rf"decltype\(({name}<[^;]*?>)\)", text)
    attributes = dict(re.findall(r"[\s&*](\w+) \[\[(\w+)\]\]", text))
    text = without_attributes(text)
    text = re.sub(r"\bthreadgroup (\w+ \w+\[)", r"static threadgroup \1", text)
    text = text.replace(f"void {name}(", f"METAL_FUNC void {name}(")
    buffers = [f"{p.type} {p.name}" for p in parameters if p.is_buffer]
    arguments = [
        p.name if p.is_buffer else _ATTRIBUTES[attributes.get(p.name, p.name)] for p in parameters
    ]
    return (
        f'{text}\nextern "C" void entry({", ".join(buffers)}) {{\n'
        f"  {instance[1] if instance else name}({', '.join(arguments)});\n}}\n"
    )


def _for_opencl(code: str, threads: tuple[int, int, int]) -> str:
    """LLVM's code for another GPU as an OpenCL kernel."""
    layout = "e-p:64:64-i64:64-v16:16-v24:32-v32:32-v48:64-v96:128-v192:256-v256:256-n8:16:32"
    code = re.sub(r"^target datalayout = .*", f'target datalayout = "{layout}"', code, flags=re.M)
    code = re.sub(
        r"^target triple = .*", 'target triple = "spir64-unknown-unknown"', code, flags=re.M
    )
    # attributes of the other GPU
    code = re.sub(
        r"^attributes #.*", lambda m: re.sub(r'"[\w-]+"(="[^"]*")?', "", m[0]), code, flags=re.M
    )
    code = code.replace("addrspace(4)", "addrspace(2)")
    if "bfloat" in code:
        code = re.sub(r"fpext bfloat (\S+) to float", r"call float @widened(i16 \1)", code)
        code = re.sub(r"fptrunc float (\S+) to bfloat", r"call i16 @narrowed(float \1)", code)
        code = re.sub(r"0xR([0-9A-F]{4})", lambda m: str(int(m[1], 16)), code)
        code = re.sub(r"\bbfloat\b", "i16", code).replace("\ndefine ", f"\n{_BFLOAT}\ndefine ", 1)
    # products and sums may be one instruction
    code = code.replace("@llvm.fmuladd.", "@llvm.fma.")
    declared: set[str] = set()
    lines = []
    for line in code.splitlines():
        if line.startswith("declare "):
            called = line.split("@")[1].split("(")[0]
            if called in declared:
                continue
            declared.add(called)
        lines.append(line)
    code = "\n".join(lines)
    # threadgroup memory begins with anything
    code = re.sub(
        r"^(@\S+ = ).*?addrspace\(3\) global (.*?) zeroinitializer.*?(, align \d+)$",
        r"\1internal addrspace(3) global \2 undef\3",
        code,
        flags=re.M,
    )
    code = re.sub(
        r"define (?:dso_local )?void @entry\((.*?)\)([^{]*)\{",
        r"define spir_kernel void @entry(\1)\2 !reqd_work_group_size !9001 {",
        code,
    )
    size = ", ".join(f"i32 {count}" for count in threads)
    return (
        f"{code}\n!9001 = !{{{size}}}\n!opencl.ocl.version = !{{!9002}}\n"
        "!opencl.spir.version = !{!9002}\n!9002 = !{i32 3, i32 0}\n"
    )


_LINE = re.compile(r"^\s*([0-9a-f]+): [0-9a-f]+\s+(.*)$")
_FREE = re.compile(r"(?:wait|if|else|while|jmp|pop_exec|push_exec|stop|barrier|[ls]?load|l?store)")
_WIDE = re.compile(r"\bd[ru]\d")


def _read(printed: str) -> Code:
    """The output of Mesa."""
    found = _STATISTICS.search(printed)
    shared = re.search(r"shared memory: (\d+)", printed)
    if found is None or shared is None:
        raise KernelError(f"Mesa printed no statistics:\n{printed[-2000:]}")
    code: list[tuple[int, str]] = []
    for line in printed.splitlines():
        if match := _LINE.match(line):
            address = int(match[1], 16)
            if code and address <= code[-1][0]:
                break  # what runs before all threads
            code.append((address, match[2].strip()))
    loops = []
    for address, text in code:
        if (jump := re.match(r"jmp_any\s+-(\d+)", text)) is not None:
            loops.append(Loop(address - int(jump[1]), address))
    loops.sort(key=lambda loop: (loop.start, -loop.stop))
    outside = Loop(0, code[-1][0])
    operations: Counter[str] = Counter()
    for address, text in code:
        around = [loop for loop in loops if loop.start <= address <= loop.stop]
        owner = min(around, key=lambda loop: loop.stop - loop.start, default=outside)
        owner.instructions += 1
        owner.slots += _slots(text)
        operations[text.split()[0].partition(".")[0]] += 1
    return Code(
        loops,
        outside,
        int(found["instructions"]),
        int(found["bytes"]),
        int(found["halves"]) / 2,
        int(found["threads"]),
        int(found["stack"]),
        int(found["spills"]) + int(found["fills"]),
        int(shared[1]),
        operations,
    )


def _slots(text: str) -> int:
    """The slots of issue of an instruction, by Mesa's table of cycles for the M1."""
    if _FREE.match(text):
        return 0
    if text.startswith("simd "):
        return 24
    is_shuffle = text.startswith(("shuffle", "simd_shuffle"))
    is_slow = re.match(r"(?:imul|imadd|rint|floor|exp2|log2|rcp|rsqrt|extr|sh[lr]|asr|bf)", text)
    if is_shuffle:
        return 2
    return 4 if _WIDE.search(text.replace("$", "").replace("^", "")) and not is_slow else 1


def _is_within(inner: Loop, outer: Loop) -> bool:
    return inner is not outer and outer.start <= inner.start and inner.stop <= outer.stop
