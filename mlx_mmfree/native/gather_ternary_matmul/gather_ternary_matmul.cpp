#include "gather_ternary_matmul/gather_ternary_matmul.h"

#include <algorithm>
#include <cmath>
#include <memory>
#include <vector>

#include "mlx/allocator.h"
#include "runtime/contiguous.h"
#include "runtime/thread_pool.h"
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

// Fewer rows than this are copied by the caller alone.
constexpr size_t kCopiedRows = 32;

// The rows of each expert lie side by side for one product, which reads its words once.
void multiply(const Call& c) {
  std::vector<PackedMatrix> experts;
  std::vector<std::vector<size_t>> rows_of(c.experts);
  for (size_t row = 0; row < c.rows; ++row) {
    if (c.indices[row] < c.experts) {
      rows_of[c.indices[row]].push_back(row);
    } else {
      std::fill_n(c.y + row * c.output_dims, c.output_dims, NAN);
    }
  }
  std::vector<RowOf> rows;
  for (size_t expert = 0; expert < c.experts; ++expert) {
    experts.push_back({c.weight + expert * c.outputs * c.row_bytes, c.outputs, c.row_bytes});
    for (size_t row : rows_of[expert]) {
      rows.push_back({expert, c.x + row * c.input_dims, c.y + row * c.output_dims});
    }
  }
  if (!c.transposed) {
    float_products(rows, c.input_dims, experts);
    return;
  }
  // not workspace, which the products take
  std::unique_ptr<float[]> x(new float[rows.size() * c.input_dims]),
      y(new float[rows.size() * c.output_dims]);
  std::vector<TransposedProduct> products;
  for (size_t first = 0; first < rows.size(); first += products.back().rows) {
    const size_t expert = rows[first].matrix;
    products.push_back({&x[first * c.input_dims], rows_of[expert].size(), experts[expert],
                        &y[first * c.output_dims], c.output_dims});
  }
  parallel_for(rows.size(), kCopiedRows, [&](size_t first, size_t last) {
    for (; first < last; ++first) {
      std::copy_n(rows[first].x, c.input_dims, &x[first * c.input_dims]);
    }
  });
  transposed_products(products);
  parallel_for(rows.size(), kCopiedRows, [&](size_t first, size_t last) {
    for (; first < last; ++first) {
      std::copy_n(&y[first * c.output_dims], c.output_dims, rows[first].y);
    }
  });
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
  dispatch([c = Call{x.data<float>(), indices.size(), size(x.shape(-1)), size(options_.dims),
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
