#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "instruction_sets/kernels.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_instruction_sets(nb::module_& m) {
  m.def("use_kernels", &use_kernels, "name"_a,
        "Computes with the named instruction set, one of kernel_names().");

  m.def("kernel_names", &kernel_names,
        "Returns the instruction sets for which this processor has kernels, fastest first.");

  m.def("kernel_name", &kernel_name, "Returns the name of the instruction set in use.");
}

}  // namespace mmfree
