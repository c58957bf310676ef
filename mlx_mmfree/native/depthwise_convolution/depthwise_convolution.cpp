#include "depthwise_convolution/depthwise_convolution.h"

#include <algorithm>

#include "depthwise_convolution/convolve.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"

namespace mmfree {

namespace {

size_t size_at(const mx::array& x, int axis) {
  return static_cast<size_t>(x.shape(axis));
}

// The call that computes the result, of which only the target is missing.
DepthwiseCall call_of(const mx::array& x, const mx::array& weight, const mx::array& y,
                      mx::Stream stream) {
  return {size_at(x, 0),
          size_at(x, 3),
          size_at(weight, 1),
          1,
          false,
          size_at(x, 1),
          size_at(x, 2),
          size_at(y, 1),
          size_at(y, 2),
          floats_of(x, stream),
          nullptr,
          nullptr,
          nullptr,
          FloatType::float32};
}

}  // namespace

mx::array depthwise_convolution(const mx::array& x, const mx::array& weight,
                                const std::optional<mx::array>& bias, int stride) {
  require(x.ndim() == 4 && x.shape(3) > 0 && is_float(x),
          "[depthwise_convolution] 'x' must be floats (B, H, W, D) with D > 0.");
  const int dims = x.shape(3), side = weight.ndim() == 4 ? weight.shape(1) : 0;
  require(side % 2 == 1 && weight.shape() == mx::Shape{dims, side, side, 1} && is_float(weight),
          "[depthwise_convolution] 'weight' must be floats (D, k, k, 1) with k odd.");
  require(!bias || (bias->shape() == mx::Shape{dims} && is_float(*bias)),
          "[depthwise_convolution] 'bias' must be floats (D,).");
  require(stride > 0, "[depthwise_convolution] 'stride' must be positive.");
  return DepthwiseConvolution::call({x, weight, bias}, {stride})[0];
}

void DepthwiseConvolution::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  mx::array& y = outputs[0];
  y.set_data(mx::allocator::malloc(y.nbytes()));
  const auto given = arguments(inputs);
  auto call = call_of(*given[0], *given[1], y, stream());
  call.stride = options_.stride;
  call.target = y.data<void>();
  call.type = float_type(y.dtype());
  dispatch([call, weight = floats_of(given[1], stream()), bias = floats_of(given[2], stream())]() {
    convolve(call, weight, bias);
  });
}

Arrays DepthwiseConvolution::vjp(const Arrays& primals, const Arrays& cotangents,
                                 const std::vector<int>& argnums, const Arrays& outputs) {
  const bool wants_x = std::ranges::find(argnums, 0) != argnums.end();
  const bool wants_weight = std::ranges::any_of(argnums, [](int n) { return n > 0; });
  const auto gradients = DepthwiseConvolutionGradient::call(
      {primals[0], primals[1], cotangents[0]}, {options_.stride, wants_x, wants_weight}, stream());
  Arrays wanted;
  for (int argnum : argnums) {
    const auto& gradient = gradients[argnum - (wants_x ? 0 : 1)];
    wanted.push_back(mx::astype(gradient, primals[argnum].dtype(), stream()));
  }
  return wanted;
}

OutputForms DepthwiseConvolution::output_forms(const Arguments& arguments) const {
  auto shape = arguments[0]->shape();
  for (int axis : {1, 2}) {
    shape[axis] = (shape[axis] + options_.stride - 1) / options_.stride;
  }
  return {{shape}, {arguments[0]->dtype()}};
}

void DepthwiseConvolutionGradient::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  for (auto& output : outputs) {
    output.set_data(mx::allocator::malloc(output.nbytes()));
  }
  const auto &x = inputs[0], &weight = inputs[1], &d_y = inputs[2];
  if (options_.wants_x) {
    // the map takes the place of the result
    auto call = call_of(d_y, weight, x, stream());
    call.stride = options_.stride;
    call.is_gradient = true;
    call.target = outputs[0].data<void>();
    call.type = float_type(x.dtype());
    dispatch([call, weight = floats_of(weight, stream())]() {
      convolve(call, weight, {nullptr, FloatType::float32});
    });
  }
  if (options_.wants_weight) {
    const size_t first = options_.wants_x ? 1 : 0;
    const DepthwiseWeightCall call{size_at(x, 0),
                                   size_at(x, 3),
                                   size_at(weight, 1),
                                   static_cast<size_t>(options_.stride),
                                   size_at(x, 1),
                                   size_at(x, 2),
                                   size_at(d_y, 1),
                                   size_at(d_y, 2),
                                   floats_of(x, stream()),
                                   floats_of(d_y, stream()),
                                   0,
                                   nullptr};
    dispatch([call, d_weight = outputs[first].data<float>(),
              d_bias = outputs[first + 1].data<float>()]() {
      sum_weight_gradients(call, d_weight, d_bias);
    });
  }
}

OutputForms DepthwiseConvolutionGradient::output_forms(const Arguments& arguments) const {
  const auto &x = *arguments[0], &weight = *arguments[1];
  OutputForms forms;
  if (options_.wants_x) {
    forms = {{x.shape()}, {x.dtype()}};
  }
  if (options_.wants_weight) {
    forms.shapes.insert(forms.shapes.end(), {weight.shape(), {x.shape(3)}});
    forms.dtypes.insert(forms.dtypes.end(), 2, mx::float32);
  }
  return forms;
}

}  // namespace mmfree
