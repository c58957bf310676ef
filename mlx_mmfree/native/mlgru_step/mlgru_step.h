#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "runtime/defined.h"

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
class MlgruStep : public Defined<MlgruOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override;
  std::vector<mx::Shape> output_shapes(const std::vector<mx::array>& inputs) override;
  DEFINE_NAME(MlgruStep)
};

}  // namespace mmfree
