#pragma once

#include <cstddef>
#include <cstdint>

#include "runtime/floats.h"

namespace mmfree {

// The losses of rows of logits.
struct CrossEntropyRows {
  Floats logits;           // (rows, classes)
  const int32_t* targets;  // (rows,); those below 0 count from the end
  size_t classes;
  float* losses;      // (rows,); NaN for a target that is no class
  float* log_totals;  // (rows,), log of the sum of e^logit
};

// The gradients of the logits.
struct CrossEntropyGradientRows {
  Floats logits;
  const int32_t* targets;
  size_t classes;
  const float *log_totals, *d_losses;  // (rows,)
  void* d_logits;                      // (rows, classes) of the type of the logits
};

// The loops of one instruction set. They compute the rows [first, last).
struct CrossEntropyKernels {
  void (*compute)(const CrossEntropyRows&, size_t first, size_t last);
  void (*differentiate)(const CrossEntropyGradientRows&, size_t first, size_t last);

  template <class Isa, class Dense>
  static constexpr CrossEntropyKernels of();
};

}  // namespace mmfree
