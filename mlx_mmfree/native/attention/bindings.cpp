#include <nanobind/nanobind.h>

#include "attention/attention.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_attention(nb::module_& m) {
  m.def("attention", &attention, "queries"_a, "keys"_a, "values"_a, "mask"_a.none(), "is_causal"_a,
        R"(Softmax attention in which H / G query heads share a key head.

        Args:
            queries: (B, H, L, K) of any float dtype.
            keys: (B, G, N, K) of any float dtype.
            values: (B, G, N, V) of any float dtype.
            mask: Booleans that broadcast to (B, 1, L, N) and say what each query sees, or None.
            is_causal: Whether query t sees the keys up to t + N - L. Only without a mask.

        Returns:
            (B, H, L, V) in the dtype of the queries.

        Raises:
            ValueError: A shape or dtype does not fit, or an array is empty.)");

  bind_definition<AttentionGradient>(m, "define_attention");
}

}  // namespace mmfree
