#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "mlx/array.h"
#include "mlx/primitives.h"

namespace mmfree {

namespace mx = mlx::core;

// y = x / sqrt(mean(x^2) + eps) * weight, or x without eps; s = 127 / max(max |y|, 1e-5). Returns
// round(y s), float32 (..., D), and s, float32 (..., 1), for x (..., D) of any float type and
// weight (D,) float32. The gradient of the codes is that of y s, s held constant.
std::pair<mx::array, mx::array> rms_norm_quantize(const mx::array& x,
                                                  const std::optional<mx::array>& weight,
                                                  std::optional<float> eps, bool half_away);

class RmsNormQuantize : public mx::Primitive {
 public:
  RmsNormQuantize(mx::Stream stream, std::optional<float> eps, bool half_away)
      : Primitive(stream), eps_(eps), half_away_(half_away) {
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
  DEFINE_NAME(RmsNormQuantize)

 private:
  std::optional<float> eps_;
  bool half_away_;
};

}  // namespace mmfree
