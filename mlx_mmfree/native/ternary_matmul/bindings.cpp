#include <nanobind/nanobind.h>

#include "ternary_matmul/ternary_matmul.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_ternary_matmul(nb::module_& m) {
  m.def("ternary_matmul", &ternary_matmul, "x"_a, "weight"_a, "codes"_a,
        R"(Product with packed trits, x T^T.

        Args:
            x: Activations, float32 (..., D).
            weight: Packed trits, uint32 (N, padded D / 16).
            codes: Whether x holds whole numbers in [-128, 127] only. A row that does not gives NaN.

        Returns:
            Sums, float32 (..., N).)");
}

}  // namespace mmfree
