#include <nanobind/nanobind.h>

#include "bit_linear/bit_linear.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_bit_linear(nb::module_& m) {
  m.def("bit_linear", &bit_linear, "x"_a, "projections"_a, "eps"_a.none(), "half_away"_a, "codes"_a,
        "gate"_a, "norm"_a.none(), "norm_eps"_a.none(), "residual"_a.none(),
        R"(Ternary projections of one input, with gate, norms, quantisation, scales and residual.

        Args:
            x: Activations (..., D), or gate and up halves (..., 2D) with a gate. All floats are
                float32, float16 or bfloat16.
            projections: For each matrix its packed trits, uint32 (N, padded D / 16); its scale,
                float32 (1,) or (N,); and with `eps` the weight of its norm, (D,), else None.
            eps: Epsilon of the norms of the projections, or None for no norms.
            half_away: Whether ties of codes go away from zero. Otherwise they go to even.
            codes: Whether the activations are quantised to 8 bits.
            gate: "silu", "relu2", "gelu" or "relu", or empty for no gate.
            norm: Weight of the norm before all projections, (D,), or None.
            norm_eps: Epsilon of that norm, or None.
            residual: What is added to the result, of its shape, or None.

        Returns:
            The results side by side in the dtype of x.

        Raises:
            ValueError: A shape or dtype does not fit, or the gate is unknown.)");

  bind_definition<BitLinear>(m, "define_bit_linear");
}

}  // namespace mmfree
