#pragma once

#include <cstddef>

#include "runtime/floats.h"

namespace mmfree {

struct RecurrenceStep {
  Floats gates;        // (rows, 3 dims): input, forget and output gates
  const float* state;  // (dims,)
  Floats weight;       // (dims,); scales the norm of the output gate
  Floats lower_bound;  // (dims,) or none
  const bool* valid;   // (rows,) or null
  size_t rows, dims;
  const float* inverse;  // (rows,); what `rms_inverse` gives for the output gates
  void* y;               // (rows, dims) of the type of the gates
  float* last;           // (dims,)
};

// The loops of one instruction set. Every set gives the same bits.
struct MlgruStepKernels {
  // Computes the channels [first, last) of all rows of one sequence.
  void (*recur)(const RecurrenceStep&, size_t first, size_t last);

  template <class Isa, class Dense>
  static constexpr MlgruStepKernels of();
};

}  // namespace mmfree
