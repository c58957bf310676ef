#pragma once

#include <algorithm>

#include "ternary_matmul/kernels.h"

namespace mmfree {

// The bytes in which the weights of a tile are interleaved, filled up to whole blocks.
inline size_t tile_bytes(const TernaryMatmulKernels& set, size_t row_bytes) {
  return !set.interleave
             ? 0
             : set.tile_outputs * ((row_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes);
}

// Computes the outputs [first, last) of all rows of p, a tile at a time, for each of which it calls
// finish(row, rows, output, outputs, values), where `values` are (rows, tile_outputs). `tile` has
// tile_bytes.
template <class Finish>
void multiply_tiles(const TernaryMatmulKernels& set, const CodeProduct& p, size_t first,
                    size_t last, uint8_t* tile, Finish&& finish) {
  const PackedMatrix& weight = p.weight;
  const size_t parts = (p.rows + set.tile_rows - 1) / set.tile_rows;
  alignas(64) float values[kTileValues];
  for (size_t output = first; output < last; output += set.tile_outputs) {
    const size_t outputs = std::min(set.tile_outputs, last - output);
    const uint8_t* bytes = weight.bytes + output * weight.row_bytes;
    if (set.interleave) {
      set.interleave(weight, output, outputs, tile);
      bytes = tile;
    }
    const uint8_t* ahead = weight.bytes + (output + set.tile_outputs) * weight.row_bytes;
    for (size_t part = 0; part < parts; ++part) {
      const size_t row = p.rows * part / parts, rows = p.rows * (part + 1) / parts - row;
      set.multiply_tile({p.codes + row * p.stride, p.sums + row, rows, p.stride, bytes,
                         weight.row_bytes / sizeof(uint32_t), outputs, part == 0 ? ahead : nullptr,
                         values});
      finish(row, rows, output, outputs, values);
    }
  }
}

}  // namespace mmfree
