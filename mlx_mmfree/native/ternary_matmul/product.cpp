#include "ternary_matmul/product.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"

namespace mmfree {

namespace {

// Permuted activations that are prepared at once.
constexpr size_t kPanelBytes = 2 << 20;
// Weights of one piece. They stay in the second-level cache together with the activations of one
// tile.
constexpr size_t kPieceBytes = 128 << 10;
// Less work than this is done by the caller alone, because another thread wakes up too late.
constexpr size_t kSharedBytes = 96 << 10;
// The outputs of a piece are whole cache lines.
constexpr size_t kOutputs = 16;

size_t panel_rows(size_t rows, size_t row_bytes) {
  return std::min(rows, std::max<size_t>(round_up(kPanelBytes / row_bytes, 12), 12));
}

// The number of outputs in one piece of a product.
size_t piece(const PackedMatrix& weight, size_t rows) {
  if (weight.outputs * weight.row_bytes * rows <= kSharedBytes) {
    return weight.outputs;
  }
  const size_t cached = std::max(kPieceBytes / std::max<size_t>(weight.row_bytes, 1), kOutputs);
  const size_t even = round_up(weight.outputs / (4 * threads()) + 1, kOutputs);
  return std::min(cached / kOutputs * kOutputs, even);
}

// The largest number of rows at which pieces are shared out.
size_t piece_rows(size_t dims) {
  return std::max<size_t>(kSharedBytes / std::max<size_t>(dims, 1) / 4, 1);
}

}  // namespace

void code_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y) {
  const auto& set = table<TernaryMatmulKernels>(kernels());
  const size_t stride = std::max<size_t>(blocks(dims), 1) * kBlockWeights;
  const size_t panel = panel_rows(rows, stride);
  for (size_t start = 0; start < rows; start += panel) {
    const size_t count = std::min(panel, rows - start);
    auto* codes = static_cast<int8_t*>(workspace(panel * (stride + sizeof(int32_t) + 1)));
    auto* sums = reinterpret_cast<int32_t*>(codes + panel * stride);
    auto* is_valid = reinterpret_cast<bool*>(sums + panel);
    parallel_for(count, piece_rows(dims), [&](size_t first, size_t last) {
      for (size_t row = first; row < last; ++row) {
        is_valid[row] =
            set.permute_codes(x + (start + row) * dims, dims, codes + row * stride, sums + row);
      }
    });
    const CodeProduct product{codes, sums, count, stride, weight, y + start * weight.outputs};
    parallel_for(weight.outputs, piece(weight, count),
                 [&](size_t first, size_t last) { set.multiply_codes(product, first, last); });
    for (size_t row = 0; row < count; ++row) {
      if (!is_valid[row]) {
        std::fill_n(product.y + row * weight.outputs, weight.outputs, NAN);
      }
    }
  }
}

void float_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y) {
  const auto& set = table<TernaryMatmulKernels>(kernels());
  const size_t stride = std::max<size_t>(blocks(dims), 1) * kBlockWeights;
  const size_t panel = panel_rows(rows, stride * sizeof(float));
  for (size_t start = 0; start < rows; start += panel) {
    const size_t count = std::min(panel, rows - start);
    auto* permuted = static_cast<float*>(workspace(panel * stride * sizeof(float)));
    parallel_for(count, piece_rows(dims), [&](size_t first, size_t last) {
      for (size_t row = first; row < last; ++row) {
        set.permute_floats(x + (start + row) * dims, dims, permuted + row * stride);
      }
    });
    const FloatProduct product{permuted, count, stride, weight, y + start * weight.outputs};
    parallel_for(weight.outputs, piece(weight, 4 * count),
                 [&](size_t first, size_t last) { set.multiply_floats(product, first, last); });
  }
}

void transposed_product(const float* dy, size_t rows, size_t dims, const PackedMatrix& weight,
                        float* dx) {
  const auto& set = table<TernaryMatmulKernels>(kernels());
  const TransposedProduct product{dy, rows, weight, dx, dims};
  const size_t groups = (rows + set.transposed_rows - 1) / set.transposed_rows;
  const size_t work = weight.outputs * weight.row_bytes * rows;
  const size_t items = groups * blocks(dims);
  // the groups of a block follow one another, because its weights are in the cache
  parallel_for(items, work <= kSharedBytes ? items : 1, [&](size_t first, size_t last) {
    for (size_t item = first; item < last; ++item) {
      const size_t row = item % groups * set.transposed_rows;
      set.multiply_transposed(product, item / groups, row,
                              std::min(set.transposed_rows, rows - row));
    }
  });
}

}  // namespace mmfree
