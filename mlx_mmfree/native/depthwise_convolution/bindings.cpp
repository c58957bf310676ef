#include <nanobind/nanobind.h>

#include "depthwise_convolution/depthwise_convolution.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_depthwise_convolution(nb::module_& m) {
  m.def("depthwise_convolution", &depthwise_convolution, "x"_a, "weight"_a, "bias"_a.none(),
        "stride"_a,
        R"(Convolves each channel of a map with a window of its own.

        Args:
            x: (B, H, W, D), float32, float16 or bfloat16.
            weight: Windows, floats (D, k, k, 1), k odd.
            bias: Is added, floats (D,), or None.
            stride: Step from window to window.

        Returns:
            (B, H / stride, W / stride, D), rounded up, in the dtype of `x`.

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<DepthwiseConvolutionGradient>(m, "define_depthwise_convolution");
}

}  // namespace mmfree
