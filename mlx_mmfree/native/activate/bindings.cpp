#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "activate/activate.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_activate(nb::module_& m) {
  m.def("activate", &activate, "x"_a, "activation"_a,
        R"(Computes an activation of each number.

        Args:
            x: Floats of any shape, float32, float16 or bfloat16.
            activation: "silu", "relu2", "gelu" or "relu".

        Returns:
            The shape of `x`, in its dtype, or in float32 for "relu2".

        Raises:
            ValueError: The dtype does not fit, or the activation is unknown.)");

  bind_definition<ActivateGradient>(m, "define_activate");
}

}  // namespace mmfree
