#pragma once

#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// y = x / sqrt(mean(x^2) + eps) * weight, or y = x without eps, and s = 127 / max(max |y|, 1e-5). x
// (..., D) has any float type, and the weight is float32 (D,). Returns round(y s), float32 (...,
// D), and s, float32 (..., 1).
std::pair<mx::array, mx::array> rms_norm_quantize(const mx::array& x,
                                                  const std::optional<mx::array>& weight,
                                                  std::optional<float> eps, bool half_away);

// Codes divided by their scale, float32 (..., D). They have no gradient.
mx::array rms_norm_round(const mx::array& x, const std::optional<mx::array>& weight,
                         std::optional<float> eps, bool half_away);

struct RmsNormQuantizeOptions {
  std::optional<float> eps;
  bool half_away;

  bool operator==(const RmsNormQuantizeOptions&) const = default;
  auto values() const {
    return std::tuple(eps, half_away);
  }
};

// The arguments are x and the weight. The gradient is that of the norm, times the scale.
class RmsNormQuantize : public Operation<RmsNormQuantize, RmsNormQuantizeOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(RmsNormQuantize)
};

// The arguments are x and the weight.
class RmsNormRound : public Operation<RmsNormRound, RmsNormQuantizeOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(RmsNormRound)
};

}  // namespace mmfree
