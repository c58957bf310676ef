#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>

#include "adamw/adamw.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_adamw(nb::module_& m) {
  m.def("adamw", &adamw, "parameter"_a, "gradient"_a, "m"_a, "v"_a, "factors"_a, "b1"_a, "b2"_a,
        "eps"_a,
        R"(One step of AdamW. It has no gradient.

        Args:
            parameter: float32.
            gradient: float32 of that shape.
            m: The first moment, likewise.
            v: The second moment, likewise.
            factors: What the parameter, the first moment and the root of the second are multiplied
                by, float32 (3,).
            b1: The share of the first moment that is kept.
            b2: The share of the second moment that is kept.
            eps: Is added to the denominator.

        Returns:
            The new parameter, first and second moment.

        Raises:
            ValueError: A shape or dtype does not fit.)");
}

}  // namespace mmfree
