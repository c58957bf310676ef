"""Runs Metal kernels on the CPU (Linux, x86-64) and counts what they load and store.

How it works:

1. MLX writes the text of a kernel for a recorded call, also where there is no Metal.
2. The text becomes C++: attributes go, threadgroup arrays become static, and `metal.h` takes the place
   of Metal's library. The clang of the package `ziglang` compiles each text once.
3. clang's thread sanitizer puts a call before each load and store of the kernel. `machine.cpp`, which
   the kernel is linked to, answers these calls: it is the race detector.
4. The machine runs one threadgroup at a time. Each thread is a fiber with a stack of its own, which
   leaves at barriers and SIMD-group operations; the next one then goes on, in an order drawn by `seed`.
5. An access must lie within a buffer or a threadgroup array, and inputs are never stored to. For each
   byte of threadgroup memory the machine keeps who wrote and read it since which barrier: an access that
   no barrier separates from another thread's is a race. Lanes must reach the same operations together.
6. Outputs and threadgroup memory start as NaN, so that what a kernel forgets to write is seen.

Each of these faults is a `KernelError`. Tests plant faults with `edit`, which changes a text first.
"""

import ctypes
import hashlib
import math
import mmap
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_mmfree.ops.backend.launch import generated_text
from tests.emulator import compiler
from tests.emulator.compiler import KernelError, without_attributes, zig

HEADER = Path(__file__).with_name("metal.h")
MACHINE = Path(__file__).with_name("machine.cpp")
# Buffers lie this far apart, so that no index leads from one to another.
GAP = 64 * 2**20
# most kernels run for less time than compiling them takes, hence -fast-isel
FLAGS = """
    --target=x86_64-linux-gnu -std=c++14 -march=x86-64-v3 -O1 -fPIC -nostdinc -nostdinc++
    -fno-exceptions -fno-rtti -fvisibility=hidden -ffp-contract=off -fno-vectorize
    -fno-slp-vectorize -ftrivial-auto-var-init=pattern
    -Xclang -ffloat16-excess-precision=none -Xclang -fbfloat16-excess-precision=none
    -Xclang -cl-single-precision-constant -Wno-unknown-attributes
    -Werror=implicit-float-conversion -Werror=c++17-extensions -mllvm -fast-isel
"""
# of a kernel alone: its loads and stores call the machine
OBSERVED = """
    -fsanitize=thread -mllvm -tsan-instrument-func-entry-exit=0
    -mllvm -tsan-instrument-read-before-write=1
"""


@dataclass(frozen=True)
class Record:
    """One launch.

    Attributes:
        threadgroups: Their number.
        threads, shared_bytes: The threads and the memory of each threadgroup.
        loaded, stored: The bytes in device memory, by name of the kernel's argument.
    """

    kernel: str
    threadgroups: int
    threads: int
    shared_bytes: int
    loaded: dict[str, int]
    stored: dict[str, int]


def unavailable() -> str | None:
    """Returns why kernels cannot be emulated here, or None."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "the emulator is written for Linux on x86-64"
    return compiler.unavailable()


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("name", ctypes.c_char_p),
        ("is_output", ctypes.c_uint64),
        ("loaded", ctypes.c_uint64),
        ("stored", ctypes.c_uint64),
    )


class _Launch(ctypes.Structure):
    _fields_ = (
        ("buffers", ctypes.POINTER(_Buffer)),
        ("number_of_buffers", ctypes.c_uint32),
        ("seed", ctypes.c_uint32),
        ("groups", ctypes.c_uint32 * 3),
        ("threads", ctypes.c_uint32),
        ("shared_bytes", ctypes.c_uint32),
        ("error", ctypes.c_char * 400),
    )


@dataclass(frozen=True)
class _Parameter:
    type: str
    name: str
    is_buffer: bool


class Emulator:
    """Stands in for `mlx_mmfree.ops.backend.launch.launch`.

    Args:
        cache: Folder of compiled kernels.
        seed: Order of threads; 0 is the natural one.

    Attributes:
        records: What each launch loaded and stored.
        edit: Changes a kernel's text before it is compiled, to plant a fault.
    """

    def __init__(self, cache: Path, seed: int = 0):
        self._cache = cache
        self.seed = seed
        self.records: list[Record] = []
        self.edit: Callable[[str], str] = lambda text: text

    def launch(
        self,
        kernel: Any,
        *,
        inputs: Sequence[mx.array],
        grid: tuple[int, int, int],
        threadgroup: tuple[int, int, int],
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Sequence[tuple[str, Any]] = (),
        init_value: float | None = None,
    ) -> list[mx.array]:
        threads = threadgroup[0]
        if threadgroup[1:] != (1, 1) or threads % 32 or not 0 < threads <= 1024:
            raise KernelError(f"a threadgroup of {threadgroup} is not emulated")
        if min(grid) < 1 or grid[0] % threads:
            raise KernelError(f"a grid of {grid} in threadgroups of {threadgroup} is not emulated")
        name, text = generated_text(
            kernel,
            inputs,
            grid=grid,
            threadgroup=threadgroup,
            output_shapes=list(output_shapes),
            output_dtypes=list(output_dtypes),
            template=list(template) or None,
            init_value=init_value,
        )
        parameters = _parameters(text, name)
        library = ctypes.CDLL(str(self._compiled(name, self.edit(text), parameters)))
        arrays = _arguments(parameters, inputs, output_shapes, output_dtypes, init_value)
        groups = (grid[0] // threads, grid[1], grid[2])
        self.records.append(self._run(library, parameters, arrays, groups, threads, name))
        outputs = arrays[len(arrays) - len(output_shapes) :]
        return [
            _to_mlx(array, dtype).reshape(tuple(shape))
            for array, shape, dtype in zip(outputs, output_shapes, output_dtypes, strict=True)
        ]

    def _compiled(self, name: str, text: str, parameters: list[_Parameter]) -> Path:
        source = _host_source(text, name, parameters)
        library = self._path(source, ".so")
        if library.exists():
            return library
        # several processes may compile the same kernel
        with tempfile.TemporaryDirectory(dir=self._cache) as folder:
            file, observed, linked = (Path(folder) / f"kernel.{end}" for end in ("cpp", "o", "so"))
            file.write_text(source)
            flags = (*FLAGS.split(), *OBSERVED.split(), "-include", str(HEADER))
            zig("clang", *flags, "-c", str(file), "-o", str(observed))
            zig("ld.lld", "-shared", str(observed), str(self._machine()), "-o", str(linked))
            linked.rename(library)
        return library

    def _machine(self) -> Path:
        """The machine's object file, which every kernel is linked to."""
        compiled = self._path(MACHINE.read_text(), ".o")
        if not compiled.exists():
            with tempfile.TemporaryDirectory(dir=self._cache) as folder:
                new = Path(folder) / "machine.o"
                zig("clang", *FLAGS.split(), "-c", str(MACHINE), "-o", str(new))
                new.rename(compiled)
        return compiled

    def _path(self, source: str, suffix: str) -> Path:
        """Where what is compiled from a source lies; its name changes with all that goes into it."""
        parts = (HEADER.read_text(), MACHINE.read_text(), FLAGS, OBSERVED, source)
        digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()
        return self._cache / f"{digest[:24]}{suffix}"

    def _run(
        self,
        library: ctypes.CDLL,
        parameters: list[_Parameter],
        arrays: list[np.ndarray],
        groups: tuple[int, int, int],
        threads: int,
        kernel: str,
    ) -> Record:
        names = [p for p in parameters if p.is_buffer]
        size = sum(a.nbytes + GAP for a in arrays) + GAP
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = np.frombuffer(memory, np.uint8)
        buffers = (_Buffer * len(arrays))()
        copies = []
        offset = GAP
        for buffer, array, parameter in zip(buffers, arrays, names, strict=True):
            bytes_of_array = whole[offset : offset + array.nbytes]
            bytes_of_array[:] = array.reshape(-1).view(np.uint8)
            copies.append(bytes_of_array)
            buffer.data, buffer.bytes = bytes_of_array.ctypes.data, array.nbytes
            buffer.name = parameter.name.encode()
            buffer.is_output = not parameter.type.startswith("const ")
            offset += -(-(array.nbytes + GAP) // 64) * 64
        run = _Launch(buffers, len(arrays), self.seed, (ctypes.c_uint32 * 3)(*groups), threads)
        library.emulate(ctypes.byref(run))
        if run.error:
            raise KernelError(f"{kernel}: {run.error.decode()}")
        for array, bytes_of_array, buffer in zip(arrays, copies, buffers, strict=True):
            if buffer.is_output:
                array.reshape(-1).view(np.uint8)[:] = bytes_of_array
        return Record(
            kernel,
            math.prod(groups),
            threads,
            run.shared_bytes,
            loaded={b.name.decode(): b.loaded for b in buffers},
            stored={b.name.decode(): b.stored for b in buffers if b.is_output},
        )


def _parameters(text: str, name: str) -> list[_Parameter]:
    start = text.rindex(f"void {name}(") + len(f"void {name}(")
    signature = text[start : text.index(") {\n", start)]
    return [
        _Parameter(type_.strip(), parameter, attribute.startswith("buffer"))
        for type_, parameter, attribute in re.findall(
            r"\s*(.+?[*&\s])(\w+) \[\[(\w+)[^\]]*\]\]", signature
        )
    ]


def _host_source(text: str, name: str, parameters: list[_Parameter]) -> str:
    """The kernel as C++: without attributes, threadgroup arrays static, called by `emulate`."""
    instance = re.search(rf"decltype\(({name}<[^;]*?>)\)", text)
    text = without_attributes(text)
    text = re.sub(
        r"\bthreadgroup (\w+) (\w+)(\[[^;=]+\]);",
        r'static threadgroup \1 \2\3; machine::declare_shared((void*)\2, sizeof \2, "\2");',
        text,
    )
    arguments = []
    for parameter in parameters:
        buffer = f"machine::run->buffers[{sum(p.is_buffer for p in parameters[: len(arguments)])}]"
        if not parameter.is_buffer:
            arguments.append(f"attributes.{parameter.name}")
        elif parameter.type.endswith("&"):
            arguments.append(f"*({parameter.type[:-1]}*){buffer}.data")
        else:
            arguments.append(f"({parameter.type}){buffer}.data")
    return (
        f"{text}\n"
        '__attribute__((no_sanitize("thread"))) static void call(const Attributes& attributes) {\n'
        f"  {instance[1] if instance else name}({', '.join(arguments)});\n}}\n"
        'extern "C" __attribute__((visibility("default"))) void emulate(Launch* launch) {\n'
        "  machine::run_grid(launch, call);\n}\n"
    )


def _arguments(
    parameters: list[_Parameter],
    inputs: Sequence[mx.array],
    output_shapes: Sequence[Sequence[int]],
    output_dtypes: Sequence[mx.Dtype],
    init_value: float | None,
) -> list[np.ndarray]:
    """The contents of the kernel's buffers, in the order of its parameters."""
    values = iter(inputs)
    outputs = iter(zip(output_shapes, output_dtypes, strict=True))
    arrays: list[np.ndarray] = []
    latest = ("", np.zeros(0))
    for parameter in (p for p in parameters if p.is_buffer):
        if latest[0] and parameter.name == f"{latest[0]}_shape":
            arrays.append(np.array(latest[1].shape, np.int32))
        elif latest[0] and parameter.name == f"{latest[0]}_ndim":
            arrays.append(np.array(latest[1].ndim, np.int32))
        elif parameter.type.startswith("const "):
            latest = (parameter.name, _to_numpy(next(values)))
            arrays.append(latest[1])
        else:
            shape, dtype = next(outputs)
            if init_value is None:
                item = _to_numpy(mx.zeros(1, dtype)).dtype
                arrays.append(np.full(math.prod(shape) * item.itemsize, 0xFF, np.uint8).view(item))
            else:
                arrays.append(_to_numpy(mx.full(math.prod(shape), init_value, dtype)))
    return arrays


def _to_numpy(x: mx.array) -> np.ndarray:
    """A row-contiguous copy; bfloat16 as its bits."""
    return np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x, order="C", copy=True)


def _to_mlx(x: np.ndarray, dtype: mx.Dtype) -> mx.array:
    return mx.array(x).view(mx.bfloat16) if dtype == mx.bfloat16 else mx.array(x)
