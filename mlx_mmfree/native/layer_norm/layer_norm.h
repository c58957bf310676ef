#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// (x - mean) / sqrt(variance + eps) * weight + bias for floats (..., D), and a weight and a bias of
// floats (D,), which may be missing. Computed in float32; the result has the dtype of x.
mx::array layer_norm(const mx::array& x, const std::optional<mx::array>& weight,
                     const std::optional<mx::array>& bias, float eps);

struct LayerNormOptions {
  float eps;

  bool operator==(const LayerNormOptions&) const = default;
  auto values() const {
    return std::tuple(eps);
  }
};

// The arguments are x, the weight and the bias.
class LayerNorm : public Operation<LayerNorm, LayerNormOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(LayerNorm)
};

// The arguments are x, the weight and the gradient of the result. Returns the gradients of x, in
// its dtype, and of the weight and the bias, float32 (D,). Its own gradient is that of the
// definition.
class LayerNormGradient : public Defined<LayerNormGradient, LayerNormOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(LayerNormGradient)
};

}  // namespace mmfree
