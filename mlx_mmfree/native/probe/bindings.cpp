#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "probe/probe.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_probe(nb::module_& m) {
  m.def("read_seconds", &read_seconds, "arrays"_a,
        "The time to read all of the arrays once and do hardly anything else with them.");

  m.def("multiply_rate", &multiply_rate, "seconds"_a,
        "Multiply-accumulates of 8-bit numbers a second at most, measured for about that long; 0 "
        "where the instruction set has none.");
}

}  // namespace mmfree
