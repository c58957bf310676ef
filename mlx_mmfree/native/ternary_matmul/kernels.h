#pragma once

#include <cstddef>
#include <cstdint>

namespace mmfree {

// A packed row is read in blocks of 64 bytes, which are 256 weights. Activations are padded to
// whole blocks.
constexpr size_t kBlockBytes = 64;
constexpr size_t kBlockWeights = 4 * kBlockBytes;

constexpr size_t blocks(size_t dims) {
  return (dims + kBlockWeights - 1) / kBlockWeights;
}

// The packed matrix T, (outputs, row_bytes). A code is a trit + 1, of 2 bits, and the first lies in
// the lowest bits.
struct PackedMatrix {
  const uint8_t* bytes;
  size_t outputs, row_bytes;
};

// y = x T^T for permuted activation codes. Code k + 4 b of a block lies at 64 k + b, so that those
// of the four bytes of a word lie side by side.
struct CodeProduct {
  const int8_t* codes;  // (rows, blocks * 256)
  const int32_t* sums;  // (rows,) of the codes
  size_t rows, stride;
  PackedMatrix weight;
  float* y;  // (rows, outputs)
};

// The part of such a product that few rows and outputs have.
struct CodeTile {
  const int8_t* codes;  // (rows, blocks * 256)
  const int32_t* sums;  // (rows,) of the codes
  size_t rows, stride;
  const uint8_t* weight;  // `words` 32-bit words for each output, which may be interleaved
  size_t words, outputs;
  const uint8_t* ahead;  // weights of later outputs, which are fetched meanwhile, or null
  size_t lines;          // of them for each word, where words are interleaved
  float* y;              // (rows, kCodeTileOutputs)
};

// How many bytes the stream of weights is prefetched ahead, to the second-level cache, which waits
// for more lines at once than the first. They cover the latency of memory at its full rate.
constexpr size_t kAheadBytes = 8 << 10;

// In weight rows shorter than this, what is done once for each row takes a large share.
constexpr size_t kShortBytes = 512;

// The outputs of a tile of any instruction set, of which none has more rows, and no stream more.
constexpr size_t kCodeTileOutputs = 64, kMostCodeTileRows = 6, kMostStreamRows = 4;

// y = x T^T for permuted floats. Value s + 16 w of a block lies at 16 s + w.
struct FloatProduct {
  const float* x;  // (rows, blocks * 256)
  size_t rows, stride;
  PackedMatrix weight;
  float* y;  // (rows, outputs)
};

// dx = dy T.
struct TransposedProduct {
  const float* dy;  // (rows, outputs)
  size_t rows;
  PackedMatrix weight;
  float* dx;  // (rows, dims)
  size_t dims;
};

// The loops of one instruction set. Every set gives the same bits.
struct TernaryMatmulKernels {
  size_t transposed_rows;
  // x: (dims,). Returns whether all values are whole numbers in [-128, 127].
  bool (*permute_codes)(const float* x, size_t dims, int8_t* codes, int32_t* sum);
  void (*permute_floats)(const float* x, size_t dims, float* permuted);
  // Computes the outputs [first, last) of all rows, which are at most stream_rows.
  size_t stream_rows;
  void (*stream_codes)(const CodeProduct&, size_t first, size_t last);
  size_t tile_rows;
  void (*multiply_tile)(const CodeTile&);
  // With many rows, the weights of a tile are interleaved first, or never if these are null.
  void (*interleave)(const PackedMatrix&, size_t first, size_t outputs, uint8_t* tile);
  void (*multiply_interleaved)(const CodeTile&);
  // Computes the outputs [first, last) of every row.
  void (*multiply_floats)(const FloatProduct&, size_t first, size_t last);
  // Computes a block of dx for the rows [first, first + rows), where rows <= transposed_rows.
  void (*multiply_transposed)(const TransposedProduct&, size_t block, size_t first, size_t rows);

  template <class Isa, class Dense>
  static constexpr TernaryMatmulKernels of();
};

}  // namespace mmfree
