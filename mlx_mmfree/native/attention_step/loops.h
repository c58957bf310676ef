#pragma once

#include <math.h>
#include <string.h>

#include "attention_step/kernels.h"
#include "bit_linear/prepare_row.h"
#include "dense_matmul/float_tile.h"
#include "runtime/exponential.h"
#include "runtime/floats.h"
#include "runtime/lanes.h"

// The parts of attention other than the scores, which are a dense product.

namespace mmfree {

// Slots whose values stay in the first-level cache while all heads and dims meet them.
constexpr size_t kValueSlots = 16;
// Vectors of one tile.
constexpr size_t kValueVectors = 4;

template <class Isa>
void rotate_head(const Heads& h, float* values) {
  const size_t half = h.rotated / 2, step = h.is_interleaved ? 2 : 1;
  const float *cosines = h.cosines, *sines = cosines + half;
  float* second = values + (h.is_interleaved ? 1 : half);
  for (size_t i = 0; i < half; ++i) {
    const float a = values[step * i], b = second[step * i];
    values[step * i] = a * cosines[i] - b * sines[i];
    second[step * i] = a * sines[i] + b * cosines[i];
  }
}

template <class Isa>
void prepare_heads(const Heads& h, float* scratch) {
  float* values = scratch + h.dims;
  for (size_t head = 0; head < h.count; ++head) {
    widen<Isa>(h.x, head * h.dims, h.dims, values);
    if (h.norm.data) {
      scale_row<Isa>(values, inverse_of<Isa>(values, h.dims, h.eps), h.norm, h.dims, scratch,
                     values);
    }
    if (h.cosines) {
      rotate_head<Isa>(h, values);
    }
    for (size_t d = 0; d < h.dims; ++d) {
      values[d] *= h.scale;
    }
    narrow<Isa>(values, h.dims, h.type,
                static_cast<char*>(h.y) + head * h.stride * size_of(h.type));
  }
}

// Turns the scores of one head into weights. It sees every slot if `seen` is null.
template <class Isa>
void soften(float* scores, const bool* seen, size_t count, float* peak, float* total) {
  if (seen) {
    for (size_t j = 0; j < count; ++j) {
      scores[j] = seen[j] ? scores[j] : -INFINITY;
    }
  }
  const float most = largest_of<Isa>(scores, count);
  for (size_t j = 0; j < count; ++j) {
    scores[j] = exponential<Isa>(scores[j] - most);
  }
  if (seen) {
    for (size_t j = 0; j < count; ++j) {
      scores[j] = seen[j] ? scores[j] : 0.0f;
    }
  }
  *peak = most;
  *total = sum_of<Isa>(scores, count);
}

// Adds the values of the slots [slot, last) for M heads and V vectors of dims from `start` on. The
// sum of each head and dim is one chain, whatever the tile.
template <class Isa, FloatType type, size_t M, size_t V>
void add_values(const SlotRun& r, size_t head, size_t slot, size_t last, size_t start) {
  using Vector = typename Isa::Floats;
  constexpr size_t kBytes = float_bytes(type), kLanes = Isa::kLanes;
  const size_t some = r.dims - start < kLanes ? r.dims - start : kLanes;
  Vector sums[M][V];
  for (size_t m = 0; m < M; ++m) {
    memcpy(sums[m], r.sums + (head + m) * r.stride + start, sizeof(sums[m]));
  }
  const float* weights = r.scores + head * r.slots;
  for (; slot < last; ++slot) {
    const uint8_t* row =
        static_cast<const uint8_t*>(r.values.data) + (slot * r.dims + start) * kBytes;
    Vector values[V];
    unroll<V>([&](auto v) MMFREE_INLINE {
      prefetch_weights(row + v * kLanes * kBytes);
      if constexpr (V > 1) {
        values[v] = Isa::template load<type>(row + v * kLanes * kBytes);
      } else {
        values[v] = load_some<Isa, type>(row, some);
      }
    });
    unroll<M>([&](auto m) MMFREE_INLINE {
      const Vector weight = Isa::fill(weights[m * r.slots + slot]);
      unroll<V>([&](auto v) MMFREE_INLINE {
        sums[m][v] = Isa::multiply_add(values[v], weight, sums[m][v]);
      });
    });
  }
  for (size_t m = 0; m < M; ++m) {
    memcpy(r.sums + (head + m) * r.stride + start, sums[m], sizeof(sums[m]));
  }
}

template <class Isa, FloatType type, size_t M>
void add_values(const SlotRun& r, size_t head, size_t slot, size_t last) {
  constexpr size_t kTile = kValueVectors * Isa::kLanes;
  size_t start = 0;
  for (; start + kTile <= r.dims; start += kTile) {
    add_values<Isa, type, M, kValueVectors>(r, head, slot, last, start);
  }
  for (; start < r.dims; start += Isa::kLanes) {
    add_values<Isa, type, M, 1>(r, head, slot, last, start);
  }
}

template <class Isa, FloatType type>
void add_values(const SlotRun& r) {
  for (size_t slot = 0; slot < r.slots; slot += kValueSlots) {
    const size_t last = slot + kValueSlots < r.slots ? slot + kValueSlots : r.slots;
    for (size_t head = 0; head < r.heads; head += Isa::kRows) {
      const size_t heads = r.heads - head < Isa::kRows ? r.heads - head : Isa::kRows;
      unroll<Isa::kRows>([&](auto m) {
        if (heads == m + 1) {
          add_values<Isa, type, m + 1>(r, head, slot, last);
        }
      });
    }
  }
}

template <class Isa>
void weigh(const SlotRun& r) {
  for (size_t head = 0; head < r.heads; ++head) {
    const bool* seen = r.seen ? r.seen + head % r.tokens * r.slots : nullptr;
    soften<Isa>(r.scores + head * r.slots, seen, r.slots, r.peaks + head, r.totals + head);
  }
  memset(r.sums, 0, r.heads * r.stride * sizeof(float));
  switch (r.values.type) {
    case FloatType::float32:
      return add_values<Isa, FloatType::float32>(r);
    case FloatType::float16:
      return add_values<Isa, FloatType::float16>(r);
    case FloatType::bfloat16:
      return add_values<Isa, FloatType::bfloat16>(r);
  }
}

template <class Isa>
void merge(const RunResults& r, float* scratch) {
  float peak = -INFINITY, total = 0.0f;
  for (size_t run = 0; run < r.runs; ++run) {
    const float own = r.peaks[run * r.distance];
    peak = own > peak ? own : peak;
  }
  memset(scratch, 0, r.dims * sizeof(float));
  for (size_t run = 0; run < r.runs; ++run) {
    const float weight = exponential<Isa>(r.peaks[run * r.distance] - peak);
    const float* sums = r.sums + run * r.distance;
    total += weight * r.totals[run * r.distance];
    for (size_t d = 0; d < r.dims; ++d) {
      scratch[d] += weight * sums[d];
    }
  }
  for (size_t d = 0; d < r.dims; ++d) {
    scratch[d] /= total;
  }
  if (r.log_total) {
    *r.log_total = peak + logf(total);
  }
  narrow<Isa>(scratch, r.dims, r.type, r.y);
}

template <class Isa, class Dense>
constexpr AttentionStepKernels AttentionStepKernels::of() {
  return {mmfree::prepare_heads<Isa>, mmfree::weigh<Dense>, mmfree::merge<Isa>};
}

}  // namespace mmfree
