#include <nanobind/nanobind.h>

#include "gather_ternary_matmul/gather_ternary_matmul.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_gather_ternary_matmul(nb::module_& m) {
  m.def("gather_ternary_matmul", &gather_ternary_matmul, "x"_a, "weight"_a, "indices"_a,
        R"(Multiplies each row by the packed trits that it names, x T[index]^T.

        Args:
            x: Activations, float32 (..., D).
            weight: Packed trits, uint32 (E, N, padded D / 16).
            indices: The matrix of each row, uint32 (...). A row with one that is not below E gives NaN.

        Returns:
            The sums, float32 (..., N).

        Raises:
            ValueError: A shape or dtype does not fit.)");
}

}  // namespace mmfree
