#include "dense_matmul/product.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "dense_matmul/kernels.h"
#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Activations that are prepared at once.
constexpr size_t kPanelBytes = 4 << 20;
// Weights of one piece. They stay in the second-level cache while all rows meet them.
constexpr size_t kPieceBytes = 128 << 10;
// Less work than this is done by the caller alone, because another thread wakes up too late.
constexpr size_t kSharedBytes = 96 << 10;
// The outputs of a piece are whole cache lines and whole tiles.
constexpr size_t kOutputs = 48;

size_t panel_rows(size_t rows, size_t row_bytes) {
  return std::min(rows, std::max<size_t>(kPanelBytes / std::max<size_t>(row_bytes, 1) / 4 * 4, 4));
}

// The number of outputs in one piece of a product.
size_t piece(size_t outputs, size_t row_bytes, size_t rows) {
  if (outputs * row_bytes * rows <= kSharedBytes) {
    return std::max<size_t>(outputs, 1);
  }
  const size_t cached = std::max(kPieceBytes / std::max<size_t>(row_bytes, 1), kOutputs);
  const size_t even = round_up(outputs / (4 * threads()) + 1, kOutputs);
  return std::min(cached / kOutputs * kOutputs, even);
}

// The largest number of rows at which pieces are shared out.
size_t piece_rows(size_t dims) {
  return std::max<size_t>(kSharedBytes / std::max<size_t>(dims, 1) / 4, 1);
}

}  // namespace

void dense_product(const float* x, size_t rows, size_t dims, const FloatMatrix& weight, float* y) {
  const auto& set = table<DenseMatmulKernels>(kernels());
  const size_t stride = std::max(round_up(dims, set.padding), set.padding);
  const size_t panel = panel_rows(rows, stride * sizeof(float));
  const size_t row_bytes = dims * (weight.type == FloatType::float32 ? 4 : 2);
  for (size_t start = 0; start < rows; start += panel) {
    const size_t count = std::min(panel, rows - start);
    auto* padded = static_cast<float*>(workspace(panel * stride * sizeof(float)));
    for (size_t row = 0; row < count; ++row) {
      std::copy_n(x + (start + row) * dims, dims, padded + row * stride);
      std::fill_n(padded + row * stride + dims, stride - dims, 0.0f);
    }
    const DenseProduct product{
        padded,        count,       stride,         dims,
        weight.values, weight.type, weight.outputs, y + start * weight.outputs};
    parallel_for(weight.outputs, piece(weight.outputs, row_bytes, count),
                 [&](size_t first, size_t last) { set.multiply(product, first, last); });
  }
}

void quantized_product(const float* x, size_t rows, size_t dims, const QuantizedMatrix& weight,
                       bool rounds, float* y) {
  const auto& all = table<DenseMatmulKernels>(kernels());
  const auto& set = rounds ? all.rounded : weight.bits <= 2 ? all.few_bits : all.quantized;
  const size_t stride = set.bytes(dims, weight.group, weight.bits);
  const size_t panel = panel_rows(rows, stride);
  for (size_t start = 0; start < rows; start += panel) {
    const size_t count = std::min(panel, rows - start);
    auto* arranged = static_cast<uint8_t*>(workspace(panel * (stride + 1)));
    auto* is_finite = reinterpret_cast<bool*>(arranged + panel * stride);
    parallel_for(count, piece_rows(dims), [&](size_t first, size_t last) {
      for (size_t row = first; row < last; ++row) {
        is_finite[row] = set.arrange(x + (start + row) * dims, dims, weight.group, weight.bits,
                                     arranged + row * stride);
      }
    });
    const QuantizedProduct product{arranged,      count,        stride,
                                   dims,          weight.codes, weight.scales,
                                   weight.biases, weight.type,  weight.outputs,
                                   weight.group,  weight.bits,  y + start * weight.outputs};
    parallel_for(weight.outputs, piece(weight.outputs, dims * weight.bits / 8, count),
                 [&](size_t first, size_t last) { set.multiply(product, first, last); });
    for (size_t row = 0; row < count; ++row) {
      if (!is_finite[row]) {
        std::fill_n(product.y + row * weight.outputs, weight.outputs, NAN);
      }
    }
  }
}

void quantized_transposed(const float* dy, size_t rows, size_t dims, const QuantizedMatrix& weight,
                          float* dx) {
  const auto& set = table<DenseMatmulKernels>(kernels());
  const QuantizedTransposed product{dy,
                                    rows,
                                    dims,
                                    weight.codes,
                                    weight.scales,
                                    weight.biases,
                                    weight.type,
                                    weight.outputs,
                                    weight.group,
                                    weight.bits,
                                    dx};
  const size_t groups = dims / weight.group, work = weight.outputs * dims / 8 * rows;
  parallel_for(groups, work <= kSharedBytes ? std::max<size_t>(groups, 1) : 1,
               [&](size_t first, size_t last) {
                 const size_t bytes = set.transposed_scratch(weight.outputs) * sizeof(float);
                 auto* scratch = static_cast<float*>(workspace(bytes));
                 for (size_t group = first; group < last; ++group) {
                   set.multiply_quantized_transposed(product, group, scratch);
                 }
               });
}

}  // namespace mmfree
