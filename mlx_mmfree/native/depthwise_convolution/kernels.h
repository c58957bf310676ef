#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "runtime/floats.h"
#include "runtime/workspace.h"

namespace mmfree {

// Channels that are computed side by side. Weights and windows are arranged in blocks of them.
constexpr size_t kBlockChannels = 16;
// Neighbouring places whose sums are held in registers. The sides of usual maps are multiples of 7.
constexpr size_t kTilePlaces = 7;
// Rows and columns of a target that are computed together, while what they read is in the cache.
constexpr size_t kStripRows = 14, kPieceColumns = 56;
// Weights whose gradients are held in registers.
constexpr size_t kTaps = 9;
// Places that are added in float32, before their sums are added in float64.
constexpr size_t kFloatPlaces = 64;

// The convolution of a map, or the gradient of the map from that of the result.
struct DepthwiseCall {
  size_t batch, channels, side, stride;
  bool is_gradient;
  size_t source_rows, source_columns, target_rows, target_columns;
  Floats source;        // (batch, source_rows, source_columns, channels)
  const float* weight;  // (blocks, side * side, kBlockChannels)
  const float* bias;    // (blocks, kBlockChannels)
  void* target;         // (batch, target_rows, target_columns, channels)
  FloatType type;       // of the target
};

// The gradients of weights and biases.
struct DepthwiseWeightCall {
  size_t batch, channels, side, stride;
  size_t source_rows, source_columns, target_rows, target_columns;
  Floats source;     // (batch, source_rows, source_columns, channels)
  Floats d_target;   // (batch, target_rows, target_columns, channels)
  size_t part_rows;  // rows of targets of all the batch, whose sums are one part
  double* sums;      // (parts, blocks, side * side + 1, kBlockChannels), the bias last
};

// Weights that meet a row of the source, or one place of it.
struct DepthwiseTap {
  const float* source;  // (columns, kBlockChannels)
  const float* weight;
};

// A weight whose gradient is summed.
struct DepthwiseSum {
  const float* source;  // (columns, kBlockChannels)
  float* sum;           // (kBlockChannels,)
};

// The memory of one thread.
struct DepthwiseScratch {
  float* rows;         // (side, columns, kBlockChannels), rows of the source, filled up with zeros
  DepthwiseTap* taps;  // (2 * side,), of a row and of a tile
  float* weights;      // (side * side,)
  float* d_target;     // (kPieceColumns, kBlockChannels)
  float* sums;         // (side * side + 2, kBlockChannels), the last unused
  DepthwiseSum* of_taps;  // (side * side + kTaps,)
};

inline size_t blocks_of(size_t channels) {
  return (channels + kBlockChannels - 1) / kBlockChannels;
}

// The columns of a source that so many places of a row read, with what the last tile reads too
// much.
inline size_t source_columns_of(size_t places, size_t side, size_t step) {
  return round_up(places, kTilePlaces) * step + side;
}

inline DepthwiseScratch cut_depthwise(Cutter& cutter, size_t side, size_t step) {
  DepthwiseScratch scratch;
  const size_t columns = source_columns_of(kPieceColumns, side, step);
  scratch.rows = cutter.take<float>(side * columns * kBlockChannels);
  scratch.taps = cutter.take<DepthwiseTap>(2 * side);
  scratch.weights = cutter.take<float>(side * side);
  scratch.d_target = cutter.take<float>(kPieceColumns * kBlockChannels);
  scratch.sums = cutter.take<float>((side * side + 2) * kBlockChannels);
  scratch.of_taps = cutter.take<DepthwiseSum>(side * side + kTaps);
  return scratch;
}

// Pieces of work: a strip of rows of a piece of the columns of a block of channels.
inline size_t items_of(const DepthwiseCall& c) {
  const size_t strips = (c.target_rows + kStripRows - 1) / kStripRows;
  const size_t pieces = (c.target_columns + kPieceColumns - 1) / kPieceColumns;
  return c.batch * strips * pieces * blocks_of(c.channels);
}

// Pieces of work: a part of the rows of all targets in a block of channels.
inline size_t items_of(const DepthwiseWeightCall& c) {
  const size_t parts = (c.batch * c.target_rows + c.part_rows - 1) / c.part_rows;
  return parts * blocks_of(c.channels);
}

// The loops of one instruction set. They compute the pieces of work [first, last).
struct DepthwiseConvolutionKernels {
  // Puts the weights (channels, taps) of blocks [first, last) into their order.
  void (*arrange)(const Floats& weight, size_t channels, size_t taps, size_t first, size_t last,
                  float* arranged, float* scratch);
  void (*convolve)(const DepthwiseCall&, size_t first, size_t last, const DepthwiseScratch&);
  void (*sum_weights)(const DepthwiseWeightCall&, size_t first, size_t last,
                      const DepthwiseScratch&);

  template <class Isa, class Dense>
  static constexpr DepthwiseConvolutionKernels of();
};

}  // namespace mmfree
