#pragma once

#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mmfree {

namespace mx = mlx::core;

// y = x W^T of x (..., D) float32 and W (N, D) of any float type: (..., N) float32.
mx::array dense_matmul(const mx::array& x, const mx::array& weight);

// The same for W in MLX's affine form: codes (N, D * bits / 32) uint32, scales and biases
// (N, D / group) of any float type.
mx::array quantized_matmul(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& biases, int bits);

// Inputs: x and W, or x, codes, scales and biases.
class DenseMatmul : public mx::UnaryPrimitive {
 public:
  DenseMatmul(mx::Stream stream, int bits) : UnaryPrimitive(stream), bits_(bits) {
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  DEFINE_NAME(DenseMatmul)

 private:
  // of each code; 0 where W is floats
  int bits_;
};

}  // namespace mmfree
