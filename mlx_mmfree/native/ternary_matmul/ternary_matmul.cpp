#include "ternary_matmul/ternary_matmul.h"

#include <functional>
#include <memory>
#include <stdexcept>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/ops.h"
#include "mlx/utils.h"
#include "ternary_matmul/product.h"

namespace mmfree {

namespace {

using Arrays = std::vector<mx::array>;
using Shapes = std::vector<mx::Shape>;

mx::Shape with_last(mx::Shape shape, int last) {
  shape.back() = last;
  return shape;
}

PackedMatrix packed(const mx::array& weight) {
  return {reinterpret_cast<const uint8_t*>(weight.data<uint32_t>()),
          static_cast<size_t>(weight.shape(0)), 4 * static_cast<size_t>(weight.shape(1))};
}

size_t row_count(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : x.size() / x.shape(-1);
}

mx::array make(std::shared_ptr<mx::Primitive> primitive, const mx::array& x,
               const mx::array& weight) {
  auto stream = primitive->stream();
  auto shape = primitive->output_shapes({x, weight})[0];
  return mx::array(std::move(shape), mx::float32, std::move(primitive),
                   {mx::contiguous(x, false, stream), mx::contiguous(weight, false, stream)});
}

mx::array multiply(const mx::array& x, const mx::array& weight, bool codes, mx::Stream stream) {
  return make(std::make_shared<TernaryMatmul>(stream, codes), x, weight);
}

mx::array multiply_transposed(const mx::array& dy, const mx::array& weight, int dims,
                              mx::Stream stream) {
  return make(std::make_shared<TernaryMatmulTransposed>(stream, dims), dy, weight);
}

[[noreturn]] void refuse_gpu() {
  throw std::runtime_error("[ternary_matmul] the native backend runs on the CPU only.");
}

void refuse_weight(const std::vector<int>& argnums) {
  for (int argnum : argnums) {
    if (argnum != 0) {
      throw std::invalid_argument("[ternary_matmul] packed trits have no gradient.");
    }
  }
}

// A mapped axis of x becomes its first one; a mapped weight is one product for each matrix.
std::pair<Arrays, std::vector<int>> mapped(
    const Arrays& inputs, const std::vector<int>& axes, mx::Stream stream,
    const std::function<mx::array(const mx::array&, const mx::array&)>& call) {
  const auto x = axes[0] > 0 ? mx::moveaxis(inputs[0], axes[0], 0, stream) : inputs[0];
  if (axes[1] < 0) {
    return {{call(x, inputs[1])}, {0}};
  }
  Arrays results;
  for (int k = 0; k < inputs[1].shape(axes[1]); ++k) {
    const auto weight = mx::take(inputs[1], k, axes[1], stream);
    results.push_back(call(axes[0] < 0 ? x : mx::take(x, k, 0, stream), weight));
  }
  return {{mx::stack(results, 0, stream)}, {0}};
}

}  // namespace

mx::array ternary_matmul(const mx::array& x, const mx::array& weight, bool codes) {
  if (x.dtype() != mx::float32 || weight.dtype() != mx::uint32) {
    throw std::invalid_argument("[ternary_matmul] 'x' must be float32 and 'weight' uint32.");
  }
  if (x.ndim() < 1 || weight.ndim() != 2 || weight.shape(1) != packed_words(x.shape(-1))) {
    throw std::invalid_argument(
        "[ternary_matmul] 'x' must be (..., D) and 'weight' (N, D / 16), padded.");
  }
  if (codes && x.shape(-1) > kMostCodes) {
    throw std::invalid_argument("[ternary_matmul] 'x' must have 4194304 inputs at most.");
  }
  return multiply(x, weight, codes, mx::to_stream({}));
}

void TernaryMatmul::eval_cpu(const Arrays& inputs, mx::array& output) {
  output.set_data(mx::allocator::malloc(output.nbytes()));
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch([codes = codes_, x = inputs[0].data<float>(), rows = row_count(output),
                    dims = static_cast<size_t>(inputs[0].shape(-1)), weight = packed(inputs[1]),
                    y = output.data<float>()]() {
    (codes ? code_product : float_product)(x, rows, dims, weight, y);
  });
}

void TernaryMatmul::eval_gpu(const Arrays&, mx::array&) {
  refuse_gpu();
}

Arrays TernaryMatmul::jvp(const Arrays& primals, const Arrays& tangents,
                          const std::vector<int>& argnums) {
  refuse_weight(argnums);
  return {multiply(tangents[0], primals[1], false, stream())};
}

Arrays TernaryMatmul::vjp(const Arrays& primals, const Arrays& cotangents,
                          const std::vector<int>& argnums, const Arrays&) {
  refuse_weight(argnums);
  return {multiply_transposed(cotangents[0], primals[1], primals[0].shape(-1), stream())};
}

std::pair<Arrays, std::vector<int>> TernaryMatmul::vmap(const Arrays& inputs,
                                                        const std::vector<int>& axes) {
  return mapped(inputs, axes, stream(), [this](const mx::array& x, const mx::array& weight) {
    return multiply(x, weight, codes_, stream());
  });
}

Shapes TernaryMatmul::output_shapes(const Arrays& inputs) {
  return {with_last(inputs[0].shape(), inputs[1].shape(0))};
}

bool TernaryMatmul::is_equivalent(const mx::Primitive& other) const {
  return codes_ == static_cast<const TernaryMatmul&>(other).codes_;
}

void TernaryMatmulTransposed::eval_cpu(const Arrays& inputs, mx::array& output) {
  output.set_data(mx::allocator::malloc(output.nbytes()));
  auto& encoder = mx::cpu::get_command_encoder(stream());
  encoder.dispatch(
      [dy = inputs[0].data<float>(), rows = row_count(output), dims = static_cast<size_t>(dims_),
       weight = packed(inputs[1]),
       dx = output.data<float>()]() { transposed_product(dy, rows, dims, weight, dx); });
}

void TernaryMatmulTransposed::eval_gpu(const Arrays&, mx::array&) {
  refuse_gpu();
}

Arrays TernaryMatmulTransposed::jvp(const Arrays& primals, const Arrays& tangents,
                                    const std::vector<int>& argnums) {
  refuse_weight(argnums);
  return {multiply_transposed(tangents[0], primals[1], dims_, stream())};
}

Arrays TernaryMatmulTransposed::vjp(const Arrays& primals, const Arrays& cotangents,
                                    const std::vector<int>& argnums, const Arrays&) {
  refuse_weight(argnums);
  return {multiply(cotangents[0], primals[1], false, stream())};
}

std::pair<Arrays, std::vector<int>> TernaryMatmulTransposed::vmap(const Arrays& inputs,
                                                                  const std::vector<int>& axes) {
  return mapped(inputs, axes, stream(), [this](const mx::array& dy, const mx::array& weight) {
    return multiply_transposed(dy, weight, dims_, stream());
  });
}

Shapes TernaryMatmulTransposed::output_shapes(const Arrays& inputs) {
  return {with_last(inputs[0].shape(), dims_)};
}

bool TernaryMatmulTransposed::is_equivalent(const mx::Primitive& other) const {
  return dims_ == static_cast<const TernaryMatmulTransposed&>(other).dims_;
}

}  // namespace mmfree
