#include <nanobind/nanobind.h>

#include "dense_matmul/dense_matmul.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_dense_matmul(nb::module_& m) {
  m.def("dense_matmul", &dense_matmul, "x"_a, "weight"_a,
        R"(Product with a matrix of floats, x W^T.

        Args:
            x: Activations, float32 (..., D).
            weight: float32, float16 or bfloat16 (N, D).

        Returns:
            float32 (..., N).)");

  m.def("quantized_matmul", &quantized_matmul, "x"_a, "weight"_a, "scales"_a, "biases"_a, "bits"_a,
        R"(Product with a matrix in MLX's affine form, x W^T. Activations are rounded to 16 bits.

        Args:
            x: Activations, float32 (..., D).
            weight: Codes of 2, 4, 6 or 8 bits, uint32 (N, D * bits / 32).
            scales: float32, float16 or bfloat16 (N, D / 32), (N, D / 64) or (N, D / 128).
            biases: As the scales.
            bits: Of each code.

        Returns:
            float32 (..., N).)");
}

}  // namespace mmfree
