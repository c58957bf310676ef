#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mmfree {

namespace mx = mlx::core;

// Inputs whose sums of codes fit 32 bits with every instruction set, the way there included.
constexpr int kMostCodes = 1 << 22;

// Words of a packed row: rows are padded to whole pairs of words.
inline int64_t packed_words(int dims) {
  return (static_cast<int64_t>(dims) + 31) / 32 * 2;
}

// y = x T^T of x (..., D) float32 and packed trits (N, padded D / 16) uint32: (..., N) float32.
// With `codes`, x holds whole numbers in [-128, 127]; a row of anything else gives NaN.
mx::array ternary_matmul(const mx::array& x, const mx::array& weight, bool codes);

class TernaryMatmul : public mx::UnaryPrimitive {
 public:
  TernaryMatmul(mx::Stream stream, bool codes) : UnaryPrimitive(stream), codes_(codes) {
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  DEFINE_NAME(TernaryMatmul)

 private:
  bool codes_;
};

// dx = dy T of dy (..., N) float32: (..., D) float32.
class TernaryMatmulTransposed : public mx::UnaryPrimitive {
 public:
  TernaryMatmulTransposed(mx::Stream stream, int dims) : UnaryPrimitive(stream), dims_(dims) {
  }

  void eval_cpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  void eval_gpu(const std::vector<mx::array>& inputs, mx::array& output) override;
  std::vector<mx::array> jvp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& tangents,
                             const std::vector<int>& argnums) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  DEFINE_NAME(TernaryMatmulTransposed)

 private:
  int dims_;
};

}  // namespace mmfree
