#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// y = x W^T with x (..., D) and y (..., N), both float32. W (N, D) holds floats of any type. With
// scales and biases, (N, D / group) of any float type, W is in MLX's affine form and holds codes
// (N, D * bits / 32) uint32.
mx::array dense_matmul(const mx::array& x, const mx::array& weight,
                       const std::optional<mx::array>& scales,
                       const std::optional<mx::array>& biases, int bits);

struct DenseMatmulOptions {
  int bits;  // of each code; 0 where W is floats

  bool operator==(const DenseMatmulOptions&) const = default;
  auto values() const {
    return std::tuple(bits);
  }
};

// The arguments are x, W, scales and biases.
class DenseMatmul : public Defined<DenseMatmul, DenseMatmulOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(DenseMatmul)
};

}  // namespace mmfree
