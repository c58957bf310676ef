#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// y = x W^T with x (..., D) and y (..., N), both float32. W (N, D) holds floats of any type. With
// scales and biases, (N, D / group) of any float type, W is in MLX's affine form and holds codes
// (N, D * bits / 32) uint32. With `rounds`, for 1 or 2 bits, activations are rounded to 8 bits.
mx::array dense_matmul(const mx::array& x, const mx::array& weight,
                       const std::optional<mx::array>& scales,
                       const std::optional<mx::array>& biases, int bits, bool rounds);

struct DenseMatmulOptions {
  int bits;     // of each code; 0 where W is floats
  bool rounds;  // activations, to 8 bits in each 32 inputs

  bool operator==(const DenseMatmulOptions&) const = default;
  auto values() const {
    return std::tuple(bits, rounds);
  }
};

// The arguments are x, W, scales and biases. The gradient by x has a kernel of its own for codes of
// 1 or 2 bits, because the definition writes the weights out as floats. It is that without
// rounding.
class DenseMatmul : public Defined<DenseMatmul, DenseMatmulOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(DenseMatmul)
};

struct DenseTransposedOptions {
  int dims;  // D, of the result
  int bits;

  bool operator==(const DenseTransposedOptions&) const = default;
};

// dx = dy W with dy (..., N) and dx (..., D), both float32. The arguments are dy, the codes, scales
// and biases.
class DenseMatmulTransposed : public Operation<DenseMatmulTransposed, DenseTransposedOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays jvp(const Arrays& primals, const Arrays& tangents,
             const std::vector<int>& argnums) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(DenseMatmulTransposed)
};

}  // namespace mmfree
