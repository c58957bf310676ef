#include <nanobind/nanobind.h>

#include "cross_entropy/cross_entropy.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_cross_entropy(nb::module_& m) {
  m.def("cross_entropy", &cross_entropy, "logits"_a, "targets"_a,
        R"(Computes the negative log-likelihood of each target.

        Args:
            logits: (..., V), float32, float16 or bfloat16.
            targets: int32 (...). Those below 0 count from the end.

        Returns:
            float32 (...), NaN for a target that is no class.

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<CrossEntropyGradient>(m, "define_cross_entropy");
}

}  // namespace mmfree
