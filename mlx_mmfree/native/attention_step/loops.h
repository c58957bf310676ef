#pragma once

#include <math.h>
#include <string.h>

#include "bit_linear/prepare_row.h"
#include "cpu/exponential.h"
#include "cpu/floats.h"
#include "cpu/kernels.h"

// Attention of one token, but for the scores, which are a dense product.

namespace mmfree {

// Independent maxima and sums, for vectors.
constexpr size_t kScoreLanes = 16;
// Values of so many slots, and so many dims of each, are added at a time.
constexpr size_t kValueSlots = 4, kValueDims = 64;

template <class Isa>
void rotate_head(const Heads& h, float* values) {
  const size_t half = h.dims / 2, step = h.is_interleaved ? 2 : 1;
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

// Weights from the scores of one head.
template <class Isa>
void soften(float* scores, size_t count, float* peak, float* total) {
  float most[kScoreLanes], sums[kScoreLanes] = {};
  for (float& lane : most) {
    lane = -INFINITY;
  }
  for (size_t j = 0; j < count; j += kScoreLanes) {
    const size_t lanes = count - j < kScoreLanes ? count - j : kScoreLanes;
    for (size_t l = 0; l < lanes; ++l) {
      most[l] = scores[j + l] > most[l] ? scores[j + l] : most[l];
    }
  }
  for (float lane : most) {
    *most = lane > *most ? lane : *most;
  }
  for (size_t j = 0; j < count; ++j) {
    scores[j] = exponential<Isa>(scores[j] - *most);
  }
  for (size_t j = 0; j < count; j += kScoreLanes) {
    const size_t lanes = count - j < kScoreLanes ? count - j : kScoreLanes;
    for (size_t l = 0; l < lanes; ++l) {
      sums[l] += scores[j + l];
    }
  }
  *peak = *most;
  *total = 0.0f;
  for (float lane : sums) {
    *total += lane;
  }
}

// The values of `count` slots for all heads, at most kValueDims of them from `start`.
template <class Isa>
void add_values(const SlotRun& r, size_t slot, size_t count, size_t start) {
  const size_t size = r.dims - start < kValueDims ? r.dims - start : kValueDims;
  float values[kValueSlots][kValueDims] = {};
  for (size_t i = 0; i < count; ++i) {
    widen<Isa>(r.values, (slot + i) * r.dims + start, size, values[i]);
  }
  for (size_t head = 0; head < r.heads; ++head) {
    float w[kValueSlots] = {};
    memcpy(w, r.scores + head * r.slots + slot, count * sizeof(float));
    float* sums = r.sums + head * r.dims + start;
    for (size_t d = 0; d < size; ++d) {
      sums[d] +=
          (w[0] * values[0][d] + w[1] * values[1][d]) + (w[2] * values[2][d] + w[3] * values[3][d]);
    }
  }
}

template <class Isa>
void weigh(const SlotRun& r) {
  for (size_t head = 0; head < r.heads; ++head) {
    soften<Isa>(r.scores + head * r.slots, r.slots, r.peaks + head, r.totals + head);
  }
  memset(r.sums, 0, r.heads * r.dims * sizeof(float));
  for (size_t slot = 0; slot < r.slots; slot += kValueSlots) {
    const size_t count = r.slots - slot < kValueSlots ? r.slots - slot : kValueSlots;
    for (size_t start = 0; start < r.dims; start += kValueDims) {
      add_values<Isa>(r, slot, count, start);
    }
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
  narrow<Isa>(scratch, r.dims, r.type, r.y);
}

}  // namespace mmfree
