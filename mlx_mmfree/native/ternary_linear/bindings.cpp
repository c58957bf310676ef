#include <nanobind/nanobind.h>

#include "ternary_linear/ternary_linear.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_ternary_linear(nb::module_& m) {
  m.def("size_sums", &size_sums, "weight"_a,
        R"(Adds up the sizes of weights in 64 blocks, as the first round of a long sum does.

        Args:
            weight: Floats.

        Returns:
            The sums, and then the sizes that are left over, float32. Up to 64 weights are all left
            over.

        Raises:
            ValueError: The dtype does not fit.)");

  m.def("pack_rounded", &pack_rounded, "weight"_a, "scale"_a,
        R"(Packs clip(round(weight / scale), -1, 1), ties to zero. It has no gradient.

        Args:
            weight: Floats (N, D).
            scale: float32 (1,).

        Returns:
            Packed trits, uint32 (N, padded D / 16).

        Raises:
            ValueError: A shape or dtype does not fit.)");

  m.def("unpack_scaled", &unpack_scaled, "packed"_a, "scale"_a, "dims"_a,
        R"(Unpacks trits times their scale. It has no gradient.

        Args:
            packed: Packed trits, uint32 (N, padded dims / 16).
            scale: float32 (1,).
            dims: The number of columns.

        Returns:
            float32 (N, dims).

        Raises:
            ValueError: A shape or dtype does not fit.)");
}

}  // namespace mmfree
