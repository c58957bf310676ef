#include <nanobind/nanobind.h>

#include "bit_linear/bit_linear.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_bit_linear(nb::module_& m) {
  m.def("bit_linear", &bit_linear, "x"_a, "projections"_a, "eps"_a.none(), "half_away"_a, "codes"_a,
        "gate"_a, "norm"_a.none(), "norm_eps"_a.none(), "residual"_a.none(),
        R"(Ternary projections of one input, with gating, norms, quantisation, scales and residual.

        Args:
            x: Activations (..., D), or gate and up halves (..., 2D) with a gate; float32, float16 or
                bfloat16, as all floats here.
            projections: Packed trits uint32 (N, padded D / 16), scale float32 (1,) or (N,) and, with
                eps, the weight of a norm (D,), of each matrix.
            eps: Epsilon of the projections' norms, or None for no norms.
            half_away: Whether ties of codes go away from zero, else to even.
            codes: Whether the activations are quantised to 8 bits.
            gate: "silu", "relu2", "gelu" or "relu"; empty for none.
            norm: Weight of the norm before all projections, (D,), or None.
            norm_eps: Its epsilon, or None.
            residual: Added to the result, of its shape, or None.

        Returns:
            The results side by side, in the dtype of x.)");

  bind_definition<BitLinear>(m, "define_bit_linear");
}

}  // namespace mmfree
