#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "mlgru_step/mlgru_step.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_mlgru_step(nb::module_& m) {
  m.def("mlgru_step", &mlgru_step, "gates"_a, "state"_a, "weight"_a, "eps"_a,
        "lower_bound"_a.none(), "valid"_a.none(),
        R"(Gates, recurrence and gated output of MLGRU.

        Args:
            gates: Input, forget and output gates side by side, (B, L, 3E), any of the float types.
            state: (B, E) float32.
            weight: Scale of the norm of the output gate, (E,).
            eps: Epsilon of that norm.
            lower_bound: Of the forget gate, (E,), or None.
            valid: Booleans (B, L), or None.

        Returns:
            The output (B, L, E) in the dtype of the gates and the last state (B, E).)");

  m.def(
      "define_mlgru_step",
      [](std::function<std::vector<mx::array>(const std::vector<mx::array>&, float, bool, bool)>
             definition) {
        MlgruStep::define([definition = std::move(definition)](const std::vector<mx::array>& inputs,
                                                               const auto& o) {
          return definition(inputs, o.eps, o.has_lower_bound, o.has_valid);
        });
      },
      "definition"_a,
      R"(Takes what gradients and batched forms are computed with.

        Args:
            definition: Called with the arrays of a call, then `eps` and whether `lower_bound` and
                `valid` are among them.)");
}

}  // namespace mmfree
