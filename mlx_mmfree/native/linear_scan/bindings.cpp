#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "linear_scan/linear_scan.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_linear_scan(nb::module_& m) {
  m.def("linear_scan", &linear_scan, "f"_a, "i"_a, "s0"_a,
        R"(s_t = f_t * s_{t-1} + i_t along the length, elementwise, in float32.

        Args:
            f: Forget factors, (B, L, D).
            i: Inputs, (B, L, D).
            s0: State before the first position, (B, D).

        Returns:
            All states (B, L, D) and the last one (B, D).)");
}

}  // namespace mmfree
