#include <nanobind/nanobind.h>

#include "rms_norm/rms_norm.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_rms_norm(nb::module_& m) {
  m.def("rms_norm", &rms_norm, "x"_a, "weight"_a.none(), "eps"_a,
        R"(Divides each row by the root of its mean square.

        Args:
            x: (..., D), float32, float16 or bfloat16.
            weight: Scale, floats (D,), or None.
            eps: Is added to the mean square.

        Returns:
            (..., D) in the dtype of `x`.

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<RmsNormGradient>(m, "define_rms_norm");
}

}  // namespace mmfree
