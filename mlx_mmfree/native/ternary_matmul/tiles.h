#pragma once

#include <algorithm>

#include "ternary_matmul/kernels.h"

namespace mmfree {

// Whether interleaving the weights of a tile takes less time than to join the lanes of all sums.
inline bool interleaves(const TernaryMatmulKernels& set, size_t rows, size_t row_bytes) {
  return set.interleave && rows > (row_bytes < kShortBytes ? 2 : 3) * set.tile_rows;
}

// The bytes in which the weights of a tile are interleaved, filled up to whole blocks.
inline size_t interleaved_bytes(const TernaryMatmulKernels& set, size_t rows, size_t row_bytes) {
  return interleaves(set, rows, row_bytes)
             ? kCodeTileOutputs * ((row_bytes + kBlockBytes - 1) / kBlockBytes * kBlockBytes)
             : 0;
}

// Computes the outputs [first, last) of all rows of p, a tile at a time, for each of which it calls
// finish(row, rows, output, outputs, values), where `values` are (rows, kCodeTileOutputs). `tile`
// has interleaved_bytes.
template <class Finish>
void multiply_tiles(const TernaryMatmulKernels& set, const CodeProduct& p, size_t first,
                    size_t last, uint8_t* tile, Finish&& finish) {
  const PackedMatrix& weight = p.weight;
  const bool is_interleaved = interleaves(set, p.rows, weight.row_bytes);
  const auto multiply = is_interleaved ? set.multiply_interleaved : set.multiply_tile;
  const size_t parts = (p.rows + set.tile_rows - 1) / set.tile_rows;
  const size_t quarter = kCodeTileOutputs / 4 * weight.row_bytes;
  alignas(64) float values[kMostCodeTileRows * kCodeTileOutputs];
  for (size_t output = first; output < last; output += kCodeTileOutputs) {
    const size_t outputs = std::min(kCodeTileOutputs, last - output);
    const uint8_t* bytes = weight.bytes + output * weight.row_bytes;
    const uint8_t* source = bytes;
    if (is_interleaved) {
      set.interleave(weight, output, outputs, tile);
      source = tile;
    }
    for (size_t part = 0; part < parts; ++part) {
      // the first part reads from memory, and the others from the cache
      const uint8_t* ahead = part == 0 ? bytes + kAheadBytes : nullptr;
      size_t lines = 0;
      if (is_interleaved) {
        // the parts fetch quarters of the next tile, evenly in time
        const size_t start = 4 * part / parts;
        ahead = bytes + (4 + start) * quarter;
        lines = 4 * (part + 1) / parts - start;
      }
      const size_t row = p.rows * part / parts, rows = p.rows * (part + 1) / parts - row;
      multiply({p.codes + row * p.stride, p.sums + row, rows, p.stride, source,
                weight.row_bytes / sizeof(uint32_t), outputs, ahead, lines, values});
      finish(row, rows, output, outputs, values);
    }
  }
}

}  // namespace mmfree
