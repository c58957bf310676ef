#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>

#include "rms_norm_quantize/rms_norm_quantize.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_rms_norm_quantize(nb::module_& m) {
  m.def("rms_norm_quantize", &rms_norm_quantize, "x"_a, "weight"_a.none(), "eps"_a.none(),
        "half_away"_a,
        R"(Quantises each row to 8-bit codes, after an RMSNorm if `eps` is given.

        Args:
            x: Activations (..., D), float32, float16 or bfloat16.
            weight: Scale of the norm, float32 (D,), or None.
            eps: Epsilon of the norm, or None for no norm.
            half_away: Whether ties go away from zero. Otherwise they go to even.

        Returns:
            The codes, float32 (..., D), and their scale, float32 (..., 1).

        Raises:
            ValueError: A shape or dtype does not fit, or there is a weight without `eps`.)");

  m.def(
      "rms_norm_round", &rms_norm_round, "x"_a, "weight"_a.none(), "eps"_a.none(), "half_away"_a,
      R"(Rounds each row to multiples of a step, which are the codes of `rms_norm_quantize` divided by
        their scale. The arguments are the same. It has no gradient.

        Returns:
            float32 (..., D).

        Raises:
            ValueError: A shape or dtype does not fit, or there is a weight without `eps`.)");
}

}  // namespace mmfree
