#include <nanobind/nanobind.h>

#include "layer_norm/layer_norm.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_layer_norm(nb::module_& m) {
  m.def("layer_norm", &layer_norm, "x"_a, "weight"_a.none(), "bias"_a.none(), "eps"_a,
        R"(Takes the mean from each row and divides by the root of the variance.

        Args:
            x: (..., D), float32, float16 or bfloat16.
            weight: Scale, floats (D,), or None.
            bias: Is added, floats (D,), or None.
            eps: Is added to the variance.

        Returns:
            (..., D) in the dtype of `x`.

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<LayerNormGradient>(m, "define_layer_norm");
}

}  // namespace mmfree
