#include "ternary_matmul/ternary_matmul.h"

#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "ternary_matmul/product.h"

namespace mmfree {

namespace {

mx::Shape with_last(mx::Shape shape, int last) {
  shape.back() = last;
  return shape;
}

PackedMatrix packed(const mx::array& weight) {
  return {weight.data<uint8_t>(), static_cast<size_t>(weight.shape(0)),
          4 * static_cast<size_t>(weight.shape(1))};
}

size_t row_count(const mx::array& x) {
  return x.shape(-1) == 0 ? 0 : x.size() / x.shape(-1);
}

mx::array multiply(const mx::array& x, const mx::array& weight, bool codes, mx::Stream stream) {
  return TernaryMatmul::call({x, weight}, {codes}, stream)[0];
}

mx::array multiply_transposed(const mx::array& dy, const mx::array& weight, int dims,
                              mx::Stream stream) {
  return TernaryMatmulTransposed::call({dy, weight}, {dims}, stream)[0];
}

void refuse_weight(const std::vector<int>& argnums) {
  for (int argnum : argnums) {
    require(argnum == 0, "[ternary_matmul] packed trits have no gradient.");
  }
}

}  // namespace

mx::array ternary_matmul(const mx::array& x, const mx::array& weight, bool codes) {
  require(x.dtype() == mx::float32 && weight.dtype() == mx::uint32,
          "[ternary_matmul] 'x' must be float32 and 'weight' uint32. A matrix of uint8 with five "
          "trits a byte is a form of files, which load_model unpacks to uint32.");
  require(x.ndim() >= 1 && weight.ndim() == 2 && weight.shape(1) == packed_words(x.shape(-1)),
          "[ternary_matmul] 'x' must be (..., D) and 'weight' (N, D / 16), padded.");
  require(!codes || x.shape(-1) <= kMostCodes,
          "[ternary_matmul] 'x' must have 4194304 inputs at most.");
  return multiply(x, weight, codes, mx::to_stream({}));
}

void TernaryMatmul::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  const auto x = contiguous(inputs[0], stream()), weight = contiguous(inputs[1], stream());
  dispatch([codes = options_.codes, x = x.data<float>(), rows = row_count(outputs[0]),
            dims = static_cast<size_t>(x.shape(-1)), weight = packed(weight),
            y = outputs[0].data<float>()]() {
    (codes ? code_product : float_product)(x, rows, dims, weight, y);
  });
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

OutputForms TernaryMatmul::output_forms(const Arguments& arguments) const {
  return {{with_last(arguments[0]->shape(), arguments[1]->shape(0))}, {mx::float32}};
}

void TernaryMatmulTransposed::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  const auto dy = contiguous(inputs[0], stream()), weight = contiguous(inputs[1], stream());
  dispatch(
      [dy = dy.data<float>(), rows = row_count(outputs[0]),
       dims = static_cast<size_t>(options_.dims), weight = packed(weight),
       dx = outputs[0].data<float>()]() { transposed_products({{dy, rows, weight, dx, dims}}); });
}

Arrays TernaryMatmulTransposed::jvp(const Arrays& primals, const Arrays& tangents,
                                    const std::vector<int>& argnums) {
  refuse_weight(argnums);
  return {multiply_transposed(tangents[0], primals[1], options_.dims, stream())};
}

Arrays TernaryMatmulTransposed::vjp(const Arrays& primals, const Arrays& cotangents,
                                    const std::vector<int>& argnums, const Arrays&) {
  refuse_weight(argnums);
  return {multiply(cotangents[0], primals[1], false, stream())};
}

OutputForms TernaryMatmulTransposed::output_forms(const Arguments& arguments) const {
  return {{with_last(arguments[0]->shape(), options_.dims)}, {mx::float32}};
}

}  // namespace mmfree
