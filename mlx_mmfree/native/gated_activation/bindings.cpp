#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include "gated_activation/gated_activation.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_gated_activation(nb::module_& m) {
  m.def("gated_activation", &gated_activation, "gate"_a, "up"_a.none(), "activation"_a,
        R"(Computes a(gate) * up.

        Args:
            gate: (..., D), float32, float16 or bfloat16.
            up: (..., D) of the same dtype, or None if `gate` (..., 2 D) holds both, the gate first.
            activation: "silu", "relu2", "gelu" or "relu".

        Returns:
            (..., D) in the dtype of `gate`, or in float32 for "relu2".

        Raises:
            ValueError: A shape or dtype does not fit, or the activation is unknown.)");

  bind_definition<GatedActivationGradient>(m, "define_gated_activation");
}

}  // namespace mmfree
