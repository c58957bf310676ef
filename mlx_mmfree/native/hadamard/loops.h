#pragma once

#include <math.h>

#include "hadamard/kernels.h"
#include "runtime/floats.h"
#include "runtime/unroll.h"

namespace mmfree {

// Neighbours that are transformed while they are in registers.
constexpr size_t kHadamardRun = 16;

// Sums and differences of numbers `step` apart.
MMFREE_INLINE inline void add_and_subtract(float* values, size_t count, size_t step) {
  for (size_t start = 0; start < count; start += 2 * step) {
    float *a = values + start, *b = a + step;
    for (size_t j = 0; j < step; ++j) {
      const float sum = a[j] + b[j], difference = a[j] - b[j];
      a[j] = sum;
      b[j] = difference;
    }
  }
}

// Two steps at once, so that each number is read and written once for both.
MMFREE_INLINE inline void add_and_subtract_twice(float* values, size_t count, size_t step) {
  for (size_t start = 0; start < count; start += 4 * step) {
    float *a = values + start, *b = a + step, *c = b + step, *d = c + step;
    for (size_t j = 0; j < step; ++j) {
      const float ab = a[j] + b[j], a_b = a[j] - b[j], cd = c[j] + d[j], c_d = c[j] - d[j];
      a[j] = ab + cd;
      b[j] = a_b + c_d;
      c[j] = ab - cd;
      d[j] = a_b - c_d;
    }
  }
}

template <class Isa>
void transform_block(float* values, size_t block) {
  const size_t run = block < kHadamardRun ? block : kHadamardRun;
  if (run == kHadamardRun) {
    for (size_t start = 0; start < block; start += kHadamardRun) {
      add_and_subtract_twice(values + start, kHadamardRun, 1);
      add_and_subtract_twice(values + start, kHadamardRun, 4);
    }
  } else {
    for (size_t step = 1; step < run; step *= 2) {
      add_and_subtract(values, block, step);
    }
  }
  size_t step = run;
  for (; 2 * step < block; step *= 4) {
    add_and_subtract_twice(values, block, step);
  }
  if (step < block) {
    add_and_subtract(values, block, step);
  }
}

template <class Isa>
void transform_blocks(const HadamardBlocks& h, size_t first, size_t last, float* scratch) {
  const size_t blocks = h.dims / h.block;
  const float scale = 1.0f / sqrtf(static_cast<float>(h.block));
  for (size_t item = first; item < last; ++item) {
    const float* signs = h.signs ? h.signs + item % blocks * h.block : nullptr;
    widen<Isa>(h.x, item * h.block, h.block, scratch);
    if (signs && !h.inverse) {
      for (size_t j = 0; j < h.block; ++j) {
        scratch[j] *= signs[j];
      }
    }
    transform_block<Isa>(scratch, h.block);
    if (signs && h.inverse) {
      for (size_t j = 0; j < h.block; ++j) {
        scratch[j] *= scale * signs[j];
      }
    } else {
      for (size_t j = 0; j < h.block; ++j) {
        scratch[j] *= scale;
      }
    }
    narrow<Isa>(scratch, h.block, h.x.type,
                static_cast<char*>(h.y) + item * h.block * size_of(h.x.type));
  }
}

template <class Isa, class Dense>
constexpr HadamardKernels HadamardKernels::of() {
  return {mmfree::transform_blocks<Isa>};
}

}  // namespace mmfree
