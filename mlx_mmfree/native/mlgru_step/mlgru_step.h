#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mmfree {

namespace mx = mlx::core;

struct MlgruOptions {
  float eps;
  bool has_lower_bound, has_valid;

  bool operator==(const MlgruOptions&) const = default;
};

// f = b + (1 - b) sigmoid(f'), h_t = f h_{t-1} + silu(i') (1 - f), y = RMSNorm(g) silu(h) of gates
// i', f', g (B, L, 3 E) of any float type, the state (B, E) float32, the norm's weight (E,), b (E,)
// and valid (B, L) bool. Computed in float32. Returns y (B, L, E) in the dtype of the gates and the
// last state (B, E) float32.
std::pair<mx::array, mx::array> mlgru_step(const mx::array& gates, const mx::array& state,
                                           const mx::array& weight, float eps,
                                           const std::optional<mx::array>& lower_bound,
                                           const std::optional<mx::array>& valid);

// Inputs: gates, state, weight, then the lower bound and valid where there are such.
class MlgruStep : public mx::Primitive {
 public:
  MlgruStep(mx::Stream stream, const MlgruOptions& options) : Primitive(stream), options_(options) {
  }

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  void eval_gpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::array> vjp(const std::vector<mx::array>& primals,
                             const std::vector<mx::array>& cotangents,
                             const std::vector<int>& argnums,
                             const std::vector<mx::array>& outputs) override;
  std::pair<std::vector<mx::array>, std::vector<int>> vmap(const std::vector<mx::array>& inputs,
                                                           const std::vector<int>& axes) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  bool is_equivalent(const mx::Primitive& other) const override;
  DEFINE_NAME(MlgruStep)

 private:
  MlgruOptions options_;
};

}  // namespace mmfree
