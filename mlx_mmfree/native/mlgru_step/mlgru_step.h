#pragma once

#include <optional>
#include <tuple>
#include <utility>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

struct MlgruOptions {
  float eps;

  bool operator==(const MlgruOptions&) const = default;
  auto values() const {
    return std::tuple(eps);
  }
};

// f = b + (1 - b) sigmoid(f'), h_t = f h_{t-1} + silu(i') (1 - f) and y = RMSNorm(g) silu(h),
// computed in float32. The gates i', f' and g (B, L, 3 E) lie side by side and have any float type.
// The state is float32 (B, E), the weight of the norm and the lower bound b are (E,), and valid is
// bool (B, L). Returns y (B, L, E) in the dtype of the gates and the last state, float32 (B, E).
std::pair<mx::array, mx::array> mlgru_step(const mx::array& gates, const mx::array& state,
                                           const mx::array& weight, float eps,
                                           const std::optional<mx::array>& lower_bound,
                                           const std::optional<mx::array>& valid);

// The arguments are gates, state, weight, lower bound and valid.
class MlgruStep : public Defined<MlgruStep, MlgruOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(MlgruStep)
};

}  // namespace mmfree
