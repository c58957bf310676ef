#pragma once

#include <algorithm>
#include <cstddef>

#include "runtime/head_rows.h"
#include "runtime/workspace.h"

namespace mmfree {

// Positions that are computed together, a power of two, and those of the smallest blocks.
constexpr size_t kChunkLength = 64, kBlockLength = 8;
// Rows of keys are padded to whole vectors of the widest instruction set.
constexpr size_t kKeyStep = 16;

// What is computed for one head: (L, K), (L, K), (L, V) and gates (L, `gates`), where `gates` is K,
// 1 or 0 for none.
struct GatedHead {
  size_t length, keys, values, gates;
  PositionRows q, k, v, f;
  const float* state;  // (K, V)
};

struct GatedOutput {
  float* o;  // rows `o_row` apart
  size_t o_row;
  float* last;  // (K, V)
};

struct GatedGradients {
  PositionRows d_o;
  const float* d_last;           // (K, V)
  float *d_q, *d_k, *d_v, *d_f;  // dense rows
  float* d_state;                // (K, V)
};

// The memory in which a thread computes one chunk after the other. Rows of keys are `row` floats
// apart and padded with zeros, and with ones for gates.
struct ChunkScratch {
  size_t row;
  float *q, *k, *f;              // (chunk, row), or `f` (chunk,)
  float *until, *after;          // products of the gates up to a position, and after it
  float *q_until, *k_after;      // times queries and keys
  float *meeting_q, *meeting_k;  // (chunk / 2, row), the same for two halves that meet
  float* columns;                // (K, chunk) or (V, row), something transposed
  float* weights;                // (chunk, chunk)
  float *carried, *one;          // (row,)
  // for gradients
  float *d_weights, *products;  // (chunk, chunk)
  float *d_q, *d_k, *d_f;       // (chunk, row)
  float *d_until, *d_after;     // (chunk, row)
  float *meeting_until, *meeting_after;
  float *part_q, *part_k;  // (chunk / 2, row), gradients of those that meet
  float* states;           // (chunks, K, V), those before each chunk
};

inline size_t chunks_of(size_t length) {
  return (length + kChunkLength - 1) / kChunkLength;
}

inline ChunkScratch cut_scratch(Cutter& cutter, const GatedHead& head, bool has_gradients) {
  ChunkScratch s;
  s.row = round_up(head.keys, kKeyStep);
  const size_t wide = std::max(head.keys, head.values);
  for (float** array :
       {&s.q, &s.k, &s.f, &s.until, &s.after, &s.q_until, &s.k_after, &s.meeting_q, &s.meeting_k}) {
    *array = cutter.take<float>(kChunkLength * s.row);
  }
  s.columns = cutter.take<float>(wide * std::max(s.row, kChunkLength));
  s.weights = cutter.take<float>(kChunkLength * kChunkLength);
  s.carried = cutter.take<float>(std::max(s.row, kChunkLength));
  s.one = cutter.take<float>(s.row);
  if (has_gradients) {
    s.d_weights = cutter.take<float>(kChunkLength * kChunkLength);
    s.products = cutter.take<float>(kChunkLength * kChunkLength);
    for (float** array : {&s.d_q, &s.d_k, &s.d_f, &s.d_until, &s.d_after, &s.meeting_until,
                          &s.meeting_after, &s.part_q, &s.part_k}) {
      *array = cutter.take<float>(kChunkLength * s.row);
    }
    s.states = cutter.take<float>(chunks_of(head.length) * head.keys * head.values);
  }
  return s;
}

// The loops of one instruction set.
struct GatedLinearAttentionKernels {
  void (*run)(const GatedHead&, const GatedOutput&, const ChunkScratch&);
  void (*run_gradient)(const GatedHead&, const GatedGradients&, const ChunkScratch&);

  template <class Isa, class Dense>
  static constexpr GatedLinearAttentionKernels of();
};

}  // namespace mmfree
