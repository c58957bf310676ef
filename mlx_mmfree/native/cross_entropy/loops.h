#pragma once

#include <math.h>

#include "cross_entropy/kernels.h"
#include "runtime/exponential.h"
#include "runtime/floats.h"
#include "runtime/lanes.h"

namespace mmfree {

// Classes that are computed at once, in the first-level cache. Their sums are added in float64.
constexpr size_t kClasses = 2048;

// The class of a target, or `classes` if it is none.
inline size_t class_of(int32_t target, size_t classes) {
  const int64_t own = target < 0 ? target + static_cast<int64_t>(classes) : target;
  return own < 0 || own >= static_cast<int64_t>(classes) ? classes : own;
}

// Calls body(values, first, count) for the parts of a row, whose values it may change.
template <class Isa, class Body>
MMFREE_INLINE inline void each_part(const Floats& logits, size_t row, size_t classes, Body&& body) {
  alignas(64) float values[kClasses];
  for (size_t first = 0; first < classes; first += kClasses) {
    const size_t count = classes - first < kClasses ? classes - first : kClasses;
    widen<Isa>(logits, row * classes + first, count, values);
    body(&values[0], first, count);
  }
}

template <class Isa>
void compute_losses(const CrossEntropyRows& r, size_t first, size_t last) {
  for (size_t row = first; row < last; ++row) {
    const size_t target = class_of(r.targets[row], r.classes);
    float most = -INFINITY, chosen = NAN;
    each_part<Isa>(r.logits, row, r.classes, [&](float* values, size_t start, size_t count) {
      const float own = largest_of<Isa>(values, count);
      most = own > most ? own : most;
      chosen = target - start < count ? values[target - start] : chosen;
    });
    double total = 0;
    each_part<Isa>(r.logits, row, r.classes, [&](float* values, size_t, size_t count) {
      for (size_t j = 0; j < count; ++j) {
        values[j] = exponential<Isa>(values[j] - most);
      }
      total += static_cast<double>(sum_of<Isa>(values, count));
    });
    r.log_totals[row] = most + static_cast<float>(log(total));
    r.losses[row] = r.log_totals[row] - chosen;
  }
}

template <class Isa>
void differentiate_losses(const CrossEntropyGradientRows& r, size_t first, size_t last) {
  const size_t bytes = size_of(r.logits.type);
  for (size_t row = first; row < last; ++row) {
    const size_t target = class_of(r.targets[row], r.classes);
    const float log_total = r.log_totals[row];
    const float factor = target < r.classes ? r.d_losses[row] : NAN;
    each_part<Isa>(r.logits, row, r.classes, [&](float* values, size_t start, size_t count) {
      for (size_t j = 0; j < count; ++j) {
        values[j] = exponential<Isa>(values[j] - log_total) * factor;
      }
      if (target - start < count) {
        values[target - start] -= factor;
      }
      narrow<Isa>(values, count, r.logits.type,
                  static_cast<char*>(r.d_logits) + (row * r.classes + start) * bytes);
    });
  }
}

template <class Isa, class Dense>
constexpr CrossEntropyKernels CrossEntropyKernels::of() {
  return {mmfree::compute_losses<Isa>, mmfree::differentiate_losses<Isa>};
}

}  // namespace mmfree
