#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "linear_scan/linear_scan.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_linear_scan(nb::module_& m) {
  m.def("linear_scan", &linear_scan, "f"_a, "i"_a, "s0"_a,
        R"(Runs s_t = f_t * s_{t-1} + i_t along the length, elementwise.

        Args:
            f: Forget gates, float32 (B, L, D).
            i: Gated inputs, float32 (B, L, D).
            s0: The state before the first position, float32 (B, D).

        Returns:
            All states, float32 (B, L, D), and the last one, float32 (B, D).

        Raises:
            ValueError: A shape or dtype does not fit.)");
}

}  // namespace mmfree
