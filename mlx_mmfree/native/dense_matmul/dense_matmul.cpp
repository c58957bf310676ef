#include "dense_matmul/dense_matmul.h"

#include <memory>
#include <stdexcept>

#include "dense_matmul/product.h"
#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/utils.h"

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;

FloatType float_type(const mx::array& array) {
  if (array.dtype() == mx::float32) {
    return FloatType::float32;
  }
  if (array.dtype() == mx::float16) {
    return FloatType::float16;
  }
  if (array.dtype() == mx::bfloat16) {
    return FloatType::bfloat16;
  }
  throw std::invalid_argument(
      "[dense_matmul] 'weight' and 'scales' must be float32, float16 or bfloat16.");
}

size_t row_count(const mx::array& output) {
  return output.shape(-1) == 0 ? 0 : output.size() / output.shape(-1);
}

mx::array make(const Arrays& inputs, int bits, mx::Stream stream) {
  auto primitive = std::make_shared<DenseMatmul>(stream, bits);
  Arrays contiguous;
  for (const auto& input : inputs) {
    contiguous.push_back(mx::contiguous(input, false, stream));
  }
  auto shape = primitive->output_shapes(inputs)[0];
  return mx::array(std::move(shape), mx::float32, std::move(primitive), std::move(contiguous));
}

}  // namespace

mx::array dense_matmul(const mx::array& x, const mx::array& weight) {
  float_type(weight);
  if (x.dtype() != mx::float32 || x.ndim() < 1 || weight.ndim() != 2 ||
      x.shape(-1) != weight.shape(1)) {
    throw std::invalid_argument("[dense_matmul] 'x' must be float32 (..., D) and 'weight' (N, D).");
  }
  return make({x, weight}, 0, mx::to_stream({}));
}

mx::array quantized_matmul(const mx::array& x, const mx::array& weight, const mx::array& scales,
                           const mx::array& biases, int bits) {
  float_type(scales);
  const bool has_dimensions = x.ndim() >= 1 && weight.ndim() == 2 && scales.ndim() == 2;
  if (x.dtype() != mx::float32 || weight.dtype() != mx::uint32 || !has_dimensions ||
      scales.shape() != biases.shape() || scales.dtype() != biases.dtype()) {
    throw std::invalid_argument(
        "[quantized_matmul] 'x' must be float32 (..., D), 'weight' a uint32 matrix, and 'biases' "
        "like 'scales'.");
  }
  const int dims = x.shape(-1), groups = scales.shape(1);
  const int group = groups > 0 ? dims / groups : 0;
  if ((bits != 2 && bits != 4 && bits != 6 && bits != 8) ||
      (group != 32 && group != 64 && group != 128) || groups * group != dims ||
      weight.shape(1) != dims / 32 * bits || weight.shape(0) != scales.shape(0)) {
    throw std::invalid_argument(
        "[quantized_matmul] 'weight' must be (N, D * bits / 32) with 2, 4, 6 or 8 bits, and "
        "'scales' (N, D / group) with groups of 32, 64 or 128.");
  }
  return make({x, weight, scales, biases}, bits, mx::to_stream({}));
}

void DenseMatmul::eval_cpu(const Arrays& inputs, mx::array& output) {
  output.set_data(mx::allocator::malloc(output.nbytes()));
  auto& encoder = mx::cpu::get_command_encoder(stream());
  const float* x = inputs[0].data<float>();
  const size_t rows = row_count(output), dims = inputs[0].shape(-1);
  const size_t outputs = inputs[1].shape(0);
  float* y = output.data<float>();
  if (bits_ == 0) {
    const FloatMatrix weight{inputs[1].data<void>(), float_type(inputs[1]), outputs};
    encoder.dispatch([=]() { dense_product(x, rows, dims, weight, y); });
    return;
  }
  const QuantizedMatrix weight{inputs[1].data<uint8_t>(),
                               inputs[2].data<void>(),
                               inputs[3].data<void>(),
                               float_type(inputs[2]),
                               outputs,
                               dims / inputs[2].shape(1),
                               bits_};
  encoder.dispatch([=]() { quantized_product(x, rows, dims, weight, y); });
}

void DenseMatmul::eval_gpu(const Arrays&, mx::array&) {
  throw std::runtime_error("[dense_matmul] the native backend runs on the CPU only.");
}

// A mapped axis of x becomes its first one.
std::pair<Arrays, std::vector<int>> DenseMatmul::vmap(const Arrays& inputs,
                                                      const std::vector<int>& axes) {
  Arrays mapped = inputs;
  for (size_t n = 1; n < axes.size(); ++n) {
    if (axes[n] >= 0) {
      throw std::invalid_argument("[dense_matmul] the weight cannot be mapped.");
    }
  }
  mapped[0] = mx::moveaxis(inputs[0], axes[0], 0, stream());
  return {{make(mapped, bits_, stream())}, {0}};
}

std::vector<mx::Shape> DenseMatmul::output_shapes(const Arrays& inputs) {
  auto shape = inputs[0].shape();
  shape.back() = inputs[1].shape(0);
  return {shape};
}

bool DenseMatmul::is_equivalent(const mx::Primitive& other) const {
  return bits_ == static_cast<const DenseMatmul&>(other).bits_;
}

}  // namespace mmfree
