#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// x / sqrt(mean(x^2) + eps) * weight for floats (..., D) and a weight of floats (D,). Computed in
// float32; the result has the dtype of x.
mx::array rms_norm(const mx::array& x, const std::optional<mx::array>& weight, float eps);

struct RmsNormOptions {
  float eps;

  bool operator==(const RmsNormOptions&) const = default;
  auto values() const {
    return std::tuple(eps);
  }
};

// The arguments are x and the weight.
class RmsNorm : public Operation<RmsNorm, RmsNormOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(RmsNorm)
};

// The arguments are x, the weight, the gradient of the result and float32 (..., 1) by which the
// result was multiplied, or none. Returns the gradients of x, in its dtype, and of the weight,
// float32 (D,). Its own gradient is that of the definition.
class RmsNormGradient : public Defined<RmsNormGradient, RmsNormOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(RmsNormGradient)
};

}  // namespace mmfree
