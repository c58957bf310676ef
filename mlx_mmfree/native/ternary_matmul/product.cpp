#include "ternary_matmul/product.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runtime/kernels.h"
#include "runtime/thread_pool.h"
#include "runtime/workspace.h"
#include "ternary_matmul/tiles.h"

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

// The number of outputs in one piece of a product, which are at most `most`.
size_t piece(const PackedMatrix& weight, size_t rows, size_t most) {
  if (weight.outputs * weight.row_bytes * rows <= kSharedBytes) {
    return weight.outputs;
  }
  const size_t even = round_up(weight.outputs / (4 * threads()) + 1, kOutputs);
  return std::min(most / kOutputs * kOutputs, even);
}

// As many outputs as the second-level cache holds.
size_t cached_outputs(const PackedMatrix& weight) {
  return std::max(kPieceBytes / std::max<size_t>(weight.row_bytes, 1), kOutputs);
}

// Rows of one matrix among several whose results are moved to their places while they are in the
// first-level cache.
constexpr size_t kMovedRows = 24;

// The largest number of rows at which pieces are shared out.
size_t piece_rows(size_t dims) {
  return std::max<size_t>(kSharedBytes / std::max<size_t>(dims, 1) / 4, 1);
}

}  // namespace

void code_product(const float* x, size_t rows, size_t dims, const PackedMatrix& weight, float* y) {
  const auto& set = table<TernaryMatmulKernels>(kernels());
  const size_t stride = std::max<size_t>(blocks(dims), 1) * kBlockWeights;
  const size_t panel = panel_rows(rows, stride);
  const size_t tile_size = interleaved_bytes(set, rows, weight.row_bytes);
  for (size_t start = 0; start < rows; start += panel) {
    const size_t count = std::min(panel, rows - start);
    int8_t* codes;
    int32_t* sums;
    bool* is_valid;
    uint8_t* tiles;
    const auto cut = [&](Cutter& cutter) {
      codes = cutter.take<int8_t>(panel * stride);
      sums = cutter.take<int32_t>(panel);
      is_valid = cutter.take<bool>(panel);
      tiles = cutter.take<uint8_t>(threads() * tile_size);
    };
    Cutter measure(nullptr);
    cut(measure);
    Cutter cutter(workspace(measure.size()));
    cut(cutter);
    parallel_for(count, piece_rows(dims), [&](size_t first, size_t last) {
      for (size_t row = first; row < last; ++row) {
        is_valid[row] =
            set.permute_codes(x + (start + row) * dims, dims, codes + row * stride, sums + row);
      }
    });
    const CodeProduct product{codes, sums, count, stride, weight, y + start * weight.outputs};
    if (count <= set.stream_rows) {
      parallel_for(weight.outputs, piece(weight, count, cached_outputs(weight)),
                   [&](size_t first, size_t last) { set.stream_codes(product, first, last); });
    } else {
      const size_t step = piece(weight, count, kCodeTileOutputs);
      parallel_region(weight.outputs, step, threads(), [&](Claims& claims) {
        uint8_t* tile = tiles + claims.thread() * tile_size;
        for (size_t first, last; claims.next(first, last);) {
          multiply_tiles(
              set, product, first, last, tile,
              [&](size_t row, size_t count, size_t output, size_t outputs, const float* values) {
                float* y = product.y + row * weight.outputs + output;
                for (size_t m = 0; m < count; ++m) {
                  std::copy_n(values + m * kCodeTileOutputs, outputs, y + m * weight.outputs);
                }
              });
        }
      });
    }
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
    parallel_for(weight.outputs, piece(weight, 4 * count, cached_outputs(weight)),
                 [&](size_t first, size_t last) { set.multiply_floats(product, first, last); });
  }
}

void float_products(const std::vector<RowOf>& rows, size_t dims,
                    const std::vector<PackedMatrix>& matrices) {
  struct Piece {
    size_t row, rows;
    PackedMatrix weight;
    size_t output;
  };
  const auto& set = table<TernaryMatmulKernels>(kernels());
  const size_t stride = std::max<size_t>(blocks(dims), 1) * kBlockWeights;
  std::vector<Piece> pieces;
  size_t most = 0, work = 0;
  for (size_t row = 0, count; row < rows.size(); row += count) {
    const PackedMatrix& all = matrices[rows[row].matrix];
    count = 1;
    while (row + count < rows.size() && rows[row + count].matrix == rows[row].matrix) {
      ++count;
    }
    const size_t cached = kPieceBytes / std::max<size_t>(all.row_bytes, 1) / kOutputs * kOutputs;
    const size_t step = std::max(cached, kOutputs);
    for (size_t output = 0; output < all.outputs; output += step) {
      const size_t outputs = std::min(step, all.outputs - output);
      pieces.push_back(
          {row, count, {all.bytes + output * all.row_bytes, outputs, all.row_bytes}, output});
      most = std::max(most, outputs * std::min(count, kMovedRows));
    }
    work += 4 * count * all.outputs * all.row_bytes;
  }
  auto* permuted =
      static_cast<float*>(workspace((rows.size() * stride + threads() * most) * sizeof(float)));
  parallel_for(rows.size(), piece_rows(dims), [&](size_t first, size_t last) {
    for (size_t row = first; row < last; ++row) {
      set.permute_floats(rows[row].x, dims, permuted + row * stride);
    }
  });
  const size_t step = work <= kSharedBytes ? pieces.size() : 1;
  parallel_region(pieces.size(), step, threads(), [&](Claims& claims) {
    float* own = permuted + rows.size() * stride + claims.thread() * most;
    for (size_t first, last; claims.next(first, last);) {
      for (; first < last; ++first) {
        const auto& [start, count, weight, output] = pieces[first];
        for (size_t row = start; row < start + count; row += kMovedRows) {
          const size_t moved = std::min(kMovedRows, start + count - row);
          set.multiply_floats({permuted + row * stride, moved, stride, weight, own}, 0,
                              weight.outputs);
          for (size_t m = 0; m < moved; ++m) {
            std::copy_n(own + m * weight.outputs, weight.outputs, rows[row + m].y + output);
          }
        }
      }
    }
  });
}

void transposed_products(const std::vector<TransposedProduct>& products) {
  struct Piece {
    const TransposedProduct* product;
    size_t block, row;
  };
  const auto& set = table<TernaryMatmulKernels>(kernels());
  std::vector<Piece> pieces;
  size_t work = 0;
  for (const auto& product : products) {
    // the groups of a block follow one another, because its weights are in the cache
    for (size_t block = 0; block < blocks(product.dims); ++block) {
      for (size_t row = 0; row < product.rows; row += set.transposed_rows) {
        pieces.push_back({&product, block, row});
      }
    }
    work += product.weight.outputs * product.weight.row_bytes * product.rows;
  }
  const size_t step = work <= kSharedBytes ? pieces.size() : 1;
  parallel_for(pieces.size(), step, [&](size_t first, size_t last) {
    for (; first < last; ++first) {
      const auto& [product, block, row] = pieces[first];
      set.multiply_transposed(*product, block, row,
                              std::min(set.transposed_rows, product->rows - row));
    }
  });
}

}  // namespace mmfree
