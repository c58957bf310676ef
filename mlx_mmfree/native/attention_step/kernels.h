#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

// Heads of one token, normed, rotated and scaled.
struct Heads {
  Floats x;  // (count, dims)
  size_t count, dims;
  Floats norm;  // weight of an RMSNorm of each head, (dims,), or none
  float eps;
  const float* cosines;  // (rotated / 2,), then as many sines; null: no rotation
  size_t rotated;        // the first dims, which are rotated
  bool is_interleaved;   // pairs are neighbours, else halves
  float scale;
  void* y;  // heads of `type`, `stride` values apart
  FloatType type;
  size_t stride;
};

// Query heads that share a key head meet a run of slots.
struct SlotRun {
  float* scores;  // (heads, slots); the call leaves e^(score - peak) there, or 0 if not seen
  size_t heads, slots, dims;
  Floats values;               // (slots, dims)
  float* sums;                 // (heads, stride), of weight times value
  size_t stride;               // dims, rounded up to whole vectors
  float* peaks;                // (heads,), the largest scores
  float* totals;               // (heads,), of the weights
  const bool* seen = nullptr;  // (tokens, slots), by head % tokens; null: every slot is
  size_t tokens = 1;
};

// The parts of one head, one for each run, `distance` floats apart.
struct RunResults {
  const float *sums, *peaks, *totals;
  size_t runs, distance, dims;
  void* y;  // (dims,)
  FloatType type;
  float* log_total = nullptr;  // takes the log of the sum of e^score, or null
};

// The loops of one instruction set. Every set gives the same bits.
struct AttentionStepKernels {
  // scratch: (2 * dims,).
  void (*prepare_heads)(const Heads&, float* scratch);
  void (*weigh)(const SlotRun&);
  // The weighted mean of the values of all runs. scratch: (dims,).
  void (*merge)(const RunResults&, float* scratch);

  template <class Isa, class Dense>
  static constexpr AttentionStepKernels of();
};

}  // namespace mmfree
