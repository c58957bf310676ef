#pragma once

#include <algorithm>
#include <cstddef>

#include "runtime/head_rows.h"
#include "runtime/workspace.h"

namespace mmfree {

// Columns of the state whose gradient is computed together, and the positions whose states are kept
// for it at a time.
constexpr size_t kDeltaColumns = 32, kDeltaSegment = 16;
// Rows of keys are padded to whole vectors of the widest instruction set.
constexpr size_t kDeltaStep = 16;

// What is computed for one head: (L, K) each, but v (L, V), and gates (L, `gates`), where `gates`
// is K or 1. Without `b.data`, what is read is taken away under `k`.
struct DeltaHead {
  size_t length, keys, values, gates;
  PositionRows q, k, v, a, f, b;
  const float* state;  // (K, V)
};

struct DeltaOutput {
  float* o;  // rows `o_row` apart
  size_t o_row;
  float* last;  // (K, V)
};

struct DeltaGradients {
  PositionRows d_o;
  const float* d_last;                       // (K, V)
  float *d_q, *d_k, *d_v, *d_a, *d_f, *d_b;  // dense rows
  float* d_state;                            // (K, V)
};

// The memory of a thread for gradients. States lie as columns, `row` floats each.
struct DeltaScratch {
  size_t row;
  float *q, *k, *a, *f, *b;            // (row,), one position
  float *d_q, *d_k, *d_a, *d_f, *d_b;  // (row,)
  float* gradient;                     // (columns, row), that of the state
  float* states;                       // (segment + 1, columns, row)
  float* begins;                       // (segments, columns, row)
  float* taken;                        // (L, columns), what was read
};

inline size_t segments_of(size_t length) {
  return (length + kDeltaSegment - 1) / kDeltaSegment;
}

inline DeltaScratch cut_scratch(Cutter& cutter, const DeltaHead& head) {
  DeltaScratch s;
  s.row = round_up(head.keys, kDeltaStep);
  for (float** array : {&s.q, &s.k, &s.a, &s.f, &s.b, &s.d_q, &s.d_k, &s.d_a, &s.d_f, &s.d_b}) {
    *array = cutter.take<float>(s.row);
  }
  s.gradient = cutter.take<float>(kDeltaColumns * s.row);
  s.states = cutter.take<float>((kDeltaSegment + 1) * kDeltaColumns * s.row);
  s.begins = cutter.take<float>(segments_of(head.length) * kDeltaColumns * s.row);
  s.taken = cutter.take<float>(head.length * kDeltaColumns);
  return s;
}

// The loops of one instruction set.
struct GatedDeltaRuleKernels {
  // Computes `count` columns from `first`. `scratch` has room for the keys times the most columns.
  void (*run)(const DeltaHead&, const DeltaOutput&, size_t first, size_t count, float* scratch);
  void (*run_gradient)(const DeltaHead&, const DeltaGradients&, const DeltaScratch&);
  // Columns that are best computed together, over one position and over many.
  size_t columns_of_one, columns_of_many;

  template <class Isa, class Dense>
  static constexpr GatedDeltaRuleKernels of();
};

}  // namespace mmfree
