#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "probe/probe.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_probe(nb::module_& m) {
  m.def("read_seconds", &read_seconds, "arrays"_a,
        "Returns the seconds that reading all of the arrays once takes.");

  m.def(
      "multiply_rate", &multiply_rate, "seconds"_a,
      "Returns the most multiply-accumulates of 8-bit numbers a second, measured for about so many "
      "seconds, or 0 if the instruction set has none.");
}

}  // namespace mmfree
