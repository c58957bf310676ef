#include "dense_matmul/dense_matmul.h"

#include "dense_matmul/product.h"
#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/float_type.h"

namespace mmfree {

namespace {

void check_floats(const mx::array& x, const mx::array& weight) {
  require(is_float(weight), "[dense_matmul] 'weight' must be float32, float16 or bfloat16.");
  require(x.dtype() == mx::float32 && x.ndim() >= 1 && weight.ndim() == 2 &&
              x.shape(-1) == weight.shape(1),
          "[dense_matmul] 'x' must be float32 (..., D) and 'weight' (N, D).");
}

void check_codes(const mx::array& x, const mx::array& weight, const mx::array& scales,
                 const mx::array& biases, int bits) {
  require(is_float(scales), "[dense_matmul] 'scales' must be float32, float16 or bfloat16.");
  require(
      x.dtype() == mx::float32 && weight.dtype() == mx::uint32 && x.ndim() >= 1 &&
          weight.ndim() == 2 && scales.ndim() == 2 && scales.shape() == biases.shape() &&
          scales.dtype() == biases.dtype(),
      "[dense_matmul] 'x' must be float32 (..., D), 'weight' a uint32 matrix, and 'biases' like "
      "'scales'.");
  const int dims = x.shape(-1), groups = scales.shape(1);
  const int group = groups > 0 ? dims / groups : 0;
  require((bits == 1 || bits == 2 || bits == 4 || bits == 6 || bits == 8) &&
              (group == 32 || group == 64 || group == 128) && groups * group == dims &&
              weight.shape(1) == dims / 32 * bits && weight.shape(0) == scales.shape(0),
          "[dense_matmul] 'weight' must be (N, D * bits / 32) with 1, 2, 4, 6 or 8 bits, and "
          "'scales' "
          "(N, D / group) with groups of 32, 64 or 128.");
}

QuantizedMatrix quantized(const mx::array& codes, const mx::array& scales, const mx::array& biases,
                          size_t dims, int bits) {
  return {codes.data<uint8_t>(),
          scales.data<void>(),
          biases.data<void>(),
          float_type(scales.dtype()),
          static_cast<size_t>(codes.shape(0)),
          dims / scales.shape(1),
          bits};
}

mx::array transposed(const mx::array& dy, const Arrays& primals, int dims, int bits,
                     mx::Stream stream) {
  return DenseMatmulTransposed::call({dy, primals[1], primals[2], primals[3]}, {dims, bits},
                                     stream)[0];
}

void require_rows_alone(const std::vector<int>& argnums) {
  for (int argnum : argnums) {
    require(argnum == 0, "[dense_matmul] the gradient has a gradient by the rows alone.");
  }
}

}  // namespace

mx::array dense_matmul(const mx::array& x, const mx::array& weight,
                       const std::optional<mx::array>& scales,
                       const std::optional<mx::array>& biases, int bits, bool rounds) {
  require(!rounds || bits == 1 || bits == 2,
          "[dense_matmul] 'rounds' must be false but for codes of 1 or 2 bits.");
  require(scales.has_value() == biases.has_value() && scales.has_value() == (bits != 0),
          "[dense_matmul] 'scales', 'biases' and 'bits' come together.");
  if (scales) {
    check_codes(x, weight, *scales, *biases, bits);
  } else {
    check_floats(x, weight);
  }
  return DenseMatmul::call({x, weight, scales, biases}, {bits, rounds})[0];
}

void DenseMatmul::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  const auto data = [&](size_t input) { return contiguous(inputs[input], stream()); };
  const auto input = data(0), matrix = data(1);
  const float* x = input.data<float>();
  const size_t dims = input.shape(-1), count = matrix.shape(0);
  const size_t rows = count == 0 ? 0 : outputs[0].size() / count;
  float* y = outputs[0].data<float>();
  if (options_.bits == 0) {
    const FloatMatrix weight{matrix.data<void>(), float_type(matrix.dtype()), count};
    dispatch([=]() { dense_product(x, rows, dims, weight, y); });
    return;
  }
  const auto weight = quantized(matrix, data(2), data(3), dims, options_.bits);
  dispatch(
      [=, rounds = options_.rounds]() { quantized_product(x, rows, dims, weight, rounds, y); });
}

Arrays DenseMatmul::vjp(const Arrays& primals, const Arrays& cotangents,
                        const std::vector<int>& argnums, const Arrays& outputs) {
  const bool is_by_x = argnums == std::vector<int>{0};
  if (is_by_x && (options_.bits == 1 || options_.bits == 2)) {
    return {transposed(cotangents[0], primals, primals[0].shape(-1), options_.bits, stream())};
  }
  return Defined::vjp(primals, cotangents, argnums, outputs);
}

OutputForms DenseMatmul::output_forms(const Arguments& arguments) const {
  auto shape = arguments[0]->shape();
  shape.back() = arguments[1]->shape(0);
  return {{shape}, {mx::float32}};
}

void DenseMatmulTransposed::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  const auto data = [&](size_t input) { return contiguous(inputs[input], stream()); };
  const auto dy = data(0), codes = data(1), scales = data(2), biases = data(3);
  const size_t dims = options_.dims, rows = outputs[0].size() / dims;
  const auto weight = quantized(codes, scales, biases, dims, options_.bits);
  dispatch([=, dy = dy.data<float>(), dx = outputs[0].data<float>()]() {
    quantized_transposed(dy, rows, dims, weight, dx);
  });
}

Arrays DenseMatmulTransposed::jvp(const Arrays& primals, const Arrays& tangents,
                                  const std::vector<int>& argnums) {
  require_rows_alone(argnums);
  return {transposed(tangents[0], primals, options_.dims, options_.bits, stream())};
}

Arrays DenseMatmulTransposed::vjp(const Arrays& primals, const Arrays& cotangents,
                                  const std::vector<int>& argnums, const Arrays&) {
  require_rows_alone(argnums);
  return DenseMatmul::call({cotangents[0], primals[1], primals[2], primals[3]},
                           {options_.bits, false}, stream());
}

OutputForms DenseMatmulTransposed::output_forms(const Arguments& arguments) const {
  auto shape = arguments[0]->shape();
  shape.back() = options_.dims;
  return {{shape}, {mx::float32}};
}

}  // namespace mmfree
