#pragma once

#include <optional>
#include <tuple>

#include "mlx/array.h"
#include "runtime/operation.h"

namespace mmfree {

// Each channel of x (B, H, W, D) convolved with its window of the weight (D, k, k, 1), k odd,
// around every stride-th place, with zeros beyond the map, and a bias (D,) added. All are floats;
// computed in float32, in the dtype of x.
mx::array depthwise_convolution(const mx::array& x, const mx::array& weight,
                                const std::optional<mx::array>& bias, int stride);

struct DepthwiseConvolutionOptions {
  int stride;

  bool operator==(const DepthwiseConvolutionOptions&) const = default;
  auto values() const {
    return std::tuple(stride);
  }
};

// The arguments are x, the weight and the bias.
class DepthwiseConvolution : public Operation<DepthwiseConvolution, DepthwiseConvolutionOptions> {
 public:
  using Operation::Operation;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  Arrays vjp(const Arrays& primals, const Arrays& cotangents, const std::vector<int>& argnums,
             const Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(DepthwiseConvolution)
};

struct DepthwiseGradientOptions {
  int stride;
  bool wants_x, wants_weight;

  bool operator==(const DepthwiseGradientOptions&) const = default;
  auto values() const {
    return std::tuple(stride, wants_x, wants_weight);
  }
};

// The arguments are x, the weight and the gradient of the result. Returns the gradient of x, in its
// dtype, and those of the weight and the bias, in float32, or what is wanted of them. Its own
// gradient is that of the definition.
class DepthwiseConvolutionGradient
    : public Defined<DepthwiseConvolutionGradient, DepthwiseGradientOptions> {
 public:
  using Defined::Defined;

  void eval_cpu(const Arrays& inputs, Arrays& outputs) override;
  OutputForms output_forms(const Arguments& arguments) const;
  DEFINE_NAME(DepthwiseConvolutionGradient)
};

}  // namespace mmfree
