#pragma once

#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mmfree {

namespace mx = mlx::core;

// s_t = f_t * s_{t-1} + i_t, one multiply and one add per element.
// f, i: (B, L, D), s0: (B, D), float32. Returns all states (B, L, D) and the last one (B, D).
std::pair<mx::array, mx::array> linear_scan(const mx::array& f, const mx::array& i,
                                            const mx::array& s0);

class LinearScan : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  DEFINE_NAME(LinearScan)
  DEFINE_DEFAULT_IS_EQUIVALENT()
};

// Inputs f, s0, states, d_states, d_final; outputs d_f, d_i (B, L, D) and d_s0 (B, D).
class LinearScanGradient : public mx::Primitive {
 public:
  using Primitive::Primitive;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  DEFINE_NAME(LinearScanGradient)
  DEFINE_DEFAULT_IS_EQUIVALENT()
};

}  // namespace mmfree
