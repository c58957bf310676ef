"""A folder of its own is all that a new kernel needs to run with each instruction set."""

import platform
import shutil
from pathlib import Path

import pytest

from tests.native.test_kernel_check import SOURCES, X86, build, run

KERNELS = """#pragma once
#include <cstddef>
namespace mmfree {
struct DoublingKernels {
  void (*twice)(const float* x, size_t count, float* y);
  size_t lanes;

  template <class Isa, class Dense>
  static constexpr DoublingKernels of();
};
}  // namespace mmfree
"""
LOOPS = """#pragma once
#include "doubling/kernels.h"
namespace mmfree {
template <class Isa>
void twice(const float* x, size_t count, float* y) {
  for (size_t i = 0; i < count; ++i) {
    y[i] = 2 * x[i];
  }
}
template <class Isa, class Dense>
constexpr DoublingKernels DoublingKernels::of() {
  return {mmfree::twice<Isa>, Dense::kLanes};
}
}  // namespace mmfree
"""
MAIN = """#include <cstdio>
#include "doubling/kernels.h"
#include "instruction_sets/kernels.h"
#include "runtime/kernels.h"
int main() {
  for (const auto& name : mmfree::kernel_names()) {
    mmfree::use_kernels(name);
    const auto& loops = mmfree::table<mmfree::DoublingKernels>(mmfree::kernels());
    float x[3] = {1, 2, 3}, y[3];
    loops.twice(x, 3, y);
    std::printf("%s %zu %g %g %g\\n", name.c_str(), loops.lanes, y[0], y[1], y[2]);
  }
}
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_a_new_kernel_is_one_new_folder(tmp_path: Path) -> None:
    sources, main = tmp_path / "native", tmp_path / "main.cpp"
    shutil.copytree(SOURCES, sources)
    (sources / "doubling").mkdir()
    (sources / "doubling/kernels.h").write_text(KERNELS)
    (sources / "doubling/loops.h").write_text(LOOPS)
    main.write_text(MAIN)
    is_x86 = platform.machine() == "x86_64"
    program = build(["c++"], ["-O0"], X86 if is_x86 else {}, tmp_path, sources, main)
    lines = run([str(program)]).splitlines()
    assert lines[-1] == "portable 4 2 4 6"
    assert all(line.endswith(" 2 4 6") for line in lines)
