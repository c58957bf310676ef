#include <nanobind/nanobind.h>

#include "ternary_matmul/ternary_matmul.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_ternary_matmul(nb::module_& m) {
  m.def("ternary_matmul", &ternary_matmul, "x"_a, "weight"_a, "codes"_a,
        R"(Multiplies by packed trits, x T^T.

        Args:
            x: Activations, float32 (..., D).
            weight: Packed trits, uint32 (N, padded D / 16).
            codes: Whether x holds whole numbers in [-128, 127] only. A row that does not gives NaN.

        Returns:
            The sums, float32 (..., N).

        Raises:
            ValueError: A shape or dtype does not fit, or there are more inputs than sums can take.)");
}

}  // namespace mmfree
