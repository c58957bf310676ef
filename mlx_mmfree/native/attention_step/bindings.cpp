#include <nanobind/nanobind.h>

#include "attention_step/attention_step.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_attention_step(nb::module_& m) {
  m.def("attention_step", &attention_step, "projected"_a, "keys"_a, "values"_a, "positions"_a,
        "num_heads"_a, "wavelengths"_a.none(), "is_interleaved"_a, "query_norm"_a.none(),
        "key_norm"_a.none(), "norm_eps"_a, "window"_a.none(), "sinks"_a,
        R"(Attention of one token to the slots of a state, which takes its key and value.

        Args:
            projected: Query, key and value heads side by side, (B, 1, (H + 2G) K), any float dtype.
            keys: (B, G, C, K) of any float dtype, with room for the token.
            values: As the keys.
            positions: The positions that the slots in use hold, int32 (B, N), -1 for none.
            num_heads: H.
            wavelengths: Positions per radian of each pair, float32 (K / 2,), or None.
            is_interleaved: Whether pairs are neighbours. Otherwise they are halves.
            query_norm: Weight of an RMSNorm of each query head, (K,), or None.
            key_norm: Weight of an RMSNorm of each key head, (K,), or None.
            norm_eps: Epsilon of both norms.
            window: Slots behind the sinks, or None for as many as there are tokens.
            sinks: Slots of the first tokens, which stay.

        Returns:
            The output (B, 1, H K) in the dtype of `projected`, and the new keys, values and
            positions.

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<AttentionStep>(m, "define_attention_step");
}

}  // namespace mmfree
