#include <nanobind/nanobind.h>

#include "hadamard/hadamard.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_hadamard(nb::module_& m) {
  m.def("hadamard", &hadamard, "x"_a, "signs"_a.none(), "block"_a, "inverse"_a,
        R"(Multiplies by signs and transforms each block, or undoes both.

        Args:
            x: (..., D), float32, float16 or bfloat16.
            signs: float32 (D,), or None where all are 1.
            block: A power of two from 2 to 8192 that divides D.
            inverse: Whether it is the inverse.

        Returns:
            (..., D) in the dtype of `x`.

        Raises:
            ValueError: A shape or dtype does not fit.)");
}

}  // namespace mmfree
