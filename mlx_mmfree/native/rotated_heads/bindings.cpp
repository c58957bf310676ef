#include <nanobind/nanobind.h>

#include "rotated_heads/rotated_heads.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_rotated_heads(nb::module_& m) {
  m.def("rotated_heads", &rotated_heads, "projected"_a, "cosines"_a, "sines"_a, "num_heads"_a,
        "num_kv_heads"_a, "is_interleaved"_a,
        R"(Splits projected tokens into heads and rotates those of queries and keys.

        Args:
            projected: (B, L, (H + 2G) K) of any float dtype, K even.
            cosines: Of the angles of the pairs, float32 (1 or B, L, K / 2).
            sines: Likewise. Neither gets a gradient.
            num_heads: H.
            num_kv_heads: G.
            is_interleaved: Whether pairs are neighbours, else halves.

        Returns:
            Queries (B, H, L, K), keys and values (B, G, L, K) in the dtype of `projected`.

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<RotatedHeadsGradient>(m, "define_rotated_heads");
}

}  // namespace mmfree
