#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "gated_delta_rule/gated_delta_rule.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_gated_delta_rule(nb::module_& m) {
  m.def(
      "gated_delta_rule", &gated_delta_rule, "q"_a, "k"_a, "v"_a, "a"_a, "f"_a, "state"_a,
      "b"_a.none(),
      R"(Runs S_t = diag(f_t) S_{t-1} + k_t^T (v_t - a_t S_{t-1}) along the length and reads o_t = q_t S_t.

        Args:
            q: Queries, float32 (B, H, L, K).
            k: Under what is written, float32 (B, H, L, K).
            v: Values, float32 (B, H, L, V).
            a: Under what the state before is read, float32 (B, H, L, K).
            f: Gates, float32 (B, H, L, K) or (B, H, L, 1).
            state: The state before the first position, float32 (B, H, K, V).
            b: Under what is taken away what was read, float32 (B, H, L, K), or None for `k`.

        Returns:
            o, float32 (B, H, L, V), and the last state, float32 (B, H, K, V).

        Raises:
            ValueError: A shape or dtype does not fit, or an array is empty.)");

  bind_definition<GatedDeltaRuleGradient>(m, "define_gated_delta_rule");
}

}  // namespace mmfree
