#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "mlgru_step/mlgru_step.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_mlgru_step(nb::module_& m) {
  m.def("mlgru_step", &mlgru_step, "gates"_a, "state"_a, "weight"_a, "eps"_a,
        "lower_bound"_a.none(), "valid"_a.none(),
        R"(Gates, recurrence and gated output of MLGRU.

        Args:
            gates: Input, forget and output gates side by side, (B, L, 3E), of any float dtype.
            state: The state before the first position, float32 (B, E).
            weight: Scale of the norm of the output gate, (E,).
            eps: Epsilon of that norm.
            lower_bound: The least that a forget gate can be, (E,), or None for 0.
            valid: Booleans (B, L), or None. Where one is false, the state stays as it is.

        Returns:
            The output (B, L, E) in the dtype of the gates and the last state, float32 (B, E).

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<MlgruStep>(m, "define_mlgru_step");
}

}  // namespace mmfree
