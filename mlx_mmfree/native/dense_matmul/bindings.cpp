#include <nanobind/nanobind.h>

#include "dense_matmul/dense_matmul.h"
#include "runtime/bind_definition.h"

namespace mmfree {

namespace nb = nanobind;
using namespace nb::literals;

void bind_dense_matmul(nb::module_& m) {
  m.def("dense_matmul", &dense_matmul, "x"_a, "weight"_a, "scales"_a.none(), "biases"_a.none(),
        "bits"_a, "rounds"_a = false,
        R"(Multiplies by a matrix of floats or of codes, x W^T.

        With codes, activations are whole numbers of 32 bits for each group, which keep what a float
        holds beside the largest of its group. With `rounds` they are inexact.

        Args:
            x: Activations, float32 (..., D).
            weight: Floats (N, D), float32, float16 or bfloat16; with scales, codes of 1, 2, 4, 6
                or 8 bits in MLX's affine form, uint32 (N, D * bits / 32).
            scales: (N, D / 32), (N, D / 64) or (N, D / 128), float32, float16 or bfloat16, or None.
            biases: Like the scales, and None where they are.
            bits: Bits of a code, or 0 for floats.
            rounds: Whether activations are rounded to 8 bits with a scale for each 32 inputs, for
                codes of 1 or 2 bits.

        Returns:
            The products, float32 (..., N).

        Raises:
            ValueError: A shape or dtype does not fit.)");

  bind_definition<DenseMatmul>(m, "define_dense_matmul");
}

}  // namespace mmfree
