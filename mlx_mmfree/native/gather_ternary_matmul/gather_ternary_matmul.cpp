#include "gather_ternary_matmul/gather_ternary_matmul.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "runtime/contiguous.h"
#include "ternary_matmul/product.h"
#include "ternary_matmul/ternary_matmul.h"

namespace mmfree {

namespace {

struct Call {
  const float* x;
  size_t rows, input_dims, output_dims;
  const uint8_t* weight;
  size_t experts, outputs, row_bytes;
  const uint32_t* indices;
  float* y;
  bool transposed;
};

// The rows of each expert lie side by side for one product, which reads its words once.
void multiply(const Call& c) {
  std::vector<size_t> first(c.experts + 1, 0);
  for (size_t row = 0; row < c.rows; ++row) {
    if (c.indices[row] < c.experts) {
      ++first[c.indices[row] + 1];
    }
  }
  for (size_t expert = 0; expert < c.experts; ++expert) {
    first[expert + 1] += first[expert];
  }
  const size_t known = first[c.experts];
  std::vector<size_t> place(c.rows, c.rows), next(first.begin(), first.end() - 1);
  // not workspace, which the products take
  std::unique_ptr<float[]> x(new float[known * c.input_dims]), y(new float[known * c.output_dims]);
  for (size_t row = 0; row < c.rows; ++row) {
    if (c.indices[row] < c.experts) {
      place[row] = next[c.indices[row]]++;
      std::copy_n(c.x + row * c.input_dims, c.input_dims, &x[place[row] * c.input_dims]);
    }
  }
  for (size_t expert = 0; expert < c.experts; ++expert) {
    const size_t at = first[expert], count = first[expert + 1] - at;
    if (count == 0) {
      continue;
    }
    const PackedMatrix weight{c.weight + expert * c.outputs * c.row_bytes, c.outputs, c.row_bytes};
    const float* from = &x[at * c.input_dims];
    float* to = &y[at * c.output_dims];
    if (c.transposed) {
      transposed_product(from, count, c.output_dims, weight, to);
    } else {
      float_product(from, count, c.input_dims, weight, to);
    }
  }
  for (size_t row = 0; row < c.rows; ++row) {
    float* to = c.y + row * c.output_dims;
    if (place[row] < c.rows) {
      std::copy_n(&y[place[row] * c.output_dims], c.output_dims, to);
    } else {
      std::fill_n(to, c.output_dims, NAN);
    }
  }
}

mx::array gather(const mx::array& x, const mx::array& weight, const mx::array& indices,
                 const GatherOptions& options, mx::Stream stream) {
  return GatherTernaryMatmul::call({x, weight, indices}, options, stream)[0];
}

void refuse_others(const std::vector<int>& argnums) {
  for (int argnum : argnums) {
    require(argnum == 0, "[gather_ternary_matmul] packed trits and indices have no gradient.");
  }
}

}  // namespace

mx::array gather_ternary_matmul(const mx::array& x, const mx::array& weight,
                                const mx::array& indices) {
  require(x.dtype() == mx::float32 && weight.dtype() == mx::uint32 && indices.dtype() == mx::uint32,
          "[gather_ternary_matmul] 'x' must be float32, 'weight' and 'indices' uint32.");
  require(x.ndim() >= 1 && weight.ndim() == 3 && weight.shape(2) == packed_words(x.shape(-1)),
          "[gather_ternary_matmul] 'x' must be (..., D) and 'weight' (E, N, D / 16), padded.");
  auto rows = x.shape();
  rows.pop_back();
  require(indices.shape() == rows, "[gather_ternary_matmul] 'indices' must have one for each row.");
  return gather(x, weight, indices, {false, weight.shape(1)}, mx::to_stream({}));
}

void GatherTernaryMatmul::eval_cpu(const Arrays& inputs, Arrays& outputs) {
  outputs[0].set_data(mx::allocator::malloc(outputs[0].nbytes()));
  const auto x = contiguous(inputs[0], stream()), weight = contiguous(inputs[1], stream()),
             indices = contiguous(inputs[2], stream());
  const auto size = [](int value) { return static_cast<size_t>(value); };
  mx::cpu::get_command_encoder(stream()).dispatch(
      [c = Call{x.data<float>(), indices.size(), size(x.shape(-1)), size(options_.dims),
                weight.data<uint8_t>(), size(weight.shape(0)), size(weight.shape(1)),
                4 * size(weight.shape(2)), indices.data<uint32_t>(), outputs[0].data<float>(),
                options_.transposed}]() { multiply(c); });
}

Arrays GatherTernaryMatmul::jvp(const Arrays& primals, const Arrays& tangents,
                                const std::vector<int>& argnums) {
  refuse_others(argnums);
  return {gather(tangents[0], primals[1], primals[2], options_, stream())};
}

Arrays GatherTernaryMatmul::vjp(const Arrays& primals, const Arrays& cotangents,
                                const std::vector<int>& argnums, const Arrays&) {
  refuse_others(argnums);
  const GatherOptions options{!options_.transposed, primals[0].shape(-1)};
  return {gather(cotangents[0], primals[1], primals[2], options, stream())};
}

OutputForms GatherTernaryMatmul::output_forms(const Arguments& arguments) const {
  auto shape = arguments[0]->shape();
  shape.back() = options_.dims;
  return {{shape}, {mx::float32}};
}

}  // namespace mmfree
