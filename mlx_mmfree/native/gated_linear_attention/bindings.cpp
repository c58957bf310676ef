#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "gated_linear_attention/gated_linear_attention.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_gated_linear_attention(nb::module_& m) {
  m.def("gated_linear_attention", &gated_linear_attention, "q"_a, "k"_a, "v"_a, "f"_a.none(),
        "state"_a,
        R"(Runs S_t = diag(f_t) S_{t-1} + k_t^T v_t along the length and reads o_t = q_t S_t.

        Args:
            q: Queries, float32 (B, H, L, K).
            k: Keys, float32 (B, H, L, K).
            v: Values, float32 (B, H, L, V).
            f: Gates, float32 (B, H, L, K) or (B, H, L, 1), or None for ones.
            state: The state before the first position, float32 (B, H, K, V).

        Returns:
            o, float32 (B, H, L, V), and the last state, float32 (B, H, K, V).

        Raises:
            ValueError: A shape or dtype does not fit, or an array is empty.)");

  bind_definition<GatedLinearAttentionGradient>(m, "define_gated_linear_attention");
}

}  // namespace mmfree
