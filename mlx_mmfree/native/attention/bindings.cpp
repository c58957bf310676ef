#include <nanobind/nanobind.h>

#include "attention/attention.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_attention(nb::module_& m) {
  m.def("attention", &attention, "queries"_a, "keys"_a, "values"_a, "mask"_a.none(), "is_causal"_a,
        R"(Softmax attention; H / G query heads share a key head.

        Args:
            queries: (B, H, L, K), any of the float types.
            keys: (B, G, N, K), any of the float types.
            values: (B, G, N, V), any of the float types.
            mask: What each query sees, booleans that broadcast to (B, 1, L, N), or None.
            is_causal: Whether query t sees the keys up to t + N - L; without a mask.

        Returns:
            (B, H, L, V) in the dtype of the queries.)");

  bind_definition<Attention>(m, "define_attention");
}

}  // namespace mmfree
